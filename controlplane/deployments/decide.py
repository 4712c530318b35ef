"""What one step of the reconcile loop changes: pure. Every state change goes through `lifecycle.advance`.

The rules run in this order, each seeing what the ones before it did: what the nodes report, who fell silent, who is no
longer wanted or missing, who has drained, who may try again, who gets a place, who may serve, whose time is up. Time, ids
and secrets are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from controlplane.deployments.placement import Need, Place, Placer
from controlplane.deployments.world import Decision, DeploymentRecord, EngineRecord, Move, World
from controlplane.fleet.lifecycle import BOOT, LIMITS, LIVE, Event, State, advance, allowed, backoff_seconds
from controlplane.fleet.model import Observation, Phase, Role
from controlplane.fleet.pairing import Incarnation, may_serve
from controlplane.nodes.presence import Presence, presence

WANTED = (State.PENDING, State.FAILED, *LIVE)
"""States of an engine that fills a slot of its pool."""
STOPPED_KEPT = 3600.0
"""Seconds for which a stopped engine's row stays, so that its attempts and logs can be read."""
STEADY_AFTER = 60.0
"""Seconds of being ready after which earlier failures no longer count."""
DRAIN_BLIND = 5.0
"""With no router heard of: seconds after which a drain goes by the engine's own load alone (two reports and more)."""

_PHASE_EVENTS = {
    Phase.INSTALLING: (Event.INSTALL, State.INSTALLING),
    Phase.FETCHING: (Event.FETCH, State.FETCHING),
    Phase.STARTING: (Event.START, State.STARTING),
    Phase.WARMING: (Event.WARM, State.WARMING),
}
_SCALE_DOWN_FIRST = {State.READY: 3, State.UNHEALTHY: 2, State.PENDING: 0, State.FAILED: 0, State.LOST: 0}

Token = Callable[[int], str]
"""So many random bytes as hex."""


def decide(world: World, *, now: float, token: Token) -> Decision:
    """The next records, and the moves that lead to them."""
    step = _Step(world, now, token)
    for rule in (
        step.take_reports,
        step.take_silence,
        step.fill_slots,
        step.end_drains,
        step.retry,
        step.place,
        step.prove,
        step.keep_limits,
        step.forget_failures,
        step.clear_away,
    ):
        rule()
    return Decision(step.engines, step.moves, step.created, step.removed, step.ended)


