"""Writes what `decide` decided, in the reconcile loop's transaction: called by `loop.py` alone. Every write of an engine is
conditional on its old state and attempt, and every state change gets its Event row.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec
from django.db.models import F
from msgspec.structs import replace

from controlplane.access.roles import SYSTEM
from controlplane.deployments.models import Attempt, Deployment, Engine, Event, Moved
from controlplane.deployments.rows import Gathered
from controlplane.deployments.world import Decision, EngineRecord, Move
from controlplane.fleet.errors import Conflict
from controlplane.fleet.lifecycle import Event as Lifecycle
from controlplane.fleet.lifecycle import State

_SAID = ("observation", "reason", "failures")
"""Fields that change often and decide nothing: written in bulk."""


def apply(decision: Decision, gathered: Gathered, *, now: datetime) -> None:
    """Write the difference between the rows and the decision. Raises `Conflict` when a row is not as it was read."""
    removed = set(decision.removed)
    Engine.objects.bulk_create([_row(decision.engines[e.id], gathered, now) for e in decision.created])
    said: list[Engine] = []
    for engine_id, old in gathered.stored.items():
        new = replace(decision.engines[engine_id], reported=False)
        if engine_id in removed or new == old:
            continue
        fields = _fields(new, gathered)
        if _decisive(new) == _decisive(old):
            said.append(Engine(id=engine_id, **{name: fields[name] for name in _SAID}))
            continue
        as_read = Engine.objects.filter(pk=engine_id, state=old.state.value, attempt=old.attempt)
        if as_read.update(**fields) != 1:
            raise Conflict(f"engine {engine_id} is no longer {old.state}")
    if said:
        Engine.objects.bulk_update(said, list(_SAID))
    _record_attempts(decision, gathered, now)
    Event.objects.bulk_create([*(_created(e) for e in decision.created), *(_event(m) for m in decision.moves)])
    if removed:
        Engine.objects.filter(pk__in=removed).delete()
    for name in decision.ended:
        Deployment.objects.filter(pk=gathered.deployment_ids[name], deleting_since__isnull=False).delete()
        Event.objects.create(deployment_name=name, kind="deleted", message=f"{name} was deleted.", actor=SYSTEM.name)


def _decisive(engine: EngineRecord) -> EngineRecord:
    return replace(engine, observation=None, reason="", failures=0)


def _fields(engine: EngineRecord, gathered: Gathered) -> dict[str, Any]:
    """The columns that change in an engine's life."""
    node = gathered.nodes.get(engine.node or "")
    return {
        "state": engine.state.value,
        "reason": engine.reason,
        "since": _time(engine.since),
        "attempt": engine.attempt,
        "failures": engine.failures,
        "node_id": node.pk if node else None,
        "gpus": list(engine.gpus),
        "runtime": engine.runtime.value if engine.runtime else "",
        "memory_fraction": engine.memory_fraction,
        "secret": engine.secret,
        "observation": msgspec.to_builtins(engine.observation),
        "ready_at": _time(engine.ready_at) if engine.ready_at is not None else None,
        "left_version": engine.left_version,
    }


def _row(engine: EngineRecord, gathered: Gathered, now: datetime) -> Engine:
    return Engine(
        id=engine.id,
        deployment_id=gathered.deployment_ids[engine.deployment],
        revision_id=gathered.revision_ids[(engine.deployment, engine.revision)],
        role=engine.role.value,
        index=engine.index,
        created_at=now,
        **_fields(engine, gathered),
    )


def _record_attempts(decision: Decision, gathered: Gathered, now: datetime) -> None:
    """A placed engine begins an attempt; one that failed, stopped or was ended ends it. Its command is kept as soon as it is known."""
    ended = {
        (m.engine.id, m.engine.attempt): m
        for m in decision.moves
        if m.engine.state in (State.FAILED, State.STOPPED) or m.event is Lifecycle.HALT
    }
    for (engine_id, number), move in ended.items():
        seen = move.engine.observation
        Attempt.objects.filter(engine_id=engine_id, number=number, ended_at=None).update(
            ended_at=now, reason=move.message, exit_code=seen.exit_code if seen else None
        )
    over = {m.engine.id for m in decision.moves if (m.engine.id, m.engine.attempt) in ended or _begins_anew(m)}
    _keep_moved([gathered.stored[key] for key in over if key in gathered.stored], gathered)
    for engine_id, old in gathered.stored.items():
        known = old.observation.command if old.observation else ()
        seen = gathered.world.engines[engine_id].observation
        if seen is not None and seen.command and seen.command != known:
            Attempt.objects.filter(engine_id=engine_id, number=old.attempt).update(command=list(seen.command))
    Attempt.objects.bulk_create(
        [
            Attempt(engine_id=m.engine.id, number=m.engine.attempt, node_name=m.engine.node or "", placed_at=now)
            for m in decision.moves
            if m.event is Lifecycle.PLACE
        ]
    )


def _begins_anew(move: Move) -> bool:
    """The same attempt is started again, as its node's records were lost: its counters begin at 0."""
    return move.old in (State.READY, State.UNHEALTHY) and move.event in (
        Lifecycle.INSTALL,
        Lifecycle.FETCH,
        Lifecycle.START,
    )


def _keep_moved(ended: Iterable[EngineRecord], gathered: Gathered) -> None:
    """Add what these processes had received, by the last counters that were read of them, to their deployments' totals."""
    for engine in ended:
        load = engine.observation.load if engine.observation else None
        if load is None or not (load.nixl_bytes or load.nixl_transfers or load.nixl_failures):
            continue
        mine, _ = Moved.objects.get_or_create(deployment_id=gathered.deployment_ids[engine.deployment])
        Moved.objects.filter(pk=mine.pk).update(
            bytes=F("bytes") + load.nixl_bytes,
            transfers=F("transfers") + load.nixl_transfers,
            failures=F("failures") + load.nixl_failures,
        )


def _created(engine: EngineRecord) -> Event:
    return Event(
        deployment_name=engine.deployment,
        engine_id=engine.id,
        kind="created",
        new_state=engine.state.value,
        message=f"{engine.name}: created for revision {engine.revision}.",
        actor=SYSTEM.name,
    )


def _event(move: Move) -> Event:
    engine = move.engine
    return Event(
        deployment_name=engine.deployment,
        engine_id=engine.id,
        node_name=engine.node or "",
        kind=move.event.value,
        old_state=move.old.value,
        new_state=engine.state.value,
        message=f"{engine.name}: {move.message}",
        actor=SYSTEM.name,
    )


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
