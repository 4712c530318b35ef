"""A node that was taken over writes what it likes into its report: it hurts itself alone, and keys wait for nobody."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import msgspec
import pytest
from django.db import transaction
from hypothesis import given
from hypothesis import strategies as st

from controlplane.access import services as access
from controlplane.access.roles import SYSTEM
from controlplane.deployments import loop, rows
from controlplane.deployments.models import Event
from controlplane.fleet import wire
from controlplane.fleet.wire import NodeReport
from controlplane.nodes import queries
from tests.controlplane.core.scripted import GIB, Fleet, facts
from tests.controlplane.pages.test_every_page import signed_in

pytestmark = pytest.mark.django_db


def two_nodes(fleet: Fleet) -> dict[str, Any]:
    """A deployment on each of two nodes; returns the report of the bad one as plain values."""
    for name in ("bad", "good"):
        agent = fleet.join(name)
        for other in set(fleet.agents) - {name}:
            fleet.agents[other].facts = facts(memory=0)  # the next deployment goes to this node
        agent.facts = facts(memory=16 * GIB)
        fleet.deploy_ready(f"on-{name}")
    report: dict[str, Any] = msgspec.to_builtins(fleet.publisher.reports["bad"])
    return report


def put(report: dict[str, Any], path: str, value: Any) -> bytes:
    """The report as bytes, with one value put into it."""
    report = copy.deepcopy(report)
    at: Any = report
    *way, last = path.split(".")
    for step in way:
        at = at[int(step)] if step.isdigit() else at[step]
    at[last] = value
    return msgspec.json.encode(report)


OUT_OF_BOUNDS = {
    "sequence": 1 << 63,
    "plan_generation": (1 << 63) - 1,
    "facts.memory_bytes": 10**17,
    "facts.cpus": -1,
    "facts.address": "1" * 65,
    "engines.0.exit_code": 1 << 31,
    "engines.0.pid": 1 << 40,
    "engines.0.block_size": -5,
    "engines.0.kv_ranks": 20_000,
    "engines.0.started_at": 1e300,
    "engines.0.ports.http": 65_536,
    "engines.0.tokenizer": "../../../snapshot",
    "engines.0.model_folder": "/a\0b",
    "engines.0.load.running": -1,
    "engines": [{"engine": "e", "attempt": 1, "phase": "exited"}] * 1_001,
}


@pytest.mark.parametrize("path", OUT_OF_BOUNDS)
def test_a_report_out_of_bounds_hurts_its_node_alone(fleet: Fleet, path: str) -> None:
    report = two_nodes(fleet)
    key = access.create_key(actor=SYSTEM, name="k", scope="inference")[0]
    fleet.step()
    assert [k.id for k in fleet.snapshot.keys] == [key.pk]
    fleet.publisher.raw["bad"] = put(report, path, OUT_OF_BOUNDS[path])
    access.revoke_key(actor=SYSTEM, key_id=key.pk)
    fleet.deploy("more")
    fleet.step()
    assert fleet.snapshot.keys == ()
    row = queries.node_row("bad")
    assert row.node.report_error.startswith(path.replace(".0.", "[0].")), row.node.report_error
    assert row.facts is not None
    (told,) = Event.objects.filter(node_name="bad", kind="report-refused")
    assert "cannot be read" in told.message
    fleet.until(lambda: fleet.status("more") == "ready")
    assert fleet.status("on-good") == "ready"
    del fleet.publisher.raw["bad"]
    fleet.step()
    assert queries.node_row("bad").node.report_error == ""


def test_a_report_nested_deep_or_endless_stops_no_step(fleet: Fleet) -> None:
    two_nodes(fleet)
    for raw in (
        b'{"x":' + b"[" * 100_000,
        b" " * (wire.REPORT_BYTES + 1),
        b"\xff",
        b"",
        b"0",
        b'{"x":1' + b"0" * 10_000,
    ):
        fleet.publisher.raw["bad"] = raw
        fleet.step()
        assert fleet.status("on-good") == "ready"


def test_long_sentences_are_cut_and_pages_stay_small(fleet: Fleet) -> None:
    report = two_nodes(fleet)
    report["sequence"] += 1
    report["engines"][0]["detail"] = "so \0 long\u2028 " * 50_000
    report["engines"][0]["command"] = ["x" * 5_000] * 400
    report["facts"]["hostname"] = "h" * 1_000_000
    fleet.publisher.raw["bad"] = msgspec.json.encode(report)
    fleet.step()
    assert queries.node_row("bad").node.report_error == ""
    known = [engine for engine in fleet.engines("on-bad") if engine.id == report["engines"][0]["engine"]]
    assert len(msgspec.json.encode(known[0].observation)) < 15_000
    assert known[0].observation["detail"].startswith("so   long")
    assert known[0].observation["detail"].endswith("…")
    assert len(queries.node_row("bad").node.facts["hostname"]) == 255


def test_a_thousand_engines_in_one_report_cost_nothing_that_stays(fleet: Fleet) -> None:
    report = two_nodes(fleet)
    stranger = {"engine": "e", "attempt": 1, "phase": "exited", "detail": "x" * 4_000}
    report["engines"] = [*report["engines"], *[stranger] * (1_000 - len(report["engines"]))]
    report["sequence"] += 1
    fleet.publisher.raw["bad"] = msgspec.json.encode(report)
    fleet.step()
    assert queries.node_row("bad").node.report_error == ""
    assert fleet.status("on-bad") == "ready"


@pytest.mark.parametrize("claimed", [(1 << 53) - 1, 1 << 53, 1 << 62])
def test_a_node_that_claimed_a_plan_of_the_far_future_recovers(fleet: Fleet, claimed: int) -> None:
    report = two_nodes(fleet)
    report["sequence"] += 1
    fleet.publisher.raw["bad"] = put(report, "plan_generation", claimed)
    fleet.step()
    fleet.step()
    del fleet.publisher.raw["bad"]
    fleet.agents["bad"].restart()
    fleet.agents["good"].facts = facts(memory=0)
    fleet.deploy("more")
    fleet.until(lambda: fleet.status("more") == "ready", 60)
    assert queries.node_row("bad").node.report_error == ""
    assert wire.decode(wire.encode(fleet.publisher.reports["bad"]), NodeReport) == fleet.publisher.reports["bad"]


def test_pages_stay_small_whatever_a_report_may_hold(fleet: Fleet) -> None:
    """Each field at its bound, all at once."""
    report = two_nodes(fleet)
    engine, text = report["engines"][0], "x" * 3_000
    pairs = [{"prefill": "p" * 128, "prefill_attempt": n, "ok": True, "detail": text} for n in range(400)]
    engine |= {"detail": text, "command": [text] * 100, "pairs": pairs, "model_folder": "/" + "m" * 4_000}
    card = {"uuid": "u" * 64, "name": text, "memory_bytes": 1 << 53, "memory_free_bytes": 0}
    card["foreign"] = [{"pid": n, "name": "y" * 300, "memory_bytes": 1} for n in range(50)]
    report["facts"] |= {"gpus": [card | {"index": n} for n in range(64)], "hostname": text, "driver": text}
    report["sequence"] += 1
    fleet.publisher.raw["bad"] = msgspec.json.encode(report)
    fleet.step()
    assert queries.node_row("bad").node.report_error == ""
    client = signed_in("admin")
    for page in ("/", "/deployments/", "/deployments/on-bad/", "/nodes/", "/nodes/bad/", "/deployments/on-bad/events/"):
        answer = client.get(page)
        assert answer.status_code == 200
        assert len(answer.content) < 500_000, page


VALUES = st.one_of(
    st.integers(-(1 << 80), 1 << 80),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=50),
    st.text(min_size=1, max_size=2).map(lambda text: text * 3_000),
    st.none(),
    st.booleans(),
    st.lists(st.integers(-5, 5), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=3),
    st.sampled_from(["exited", "warming", "unhealthy", "installing", "stopping"]),
    st.integers(0, 70_000),
)


def paths_of(value: Any, at: str = "") -> list[str]:
    found = []
    for key, below in value.items() if isinstance(value, dict) else enumerate(value):
        found.append(f"{at}{key}")
        if isinstance(below, dict | list):
            found += paths_of(below, f"{at}{key}.")
    return found


def test_no_report_of_any_shape_stops_a_step(fleet: Fleet) -> None:
    report = two_nodes(fleet)
    report["engines"][0]["load"] = {"running": 1}
    report["sequence"] += 1
    key = access.create_key(actor=SYSTEM, name="k", scope="inference")[0]

    @given(data=st.data())
    def attack(data: st.DataObject) -> None:
        hostile = report
        for path in data.draw(st.lists(st.sampled_from(paths_of(report)), min_size=1, max_size=4, unique=True)):
            with contextlib.suppress(KeyError, IndexError, TypeError, msgspec.MsgspecError):  # what held it is gone
                hostile = msgspec.json.decode(put(hostile, path, data.draw(VALUES)))
        fleet.publisher.raw["bad"] = msgspec.json.encode(hostile)
        with transaction.atomic():
            fleet.step()
            assert fleet.snapshot.keys
            access.revoke_key(actor=SYSTEM, key_id=key.pk)
            fleet.step()
            assert fleet.snapshot.keys == ()
            assert fleet.status("on-good") == "ready"
            assert len(msgspec.json.encode([e.observation for e in fleet.engines("on-bad")])) < 100_000
            transaction.set_rollback(True)

    attack()


def test_a_report_that_a_step_fails_on_is_refused_and_the_others_go_on(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_nodes(fleet)
    whole = loop.gather

    def fragile(lease: Any, nodes: Any, found: dict[str, NodeReport], routers: Any, **more: Any) -> rows.Gathered:
        if "bad" in found:
            raise ZeroDivisionError
        return whole(lease, nodes, found, routers, **more)

    monkeypatch.setattr(loop, "gather", fragile)
    fleet.deploy("more")
    fleet.until(lambda: fleet.status("more") == "ready")
    assert queries.node_row("bad").node.report_error == "the control plane fails on it (ZeroDivisionError)"


@pytest.mark.parametrize(
    "part", ["loop.decide", "loop.apply", "publisher.read_reports", "publisher.router_statuses", "publisher.push_live"]
)
def test_a_revoked_key_leaves_the_snapshot_whatever_of_a_step_fails(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    two_nodes(fleet)
    key = access.create_key(actor=SYSTEM, name="k", scope="inference")[0]
    fleet.step()
    before = fleet.snapshot
    access.revoke_key(actor=SYSTEM, key_id=key.pk)

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    where, name = part.split(".")
    with monkeypatch.context() as patch:
        patch.setattr(loop if where == "loop" else fleet.publisher, name, broken)
        with pytest.raises(ZeroDivisionError):
            fleet.step()
        assert fleet.snapshot.keys == ()
        assert fleet.snapshot.version == before.version + 1
        assert fleet.snapshot.deployments == before.deployments
    fleet.step()
    assert fleet.snapshot.version == before.version + 1


STATUS = {"router": "r9", "snapshot_version": 1}


@pytest.mark.parametrize(
    "status",
    [
        {"snapshot_version": 1 << 63},
        {"keys_seen": {"k": 1e300}},
        {"keys_seen": {"k": -1.0}},
        {"in_flight": {"e": -1}},
        {"started_at": 1e11},
        {"faults": [{"engine": "e", "attempt": 1 << 40, "cause": "", "reason": "", "seconds": 1, "failures": 1}]},
    ],
)
def test_what_a_router_says_is_bounded_too(status: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        wire.decode(msgspec.json.encode(STATUS | status), wire.RouterStatus)
    assert wire.decode(msgspec.json.encode(STATUS), wire.RouterStatus).router == "r9"