class _Step:
    def __init__(self, world: World, now: float, token: Token) -> None:
        self.world, self.now, self.token = world, now, token
        self.engines = dict(world.engines)
        self.moves: list[Move] = []
        self.created: list[EngineRecord] = []
        self.removed: list[str] = []
        self.ended: list[str] = []
        self.by_deployment: dict[str, list[str]] = {name: [] for name in world.deployments}
        for engine in world.engines.values():
            self.by_deployment[engine.deployment].append(engine.id)

    def of(self, deployment: str) -> list[EngineRecord]:
        """The deployment's engines as they are now."""
        return [self.engines[engine_id] for engine_id in self.by_deployment[deployment]]

    # -- the only ways to change an engine

    def move(self, engine: EngineRecord, event: Event, reason: str, **changes: Any) -> EngineRecord:
        """The engine after a lifecycle event; its reason is always the new state's own."""
        target = advance(engine.state, event)
        moved = replace(engine, state=target, since=self.now, reason=reason, **changes)
        self.engines[engine.id] = moved
        self.moves.append(Move(moved, event, engine.state, reason))
        return moved

    def note(self, engine: EngineRecord, **changes: Any) -> None:
        """Change what is said of the engine, not its state: no history row."""
        self.engines[engine.id] = replace(engine, **changes)

    def fail(self, engine: EngineRecord, event: Event, reason: str) -> EngineRecord:
        """A failure that counts towards the back-off, and says when the next attempt comes."""
        failures = engine.failures + 1
        wait = f"Tries again in {backoff_seconds(failures):.0f} s."
        return self.move(engine, event, f"{reason} {wait}", failures=failures)

    # -- rules

    def take_reports(self) -> None:
        for engine in list(self.engines.values()):
            node = self.world.nodes.get(engine.node or "")
            if node is None or presence(node.silent_seconds) is not Presence.REPORTING:
                continue
            if engine.reported and engine.observation is not None:
                self._take_observation(engine, engine.observation)
            elif node.took_plan:
                self._take_absence(engine)

    def _take_observation(self, engine: EngineRecord, seen: Observation) -> None:
        if seen.phase is Phase.EXITED:
            self._take_exit(engine, _exit_reason(seen))
            return
        if engine.state is State.LOST:
            engine = self.move(engine, Event.RETURN, "Its node reports again; the process still runs.")
        if seen.phase in (Phase.UNHEALTHY, Phase.STOPPING):
            if engine.state is State.READY:
                self.move(engine, Event.SICKEN, seen.detail or "Its health probe fails.")
            return
        event, target = _PHASE_EVENTS[seen.phase]
        if seen.phase is Phase.WARMING and engine.state is State.UNHEALTHY:
            self.move(engine, Event.RECOVER, "Serving.")
        elif engine.state in BOOT and engine.state is not target:
            self.move(engine, event, _progress(seen, target))
        elif engine.state in BOOT and engine.state is not State.WARMING and engine.reason != _progress(seen, target):
            self.note(engine, reason=_progress(seen, target))

    def _take_exit(self, engine: EngineRecord, reason: str) -> None:
        if engine.state is State.STOPPING:
            self.move(engine, Event.GONE, "Ended.")
        elif engine.state is State.DRAINING:
            self.move(engine, Event.EXIT, reason)
        elif allowed(engine.state, Event.EXIT):
            self.fail(engine, Event.EXIT, reason)

    def _take_absence(self, engine: EngineRecord) -> None:
        """The agent has the newest plan and does not name the engine."""
        if engine.state is State.STOPPING:
            self.move(engine, Event.GONE, "Ended.")
        elif engine.state is not State.PLACED and allowed(engine.state, Event.EXIT):  # PLACED has a limit of its own
            self._take_exit(engine, "Its node's agent knows no such process any more.")

    def take_silence(self) -> None:
        for engine in list(self.engines.values()):
            if not allowed(engine.state, Event.SILENCE):
                continue
            node = self.world.nodes.get(engine.node or "")
            if node is None:
                self.move(engine, Event.SILENCE, "Its node was removed.")
            elif presence(node.silent_seconds) is not Presence.REPORTING:
                self.move(engine, Event.SILENCE, f"Node {node.name} is silent; the process may well live.")

    def fill_slots(self) -> None:
        for name, deployment in self.world.deployments.items():
            there = self.of(name)
            for role in Role:
                self._fill_pool(deployment, role, [e for e in there if e.role is role])

    def _fill_pool(self, deployment: DeploymentRecord, role: Role, there: list[EngineRecord]) -> None:
        pool = deployment.spec.pools.get(role)
        wanted = pool.replicas if pool is not None and not deployment.deleting else 0
        filling = [e for e in there if e.state in WANTED]
        kept = [e for e in filling if e.revision == deployment.revision]
        for engine in filling:
            if engine.revision != deployment.revision:
                why = (
                    "Its deployment is being deleted."
                    if deployment.deleting
                    else f"Revision {deployment.revision} replaces it."
                )
                self.drain(engine, why)
        kept.sort(key=lambda e: (_SCALE_DOWN_FIRST.get(e.state, 1), -e.index))
        for engine in kept[: max(0, len(kept) - wanted)]:
            self.drain(
                engine, "Its deployment is being deleted." if deployment.deleting else "Its pool was scaled down."
            )
        taken = {e.index for e in there if e.state is not State.STOPPED}
        for _ in range(wanted - len(kept)):
            index = next(i for i in range(len(taken) + 1) if i not in taken)
            taken.add(index)
            self._create(deployment, role, index)

    def _create(self, deployment: DeploymentRecord, role: Role, index: int) -> None:
        stem = f"{deployment.name}-{role}-{index}"
        while (engine_id := f"{stem}-{self.token(2)}") in self.engines:
            pass
        engine = EngineRecord(
            id=engine_id,
            deployment=deployment.name,
            revision=deployment.revision,
            role=role,
            index=index,
            state=State.PENDING,
            since=self.now,
            secret=self.token(32),
            reason="Waits for a place.",
        )
        self.engines[engine.id] = engine
        self.by_deployment[deployment.name].append(engine.id)
        self.created.append(engine)

    def drain(self, engine: EngineRecord, reason: str) -> None:
        self.move(engine, Event.DRAIN, reason)

    def end_drains(self) -> None:
        for engine in list(self.engines.values()):
            if engine.state is State.DRAINING and (why := self._drained(engine)):
                self.move(engine, Event.DRAINED, why)
            elif engine.state in (State.DRAINING, State.STOPPING) and engine.node not in self.world.nodes:
                engine = self.move(engine, Event.OVERRUN, "Its node was removed.")
                if engine.state is State.STOPPING:
                    self.move(engine, Event.GONE, "Its node was removed.")

    def _drained(self, engine: EngineRecord) -> str:
        """Why it may be stopped; empty: it may not yet."""
        load = engine.observation.load if engine.observation else None
        if load is not None and load.running + load.waiting:
            return ""
        if engine.left_version is None:
            return ""
        if not self.world.routers:
            blind = self.now - engine.since >= DRAIN_BLIND
            return "It has no requests (no router was heard of)." if blind else ""
        for router in self.world.routers:
            if router.snapshot_version < engine.left_version or router.in_flight.get(engine.id, 0):
                return ""
        return "Its last requests have finished."

    def retry(self) -> None:
        for engine in list(self.engines.values()):
            if engine.state is State.FAILED and self.now - engine.since >= backoff_seconds(engine.failures):
                self.try_again(engine, "Waits for a place.")

    def try_again(self, engine: EngineRecord, reason: str) -> EngineRecord:
        """A new attempt: a new process with a secret of its own; what is known of the old one no longer counts."""
        return self.move(
            engine,
            Event.RETRY,
            reason,
            attempt=engine.attempt + 1,
            secret=self.token(32),
            observation=None,
            reported=False,
            ready_at=None,
            left_version=None,
        )

    def place(self) -> None:
        placer = Placer(self.world.nodes.values(), self.engines.values(), self.world.specs, now=self.now)
        waiting = sorted(
            (e for e in self.engines.values() if e.state is State.PENDING), key=lambda e: (e.index, e.role)
        )
        pending: dict[str, int] = {}
        for engine in waiting:
            pending[engine.deployment] = pending.get(engine.deployment, 0) + 1
        for engine in waiting:
            place = placer.place(self._need(engine), revision=engine.revision, pending=pending[engine.deployment])
            if isinstance(place, Place):
                pending[engine.deployment] -= 1
                self._put(engine, place)
            elif engine.reason != place.reason:
                self.note(engine, reason=place.reason)
        self._replace_lost(placer)

    def _need(self, engine: EngineRecord) -> Need:
        avoid = engine.node if engine.failures else None
        spec = self.world.specs[(engine.deployment, engine.revision)]
        return Need(engine.id, engine.deployment, engine.role, spec, avoid)

    def _put(self, engine: EngineRecord, place: Place) -> None:
        self.move(
            engine,
            Event.PLACE,
            f"Placed on {place.node}; awaits {LIMITS[State.PLACED].awaits}.",
            node=place.node,
            runtime=place.runtime,
            gpus=place.gpus,
            memory_fraction=place.memory_fraction,
        )

    def _replace_lost(self, placer: Placer) -> None:
        """Engines that have been lost for long move, one of a deployment per step, and only where there is room."""
        if not self._most_nodes_report():
            return
        done: set[str] = set()
        for engine in sorted((e for e in self.engines.values() if e.state is State.LOST), key=lambda e: e.since):
            removed = engine.node not in self.world.nodes
            overdue = not removed and presence(self.world.nodes[str(engine.node)].silent_seconds) is Presence.LOST
            if engine.deployment in done or not (removed or overdue):
                continue
            place = placer.place(self._need(engine), revision=engine.revision, pending=1)
            if not isinstance(place, Place) and not removed:
                continue
            done.add(engine.deployment)
            where = f"moves to {place.node}" if isinstance(place, Place) else "waits for a place"
            engine = self.move(engine, Event.REPLACE, f"Its node stayed away; the engine {where}.")
            engine = self.try_again(engine, place.reason if not isinstance(place, Place) else "Waits for a place.")
            if isinstance(place, Place):
                self._put(engine, place)

    def _most_nodes_report(self) -> bool:
        """When most nodes are silent at once, the network is the likelier cause: then nothing is moved."""
        known = [node for node in self.world.nodes.values() if presence(node.silent_seconds) is not Presence.NEVER]
        reporting = sum(presence(node.silent_seconds) is Presence.REPORTING for node in known)
        return 2 * reporting >= len(known)

    def prove(self) -> None:
        proofs = proofs_of(self.engines)
        for engine in list(self.engines.values()):
            if engine.state not in (State.WARMING, State.READY) or not engine.answers:
                continue
            partners = self._partners(engine)
            verdict = may_serve(
                engine.incarnation,
                engine.role,
                up=[p.incarnation for p in partners if p.answers],
                coming=any(p.state in BOOT and not p.answers for p in partners),
                proofs=proofs,
            )
            if engine.state is State.WARMING and verdict.ready:
                ready_at = engine.ready_at or self.now
                self.move(engine, Event.PROVE, verdict.reason, ready_at=ready_at)
            elif engine.reason != verdict.reason:
                self.note(engine, reason=verdict.reason)

    def _partners(self, engine: EngineRecord) -> list[EngineRecord]:
        other = Role.DECODE if engine.role is Role.PREFILL else Role.PREFILL
        return [e for e in self.of(engine.deployment) if e.role is other and e.revision == engine.revision]

    def keep_limits(self) -> None:
        if not self.world.steady:
            return
        for engine in list(self.engines.values()):
            limit = LIMITS.get(engine.state)
            if limit is None or not allowed(engine.state, Event.OVERRUN):
                continue
            if self.now - self._waits_since(engine) <= limit.seconds:
                continue
            waited = f"Waited {_duration(limit.seconds)} for {limit.awaits}."
            if engine.state in (State.DRAINING, State.STOPPING):
                self.move(engine, Event.OVERRUN, waited)
            elif engine.state is State.PENDING:
                self.move(engine, Event.OVERRUN, f"{waited} {engine.reason}")
            else:
                last = engine.reason if engine.state is not State.PLACED else ""
                self.fail(engine, Event.OVERRUN, f"{waited} {last}".strip())

    def _waits_since(self, engine: EngineRecord) -> float:
        """When the wait that a limit bounds began. An engine that warms up cannot prove a pair before a partner is up."""
        if engine.state is not State.WARMING or not engine.answers:
            return engine.since
        up = [p.since for p in self._partners(engine) if p.answers]
        return max(engine.since, *up) if up else self.now

    def forget_failures(self) -> None:
        for engine in list(self.engines.values()):
            if engine.state is State.READY and engine.failures and self.now - engine.since >= STEADY_AFTER:
                self.note(engine, failures=0)

    def clear_away(self) -> None:
        for deployment in self.world.deployments.values():
            mine = self.of(deployment.name)
            stopped = [e for e in mine if e.state is State.STOPPED]
            if deployment.deleting and len(stopped) == len(mine):
                self.ended.append(deployment.name)
                gone = stopped
            else:
                gone = [e for e in stopped if self.now - e.since >= STOPPED_KEPT]
            for engine in gone:
                self.removed.append(engine.id)


def proofs_of(engines: Mapping[str, EngineRecord]) -> dict[tuple[Incarnation, Incarnation], bool]:
    """Every transfer that was tried, by the two processes it was tried between: told by the decode side."""
    proofs: dict[tuple[Incarnation, Incarnation], bool] = {}
    for engine in engines.values():
        if engine.observation is not None:
            decode = engine.incarnation
            for pair in engine.observation.pairs:
                proofs[(Incarnation(pair.prefill, pair.prefill_attempt), decode)] = pair.ok
    return proofs


def _progress(seen: Observation, state: State) -> str:
    text = seen.detail or f"Awaits {LIMITS[state].awaits}."
    return f"{text} ({seen.progress:.0%})" if seen.progress is not None else text


def _exit_reason(seen: Observation) -> str:
    if seen.exit_code is None:
        return seen.detail or "It could not be started."
    how = f"ended by signal {-seen.exit_code}" if seen.exit_code < 0 else f"exited with code {seen.exit_code}"
    return f"The process {how}. {seen.detail}".strip()


def _duration(seconds: float) -> str:
    return (
        f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds / 60:g} min" if seconds >= 120 else f"{seconds:g} s"
    )
