"""From an engine assignment to the command that runs it: argv and environment. Pure; the one place that knows vLLM's options.

Secrets go into the environment only: argv is world-readable and is shown on pages. Every socket gets the node's own
address, never a wildcard: KV events, replay and the NIXL side channel have no authentication at all.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from controlplane.fleet.model import EngineAssignment, EngineSpec, NodeFacts, Ports, Role, Runtime
from workers.runtimes import EngineRuntime
from workers.sim.settings import Settings

ENTRY_POINT = ("-m", "vllm.entrypoints.openai.api_server")
"""The `vllm` command asks for a distribution named `vllm` and fails in the CPU runtime; the module works in both."""

KV_TOPIC = "kv"
CPU_KV_CACHE_BYTES = 1 << 30
"""Explicit, because vLLM would else reserve 92 % of the machine's memory for each CPU engine."""

_KV_ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}


class Command(Struct, frozen=True):
    """What to execute. `env` is laid over the environment that the agent chooses; it holds the engine's secret."""

    argv: tuple[str, ...]
    env: dict[str, str]


def build(
    assignment: EngineAssignment,
    *,
    runtime: EngineRuntime,
    model_path: Path | None,
    address: str,
    ports: Ports,
    facts: NodeFacts,
    cpu_threads: int,
    home: Path | None = None,
) -> Command:
    """The command of one engine on this node.

    `model_path` is the prepared folder (None for a stand-in that has words of its own), `address` the node's private IP
    address, `cpu_threads` the threads of a CPU engine, `home` the one of
    the user that it runs as, if that is not the agent's.
    """
    if runtime.kind is Runtime.SIM:
        return _sim(assignment, runtime=runtime, model_path=model_path, address=address, ports=ports)
    if model_path is None:
        raise ValueError(f"{assignment.engine}: a {runtime.kind} engine needs a model folder")
    # The last of two equal options counts: ours stand behind the user's.
    argv = [
        str(runtime.python),
        *ENTRY_POINT,
        *assignment.spec.extra_args,
        *_model(assignment.spec, runtime.kind, model_path),
        *_memory(assignment.spec, runtime.kind),
        *_sockets(assignment.spec.role, runtime.kind, address, ports),
    ]
    env = _environment(assignment.secret, runtime, address, ports, home)
    env |= _cpu(cpu_threads, facts.interface) if runtime.kind is Runtime.CPU else _gpu(assignment.gpus)
    return Command(tuple(argv), env)


def _model(spec: EngineSpec, kind: Runtime, model_path: Path) -> list[str]:
    dtype = spec.dtype
    if dtype == "auto" and kind is Runtime.CPU:
        # Without native bfloat16 anything else is an order of magnitude slower, and a choice by node would pair engines
        # whose KV does not fit.
        dtype = "float32"
    argv = ["--model", str(model_path), "--served-model-name", spec.served_name, "--dtype", dtype]
    if spec.max_model_len is not None:
        argv += ["--max-model-len", str(spec.max_model_len)]
    if spec.max_num_batched_tokens is not None:
        argv += ["--max-num-batched-tokens", str(spec.max_num_batched_tokens)]
    if spec.tensor_parallel > 1:
        argv += ["--tensor-parallel-size", str(spec.tensor_parallel)]
    if kind is Runtime.CPU:
        argv += ["--enforce-eager"]  # compiling needs a C++ compiler on the node and minutes at each start
    return argv


def _memory(spec: EngineSpec, kind: Runtime) -> list[str]:
    argv = []
    if spec.block_size is not None:
        argv += ["--block-size", str(spec.block_size)]
    if kind is Runtime.CPU:
        argv += ["--kv-cache-memory-bytes", str(spec.kv_cache_bytes or CPU_KV_CACHE_BYTES)]
    elif spec.memory_fraction is not None:
        argv += ["--gpu-memory-utilization", f"{spec.memory_fraction:g}"]
    return argv


