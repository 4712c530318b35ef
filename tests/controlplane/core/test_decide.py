"""Properties of the pure step: whatever the world looks like, it answers, keeps its promises and comes to rest."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from controlplane.deployments import plans, snapshot
from controlplane.deployments.decide import WANTED, decide
from controlplane.deployments.world import Decision, DeploymentRecord, EngineRecord, NodeRecord, World
from controlplane.fleet import spec
from controlplane.fleet.lifecycle import HOLDS_NODE, Event, State, advance
from controlplane.fleet.model import EngineLoad, Observation, PairProof, Phase, Ports, Role, Runtime
from controlplane.fleet.wire import Fault, RouterStatus
from tests.controlplane.core.scripted import facts

NOW = 100_000.0
NODES = ("a", "b")
counter = itertools.count()


def token(size: int) -> str:
    return f"{next(counter):0{2 * size}x}"


@st.composite
def observations(draw: st.DrawFn, engine: str, attempt: int) -> Observation:
    phase = draw(st.sampled_from(list(Phase)))
    up = phase in (Phase.WARMING, Phase.UNHEALTHY)
    prefill = f"d-prefill-{draw(st.integers(0, 2))}-x"
    proofs = draw(st.lists(st.builds(PairProof, st.just(prefill), st.just(1), st.booleans(), st.just("x")), max_size=2))
    return Observation(
        engine,
        attempt,
        phase,
        exit_code=draw(st.sampled_from([None, 0, 1, -9])) if phase is Phase.EXITED else None,
        address="127.0.0.1" if up else "",
        ports=Ports(1, 2, 3, 4) if up else None,
        load=draw(st.sampled_from([None, EngineLoad(), EngineLoad(running=1)])),
        pairs=tuple(proofs),
    )


@st.composite
def worlds(draw: st.DrawFn) -> World:
    pools = {role: {"replicas": draw(st.integers(0, 3))} for role in ("prefill", "decode")}
    document = spec.parse({"name": "d", "model": "package:x", "pools": pools})
    deployment = DeploymentRecord("d", document, draw(st.sampled_from([1, 2])), deleting=draw(st.booleans()))
    nodes = {
        name: NodeRecord(
            name,
            facts(),
            cordoned=draw(st.booleans()),
            silent_seconds=draw(st.sampled_from([0.0, 20.0, 100.0, float("inf")])),
            took_plan=draw(st.booleans()),
        )
        for name in NODES
        if draw(st.booleans())
    }
    engines = {}
    for role in (Role.PREFILL, Role.DECODE):
        for index in range(draw(st.integers(0, 3))):
            name = f"d-{role}-{index}-x"
            seen = draw(st.one_of(st.none(), observations(name, 1)))
            ready_at = draw(st.sampled_from([None, NOW - 500]))
            engines[name] = EngineRecord(
                id=name,
                deployment="d",
                revision=draw(st.sampled_from([1, 1, 2])),
                role=role,
                index=index,
                state=draw(st.sampled_from(list(State))),
                since=NOW - draw(st.sampled_from([0.0, 3.0, 70.0, 1e6])),
                secret="s",
                reason="Because.",
                failures=draw(st.sampled_from([0, 1, 9, 5000])),
                node=draw(st.sampled_from([*NODES, None])),
                runtime=Runtime.SIM,
                observation=seen,
                reported=seen is not None and draw(st.booleans()),
                ready_at=ready_at,
                left_version=draw(st.sampled_from([None, 5])),
            )
    blames = st.builds(Fault, st.sampled_from([*engines, "x"]), st.just(1), st.just("c"), st.just("Because."),
                       st.sampled_from([0.0, 60.0]), st.just(3))  # fmt: skip
    faults = st.lists(blames, max_size=2).map(tuple)
    status = st.builds(RouterStatus, st.just("r"), st.integers(4, 6), st.just({}), faults=faults)
    routers = draw(st.lists(status, max_size=2))
    specs = {("d", 1): document.engine_part(), ("d", 2): document.engine_part()}
    return World(nodes, {"d": deployment}, engines, specs, tuple(routers), steady=draw(st.booleans()))


def next_world(world: World, decision: Decision) -> World:
    """The same moment again, after the rows were written and no report came."""
    engines = {key: replace(e, reported=False) for key, e in decision.engines.items() if key not in decision.removed}
    nodes = {name: replace(node, took_plan=False) for name, node in world.nodes.items()}
    deployments = {name: d for name, d in world.deployments.items() if name not in decision.ended}
    return World(nodes, deployments, engines if deployments else {}, world.specs, world.routers, world.steady)


@settings(max_examples=150)
@given(worlds())
def test_a_step_answers_for_any_world(world: World) -> None:
    decision = decide(world, now=NOW, token=token)
    state = {key: engine.state for key, engine in world.engines.items()} | {e.id: e.state for e in decision.created}
    for move in decision.moves:
        assert move.old is state[move.engine.id], "moves of one engine follow each other"
        state[move.engine.id] = advance(move.old, move.event)
        assert move.engine.state is state[move.engine.id]
        assert move.message
    assert state == {key: engine.state for key, engine in decision.engines.items()}
    assert all(engine.reason for key, engine in decision.engines.items() if engine != world.engines.get(key))


@settings(max_examples=150)
@given(worlds())
def test_after_a_step_pools_have_just_what_is_wanted(world: World) -> None:
    decision = decide(world, now=NOW, token=token)
    deployment = world.deployments["d"]
    wanted = {role: 0 if deployment.deleting else pool.replicas for role, pool in deployment.spec.pools.items()}
    filling = Counter(e.role for e in decision.engines.values() if e.state in WANTED)
    assert {role: filling[role] for role in wanted} == wanted
    assert all(e.revision == deployment.revision for e in decision.engines.values() if e.state in WANTED)
    names = Counter(e.name for e in decision.engines.values() if e.state in WANTED)
    kept = Counter(e.name for e in world.engines.values())
    assert all(count == 1 or kept[name] >= count for name, count in names.items())


@given(worlds())
def test_plans_and_snapshot_follow_from_any_decision(world: World) -> None:
    decision = decide(world, now=NOW, token=token)
    planned = plans.assignments(decision.engines.values(), world.specs)
    inside = {(a.engine, a.attempt) for plan in planned.values() for a in plan}
    for engine in decision.engines.values():
        in_plan = (engine.id, engine.attempt) in inside
        if engine.state in HOLDS_NODE and engine.state is not State.STOPPING and engine.node:
            assert in_plan
        else:
            assert not in_plan
    made = snapshot.build(world.deployments.values(), decision.engines, ())
    named = {e.id for d in made.deployments for e in d.engines}
    for engine in decision.engines.values():
        if engine.state in (
            State.DRAINING,
            State.STOPPING,
            State.STOPPED,
            State.FAILED,
            State.PENDING,
        ):
            assert engine.id not in named
        if engine.state is State.UNHEALTHY and not engine.is_blamed:
            assert engine.id not in named, "it says itself that it is not well"
        if engine.state is State.READY and engine.url and not world.deployments["d"].deleting:
            assert engine.id in named
    assert snapshot.digest(made) == snapshot.digest(snapshot.build(world.deployments.values(), decision.engines, ()))


@given(worlds())
def test_the_same_moment_again_comes_to_rest(world: World) -> None:
    """No two rules push an engine to and fro."""
    for _ in range(6):
        decision = decide(world, now=NOW, token=token)
        if not decision.moves and not decision.created and not decision.removed:
            return
        world = next_world(world, decision)
    assert [m.event for m in decision.moves] == []


@given(worlds())
def test_silence_alone_ends_no_process(world: World) -> None:
    """With every node silent and the intent as it is, no engine leaves its node's plan."""
    silent = {name: replace(node, silent_seconds=1e5, cordoned=False) for name, node in world.nodes.items()}
    deployment = replace(world.deployments["d"], deleting=False, revision=1)
    pools = {role: replace(pool, replicas=3) for role, pool in deployment.spec.pools.items()}
    deployment = replace(deployment, spec=replace(deployment.spec, pools=pools))
    engines = {key: replace(e, revision=1, since=NOW - 300) for key, e in world.engines.items()}
    still = replace(world, nodes=silent, deployments={"d": deployment}, engines=engines, steady=True)
    decision = decide(still, now=NOW, token=token)
    for key, before in engines.items():
        if (
            before.state in (*HOLDS_NODE,)
            and before.state not in (State.DRAINING, State.STOPPING)
            and before.node in silent
        ):
            assert decision.engines[key].state in (
                State.LOST,
                State.FAILED if before.state is State.LOST else State.LOST,
            )
            assert all(m.event is not Event.EXIT for m in decision.moves if m.engine.id == key)
