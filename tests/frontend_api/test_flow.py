"""The rules of retry and fallback, as tables: what the flow wants next after each outcome. No IO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.fleet.model import Role
from controlplane.fleet.wire import Disaggregate, OnPrefillFailure, RoutingPolicy, SnapshotDeployment, SnapshotEngine
from frontend_api.flow import LEASE_MARGIN, LEASE_SECONDS, MAX_LEGS, Serving
from frontend_api.formats.openai import Problem
from frontend_api.http.upstream import Broken
from frontend_api.kv.evidence import Cache, Prompt
from frontend_api.routing.loads import Loads
from frontend_api.routing.rates import USUAL_STEP
from frontend_api.routing.reason import Reason
from frontend_api.routing.view import HANG_PAUSE, Deployment, Engine, Health
from frontend_api.steps import (
    Began,
    Decode,
    Ended,
    Lost,
    NoRoom,
    Outcome,
    Prefill,
    Prefilled,
    Probe,
    Replied,
    Room,
    Wait,
)
from frontend_api.trace import Trace
from frontend_api.verdicts import PassOn

P = b'{"remote":1}'
REFUSED = Lost(Broken.CONNECT, False)
RESET = Lost(Broken.RESET, True)
STALE = Lost(Broken.STALE, True)
ALWAYS = RoutingPolicy(disaggregate=Disaggregate.ALWAYS)
FAIL = RoutingPolicy(on_prefill_failure=OnPrefillFailure.FAIL, disaggregate=Disaggregate.ALWAYS)


def fleet(*names: str, policy: RoutingPolicy | None = None, **more: Any) -> Deployment:
    """Engines by name: p0, d0 …, a0 …"""
    roles = {"p": Role.PREFILL, "d": Role.DECODE, "a": Role.AGGREGATED}
    engines = tuple(Engine(SnapshotEngine(id=n, name=n, attempt=1, role=roles[n[0]], url="http://x")) for n in names)
    return Deployment(SnapshotDeployment(name="x", served_name="m", routing=policy or ALWAYS, **more), engines)


def load(deployment: Deployment) -> dict[str, int]:
    engines = (*deployment.prefill, *deployment.decode, *deployment.aggregated)
    return {e.id: e.in_flight for e in engines if e.in_flight or e.queued}


def long_prompt(deployment: Deployment) -> Prompt:
    """Of which no engine has anything."""
    return Prompt(Cache(deployment), 5_000, {}, {})


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def prefilled(clock: Clock, age: float = 0.0) -> Prefilled:
    return Prefilled(P, clock.now - age)


def walk(
    deployment: Deployment, script: list[Callable[[Clock], Outcome]], alone: Reason | None = None, known: bool = False
) -> tuple[list[str], Any, Trace]:
    """Play a script of outcomes. Returns the legs asked for (`p0`, `d0`, `d0+kv`, `…!` on a new connection, `d0?` where it is
    only to be seen whether it takes one, `d0=` where only whether it takes the request) and the verdict."""
    clock, trace = Clock(), Trace()
    flow = Serving(deployment, alone, trace, clock, long_prompt(deployment) if known else None).steps()
    legs: list[str] = []
    outcome: Outcome = None
    todo = list(script)
    while True:
        try:
            step = flow.send(outcome)
        except StopIteration as stop:
            assert not todo, "the flow ended before the script"
            assert load(deployment) == {}
            return legs, stop.value, trace
        if step is None:
            outcome = Ended()
            continue
        assert isinstance(step, Prefill | Decode | Probe)
        with_kv = "+kv" if isinstance(step, Decode) and step.params else ""
        if isinstance(step, Prefill) and not step.keep:
            with_kv = "="
        legs.append(step.engine.id + ("?" if isinstance(step, Probe) else with_kv + ("!" if step.fresh else "")))
        assert load(deployment).get(step.engine.id) == 1, "load is counted before the leg begins"
        outcome = todo.pop(0)(clock)


def says(outcome: Outcome) -> Callable[[Clock], Outcome]:
    return lambda clock: outcome


OK = says(Began(whole=True))
KV = prefilled
NO_KV = says(Prefilled(None, 0.0))

CASES: dict[str, tuple[tuple[str, ...], dict[str, Any], list[Callable[[Clock], Outcome]], list[str], Any]] = {
    # name: engines, deployment, outcomes, legs, (kind of verdict, status) or None
    "aggregated": (("a0",), {}, [OK], ["a0"], None),
    "two legs": (("p0", "d0"), {}, [KV, OK], ["p0", "d0+kv"], None),
    "prefill refused, another": (("p0", "p1", "d0"), {}, [says(REFUSED), KV, OK], ["p0", "p1", "d0+kv"], None),
    "prefill refused, fall back": (("p0", "d0"), {}, [says(REFUSED), OK], ["p0", "d0"], None),
    "prefill refused, fail": (("p0", "d0"), {"policy": FAIL}, [says(REFUSED)], ["p0"], (Problem, 503)),
    "no params, fall back": (("p0", "p1", "d0"), {}, [NO_KV, OK], ["p0", "d0"], None),
    "no params, fail": (("p0", "d0"), {"policy": FAIL}, [NO_KV], ["p0"], (Problem, 503)),
    "prefill and decode refuse the request": (
        ("p0", "p1", "d0"), {}, [says(Replied(400, b"")), says(Replied(400, b""))], ["p0", "d0"], (PassOn, 400)),
    "only prefill refuses the request": (("p0", "p1", "d0"), {}, [says(Replied(400, b"")), OK], ["p0", "d0"], None),
    "both refuse, fail": (
        ("p0", "d0"), {"policy": FAIL}, [says(Replied(422, b"")), says(Replied(422, b""))], ["p0", "d0="], (PassOn, 422)),
    "only prefill refuses, fail": (
        ("p0", "d0"), {"policy": FAIL}, [says(Replied(404, b"")), KV], ["p0", "d0="], (Problem, 503)),
    "only one prefill refuses, fail": (
        ("p0", "p1", "d0"), {"policy": FAIL}, [says(Replied(404, b"")), KV, KV, OK], ["p0", "d0=", "p1", "d0+kv"], None),
    "decode refuses the request": (
        ("p0", "d0"), {}, [KV, says(Replied(400, b"")), says(Replied(400, b""))], ["p0", "d0+kv", "d0"], (PassOn, 400)),
    "decode refuses the KV": (("p0", "d0"), {}, [KV, says(Replied(400, b"")), OK], ["p0", "d0+kv", "d0"], None),
    "decode refuses the request, fail": (
        ("p0", "d0"), {"policy": FAIL}, [KV, says(Replied(400, b""))], ["p0", "d0+kv"], (PassOn, 400)),
    "one of two knows no such model": (("a0", "a1"), {}, [says(Replied(404, b"")), OK], ["a0", "a1"], None),
    "two of three know no such model": (
        ("a0", "a1", "a2"), {}, [says(Replied(404, b""))] * 2, ["a0", "a1"], (PassOn, 404)),
    "prefill 500, fall back": (("p0", "d0"), {}, [says(Replied(500, b"")), OK], ["p0", "d0"], None),
    "prefill 500, fail": (("p0", "d0"), {"policy": FAIL}, [says(Replied(500, b""))], ["p0"], (Problem, 503)),
    "the only transfer fails": (
        ("p0", "d0"), {}, [KV, says(Replied(500, b"")), OK], ["p0", "d0+kv", "d0"], None),
    "the only transfer fails, fail": (
        ("p0", "d0"), {"policy": FAIL}, [KV, says(Replied(500, b""))], ["p0", "d0+kv"], (Problem, 503)),
    "the only transfer hangs": (
        ("p0", "d0"), {}, [KV, says(Lost(Broken.SILENT, True)), OK], ["p0", "d0+kv", "d0"], None),
    "the only transfer hangs, fail": (
        ("p0", "d0"), {"policy": FAIL}, [KV, says(Lost(Broken.SILENT, True))], ["p0", "d0+kv"], (Problem, 504)),
    "every transfer fails": (
        ("p0", "p1", "d0", "d1"), {}, [KV, says(Replied(500, b"")), KV, says(RESET), OK],
        ["p0", "d0+kv", "p1", "d1+kv", "d0"], None),
    "decode fails with KV and without": (
        ("p0", "d0"), {}, [KV, says(Replied(500, b"")), says(Replied(500, b""))], ["p0", "d0+kv", "d0"], (PassOn, 500)),
    "a transfer fails, and the other decode engine": (
        ("p0", "d0", "d1"), {}, [KV, says(Replied(500, b"")), KV, says(Replied(500, b"")), says(Replied(500, b"")), OK],
        ["p0", "d0+kv", "p0", "d1+kv", "d0", "d1"], None),
    "every prefill engine fails": (
        ("p0", "p1", "d0"), {}, [says(Replied(500, b"")), says(Lost(Broken.SILENT, True)), says(None), OK],
        ["p0", "p1", "p0?", "d0"], None),
    "every prefill engine fails, and one of two decode engines": (
        ("p0", "p1", "d0", "d1"), {},
        [says(Replied(500, b"")), says(Lost(Broken.SILENT, True)), says(None), says(Replied(500, b"")), says(None), says(None), OK],
        ["p0", "p1", "p0?", "d0", "p0?", "d0?", "d1"], None),
    "every prefill engine fails, and two of three decode engines": (
        ("p0", "d0", "d1", "d2"), {}, [says(Replied(500, b""))] * 2 + [says(None)] * 2 + [says(Replied(500, b""))],
        ["p0", "d1", "p0?", "d1?", "d2"], (PassOn, 500)),
    "every prefill engine breaks off, and lives": (
        ("p0", "p1", "d0"), {}, [says(RESET), says(RESET), says(None), says(None), OK],
        ["p0", "p1", "p0?", "p1?", "d0"], None),
    "two prefill engines die of it": (
        ("p0", "p1", "d0"), {}, [says(RESET), says(RESET), says(REFUSED)], ["p0", "p1", "p0?"], (Problem, 503)),
    "decode is too busy for a transfer": (
        ("p0", "d0"), {}, [KV, says(Replied(503, b"")), OK], ["p0", "d0+kv", "d0"], None),
    "decode not reached, same params": (("p0", "d0", "d1"), {}, [KV, says(REFUSED), OK], ["p0", "d0+kv", "d1+kv"], None),
    "decode reached, params spent": (
        ("p0", "d0", "d1"), {}, [KV, says(RESET), KV, OK], ["p0", "d0+kv", "p0", "d1+kv"], None),
    "decode 500, params spent": (
        ("p0", "d0", "d1"), {}, [KV, says(Replied(500, b"")), KV, OK], ["p0", "d0+kv", "p0", "d1+kv"], None),
    "decode stale, params spent, same engine": (
        ("p0", "d0"), {}, [KV, says(STALE), KV, OK], ["p0", "d0+kv", "p0!", "d0+kv!"], None),
    "prefill stale, same engine": (("p0", "d0"), {}, [says(STALE), KV, OK], ["p0", "p0!", "d0+kv!"], None),
    "prefill stale and well, decode breaks": (
        ("p0", "d0", "d1"), {}, [says(STALE), KV, says(RESET), KV, OK], ["p0", "p0!", "d1+kv!", "p0!", "d0+kv!"], None),
    "stale, as they died of it": (("a0", "a1", "a2"), {}, [says(STALE), says(RESET)], ["a0", "a1!"], (Problem, 503)),
    "stale, and it is gone": (("a0",), {}, [says(STALE), says(REFUSED)], ["a0", "a0!"], (Problem, 503)),
    "only decode takes no connection": (("p0", "d0"), {}, [KV, says(REFUSED)], ["p0", "d0+kv"], (Problem, 503)),
    "silent": (("a0",), {}, [says(Lost(Broken.SILENT, True))], ["a0"], (Problem, 504)),
    "our key refused": (("a0", "a1"), {}, [says(Replied(401, b"")), OK], ["a0", "a1"], None),
    "our key refused everywhere": (("a0",), {}, [says(Replied(401, b""))], ["a0"], (Problem, 502)),
    "two strikes": (("a0", "a1", "a2"), {}, [says(RESET), says(RESET)], ["a0", "a1"], (Problem, 503)),
    "no decode": (("p0",), {}, [], [], (Problem, 503)),
    "nothing": ((), {}, [], [], (Problem, 503)),
    "all pairs broken, fall back": (("p0", "d0"), {"broken_pairs": (("p0", "d0"),)}, [OK], ["d0"], None),
    "all pairs broken, fail": (("p0", "d0"), {"broken_pairs": (("p0", "d0"),), "policy": FAIL}, [], [], (Problem, 503)),
    "the other pair is broken, fall back": (
        ("p0", "d0", "d1"), {"broken_pairs": (("p0", "d1"),)}, [KV, says(REFUSED), OK], ["p0", "d0+kv", "d1"], None),
    "params too old": (
        ("p0", "d0"), {}, [lambda c: prefilled(c, LEASE_SECONDS - LEASE_MARGIN), KV, OK], ["p0", "p0", "d0+kv"], None),
    "params old enough": (
        ("p0", "d0"), {}, [lambda c: prefilled(c, LEASE_SECONDS - LEASE_MARGIN - 0.1), OK], ["p0", "d0+kv"], None),
}  # fmt: skip


@pytest.mark.parametrize(("engines", "more", "script", "legs", "verdict"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("known", [False, True])
def test_walk(
    engines: tuple[str, ...], more: dict[str, Any], script: list[Any], legs: list[str], verdict: Any, known: bool
) -> None:
    deployment = fleet(*engines, **more)
    got, end, _ = walk(deployment, script, known=known)
    assert got == legs
    assert (None if end is None else (type(end), end.status)) == verdict


def test_params_are_dropped_when_a_slow_connection_ate_the_lease() -> None:
    def late(clock: Clock) -> Outcome:
        clock.now += LEASE_SECONDS
        return Lost(Broken.CONNECT_TIMEOUT, False)

    legs, _, _ = walk(fleet("p0", "d0", "d1"), [KV, late, KV, OK])
    assert legs == ["p0", "d0+kv", "p0", "d1+kv"]


@pytest.mark.parametrize(
    ("down", "script", "legs", "status"),
    [
        (("d0",), [says(REFUSED)], ["d0?"], 503),
        (("d0",), [says(None), KV, OK], ["d0?", "p0", "d0+kv"], None),
        (("d0", "d1"), [says(REFUSED), says(REFUSED)], ["d0?", "d1?"], 503),
        (("d0", "d1"), [says(REFUSED), says(None), KV, OK], ["d0?", "d1?", "p0", "d1+kv"], None),
        (("d0", "d1"), [says(None), KV, says(REFUSED), OK], ["d0?", "p0", "d0+kv", "d1+kv"], None),
        (("d0", "d1"), [says(None), KV, says(RESET), says(REFUSED), OK], ["d0?", "p0", "d0+kv", "d1?", "d0"], None),
    ],
)
def test_nothing_is_prefilled_for_an_engine_that_takes_no_connection(
    down: tuple[str, ...], script: list[Any], legs: list[str], status: int | None
) -> None:
    deployment = fleet("p0", *down)
    for engine in deployment.decode:
        engine.failed(0.0, hangs=False)
    got, end, _ = walk(deployment, script)
    assert got == legs
    assert (end.status if end else None) == status


@pytest.mark.parametrize(
    ("prefills", "down", "script", "last"),
    [
        (6, 0, [*[says(REFUSED)] * 5, KV, OK], "d0+kv"),
        (1, 6, [*[says(REFUSED)] * 4, says(None), KV, OK], "d4+kv"),
        (1, 6, [*[says(REFUSED)] * 5, says(None), KV, OK], "d5+kv"),
    ],
)
def test_the_last_that_is_tried_prefills_nothing_in_vain(
    prefills: int, down: int, script: list[Any], last: str
) -> None:
    deployment = fleet(*(f"p{n}" for n in range(prefills)), *(f"d{n}" for n in range(down or 1)))
    for engine in deployment.decode[:down]:
        engine.failed(0.0, hangs=False)
    legs, end, trace = walk(deployment, script)
    assert (legs[-1], end, trace.stranded) == (last, None, 0)


def test_after_so_many_legs_nothing_more_is_tried() -> None:
    names = [f"{kind}{n}" for kind in "pd" for n in range(9)]
    legs, end, _ = walk(fleet(*names), [KV, *[says(REFUSED)] * (MAX_LEGS - 1)])
    assert (len(legs), end.status) == (MAX_LEGS, 503)
    legs, end, trace = walk(fleet(*names), [*[says(REFUSED)] * MAX_LEGS, OK])  # but decode alone
    assert (len(legs), end, trace.fallback, trace.cause) == (MAX_LEGS + 1, None, True, "prefill-connect")


def test_it_is_seen_only_now_and_then_whether_an_engine_that_hangs_takes_a_connection() -> None:
    deployment = fleet("p0", "d0")
    deployment.decode[0].failed(0.0, hangs=False)
    assert walk(deployment, [says(Lost(Broken.CONNECT_TIMEOUT, False))])[0] == ["d0?"]
    assert walk(deployment, [])[0] == []


def test_fallback_is_told_with_its_cause() -> None:
    for script, cause in (
        ([says(REFUSED), OK], "prefill-connect"),
        ([says(Replied(503, b"")), OK], "prefill-status-503"),
        ([NO_KV, OK], "no-params"),
    ):
        _, _, trace = walk(fleet("p0", "d0"), script)
        assert (trace.fallback, trace.cause, trace.prefill, trace.decode) == (True, cause, None, "d0")
    _, _, trace = walk(fleet("d0"), [OK])
    assert (trace.fallback, trace.cause) == (True, "prefill-unavailable")
    _, _, trace = walk(fleet("p0", "d0"), [OK], alone=Reason.SEVERAL_PROMPTS)
    assert (trace.fallback, trace.reason) == (False, "several-prompts")


def test_what_is_disaggregated_at_last_was_no_fallback() -> None:
    deployment = fleet("p0", "d0", "d1")
    deployment.prefill[0].failed(100.0, hangs=True)

    def refused_late(clock: Clock) -> Outcome:
        clock.now += HANG_PAUSE
        return REFUSED

    legs, _, trace = walk(deployment, [refused_late, KV, OK])
    assert legs == ["d0", "p0", "d1+kv"]
    assert not trace.fallback


def test_health_follows_connections_and_never_the_engines_answers() -> None:
    for outcome, health in (
        (REFUSED, Health.DOWN),
        (RESET, Health.DOWN),
        (Lost(Broken.PROTOCOL, True), Health.DOWN),
        (Lost(Broken.CONNECT_TIMEOUT, False), Health.DOWN),
        (Lost(Broken.SILENT, True), Health.UP),
        (STALE, Health.UP),
        (Replied(500, b""), Health.UP),
        (Replied(401, b""), Health.UP),
    ):
        deployment = fleet("a0", "a1")
        walk(deployment, [says(outcome), OK])
        assert deployment.aggregated[0].health is health, outcome


def test_a_stream_holds_decode_until_its_end_and_prefill_until_its_beginning() -> None:
    deployment, clock = fleet("p0", "d0"), Clock()
    flow = Serving(deployment, None, Trace(), clock).steps()
    flow.send(None)
    assert load(deployment) == {"p0": 1, "d0": 1}
    flow.send(prefilled(clock))
    assert load(deployment) == {"p0": 1, "d0": 1}
    assert flow.send(Began()) is None
    assert load(deployment) == {"d0": 1}
    with pytest.raises(StopIteration):
        flow.send(Ended())
    assert load(deployment) == {}


def test_what_is_computed_no_longer_waits_and_teaches_the_engines_pace() -> None:
    deployment, clock, trace = fleet("p0", "d0"), Clock(), Trace()
    (prefill,) = deployment.prefill
    flow = Serving(deployment, None, trace, clock, long_prompt(deployment)).steps()
    flow.send(None)
    assert (prefill.queued, deployment.decode[0].queued, trace.overlap) == (5_000, 0, 0)
    clock.now += 50.0
    flow.send(prefilled(clock))
    assert (prefill.queued, prefill.in_flight) == (0, 1)
    assert prefill.read.own == pytest.approx(0.01)
    flow.close()
    for whole, learned in ((True, False), (False, True)):
        deployment = fleet("a0")
        flow = Serving(deployment, None, trace, clock, long_prompt(deployment)).steps()
        flow.send(None)
        clock.now += 5.0
        try:
            flow.send(Began(whole=whole))
        except StopIteration:
            assert whole
        assert deployment.aggregated[0].queued == 0
        assert (deployment.aggregated[0].read.measured == 1) is learned, (
            "the time of a whole answer is not its prompt's"
        )
        flow.close()


def test_the_first_token_of_decode_teaches_the_pace_of_transfers_and_its_stream_the_step() -> None:
    for known, token, whole, learned in (
        (True, True, False, True),
        (True, False, False, False),  # a stream of responses begins before its first token
        (True, True, True, False),
        (False, True, False, False),
    ):
        deployment, clock = fleet("p0", "d0"), Clock()
        (decode,) = deployment.decode
        flow = Serving(deployment, None, Trace(), clock, long_prompt(deployment) if known else None).steps()
        flow.send(None)
        flow.send(prefilled(clock))
        clock.now += 1.0
        try:
            assert flow.send(Began(whole=whole, token=token)) is None
            with pytest.raises(StopIteration):
                flow.send(Ended(40, 2.0))
            assert decode.step.own == pytest.approx(0.05)
        except StopIteration:
            assert whole
        assert decode.pull.measured == learned
        if learned:  # 5,000 tokens are 313 blocks of 16; the first step is no transfer
            assert decode.pull.own == pytest.approx((1.0 - USUAL_STEP) / 5_008)
        assert decode.read.measured == 0


def test_a_prompt_read_where_it_is_answered_teaches_only_by_its_first_token() -> None:
    for token in (True, False):
        deployment, clock = fleet("a0"), Clock()
        flow = Serving(deployment, None, Trace(), clock, long_prompt(deployment)).steps()
        flow.send(None)
        clock.now += 5.0
        flow.send(Began(token=token))
        (engine,) = deployment.aggregated
        assert (engine.read.measured, engine.queued) == (int(token), 0)
        with pytest.raises(StopIteration):
            flow.send(Ended(8, 0.8))
        assert engine.step.own == pytest.approx(0.1)


def test_an_other_routers_prompts_count_for_the_time_a_prompt_took() -> None:
    deployment, clock = fleet("p0", "d0"), Clock()
    (prefill,) = deployment.prefill
    prefill.others_queued = 15_000
    flow = Serving(deployment, None, Trace(), clock, long_prompt(deployment)).steps()
    flow.send(None)
    clock.now += 2.0
    flow.send(prefilled(clock))
    assert prefill.read.own == pytest.approx(2.0 / 20_000)
    flow.close()


@pytest.mark.parametrize(
    ("script", "stranded"),
    [
        ([KV, OK], 0),
        ([NO_KV, OK], 0),
        ([KV, says(Replied(400, b"")), OK], 0),  # it tells the prefill engine
        ([KV, says(RESET), KV, OK], 0),
        ([KV, says(REFUSED), OK], 0),
        ([KV, says(REFUSED), says(REFUSED)], 1),
        ([lambda c: prefilled(c, LEASE_SECONDS), KV, OK], 1),
    ],
    ids=["answered", "no params", "decode refuses", "prefilled again", "another decode", "no decode", "too late"],
)
def test_kv_that_nobody_fetched_is_noted(script: list[Any], stranded: int) -> None:
    _, _, trace = walk(fleet("p0", "d0", "d1"), script)
    assert trace.stranded == stranded


def test_kv_of_a_client_that_left_while_decode_answers_is_not_stranded() -> None:
    deployment, clock, trace = fleet("p0", "d0"), Clock(), Trace()
    flow = Serving(deployment, None, trace, clock).steps()
    flow.send(None)
    flow.send(prefilled(clock))
    flow.close()
    assert (trace.stranded, load(deployment)) == (0, {})


def test_a_session_keeps_its_engines_when_decode_is_tried_again() -> None:
    deployment, clock = fleet("p0", "p1", "d0", "d1", "d2"), Clock()
    seen = set()
    for _ in range(4):
        flow = Serving(deployment, None, Trace(), clock, session=b"s").steps()
        prefill, decode = flow.send(None), flow.send(prefilled(clock))
        assert isinstance(prefill, Prefill)
        assert isinstance(decode, Decode)
        seen.add((prefill.engine.id, decode.engine.id))
        flow.close()
    assert len(seen) == 1


OUTCOMES = st.sampled_from(["began", "kv", "nokv", "refused", "reset", "stale", "400", "500", "401", "silent", "close"])


@given(
    st.sampled_from([("a0",), ("a0", "a1"), ("p0", "d0"), ("p0", "p1", "d0", "d1"), ("d0",)]),
    st.lists(
        st.sampled_from(["full", "room", "began", "kv", "refused", "reset", "500", "429", "no room", "gone"]),
        max_size=16,
    ),
    st.booleans(),
)
def test_whoever_waits_holds_nothing_and_no_engine_gets_more_than_it_may(
    engines: tuple[str, ...], script: list[str], queued: bool
) -> None:
    """Others come and go: `full` fills all engines to their limit, `room` empties them."""
    deployment, clock, trace = fleet(*engines, policy=RoutingPolicy(max_in_flight=2)), Clock(), Trace()
    members = (*deployment.prefill, *deployment.decode, *deployment.aggregated)
    flow = Serving(deployment, None, trace, clock, loads=Loads(), queued=queued).steps()
    outcome: Outcome = None
    script = script[:]
    try:
        step = flow.send(None)
        assert isinstance(step, Wait) is queued
        while True:
            word = script.pop(0) if script else "close"
            if word in ("full", "room"):
                for engine in members:
                    engine.others = 2 - engine.in_flight if word == "full" else 0
                continue
            if word == "close":
                flow.close()
                break
            if step is None:
                outcome = Ended()
            elif isinstance(step, Wait):
                assert load(deployment) == {}
                gone = Room(None, None) if word == "gone" else Room(deployment, None)
                outcome = NoRoom("") if word == "no room" else gone
            else:
                probed = step.engine if isinstance(step, Probe) else None  # which is no request
                assert all(engine.load <= 2 for engine in members if engine is not probed)
                good: Outcome = prefilled(clock) if isinstance(step, Prefill) else Began()
                bad: dict[str, Outcome] = {
                    "refused": REFUSED, "reset": RESET, "500": Replied(500, b""), "429": Replied(429, b"", 3.0),
                }  # fmt: skip
                outcome = bad.get(word, good)
            step = flow.send(outcome)
    except StopIteration:
        pass
    assert load(deployment) == {}


def test_an_overloaded_engine_is_no_strike_and_its_refusal_is_passed_on_with_its_time() -> None:
    busy = says(Replied(503, b"", 7.0))
    legs, end, _ = walk(fleet("a0", "a1", "a2", "a3"), [busy, busy, busy, OK])
    assert legs == ["a0", "a1", "a2", "a3"]
    assert end is None
    for asked, told in ((None, 1), (0.0, 1), (7.0, 7), (1e9, 30)):
        deployment = fleet("a0")
        _, end, _ = walk(deployment, [says(Replied(429, b"x", asked))])
        assert end == PassOn(429, b"x", told)
        assert deployment.aggregated[0].health is Health.OVERLOADED


@given(
    st.sampled_from([("a0",), ("a0", "a1"), ("p0", "d0"), ("p0", "p1", "d0", "d1"), ("p0",), ("d0",), ()]),
    st.sampled_from([RoutingPolicy(), ALWAYS, FAIL]),
    st.lists(OUTCOMES, max_size=12),
    st.booleans(),
    st.booleans(),
)
def test_whatever_happens_load_returns_to_zero_and_legs_are_bounded(
    engines: tuple[str, ...], policy: RoutingPolicy, script: list[str], known: bool, down: bool
) -> None:
    deployment, clock, trace = fleet(*engines, policy=policy), Clock(), Trace()
    for engine in deployment.decode if down else ():
        engine.failed(0.0, hangs=False)
    flow = Serving(deployment, None, trace, clock, long_prompt(deployment) if known else None).steps()
    outcome: Outcome = None
    legs, spent = 0, False
    script = script[:]
    try:
        while True:
            step = flow.send(outcome)
            if step is None:
                outcome = Ended()
                continue
            legs += 1
            assert legs <= MAX_LEGS + 6
            assert not (isinstance(step, Decode) and step.params and spent), "spent params were used again"
            word = script.pop(0) if script else "close"
            if word == "close":
                flow.close()
                break
            if isinstance(step, Probe):
                outcome = REFUSED if word == "refused" else None
                continue
            good: Outcome = prefilled(clock) if isinstance(step, Prefill) else Began()
            outcome = {
                "began": good, "kv": good, "nokv": Prefilled(None, clock.now) if isinstance(step, Prefill) else Began(),
                "refused": REFUSED, "reset": RESET, "stale": STALE, "400": Replied(400, b""), "500": Replied(500, b""),
                "401": Replied(401, b""), "silent": Lost(Broken.SILENT, True),
            }[word]  # fmt: skip
            if isinstance(step, Prefill):
                spent = False
            elif isinstance(step, Decode) and step.params:
                spent = not (isinstance(outcome, Lost) and not outcome.sent)
    except StopIteration:
        pass
    assert load(deployment) == {}