def _sockets(role: Role, kind: Runtime, address: str, ports: Ports) -> list[str]:
    argv = ["--host", address, "--port", str(ports.http), "--disable-uvicorn-access-log"]
    argv += ["--enable-prompt-tokens-details"]  # the router's records and the hit rate need it
    if role in _KV_ROLES:
        transfer = {"kv_connector": "NixlConnector", "kv_role": _KV_ROLES[role], "kv_load_failure_policy": "fail"}
        if kind is Runtime.CPU:
            transfer["kv_buffer_device"] = "cpu"
        argv += ["--kv-transfer-config", json.dumps(transfer)]
    if ports.events:
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": binding_endpoint(address, ports.events),
            "replay_endpoint": f"tcp://{address}:{ports.replay}",
            "topic": KV_TOPIC,
        }
        argv += ["--kv-events-config", json.dumps(events)]
    return argv


def binding_endpoint(address: str, port: int) -> str:
    """A ZMQ endpoint that vLLM's publisher *binds*, on one address only.

    It binds where the text holds `*` or `::` and connects otherwise, and then every event is lost without an error. The
    IPv4 address is therefore written in its IPv6-mapped form; subscribers use the plain one.
    """
    return f"tcp://[::ffff:{ipaddress.IPv4Address(address)}]:{port}"


def _environment(secret: str, runtime: EngineRuntime, address: str, ports: Ports, home: Path | None) -> dict[str, str]:
    installed = runtime.python.parent.parent
    caches = (
        home / installed.name if home else installed / "cache"
    )  # compiled kernels belong to one runtime, and go with it
    env = {
        "VLLM_API_KEY": secret,
        "VLLM_HOST_IP": address,
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",  # the model store has fetched everything
        "TRANSFORMERS_OFFLINE": "1",
        "XDG_CACHE_HOME": str(caches),
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
        "VLLM_CONFIG_ROOT": str(caches / "vllm-config"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "PYTHONUNBUFFERED": "1",
    }
    if ports.side_channel:
        env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = address
        env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(ports.side_channel)
    return env


def _cpu(threads: int, interface: str) -> dict[str, str]:
    env = {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines of one node share its cores
    }
    if interface:
        env["UCX_NET_DEVICES"] = interface  # UCX would else listen on the addresses of all interfaces
    return env


def _gpu(gpus: tuple[int, ...]) -> dict[str, str]:
    # UCX chooses its devices itself here: NVLink, RDMA cards and networks are not bound to the node's address.
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the order in which the agent counted them
        "CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for gpu in gpus),
    }


def decode_context_parallel(arguments: Sequence[str]) -> int:
    """Ranks over which an engine with these arguments spreads the tokens of each KV block: it has so many times the tokens that
    its `block_size` says (vLLM 0.32, `resolve_dcp_kv_block_size`)."""
    found = "1"
    for at, argument in enumerate(arguments):
        name, given, value = argument.partition("=")
        if name.replace("_", "-") in ("--decode-context-parallel-size", "-dcp"):
            found = value if given else "".join(arguments[at + 1 : at + 2])
    return min(max(int(found), 1), 64) if found.isdecimal() and len(found) < 9 else 1


def _sim(
    assignment: EngineAssignment, *, runtime: EngineRuntime, model_path: Path | None, address: str, ports: Ports
) -> Command:
    spec = assignment.spec
    argv = [str(runtime.python), "-m", "workers.sim"]
    if model_path is not None and (model_path / "tokenizer.json").is_file():
        argv += ["--tokenizer", str(model_path)]
    argv += spec.extra_args
    argv += ["--host", address, "--port", str(ports.http)]
    argv += ["--served-model-name", spec.served_name, "--role", str(spec.role)]
    for option, port in (("side-channel", ports.side_channel), ("events", ports.events), ("replay", ports.replay)):
        if port:
            argv += [f"--{option}-port", str(port)]
    if spec.max_model_len is not None:
        argv += ["--max-model-len", str(spec.max_model_len)]
    if spec.block_size is not None:
        argv += ["--block-size", str(spec.block_size)]
    if spec.kv_cache_bytes is not None:
        its = Settings()
        block_bytes = (spec.block_size or its.block_size) * its.kv_bytes_per_token
        argv += ["--kv-blocks", str(max(1, spec.kv_cache_bytes // block_bytes))]
        argv += ["--kv-bytes-per-token", str(its.kv_bytes_per_token)]
    return Command(tuple(argv), {"VLLM_API_KEY": assignment.secret, "PYTHONUNBUFFERED": "1"})
