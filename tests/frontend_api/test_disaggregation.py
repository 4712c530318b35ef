"""Remote or local: what reading a prompt elsewhere costs against reading it where it is answered, as a table and properties."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.fleet.wire import Disaggregate, RoutingMode, RoutingPolicy
from frontend_api.routing.choice import Choice, choose, explain_costs
from frontend_api.routing.costs import Part, costs_of
from frontend_api.routing.rates import USUAL_PULL, USUAL_READ, USUAL_STEP
from frontend_api.routing.reason import Reason
from frontend_api.routing.view import Deployment, carrying
from tests.frontend_api.test_flow import fleet
from tests.frontend_api.test_routing import asked

AUTO = RoutingPolicy(mode=RoutingMode.KV)
ALWAYS = RoutingPolicy(mode=RoutingMode.KV, disaggregate=Disaggregate.ALWAYS)
SMALL = RoutingPolicy(mode=RoutingMode.KV, local_below_tokens=512)
SMALL_ALWAYS = RoutingPolicy(mode=RoutingMode.KV, disaggregate=Disaggregate.ALWAYS, local_below_tokens=512)
LOCAL, BELOW = Reason.LOCAL_CHEAPER, Reason.LOCAL_BELOW_THRESHOLD
COLD, WARM = Reason.NO_OVERLAP, Reason.OVERLAP

CASES: dict[str, tuple[RoutingPolicy, dict[str, int], dict[str, int], tuple[str | None, str], Reason]] = {
    # name: policy, streams, overlap of 2,000 tokens, (prefill, decode), reason
    "idle: a transfer is only more": (AUTO, {}, {}, (None, "d0"), LOCAL),
    "streams would stand still": (AUTO, {"d0": 1, "d1": 1}, {}, ("p0", "d0"), COLD),
    "always": (ALWAYS, {}, {}, ("p0", "d0"), COLD),
    "prefill has most of it": (AUTO, {}, {"p1": 1_900}, ("p1", "d0"), WARM),
    "decode has most of it": (AUTO, {"d0": 2, "d1": 2}, {"d1": 1_984}, (None, "d1"), LOCAL),
    "decode has all of it": (AUTO, {"d0": 9, "d1": 9}, {"d1": 2_000}, (None, "d1"), LOCAL),
    "decode has most of it and many streams": (AUTO, {"d0": 30, "d1": 30}, {"d1": 1_600}, ("p0", "d1"), COLD),
    "prefill is full": (AUTO, {"p0": 60, "p1": 60, "d0": 2, "d1": 2}, {}, (None, "d0"), LOCAL),
    "a small rest, one idle": (SMALL, {"d0": 20}, {"d1": 1_600}, (None, "d1"), BELOW),
    "a small rest, streams or not": (SMALL, {"d0": 50, "d1": 50}, {"d1": 1_600}, (None, "d1"), BELOW),
    "a rest that is not small": (SMALL, {"d0": 50, "d1": 50}, {"d1": 1_488}, ("p0", "d1"), COLD),
    "always but for a small rest": (SMALL_ALWAYS, {}, {"d1": 1_600}, (None, "d1"), BELOW),
    "always, no small rest": (SMALL_ALWAYS, {}, {"d1": 1_488}, ("p0", "d1"), COLD),
}


def chosen(choice: Choice) -> tuple[str | None, str | None]:
    return choice.prefill.id if choice.prefill else None, choice.decode.id if choice.decode else None


@pytest.mark.parametrize(("policy", "streams", "overlap", "pair", "reason"), CASES.values(), ids=CASES)
def test_the_cheaper_is_taken(
    policy: RoutingPolicy, streams: dict[str, int], overlap: dict[str, int], pair: Any, reason: Reason
) -> None:
    deployment = fleet("p0", "p1", "d0", "d1", policy=policy)
    with ExitStack() as running:
        for engine in (*deployment.prefill, *deployment.decode):
            for _ in range(streams.get(engine.id, 0)):
                running.enter_context(carrying(engine))
            engine.last_taken = 0
        choice = choose(deployment, now=0.0, prompt=asked(deployment, 2_000, **overlap))
    assert (chosen(choice), choice.reason, choice.fallback) == (pair, reason, False)


def test_all_three_parts_are_told_in_seconds() -> None:
    deployment = fleet("p0", "d0", policy=AUTO)
    prefill, decode = deployment.prefill[0], deployment.decode[0]
    decode.spec = type(decode.spec)(
        id="d0", name="d0", attempt=1, role=decode.spec.role, url="http://x", block_size=128
    )
    with carrying(prefill, 300), carrying(decode), carrying(decode):
        choice = choose(deployment, now=0.0, prompt=asked(deployment, 1_000, p0=200, d0=384))
    told = {
        c.part: (c.engine.id, c.overlap, c.queue, c.compute, c.transfer, c.stalls, c.streams)
        for c in costs_of(choice.weighed)
    }
    local = 616 * USUAL_READ
    assert told == {
        Part.PREFILL: ("p0", 200, 300 * USUAL_READ, 800 * USUAL_READ, 0.0, 0.0, USUAL_STEP),
        Part.DECODE: ("d0", 384, 0.0, 0.0, 5 * 128 * USUAL_PULL, 0.0, 2 * USUAL_STEP),
        Part.LOCAL: ("d0", 384, 0.0, local, 0.0, 2 * local, 2 * USUAL_STEP),
    }
    for c in costs_of(choice.weighed):
        assert c.total == pytest.approx(c.queue + c.compute + c.transfer + c.stalls + c.streams)
    assert chosen(choice) == ("p0", "d0")


@pytest.mark.parametrize("mode", [RoutingMode.LEAST_LOAD, RoutingMode.ROUND_ROBIN, RoutingMode.RANDOM, RoutingMode.KV])
def test_without_tokens_what_can_be_disaggregated_is_and_costs_are_told_to_those_who_ask(mode: RoutingMode) -> None:
    deployment = fleet("p0", "p1", "d0", policy=RoutingPolicy(mode=mode, local_below_tokens=10_000))
    with carrying(deployment.prefill[1], 500), carrying(deployment.decode[0]):
        choice = choose(deployment, now=0.0)
        assert choice.prefill is not None
        assert choice.weighed == ()
        costs = costs_of(explain_costs(deployment, choice, now=0.0))
    assert [(c.engine.id, c.part, c.overlap, c.queue, c.compute, c.transfer, c.streams) for c in costs] == [
        ("p0", Part.PREFILL, 0, 0.0, 0.0, 0.0, 0.0),
        ("p1", Part.PREFILL, 0, 500 * USUAL_READ, 0.0, 0.0, USUAL_STEP),
        ("d0", Part.DECODE, 0, 0.0, 0.0, 0.0, USUAL_STEP),
    ]


def test_below_the_threshold_too_load_wins_before_the_engine_of_a_hot_prefix_drowns() -> None:
    deployment = fleet("p0", "d0", "d1", "d2", policy=SMALL_ALWAYS)
    for _ in range(90):
        prompt = asked(deployment, 5_200, d0=5_000)
        choice = choose(deployment, now=0.0, prompt=prompt)
        assert choice.decode is not None
        carrying(choice.decode, 0 if choice.prefill else prompt.lacking(choice.decode)).__enter__()
    loads = [engine.in_flight for engine in deployment.decode]
    assert min(loads) > 20
    assert max(loads) < 40


@pytest.mark.parametrize("broken", [(), (("p0", "d0"),)])
def test_a_small_prompt_misses_no_prefill_engine(broken: tuple[tuple[str, str], ...]) -> None:
    deployment = fleet("p0", "d0", policy=SMALL_ALWAYS, broken_pairs=broken)
    if not broken:
        deployment.prefill[0].failed(0.0, hangs=True)
    for tokens, reason, fallback in (
        (511, BELOW, False),
        (512, Reason.PAIRS_BROKEN if broken else Reason.PREFILL_UNAVAILABLE, True),
    ):
        choice = choose(deployment, now=0.0, prompt=asked(deployment, tokens))
        assert (chosen(choice), choice.reason, choice.fallback) == ((None, "d0"), reason, fallback)


def test_who_holds_the_kv_already_is_not_asked_again() -> None:
    """Decode broke after prefill: nothing is computed anew because that would be cheaper."""
    deployment = fleet("p0", "d0", "d1", policy=SMALL)
    choice = choose(deployment, now=0.0, prompt=asked(deployment, 100, d1=96), prefill=deployment.prefill[0])
    assert chosen(choice) == ("p0", "d1")


def test_of_pairs_that_work_the_cheapest_is_taken() -> None:
    broken = (("p0", "d0"), ("p0", "d1"))
    deployment = fleet("p0", "p1", "d0", "d1", "d2", policy=ALWAYS, broken_pairs=broken)
    with ExitStack() as running:
        for _ in range(50):
            running.enter_context(carrying(deployment.decode[2]))  # p0's only partner drowns
        choice = choose(deployment, now=0.0, prompt=asked(deployment, 2_000, p0=500))
    assert chosen(choice) == ("p1", "d0")
    choice = choose(deployment, now=0.0, prompt=asked(deployment, 2_000, p0=500))
    assert chosen(choice) == ("p0", "d2")


NAMES = ["p0", "p1", "d0", "d1", "d2"]


@st.composite
def fleets(draw: st.DrawFn) -> tuple[Deployment, int, dict[str, int]]:
    broken = draw(st.lists(st.tuples(st.sampled_from(NAMES[:2]), st.sampled_from(NAMES[2:])), max_size=5))
    deployment = fleet(*NAMES, policy=draw(st.sampled_from([AUTO, ALWAYS])), broken_pairs=tuple(broken))
    for engine in (*deployment.prefill, *deployment.decode):
        engine.in_flight, engine.queued = draw(st.integers(0, 40)), draw(st.integers(0, 20_000))
        engine.read.pace = draw(st.sampled_from([1e-5, 1e-4, 1e-3]))
        engine.pull.pace = draw(st.sampled_from([1e-6, 1e-5, 1e-3]))
    tokens = draw(st.integers(1, 10_000))
    return deployment, tokens, {name: draw(st.integers(0, tokens)) for name in NAMES}


@given(fleets())
def test_no_other_way_would_have_been_cheaper(drawn: tuple[Deployment, int, dict[str, int]]) -> None:
    deployment, tokens, overlap = drawn
    choice = choose(deployment, now=0.0, prompt=asked(deployment, tokens, **overlap))
    costs = {(c.part, c.engine): c.total for c in costs_of(choice.weighed)}
    ways = {
        (p, d): costs[Part.PREFILL, p] + costs[Part.DECODE, d]
        for p in deployment.prefill
        for d in deployment.decode
        if (p.id, d.id) not in deployment.broken_pairs and (Part.PREFILL, p) in costs
    }
    ways |= {(None, e): total for (part, e), total in costs.items() if part in (Part.LOCAL, Part.ALONE)}  # type: ignore[misc]
    assert ways[choice.prefill, choice.decode] <= min(ways.values()) * (1 + 1e-9)  # type: ignore[index]
