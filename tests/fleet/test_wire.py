"""The messages: round trips, neighbouring versions, and names that cannot reach each other's keys."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from controlplane.fleet import wire
from controlplane.fleet.errors import InvalidInput
from controlplane.fleet.model import (
    EngineAssignment,
    EngineLoad,
    EngineSpec,
    ForeignProcess,
    GpuFacts,
    NodeFacts,
    Observation,
    PairProof,
    Peer,
    Phase,
    Ports,
    Role,
    Runtime,
)

SPEC = EngineSpec(
    model="package:x", served_name="org/x", role=Role.DECODE, runtime=Runtime.CPU, extra_args=("--seed", "1")
)
FACTS = NodeFacts(
    address="10.0.0.1",
    hostname="h",
    cpus=2,
    memory_bytes=1,
    memory_free_bytes=1,
    shm_bytes=1,
    disk_free_bytes=1,
    gpus=(GpuFacts(0, "u", "n", 2, 1, (ForeignProcess(1, "p", 1),)),),
    runtimes=(Runtime.GPU, Runtime.CPU),
)
MESSAGES: list[Struct] = [
    wire.NodePlan("a", 3, (EngineAssignment("e", 2, "d", 1, SPEC, "s", (0, 1), (Peer("p", 1, "http://h:1", "t"),)),)),
    wire.NodeReport(
        "a",
        "agent",
        9,
        3,
        FACTS,
        (
            Observation(
                "e",
                2,
                Phase.WARMING,
                progress=0.5,
                ports=Ports(1, 2, 3, 4),
                load=EngineLoad(running=1),
                pairs=(PairProof("p", 1, True, "ok", 10, 0.1),),
                command=("python",),
            ),
        ),
    ),
    wire.FleetSnapshot(
        4,
        1.5,
        (
            wire.SnapshotDeployment(
                "d",
                "org/x",
                wire.RoutingPolicy(),
                (wire.SnapshotEngine("e", "decode-0", 2, Role.DECODE, "http://h:1", "s"),),
                (("p", "e"),),
            ),
        ),
        (wire.SnapshotKey("k", "0" * 64, models=("org/x",)),),
    ),
    wire.RouterStatus("r", 4, {"e": 1}, {"ok": 2}, 1.0),
    wire.RequestRecord("id", 1.0, "d", "/v1/chat/completions", 200, wire.Result.OK, ttft=0.1),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_survives_the_wire(message: Struct) -> None:
    assert wire.decode(wire.encode(message), type(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_fields_of_a_later_version_are_ignored(message: Struct) -> None:
    data = msgspec.json.decode(wire.encode(message))
    data["invented_later"] = {"x": [1]}
    for value in data.values():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            value[0]["invented_later"] = 1
    assert wire.decode(msgspec.json.encode(data), type(message)) == message


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"node": 1}', b"null"])
def test_what_is_no_message_raises_and_never_passes(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        wire.decode(data, wire.NodePlan)


@pytest.mark.parametrize("kind", [type(message) for message in MESSAGES], ids=lambda kind: kind.__name__)
def test_nesting_that_no_stack_holds_is_no_message(kind: type[Struct]) -> None:
    with pytest.raises(msgspec.DecodeError, match="too deep"):
        wire.decode(b'{"invented":' + b"[" * 100_000, kind)


nodes = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True)


@given(nodes, nodes)
def test_one_nodes_keys_are_never_under_anothers_prefix(one: str, other: str) -> None:
    keys = [
        wire.plan_key(one),
        wire.report_key(one),
        wire.log_key(one, "e", 1),
        wire.node_prefix(one) + wire.queue_name(one),
    ]
    assert all(key.startswith(wire.node_prefix(one)) for key in keys)
    if one != other:
        assert not any(key.startswith(wire.node_prefix(other)) for key in keys)


@pytest.mark.parametrize("name", ["", "*", "a*", "a:b", "A", "a b", "-a", "a-", "a..b", "a" * 64, "a\n", "[a]", "a?"])
def test_a_name_that_could_widen_a_pattern_is_no_nodes_name(name: str) -> None:
    for function in (wire.checked_node_name, wire.acl_rules):
        with pytest.raises(InvalidInput):
            function(name)


@given(st.text(max_size=100))
def test_every_host_name_makes_a_node_name(hostname: str) -> None:
    assert wire.checked_node_name(wire.node_name_of_host(hostname))


@pytest.mark.parametrize(
    ("hostname", "expected"),
    [("GPU-1.lab.example", "gpu-1.lab.example"), ("노드", "node"), ("노드-1", "1"), ("a_b", "a-b"), ("", "node")],
)
def test_host_names_of_every_script_become_node_names(hostname: str, expected: str) -> None:
    assert wire.node_name_of_host(hostname) == expected


def test_an_acl_names_commands_one_by_one_and_keys_by_prefix() -> None:
    rules = wire.acl_rules("n1")
    assert [rule for rule in rules if rule.startswith("~")] == ["~tandem:node:n1:*"]
    assert not any(rule.startswith("+@") or rule in ("allkeys", "allchannels", "~*", "&*") for rule in rules)
    assert not {"+scan", "+keys", "+config", "+acl", "+flushall", "+eval", "+subscribe", "+publish"} & set(rules)
