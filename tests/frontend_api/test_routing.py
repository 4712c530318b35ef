"""Choices over pools, as tables and properties."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.fleet.wire import Disaggregate, RoutingMode, RoutingPolicy
from frontend_api.kv.evidence import Cache, Prompt
from frontend_api.routing.choice import choose
from frontend_api.routing.costs import costs_of
from frontend_api.routing.rates import ENOUGH, USUAL_PULL, USUAL_READ, USUAL_STEP
from frontend_api.routing.reason import Reason
from frontend_api.routing.view import Deployment, Engine, carrying
from tests.frontend_api.test_flow import fleet

ROUND_ROBIN = RoutingPolicy(mode=RoutingMode.ROUND_ROBIN)


def pick(deployment: Deployment) -> str:
    choice = choose(deployment, now=0.0)
    assert choice.decode is not None
    with carrying(choice.decode):
        return choice.decode.id


def suspect(engine: Engine) -> None:
    engine.spec = engine.spec.__class__(
        id=engine.id, name=engine.id, attempt=1, role=engine.spec.role, url=engine.spec.url, suspect=True
    )


def test_least_load_takes_the_least_loaded_and_ties_in_turn() -> None:
    deployment = fleet("a0", "a1", "a2")
    assert [pick(deployment) for _ in range(6)] == ["a0", "a1", "a2"] * 2
    with carrying(deployment.aggregated[1]):
        assert Counter(pick(deployment) for _ in range(10)) == {"a0": 5, "a2": 5}


def test_a_newcomer_is_not_flooded() -> None:
    deployment = fleet("a0", "a1")
    for _ in range(1_000):
        pick(deployment)
    newcomer = fleet("a2").aggregated[0]
    deployment.aggregated = (*deployment.aggregated, newcomer)
    assert Counter(pick(deployment) for _ in range(9)) == {"a0": 3, "a1": 3, "a2": 3}


def test_round_robin_ignores_load() -> None:
    deployment = fleet("a0", "a1", policy=ROUND_ROBIN)
    with carrying(deployment.aggregated[0]), carrying(deployment.aggregated[0]):
        assert [pick(deployment) for _ in range(4)] == ["a1", "a0", "a1", "a0"]


def test_suspects_only_when_nobody_else_is_there() -> None:
    deployment = fleet("a0", "a1")
    suspect(deployment.aggregated[0])
    assert {pick(deployment) for _ in range(4)} == {"a1"}
    suspect(deployment.aggregated[1])
    assert {pick(deployment) for _ in range(4)} == {"a0", "a1"}
    deployment.aggregated[1].failed(0.0, hangs=False)
    assert {pick(deployment) for _ in range(4)} == {"a0"}


def test_down_engines_are_the_last_resort_and_hanging_ones_not_even_that() -> None:
    deployment = fleet("a0", "a1")
    first, second = deployment.aggregated
    first.failed(0.0, hangs=False)
    assert {pick(deployment) for _ in range(4)} == {"a1"}
    second.failed(0.0, hangs=True)
    assert {pick(deployment) for _ in range(4)} == {"a0"}
    first.failed(0.0, hangs=True)
    assert choose(deployment, now=0.0).reason is Reason.NO_ENGINE
    assert choose(deployment, now=60.0).decode is not None


def test_half_open_takes_one_at_a_time() -> None:
    deployment = fleet("a0", "a1")
    first = deployment.aggregated[0]
    first.failed(0.0, hangs=False)
    first.accepts()
    assert pick(deployment) == "a0"
    with carrying(first):
        assert {pick(deployment) for _ in range(4)} == {"a1"}


def test_reasons() -> None:
    assert choose(fleet("p0", "d0"), now=0.0).reason is Reason.LEAST_LOAD
    assert choose(fleet("p0", "d0", policy=ROUND_ROBIN), now=0.0).reason is Reason.ROUND_ROBIN
    assert choose(fleet("a0"), now=0.0).reason is Reason.AGGREGATED
    assert choose(fleet("d0", wants_prefill=False), now=0.0).reason is Reason.NO_PREFILL_POOL
    assert (choice := choose(fleet("d0"), now=0.0)).reason is Reason.PREFILL_UNAVAILABLE
    assert choice.fallback
    assert choose(fleet("p0"), now=0.0).reason is Reason.NO_ENGINE
    assert choose(fleet("p0"), now=0.0, alone=Reason.RELAYED).decode is not None


def test_random_takes_any() -> None:
    deployment = fleet("a0", "a1", "a2", policy=RoutingPolicy(mode=RoutingMode.RANDOM))
    counts = Counter(pick(deployment) for _ in range(600))
    assert min(counts[name] for name in ("a0", "a1", "a2")) > 100
    assert choose(fleet("p0", "d0", policy=RoutingPolicy(mode=RoutingMode.RANDOM)), now=0.0).reason is Reason.RANDOM


KV = RoutingPolicy(mode=RoutingMode.KV, disaggregate=Disaggregate.ALWAYS)


def asked(deployment: Deployment, tokens: int, **overlap: int) -> Prompt:
    """A prompt of which the engines named have so many tokens."""
    engines = {e.id: e for e in (*deployment.prefill, *deployment.decode, *deployment.aggregated)}
    return Prompt(Cache(deployment), tokens, {engines[name]: have for name, have in overlap.items()}, {})


def test_every_candidate_is_told_with_its_parts_in_seconds() -> None:
    deployment = fleet("p0", "p1", "d0", "d1", policy=KV)
    p0, p1 = deployment.prefill
    learn(p0, 0.01)
    learn(p1, 0.001)
    deployment.settle(0.0)
    with carrying(p0, 500), carrying(deployment.decode[1]):
        choice = choose(deployment, now=0.0, prompt=asked(deployment, 1_000, p0=400, d1=960))
        told = {c.engine.id: (c.overlap, c.queue, c.compute, c.transfer, c.streams) for c in costs_of(choice.weighed)}
        assert told == {
            "p0": (400, 500 * p0.read.pace, 600 * p0.read.pace, 0.0, USUAL_STEP),
            "p1": (0, 0.0, 1_000 * p1.read.pace, 0.0, 0.0),
            "d0": (0, 0.0, 0.0, 1_008 * USUAL_PULL, 0.0),
            "d1": (960, 0.0, 0.0, 48 * USUAL_PULL, USUAL_STEP),
        }
        for c in costs_of(choice.weighed):
            assert c.total == pytest.approx(c.queue + c.compute + c.transfer + c.stalls + c.streams)
        assert (choice.prefill, choice.decode, choice.reason) == (p1, deployment.decode[0], Reason.LOAD_WINS)
    assert [p0.read.pace, p1.read.pace] == pytest.approx([0.01, 0.001])
    assert (p0.queued, p0.in_flight) == (0, 0)


def test_overlap_decides_for_each_pool_by_itself() -> None:
    deployment = fleet("p0", "p1", "d0", "d1", policy=KV)
    choice = choose(deployment, now=0.0, prompt=asked(deployment, 2_000, p1=1_600, d0=1_600))
    assert (choice.prefill, choice.decode, choice.reason) == (
        deployment.prefill[1],
        deployment.decode[0],
        Reason.OVERLAP,
    )


def test_a_prompt_that_no_block_holds_is_told_as_such() -> None:
    deployment = fleet("a0", "a1", policy=KV)
    short = Prompt(Cache(deployment), 89, {}, {}, below_block=128)
    assert choose(deployment, now=0.0, prompt=short).reason is Reason.BELOW_ONE_BLOCK
    with carrying(deployment.aggregated[0]):
        choice = choose(deployment, now=0.0, prompt=short)
    assert (choice.decode, choice.reason) == (deployment.aggregated[1], Reason.BELOW_ONE_BLOCK)


def test_equal_costs_go_to_the_least_served_and_no_overlap_to_the_least_loaded() -> None:
    deployment = fleet("a0", "a1", "a2", policy=KV)
    taken = []
    for _ in range(6):
        choice = choose(deployment, now=0.0, prompt=asked(deployment, 100, a0=64, a2=64))
        assert choice.decode is not None
        assert choice.reason is Reason.OVERLAP
        with carrying(choice.decode):
            taken.append(choice.decode.id)
    assert taken == ["a0", "a2"] * 3
    with carrying(deployment.aggregated[0]), carrying(deployment.aggregated[2]):
        choice = choose(deployment, now=0.0, prompt=asked(deployment, 100))
    assert (choice.decode, choice.reason) == (deployment.aggregated[1], Reason.NO_OVERLAP)


def test_new_prompts_take_turns_between_engines_that_differ_by_noise() -> None:
    """Else the one that was measured a little faster gets all of them, and its KV is turned over while others idle."""
    deployment = fleet("a0", "a1", "a2", policy=KV)
    first, second, slow = deployment.aggregated
    for engine, factor in ((first, 1.0), (second, 1.3), (slow, 3.0)):
        learn(engine, factor * USUAL_READ)
    deployment.settle(0.0)
    taken = []
    for _ in range(6):
        choice = choose(deployment, now=0.0, prompt=asked(deployment, 2_000))
        assert choice.decode is not None
        with carrying(choice.decode):
            taken.append(choice.decode.id)
    assert taken == ["a0", "a1"] * 3
    with carrying(second):
        assert choose(deployment, now=0.0, prompt=asked(deployment, 2_000)).decode is first
    holder = choose(deployment, now=0.0, prompt=asked(deployment, 2_000, a1=1_000)).decode
    assert holder is second


def learn(engine: Engine, pace: float, times: int = ENOUGH) -> None:
    for _ in range(times):
        engine.read.learn(100_000, 100_000 * pace, 0.0)


def test_an_engine_that_was_measured_too_seldom_is_tried() -> None:
    """Its first prompt may have taken many times as long as the next will."""
    deployment = fleet("a0", "a1", policy=KV)
    fast, unlucky = deployment.aggregated
    learn(fast, 1e-6)
    deployment.settle(0.0)
    for _ in range(ENOUGH):
        with carrying(fast):
            pass
        assert choose(deployment, now=0.0, prompt=asked(deployment, 2_000)).decode is unlucky
        learn(unlucky, 1e-3, 1)
        deployment.settle(0.0)
    assert choose(deployment, now=0.0, prompt=asked(deployment, 2_000)).decode is fast


@pytest.mark.parametrize("times", [1, ENOUGH])
def test_slow_hand_overs_do_not_end_remote_prefill_for_good(times: int) -> None:
    """Who looks too dear gets nothing and is measured no more, while decode reads all prompts itself."""
    deployment = fleet("p0", "d0", policy=RoutingPolicy(mode=RoutingMode.KV))
    (prefill,), (decode,) = deployment.prefill, deployment.decode
    for _ in range(times):
        decode.pull.learn(300, 2.0, 0.0)
    deployment.settle(0.0)
    with carrying(decode), carrying(decode):
        assert choose(deployment, now=0.0, prompt=asked(deployment, 4_000)).reason is Reason.LOCAL_CHEAPER
        for second in range(1, 150):
            decode.read.learn(4_000, 4_000 * USUAL_READ, float(second))
            deployment.settle(float(second))
        assert choose(deployment, now=150.0, prompt=asked(deployment, 4_000)).prefill is prefill


def test_a_hot_prefix_leaves_its_engine_before_that_drowns() -> None:
    deployment = fleet("a0", "a1", "a2", policy=KV)
    running = []
    for _ in range(90):
        choice = choose(deployment, now=0.0, prompt=asked(deployment, 2_024, a0=2_000))
        assert choice.decode is not None
        running.append(carrying(choice.decode, 24).__enter__())
    counts = {e.id: e.in_flight for e in deployment.aggregated}
    assert counts["a0"] > counts["a1"] >= 20
    assert counts["a0"] - counts["a1"] <= 2_000 * USUAL_READ / USUAL_STEP + 1
    assert abs(counts["a1"] - counts["a2"]) <= 1
    for load in running:
        load.release()
    assert [(e.in_flight, e.queued) for e in deployment.aggregated] == [(0, 0)] * 3


def test_waiting_prompts_count_until_they_are_computed() -> None:
    deployment = fleet("a0", "a1", policy=KV)
    with carrying(deployment.aggregated[0], 50_000) as load, carrying(deployment.aggregated[1]):
        prompt = asked(deployment, 1_000, a0=900)
        assert choose(deployment, now=0.0, prompt=prompt).decode is deployment.aggregated[1]
        load.computed()
        assert choose(deployment, now=0.0, prompt=prompt).decode is deployment.aggregated[0]
        load.computed()
    assert deployment.aggregated[0].queued == 0


def test_without_tokens_load_alone_decides_and_it_is_said() -> None:
    for names in (("a0", "a1"), ("p0", "p1", "d0", "d1")):
        deployment = fleet(*names, policy=KV)
        first = (deployment.prefill or deployment.aggregated)[0]
        with carrying(first, 0):
            choice = choose(deployment, now=0.0)
        assert (choice.reason, choice.weighed) == (Reason.NO_TOKENS, ())
        assert first not in (choice.prefill, choice.decode)


def test_a_reason_to_be_alone_is_kept() -> None:
    deployment = fleet("p0", "d0", "d1", policy=KV)
    prompt = asked(deployment, 1_000, d1=800)
    choice = choose(deployment, now=0.0, prompt=prompt, alone=Reason.PROMPT_LOGPROBS)
    assert (choice.prefill, choice.decode, choice.reason) == (None, deployment.decode[1], Reason.PROMPT_LOGPROBS)
    assert [c.compute for c in costs_of(choice.weighed)] == [1_000 * USUAL_READ, 200 * USUAL_READ]


NAMES = st.lists(st.sampled_from(["p0", "p1", "p2", "d0", "d1", "d2"]), unique=True, max_size=6)
PAIRS = st.lists(st.tuples(st.sampled_from(["p0", "p1", "p2"]), st.sampled_from(["d0", "d1", "d2"])), max_size=9)


POLICIES = st.builds(
    RoutingPolicy,
    mode=st.sampled_from(RoutingMode),
    disaggregate=st.sampled_from(Disaggregate),
    local_below_tokens=st.sampled_from([0, 450]),
    temperature=st.sampled_from([0.0, 0.3]),
)


@given(
    NAMES,
    PAIRS,
    st.sets(st.sampled_from(["p0", "p1", "d0", "d1"])),
    POLICIES,
    st.booleans(),
    st.sampled_from([None, b"a", b"b"]),
    st.lists(st.integers(0, 30), min_size=6, max_size=6),
    st.floats(0, 1, exclude_max=True),
)
def test_a_choice_is_never_broken_or_avoided_and_is_made_when_it_can_be(
    names: list[str],
    broken: list[tuple[str, str]],
    bad: set[str],
    policy: RoutingPolicy,
    known: bool,
    session: bytes | None,
    loads: list[int],
    chance: float,
) -> None:
    deployment = fleet(*names, broken_pairs=tuple(broken), policy=policy)
    engines = (*deployment.prefill, *deployment.decode)
    for engine, load in zip(engines, loads, strict=False):
        engine.in_flight = load
    avoid = {e for e in engines if e.id in bad}
    prompt = asked(deployment, 500, **dict.fromkeys(names[:2], 64)) if known else None
    choice = choose(deployment, now=0.0, avoid=avoid, prompt=prompt, session=session, chance=lambda: chance)
    good = [n for n in names if n not in bad]
    decodes = [n for n in good if n[0] == "d"]
    pairs = [(p, d) for p in good if p[0] == "p" for d in decodes if (p, d) not in broken]
    local = choice.reason in (Reason.LOCAL_CHEAPER, Reason.LOCAL_BELOW_THRESHOLD)
    assert (choice.decode is not None) is bool(decodes)
    if choice.reason is not Reason.LOCAL_BELOW_THRESHOLD:
        assert (choice.prefill is not None or local) is bool(pairs)
    assert not local or (known and (policy.disaggregate is Disaggregate.AUTO or policy.local_below_tokens))
    if choice.prefill is not None and choice.decode is not None:
        assert (choice.prefill.id, choice.decode.id) in pairs
    elif choice.decode is not None:
        assert choice.fallback is not local
        assert choice.decode.id in decodes
