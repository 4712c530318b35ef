"""Command lines and environments of engines. `tests/real` has vLLM's own parser read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.fleet.model import EngineAssignment, EngineSpec, NodeFacts, Ports, Role, Runtime
from workers import command
from workers.command import Command, build
from workers.runtimes import EngineRuntime
from workers.sim.__main__ import parse_arguments

PYTHON = Path("/cache/runtimes/cpu-0123/bin/python")
PORTS = Ports(http=21000, side_channel=21001, events=21002, replay=21003)
SECRET = "not-for-argv"


def made(kind: Runtime = Runtime.CPU, role: Role = Role.DECODE, *, ports: Ports = PORTS, **changes: Any) -> Command:
    interface = changes.pop("interface", "eth1")
    gpus = changes.pop("gpus", ())
    home = changes.pop("home", None)
    spec = EngineSpec(model="hub:o/n", served_name="org/m", role=role, runtime=kind, **changes)
    return build(
        EngineAssignment(
            engine="e", attempt=1, deployment="d", revision=1, spec=spec, secret=SECRET, gpus=gpus
        ),
        runtime=EngineRuntime(kind=kind, python=PYTHON, version="0.32.0"),
        model_path=Path("/cache/models/m"),
        address="10.0.0.5",
        ports=ports,
        facts=NodeFacts(
            address="10.0.0.5", hostname="h", cpus=4, memory_bytes=0, memory_free_bytes=0, shm_bytes=0, disk_free_bytes=0,
            interface=interface,
        ),
        cpu_threads=3,
        home=home,
    )  # fmt: skip


def option(argv: tuple[str, ...], name: str) -> str | None:
    return argv[len(argv) - argv[::-1].index(name)] if name in argv else None


def config(argv: tuple[str, ...], name: str) -> dict[str, Any]:
    value = option(argv, name)
    return json.loads(value) if value else {}


@pytest.mark.parametrize("kind", [Runtime.CPU, Runtime.GPU])
@pytest.mark.parametrize(
    ("role", "kv_role"), [(Role.PREFILL, "kv_producer"), (Role.DECODE, "kv_consumer"), (Role.AGGREGATED, None)]
)
def test_each_role_hands_kv_over_as_its_role_says(kind: Runtime, role: Role, kv_role: str | None) -> None:
    transfer = config(made(kind, role).argv, "--kv-transfer-config")
    assert transfer.get("kv_role") == kv_role
    if kv_role:
        assert (transfer["kv_connector"], transfer["kv_load_failure_policy"]) == ("NixlConnector", "fail")
        assert transfer.get("kv_buffer_device") == ("cpu" if kind is Runtime.CPU else None)


@pytest.mark.parametrize("kind", list(Runtime))
@pytest.mark.parametrize("role", list(Role))
def test_the_secret_is_in_the_environment_alone(kind: Runtime, role: Role) -> None:
    made_command = made(kind, role)
    assert made_command.env["VLLM_API_KEY"] == SECRET
    assert not any(SECRET in argument for argument in made_command.argv)


def test_what_engines_compile_lies_with_the_runtime_or_in_the_home_of_their_own_user() -> None:
    for home, caches in (
        (None, PYTHON.parent.parent / "cache"),
        (Path("/home/e"), Path("/home/e", PYTHON.parent.parent.name)),
    ):
        env = made(home=home).env
        assert env["XDG_CACHE_HOME"] == str(caches)
        folders = [env[name] for name in env if name.endswith(("_ROOT", "_CACHE_DIR"))]
        assert len(folders) == 4
        assert all(Path(folder).is_relative_to(caches) for folder in folders)


@pytest.mark.parametrize("kind", list(Runtime))
def test_no_socket_is_on_a_wildcard(kind: Runtime) -> None:
    text = " ".join(made(kind).argv)
    assert option(made(kind).argv, "--host") == "10.0.0.5"
    assert not any(wildcard in text for wildcard in ("*", "0.0.0.0", "[::]"))


def test_events_are_published_where_vllm_binds() -> None:
    events = config(made().argv, "--kv-events-config")
    assert events["endpoint"] == "tcp://[::ffff:10.0.0.5]:21002"
    assert events["replay_endpoint"] == "tcp://10.0.0.5:21003"
    assert events["enable_kv_cache_events"] is True
    assert "--kv-events-config" not in made(ports=Ports(1, 2, 0, 0)).argv


@given(st.ip_addresses(v=4), st.integers(1, 65535))
def test_the_publishers_endpoint_always_binds(address: Any, port: int) -> None:
    endpoint = command.binding_endpoint(str(address), port)
    assert "::" in endpoint  # what vLLM looks for
    assert endpoint.endswith(f"{address}]:{port}")


def test_side_channel_is_the_nodes_address_and_only_where_there_is_one() -> None:
    env = made().env
    assert (env["VLLM_NIXL_SIDE_CHANNEL_HOST"], env["VLLM_NIXL_SIDE_CHANNEL_PORT"]) == ("10.0.0.5", "21001")
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" not in made(role=Role.AGGREGATED, ports=Ports(1, 0, 3, 4)).env


@pytest.mark.parametrize(
    ("kind", "dtype", "shown"),
    [
        (Runtime.CPU, "auto", "float32"),
        (Runtime.CPU, "bfloat16", "bfloat16"),
        (Runtime.GPU, "auto", "auto"),
        (Runtime.GPU, "float16", "float16"),
    ],
)
def test_dtype_does_not_depend_on_the_node(kind: Runtime, dtype: str, shown: str) -> None:
    assert option(made(kind, dtype=dtype).argv, "--dtype") == shown


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        (Runtime.CPU, {}, {"--kv-cache-memory-bytes": "1073741824", "--gpu-memory-utilization": None}),
        (Runtime.CPU, {"kv_cache_bytes": 5 << 20, "memory_fraction": 0.5}, {"--kv-cache-memory-bytes": "5242880"}),
        (Runtime.GPU, {}, {"--kv-cache-memory-bytes": None, "--gpu-memory-utilization": None}),
        (Runtime.GPU, {"memory_fraction": 0.45}, {"--gpu-memory-utilization": "0.45"}),
        (Runtime.CPU, {"max_model_len": 2048, "block_size": 32}, {"--max-model-len": "2048", "--block-size": "32"}),
        (Runtime.CPU, {"max_num_batched_tokens": 256}, {"--max-num-batched-tokens": "256"}),
        (Runtime.GPU, {"tensor_parallel": 4}, {"--tensor-parallel-size": "4"}),
        (Runtime.GPU, {}, {"--tensor-parallel-size": None, "--max-model-len": None, "--block-size": None}),
    ],
)
def test_sizes(kind: Runtime, changes: dict[str, Any], expected: dict[str, str | None]) -> None:
    argv = made(kind, **changes).argv
    assert {name: option(argv, name) for name in expected} == expected


def test_what_the_user_adds_cannot_outdo_what_tandem_sets() -> None:
    """The last of two equal options counts, and ours come last."""
    argv = made(extra_args=("--seed", "1", "--port", "9")).argv
    assert argv[3:5] == ("--seed", "1")
    assert option(argv, "--port") == "21000"


def test_cpu_engines_share_the_cores_and_keep_to_one_interface() -> None:
    env = made().env
    assert (env["OMP_NUM_THREADS"], env["VLLM_CPU_OMP_THREADS_BIND"]) == ("3", "nobind")
    assert env["UCX_NET_DEVICES"] == "eth1"
    assert "UCX_NET_DEVICES" not in made(interface="").env
    assert "--enforce-eager" in made().argv


def test_gpu_engines_see_their_own_gpus_and_choose_their_own_links() -> None:
    env = made(Runtime.GPU, gpus=(1, 3)).env
    assert (env["CUDA_VISIBLE_DEVICES"], env["CUDA_DEVICE_ORDER"]) == ("1,3", "PCI_BUS_ID")
    assert not any(name.startswith("UCX_") for name in env)
    assert "--enforce-eager" not in made(Runtime.GPU).argv


def test_an_engine_asks_no_hub_and_tells_nobody() -> None:
    env = made().env
    assert (env["HF_HUB_OFFLINE"], env["VLLM_NO_USAGE_STATS"], env["DO_NOT_TRACK"]) == ("1", "1", "1")
    assert env["VLLM_CACHE_ROOT"].startswith("/cache/runtimes/cpu-0123/")


def test_the_stand_ins_command_line() -> None:
    argv = made(
        Runtime.SIM, Role.PREFILL, max_model_len=512, block_size=16, kv_cache_bytes=16 * 46_080 * 10,
        extra_args=("--fault", "slow-transfer"),
    ).argv  # fmt: skip
    assert argv[1:3] == ("-m", "workers.sim")
    assert option(argv, "--fault") == "slow-transfer"
    assert option(argv, "--role") == "prefill"
    assert [option(argv, f"--{name}-port") for name in ("side-channel", "events", "replay")] == [
        "21001",
        "21002",
        "21003",
    ]
    assert (option(argv, "--kv-blocks"), option(argv, "--kv-bytes-per-token")) == ("10", "46080")


def test_a_stand_in_has_the_kv_memory_it_is_given() -> None:
    """Also where its block size is its own choice."""
    its = parse_arguments(made(Runtime.SIM, Role.AGGREGATED, kv_cache_bytes=1 << 30).argv[3:])
    assert 0 <= (1 << 30) - its.kv_blocks * its.block_size * its.kv_bytes_per_token < 1 << 20


def test_a_real_engine_without_a_model_is_a_defect() -> None:
    assignment = EngineAssignment(
        engine="e", attempt=1, deployment="d", revision=1, secret="s",
        spec=EngineSpec(model="/m", served_name="m", role=Role.DECODE, runtime=Runtime.CPU),
    )  # fmt: skip
    facts = NodeFacts(
        address="1.2.3.4", hostname="h", cpus=1, memory_bytes=0, memory_free_bytes=0, shm_bytes=0, disk_free_bytes=0
    )
    runtime = EngineRuntime(kind=Runtime.CPU, python=PYTHON, version="1")
    with pytest.raises(ValueError, match="model folder"):
        build(assignment, runtime=runtime, model_path=None, address="1.2.3.4", ports=PORTS, facts=facts, cpu_threads=1)
