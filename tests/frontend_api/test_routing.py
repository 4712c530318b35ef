"""Choices over pools, as tables and properties."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from controlplane.fleet.wire import RoutingMode, RoutingPolicy
from frontend_api.routing import Reason, choose
from frontend_api.view import Deployment, Engine, carrying
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
    assert choose(fleet("d0"), now=0.0)[2:] == (Reason.PREFILL_UNAVAILABLE, True)
    assert choose(fleet("p0"), now=0.0).reason is Reason.NO_ENGINE
    assert choose(fleet("p0"), now=0.0, alone=Reason.RELAYED).decode is not None


NAMES = st.lists(st.sampled_from(["p0", "p1", "p2", "d0", "d1", "d2"]), unique=True, max_size=6)
PAIRS = st.lists(st.tuples(st.sampled_from(["p0", "p1", "p2"]), st.sampled_from(["d0", "d1", "d2"])), max_size=9)


@given(NAMES, PAIRS, st.sets(st.sampled_from(["p0", "p1", "d0", "d1"])))
def test_a_choice_is_never_broken_or_avoided_and_is_made_when_it_can_be(
    names: list[str], broken: list[tuple[str, str]], bad: set[str]
) -> None:
    deployment = fleet(*names, broken_pairs=tuple(broken))
    avoid = {e for e in (*deployment.prefill, *deployment.decode) if e.id in bad}
    choice = choose(deployment, now=0.0, avoid=avoid)
    good = [n for n in names if n not in bad]
    decodes = [n for n in good if n[0] == "d"]
    pairs = [(p, d) for p in good if p[0] == "p" for d in decodes if (p, d) not in broken]
    assert (choice.decode is not None) is bool(decodes)
    assert (choice.prefill is not None) is bool(pairs)
    if choice.prefill is not None and choice.decode is not None:
        assert (choice.prefill.id, choice.decode.id) in pairs
    elif choice.decode is not None:
        assert choice.fallback
        assert choice.decode.id in decodes
