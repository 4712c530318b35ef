"""What a router takes of a snapshot whose engines claim anything: every other engine and deployment goes on, and right values heal."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.fleet.model import Role
from controlplane.fleet.wire import (
    FleetSnapshot,
    RoutingMode,
    RoutingPolicy,
    SnapshotDeployment,
    SnapshotEngine,
    SnapshotKey,
    encode,
)
from frontend_api.flow import Serving
from frontend_api.kv.evidence import Cache, Evidence
from frontend_api.observe.telemetry import Telemetry
from frontend_api.routing import intake
from frontend_api.routing.outcomes import Outcomes
from frontend_api.routing.view import View
from frontend_api.steps import Decode
from frontend_api.trace import Trace
from tests.frontend_api.test_evidence import NoTokens, prompt

RIGHT: dict[str, Any] = {
    "id": "e-1", "name": "decode-0", "attempt": 1, "role": Role.AGGREGATED, "url": "http://10.0.0.5:21000", "secret": "s3cret",
    "block_size": 16, "kv_blocks": 4_096, "max_model_len": 8_192, "events": "tcp://10.0.0.5:21002",
    "replay": "tcp://10.0.0.5:21003", "ranks": 1,
}  # fmt: skip
NUMBERS = st.one_of(
    st.integers(-(1 << 63), (1 << 64) - 1), st.sampled_from([-5, -1, 0, 1, 20_000, 65_536, 65_537, 1 << 31, 1 << 62])
)
ADDRESSES = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        ["", "http://", "tcp://", "http://h:0", "http://h:99999", "http://[::1", "http://a@h:1", "http://h:1/x?y", "http://h:1\r\nx: y",
         "tcp://*:1", "tcp://h:65535", "tcp://h", "ipc:///tmp/x", "inproc://x", "http://169.254.169.254", "http://[fe80::1]:1",
         "http://[::ffff:169.254.169.254]:80", "http://224.0.0.1:1", "tcp://169.254.169.254:80", "http://ü:1", "http://h:1 "]
    ),
)  # fmt: skip
WRONG = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("attempt", "ranks"), NUMBERS),
        **dict.fromkeys(("block_size", "kv_blocks", "max_model_len"), st.none() | NUMBERS),
        **dict.fromkeys(("url", "events", "replay"), ADDRESSES),
        **dict.fromkeys(("id", "name", "secret"), st.text(max_size=300)),
        "role": st.sampled_from(Role),
        "suspect": st.booleans(),
    },
)
MODES = (RoutingMode.KV, RoutingMode.KV_APPROXIMATE, RoutingMode.LEAST_LOAD)


class Fleet:
    """A deployment whose engines claim anything, beside one that is as it should be."""

    def __init__(self, mode: RoutingMode = RoutingMode.KV, ranks: int = 64) -> None:
        self.view = View(ranks=ranks)
        self.evidence = Evidence(self.view)
        self.telemetry = Telemetry("r", 0.0)
        self.policy = RoutingPolicy(mode=mode)

    def take(self, *engines: SnapshotEngine) -> None:
        good = SnapshotEngine(
            **{**RIGHT, "id": "good", "url": "http://10.0.0.9:1", "events": "tcp://10.0.0.9:2", "replay": ""}
        )
        deployments = tuple(
            SnapshotDeployment(name=name, served_name=name, routing=self.policy, engines=members)
            for name, members in (("odd", engines), ("good", (good,)))
        )
        snapshot, unread = intake.read(encode(FleetSnapshot(version=self.view.version + 1, deployments=deployments)))
        assert unread == []
        self.view.take(snapshot)
        self.evidence.tick(1.0)
        for cache in self.evidence.caches.values():
            cache.tokens = NoTokens()

    def cache(self, name: str) -> Cache:
        cache = self.evidence.of(self.view.deployments[name])
        assert cache is not None
        return cache

    def ask(self, name: str) -> str:
        """The engine that a request is sent to; empty: none."""
        deployment = self.view.deployments[name]
        cache = self.evidence.of(deployment)
        seen = cache.prompt(prompt(1), None) if cache is not None else None
        flow = Serving(deployment, None, Trace(explain=True), lambda: 1.0, seen).steps()
        step = next(flow, None)
        flow.close()
        assert step is None or isinstance(step, Decode)
        return step.engine.id if step is not None else ""

    def look(self) -> None:
        """Everything that goes on beside requests."""
        self.evidence.tick(2.0)
        assert len(self.evidence.sources()) <= 64
        self.telemetry.text(self.view, self.evidence, clients=0, upstream=0)
        encode(self.telemetry.status(self.view, self.evidence, Outcomes()))


@pytest.mark.parametrize("mode", MODES)
@given(wrong=st.lists(WRONG, min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_whatever_engines_claim_others_serve_and_right_values_heal(
    mode: RoutingMode, wrong: list[dict[str, Any]]
) -> None:
    fleet = Fleet(mode)
    for fields in wrong:
        fleet.take(
            SnapshotEngine(**{**RIGHT, **fields}),
            SnapshotEngine(**{**RIGHT, "id": "beside", "url": "http://10.0.0.6:1"}),
        )
        fleet.look()
        assert fleet.ask("odd")
        assert fleet.ask("good") == "good"
        fleet.take(SnapshotEngine(**{**RIGHT, **fields}))
        fleet.ask("odd")
    fleet.take(SnapshotEngine(**RIGHT))
    fleet.look()
    assert fleet.ask("odd") == "e-1"
    assert fleet.view.trouble == []
    if mode is RoutingMode.KV:
        assert {source.events for source in fleet.evidence.sources()} == {RIGHT["events"], "tcp://10.0.0.9:2"}
        assert dict(fleet.cache("odd").standing().reasons) == {"e-1": "not-heard"}
        assert fleet.cache("odd").index.block_sizes == {16}


@pytest.mark.parametrize(
    "claims",
    [
        {"block_size": -5}, {"block_size": 0}, {"block_size": 1 << 63}, {"kv_blocks": -1}, {"max_model_len": 0}, {"ranks": 0},
        {"ranks": 20_000}, {"ranks": -1}, {"events": "ipc:///tmp/x"}, {"events": "tcp://10.0.0.5:65535", "ranks": 2},
        {"replay": "tcp://169.254.169.254:80"},
    ],
)  # fmt: skip
def test_an_engine_whose_figures_cannot_be_serves_without_its_kv_and_says_why(claims: dict[str, Any]) -> None:
    fleet = Fleet()
    fleet.take(SnapshotEngine(**{**RIGHT, **claims}))
    assert fleet.ask("odd") == "e-1"
    assert dict(fleet.cache("odd").standing().reasons) == {"e-1": "kv_claims_refused"}
    assert [source.engine for source in fleet.evidence.sources()] == ["good"]
    (why,) = fleet.view.trouble
    assert why.startswith("odd: the KV of engine 'e-1' is not followed: ")


@pytest.mark.parametrize(
    "claims",
    [
        {"url": "http://169.254.169.254"}, {"url": "http://10.0.0.5:21000/x"}, {"url": "ftp://10.0.0.5:1"}, {"url": ""},
        {"secret": "a\r\nhost: b"}, {"id": "a\r\nset-cookie: b"}, {"id": ""}, {"id": "x" * 201}, {"attempt": -1},
    ],
)  # fmt: skip
def test_an_engine_that_nothing_may_be_sent_to_is_left_out_and_it_is_said(claims: dict[str, Any]) -> None:
    fleet = Fleet()
    fleet.take(SnapshotEngine(**{**RIGHT, **claims}))
    assert fleet.ask("odd") == ""
    (why,) = fleet.view.trouble
    assert "is left out: its" in why
    assert fleet.view.deployments["odd"].status == why
    assert "host: b" not in why  # a secret is never shown


def test_engines_of_many_ranks_take_no_sockets_from_those_of_few() -> None:
    fleet = Fleet(ranks=300)
    greedy = [SnapshotEngine(**{**RIGHT, "id": f"g{n}", "url": f"http://10.0.1.{n}:1", "ranks": 256}) for n in range(5)]
    fleet.take(*greedy, SnapshotEngine(**RIGHT))
    followed = {source.engine for source in fleet.evidence.sources()}
    assert followed == {"g0", "e-1", "good"}
    assert fleet.cache("odd").standing().reasons["g1"] == "kv_ranks_not_followed"
    assert len(fleet.view.trouble) == 4


def test_a_deployment_has_no_more_engines_than_can_be_chosen_among() -> None:
    fleet = Fleet(RoutingMode.LEAST_LOAD)
    fleet.take(*(SnapshotEngine(**{**RIGHT, "id": f"e{n}"}) for n in range(intake.MOST_ENGINES + 5)))
    assert len(fleet.view.deployments["odd"].aggregated) == intake.MOST_ENGINES
    assert fleet.ask("good") == "good"


def test_block_sizes_that_few_engines_claim_cost_the_others_nothing() -> None:
    fleet = Fleet()
    usual = [SnapshotEngine(**{**RIGHT, "id": f"e{n}", "url": f"http://10.0.1.{n}:1"}) for n in range(3)]
    odd = [
        SnapshotEngine(**{**RIGHT, "id": f"o{n}", "url": f"http://10.0.2.{n}:1", "block_size": n}) for n in range(1, 9)
    ]
    fleet.take(*odd, *usual)
    assert 16 in fleet.cache("odd").index.block_sizes
    assert len(fleet.cache("odd").index.block_sizes) <= 4
    fleet.take(*usual)
    assert fleet.cache("odd").index.block_sizes == {16}


def snapshot() -> dict[str, Any]:
    deployments = tuple(
        SnapshotDeployment(
            name=n, served_name=n, routing=RoutingPolicy(), engines=(SnapshotEngine(**{**RIGHT, "id": n}),)
        )
        for n in ("a", "b")
    )
    keys = (SnapshotKey(id="k", digest="0" * 64),)
    found: dict[str, Any] = json.loads(encode(FleetSnapshot(version=3, deployments=deployments, keys=keys)))
    return found


@pytest.mark.parametrize("value", [1 << 70, -(1 << 70), "text", None, [], {}, 1.5, True])
@pytest.mark.parametrize("field", ["id", "attempt", "role", "url", "block_size", "ranks", "events"])
def test_an_entry_that_cannot_be_read_hides_no_other(field: str, value: Any) -> None:
    told = snapshot()
    told["deployments"][0]["engines"].append({**told["deployments"][0]["engines"][0], field: value})
    taken, _ = intake.read(json.dumps(told).encode())
    assert [d.name for d in taken.deployments] == ["a", "b"]
    assert taken.deployments[0].engines[0].id == "a"
    assert taken.keys[0].id == "k"


def test_a_routing_of_a_later_version_is_the_usual_one_until_the_router_is_as_new() -> None:
    told = snapshot()
    told["deployments"][0]["routing"] = {"mode": "by-astrology"}
    taken, (why,) = intake.read(json.dumps(told).encode())
    assert taken.deployments[0].routing == RoutingPolicy()
    assert why.startswith("a: the routing (the defaults hold) cannot be read: ")


def test_deployments_and_keys_that_cannot_be_read_are_left_out_one_by_one() -> None:
    told = snapshot()
    told["deployments"].insert(0, {"name": 7})
    told["keys"].insert(0, {"id": "bad"})
    taken, trouble = intake.read(json.dumps(told).encode())
    assert ([d.name for d in taken.deployments], [k.id for k in taken.keys]) == (["a", "b"], ["k"])
    assert len(trouble) == 2


def test_what_is_no_snapshot_at_all_is_refused() -> None:
    for data in (b"{}", b"[", b'{"version": "x"}', b"\xff"):
        with pytest.raises(msgspec.MsgspecError):
            intake.read(data)


@pytest.mark.parametrize(
    "key", ["tandem:node:n:tokenizer:../../x", "a:" + "0" * 63, "x" * 999 + ":" + "0" * 64, ":" + "0" * 64]
)
def test_a_tokenizers_key_names_no_folder_but_a_digest(key: str) -> None:
    assert intake.tokenizer_key(key) == ""
    assert intake.tokenizer_key(good := "tandem:node:n:tokenizer:" + "0" * 64) == good
