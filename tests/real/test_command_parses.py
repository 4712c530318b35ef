"""Every command line we make is understood by vLLM's own parser, as we mean it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controlplane.fleet.engine_options import HARMLESS, MANAGED_ARGUMENTS, managed_argument
from controlplane.fleet.model import EngineAssignment, Ports, Role, Runtime
from tests.real.engines import facts, spec
from workers import command
from workers.runtimes import EngineRuntime

SCRIPT = Path(__file__).with_name("parse_command.py")
FULL = {
    "dtype": "bfloat16", "tensor_parallel": 2, "memory_fraction": 0.45, "kv_cache_bytes": 1 << 30, "max_model_len": 4096,
    "max_num_batched_tokens": 512, "block_size": 32, "extra_args": ("--seed", "7", "--max_num_seqs=9", "-O3"),
}  # fmt: skip
BARE = {"max_model_len": None, "kv_cache_bytes": None}
CASES = list(itertools.product((Runtime.CPU, Runtime.GPU), Role, ({}, FULL, BARE)))


def argv_of(kind: Runtime, role: Role, changes: dict[str, Any]) -> list[str]:
    ports = Ports(8001, 0 if role is Role.AGGREGATED else 8002, 8003, 8004)
    built = command.build(
        EngineAssignment(
            engine="e", attempt=1, deployment="d", revision=1, spec=spec(role, runtime=kind, **changes), secret="s",
            gpus=(0, 1) if kind is Runtime.GPU else (),
        ),
        runtime=EngineRuntime(kind=kind, python=Path("/r/bin/python"), version="0.32.0"),
        model_path=Path("/m"), address="10.1.2.3", ports=ports, facts=facts(), cpu_threads=1,
    )  # fmt: skip
    return list(built.argv[1 + len(command.ENTRY_POINT) :])


@pytest.fixture(scope="module")
def parser(runtime_script: Callable[..., str]) -> dict[str, Any]:
    return json.loads(runtime_script(str(SCRIPT), stdin=json.dumps([argv_of(*case) for case in CASES])))


@pytest.mark.parametrize(("index", "case"), list(enumerate(CASES)), ids=lambda value: str(value)[:60])
def test_vllm_reads_what_we_mean(
    parser: dict[str, Any], index: int, case: tuple[Runtime, Role, dict[str, Any]]
) -> None:
    kind, role, changes = case
    read = parser["parsed"][index]
    assert (read["model"], read["served_model_name"]) == ("/m", ["smollm2"])
    assert read["model_tag"] is None
    assert (read["host"], read["port"]) == ("10.1.2.3", 8001)
    assert read["enable_prompt_tokens_details"] is True
    assert read["disable_uvicorn_access_log"] is True
    assert read["api_key"] is None
    wanted = spec(role, runtime=kind, **changes)
    assert read["dtype"] == (wanted.dtype if wanted.dtype != "auto" or kind is Runtime.GPU else "float32")
    assert read["tensor_parallel_size"] == wanted.tensor_parallel
    assert read["max_model_len"] == wanted.max_model_len
    assert read["max_num_batched_tokens"] == wanted.max_num_batched_tokens
    assert read["block_size"] == wanted.block_size
    assert read["enforce_eager"] is (kind is Runtime.CPU)
    if kind is Runtime.CPU:
        assert read["kv_cache_memory_bytes"] == (wanted.kv_cache_bytes or command.CPU_KV_CACHE_BYTES)
    else:
        assert read["kv_cache_memory_bytes"] is None
        assert wanted.memory_fraction is None or read["gpu_memory_utilization"] == wanted.memory_fraction
    if changes is FULL:
        assert (read["seed"], read["max_num_seqs"], read["optimization_level"]) == (7, 9, "3")
    transfer, events = read["kv_transfer_config"], read["kv_events_config"]
    if role is Role.AGGREGATED:
        assert transfer is None
    else:
        assert transfer["kv_connector"] == "NixlConnector"
        assert transfer["kv_role"] == {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}[role]
        assert transfer["kv_load_failure_policy"] == "fail"
        assert kind is Runtime.GPU or transfer["kv_buffer_device"] == "cpu"
    assert events["enable_kv_cache_events"] is True
    assert events["endpoint"] == "tcp://[::ffff:10.1.2.3]:8003"
    assert events["replay_endpoint"] == "tcp://10.1.2.3:8004"


def test_managed_arguments_are_vllms_and_shadow_no_other(parser: dict[str, Any]) -> None:
    options = [option for names in parser["options"] for option in names]
    assert set(options) >= MANAGED_ARGUMENTS
    assert set(options) >= HARMLESS
    assert not MANAGED_ARGUMENTS & HARMLESS
    for names in parser["options"]:
        managed = [name for name in names if managed_argument(name) is not None]
        assert managed in ([], names), f"one of {names} is managed, another is not"
        assert all(managed_argument(name) in (None, name, "--" + name[5:]) for name in names)
