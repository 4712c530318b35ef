"""What the nodes' reports, and their silence, do to the engines: pure. Level-triggered: the same report again does nothing."""

from __future__ import annotations

from controlplane.deployments.draft import Draft
from controlplane.deployments.world import EngineRecord
from controlplane.fleet.lifecycle import BOOT, LIMITS, Event, State, allowed
from controlplane.fleet.model import Observation, Phase
from controlplane.nodes.presence import Presence

_PHASE_EVENTS = {
    Phase.INSTALLING: (Event.INSTALL, State.INSTALLING),
    Phase.FETCHING: (Event.FETCH, State.FETCHING),
    Phase.STARTING: (Event.START, State.STARTING),
    Phase.WARMING: (Event.WARM, State.WARMING),
}


def take_reports(draft: Draft) -> None:
    """Follow what the nodes that report now say of their engines."""
    for engine in draft.all():
        if draft.presence_of(engine) is not Presence.REPORTING:
            continue
        if engine.reported and engine.observation is not None:
            _take_observation(draft, engine, engine.observation)
        elif draft.world.nodes[str(engine.node)].took_plan:
            _take_absence(draft, engine)


def take_blame(draft: Draft) -> None:
    """Engines that call themselves healthy and are at fault where requests or KV transfers fail are unhealthy."""
    for engine in draft.all():
        why = draft.blamed.get(engine.incarnation)
        if why is not None and engine.state is State.READY:
            draft.move(engine, Event.BLAME, why)
        elif why is not None and engine.is_blamed and engine.reason != why:
            draft.note(engine, reason=why)


def take_silence(draft: Draft) -> None:
    """Engines of nodes that report no more, or were removed, are lost: suspects, whose processes may well live."""
    for engine in draft.all():
        if not allowed(engine.state, Event.SILENCE):
            continue
        heard = draft.presence_of(engine)
        if heard is None:
            draft.move(engine, Event.SILENCE, "Its node was removed.")
        elif heard is not Presence.REPORTING and draft.world.steady:
            draft.move(engine, Event.SILENCE, f"Node {engine.node} does not report. The engine may still be running.")


def _take_observation(draft: Draft, engine: EngineRecord, seen: Observation) -> None:
    if seen.phase is Phase.EXITED:
        if seen.stopped and allowed(engine.state, Event.HALT):
            draft.start_over(engine, _exit_reason(seen))
        else:
            _take_exit(draft, engine, _exit_reason(seen))
        return
    if engine.state is State.LOST:
        engine = draft.move(engine, Event.RETURN, "Its node reports again, and the engine is still running.")
    if seen.phase in (Phase.UNHEALTHY, Phase.STOPPING):
        if engine.state is State.READY:
            draft.move(engine, Event.SICKEN, seen.detail or "It does not answer its health check.")
        return
    if seen.phase is Phase.WARMING and engine.state is State.UNHEALTHY:
        if engine.incarnation not in draft.blamed:
            draft.move(engine, Event.RECOVER, "Serving.")
        return
    event, target = _PHASE_EVENTS[seen.phase]
    said = _said(seen, target)
    if engine.state in (State.READY, State.UNHEALTHY) and target is not State.WARMING:
        draft.move(engine, event, said, ready_at=None)
    elif engine.state in BOOT and engine.state is not target:
        draft.move(engine, event, said)
    elif engine.state in BOOT and engine.state is not State.WARMING and engine.reason != said:
        draft.note(engine, reason=said)


def _take_exit(draft: Draft, engine: EngineRecord, reason: str) -> None:
    if engine.state is State.STOPPING:
        draft.move(engine, Event.GONE, "Ended.")
    elif engine.state is State.DRAINING:
        draft.move(engine, Event.EXIT, reason)
    elif allowed(engine.state, Event.EXIT):
        draft.fail(engine, Event.EXIT, reason)


def _take_absence(draft: Draft, engine: EngineRecord) -> None:
    """The agent has taken in the newest plan and does not name the engine."""
    if engine.state is State.STOPPING:
        draft.move(engine, Event.GONE, "Ended.")
    elif engine.state is not State.PLACED and allowed(engine.state, Event.EXIT):  # PLACED has a limit of its own
        _take_exit(draft, engine, "The agent on its node has no such process any more.")


def _said(seen: Observation, state: State) -> str:
    text = seen.detail or f"Waiting for {LIMITS[state].awaits}."
    return f"{text} ({seen.progress:.0%})" if seen.progress is not None else text


def _exit_reason(seen: Observation) -> str:
    if seen.detail or seen.exit_code is None:
        return seen.detail or "It could not be started."
    how = f"ended by signal {-seen.exit_code}" if seen.exit_code < 0 else f"exited with code {seen.exit_code}"
    return f"The process {how}."
