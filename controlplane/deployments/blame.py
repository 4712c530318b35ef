"""Who is at fault where requests or KV transfers fail, by what routers and agents tell: pure.

Nothing is remembered here: an engine is blamed for as long as somebody sees it fail. So that routers go on seeing a blamed
engine it stays in the snapshot, as a suspect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from controlplane.deployments.world import EngineRecord, World
from controlplane.fleet.lifecycle import State
from controlplane.fleet.model import Phase, Role
from controlplane.fleet.pairing import Incarnation, at_fault
from controlplane.fleet.wire import Fault, RouterStatus

BELIEVED_AFTER = 5.0
"""Seconds for which a router must have seen a fault."""

Pair = tuple[Incarnation, Incarnation]
"""Prefill and decode process."""


def faulty_engines(routers: Iterable[RouterStatus]) -> dict[Incarnation, str]:
    """The processes that routers blame, each with the sentence of the router that has seen it longest."""
    faults = [fault for fault in _believed(routers) if not fault.prefill]
    return {Incarnation(fault.engine, fault.attempt): fault.reason for fault in faults}


def faulty_pairs(routers: Iterable[RouterStatus]) -> set[Pair]:
    """The pairs over which requests fail."""
    faults = [fault for fault in _believed(routers) if fault.prefill]
    return {
        (Incarnation(fault.prefill, fault.prefill_attempt), Incarnation(fault.engine, fault.attempt))
        for fault in faults
    }


def _believed(routers: Iterable[RouterStatus]) -> list[Fault]:
    faults = [fault for router in routers for fault in router.faults if fault.seconds >= BELIEVED_AFTER]
    return sorted(faults, key=lambda fault: fault.seconds)


def blamed(world: World) -> dict[Incarnation, str]:
    """Every engine at fault, and why: those that routers blame, and those but for which KV transfers would work."""
    found = faulty_engines(world.routers)
    answering: dict[str, dict[Incarnation, EngineRecord]] = {}
    for engine in world.engines.values():
        if _calls_itself_well(engine) and engine.incarnation not in found:
            answering.setdefault(engine.deployment, {})[engine.incarnation] = engine
    for engines in answering.values():
        found |= _by_transfers(engines)
    return found


def _calls_itself_well(engine: EngineRecord) -> bool:
    up = engine.state in (State.WARMING, State.READY, State.UNHEALTHY)
    return up and engine.observation is not None and engine.observation.phase is Phase.WARMING


def _by_transfers(engines: Mapping[Incarnation, EngineRecord]) -> dict[Incarnation, str]:
    """Those at fault among engines of one deployment that answer completions; a pair that only routers doubt is proved anew by
    decode's agent first."""
    tried = {
        (Incarnation(proof.prefill, proof.prefill_attempt), decode): proof
        for decode, engine in engines.items()
        for proof in (engine.observation.pairs if engine.observation else ())
    }
    tried = {pair: proof for pair, proof in tried.items() if pair[0] in engines}
    works = {who for pair, proof in tried.items() if proof.ok for who in pair}
    alone: dict[Incarnation, str] = {}
    for (prefill, decode), proof in tried.items():
        sick = prefill if proof.fault is Role.PREFILL else decode
        if proof.fault is not None and sick not in works:
            alone[sick] = proof.detail
    left = {pair: proof.ok for pair, proof in tried.items() if not alone.keys() & {*pair}}
    of_all = {who: f"No KV transfer works {_with(engines[who].role)}." for who in at_fault(left)}
    return alone | of_all


def _with(role: Role) -> str:
    return "to any decode engine" if role is Role.PREFILL else "from any prefill engine"
