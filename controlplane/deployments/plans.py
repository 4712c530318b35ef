"""What each node shall run: pure. A node's plan is its whole wanted set; an engine that is to stop is left out of it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping

from msgspec.structs import replace

from controlplane.deployments import blame
from controlplane.deployments.world import EngineRecord
from controlplane.fleet import wire
from controlplane.fleet.lifecycle import HOLDS_NODE, LIVE, State
from controlplane.fleet.model import EngineAssignment, Peer, Role
from controlplane.fleet.pairing import Incarnation
from controlplane.fleet.spec import DeploymentSpec
from controlplane.fleet.wire import RouterStatus

Specs = Mapping[tuple[str, int], DeploymentSpec]


def assignments(
    engines: Iterable[EngineRecord], specs: Specs, routers: Collection[RouterStatus] = ()
) -> dict[str, tuple[EngineAssignment, ...]]:
    """The assignments of each node that has any, sorted by engine; what `routers` blame is to be looked at by its agent."""
    engines = list(engines)
    doubted, doubted_pairs = blame.faulty_engines(routers), blame.faulty_pairs(routers)
    peers: dict[tuple[str, int], list[Peer]] = {}
    for engine in engines:
        # One that was ready stays a peer through silence and bad health, so that its proofs outlive them.
        has_answered = engine.answers or (engine.ready_at is not None and engine.state in LIVE)
        if engine.role is Role.PREFILL and has_answered and engine.url:
            peer = Peer(engine.id, engine.attempt, engine.url, engine.secret)
            peers.setdefault((engine.deployment, engine.revision), []).append(peer)
    plans: dict[str, list[EngineAssignment]] = {}
    for engine in engines:
        if engine.state in HOLDS_NODE and engine.state is not State.STOPPING and engine.node and engine.runtime:
            which = (engine.deployment, engine.revision)
            partners = peers.get(which, []) if engine.role is Role.DECODE else []
            partners = [
                replace(p, doubted=True)
                if (Incarnation(p.engine, p.attempt), engine.incarnation) in doubted_pairs
                else p
                for p in partners
            ]
            assignment = _assignment(engine, specs[which], partners)
            if engine.incarnation in doubted:
                assignment = replace(assignment, doubted=True)
            plans.setdefault(engine.node, []).append(assignment)
    return {node: tuple(sorted(plan, key=lambda a: a.engine)) for node, plan in plans.items()}


def _assignment(engine: EngineRecord, spec: DeploymentSpec, peers: Iterable[Peer]) -> EngineAssignment:
    assert engine.runtime is not None
    return EngineAssignment(
        engine=engine.id,
        attempt=engine.attempt,
        deployment=engine.deployment,
        revision=engine.revision,
        spec=replace(spec.engine_spec(engine.role, engine.runtime), memory_fraction=engine.memory_fraction),
        secret=engine.secret,
        gpus=engine.gpus,
        peers=tuple(sorted(peers, key=lambda p: p.engine)),
    )


def digest(node: str, engines: tuple[EngineAssignment, ...]) -> str:
    """Of a plan's content, generation aside: equal digests need no new plan."""
    return hashlib.sha256(wire.encode(wire.NodePlan(node, 0, engines))).hexdigest()
