"""What one step of the reconcile loop changes: pure. Time, ids and secrets are arguments.

The rules run in this order, each seeing what the ones before it did: what the nodes report, who is at fault, who fell silent,
who is no longer wanted or missing, who has drained, who may try again, who gets a place, who may serve, whose time is up.
"""

from __future__ import annotations

from controlplane.deployments.draft import Draft, Token, proofs_of
from controlplane.deployments.observe import take_blame, take_reports, take_silence
from controlplane.deployments.placement import Need, Place, Placer
from controlplane.deployments.world import Decision, DeploymentRecord, EngineRecord, NodeRecord, World
from controlplane.fleet.lifecycle import BOOT, LIMITS, LIVE, Event, State, allowed, backoff_seconds
from controlplane.fleet.model import Role
from controlplane.fleet.pairing import may_serve
from controlplane.nodes.presence import LOST_AFTER, SILENT_AFTER, Presence, presence

WANTED = (State.PENDING, State.FAILED, *LIVE)
"""States of an engine that fills a slot of its pool."""
STOPPED_KEPT = 3600.0
"""Seconds for which a stopped engine's row stays, so that its attempts and logs can be read."""
STEADY_AFTER = 60.0
"""Seconds of being ready after which earlier failures no longer count."""
LOST_FOR = LOST_AFTER - SILENT_AFTER
"""Seconds for which an engine has been lost before it moves: the loop must have watched that silence itself."""
AT_ONCE = 60.0
"""Nodes that fell silent within so many seconds of each other fell silent at once."""
NETWORK_HEALS = 600.0
"""Seconds for which a silence of most nodes at once is taken for a network that is cut."""
DRAIN_BLIND = 5.0
"""With no router heard of: seconds after which a drain goes by the engine's own load alone (two reports and more)."""
_SCALE_DOWN_FIRST = {State.PENDING: 0, State.FAILED: 0, State.LOST: 0, State.UNHEALTHY: 2, State.READY: 3}
"""The lower, the sooner it goes; 1: on its way up."""


def decide(world: World, *, now: float, token: Token) -> Decision:
    """The next records, and the moves that lead to them."""
    draft = Draft(world, now, token)
    for rule in (
        take_reports,
        take_blame,
        take_silence,
        fill_slots,
        end_drains,
        retry,
        place,
        prove,
        keep_limits,
        forget_failures,
        clear_away,
    ):
        rule(draft)
    return draft.decision()


def fill_slots(draft: Draft) -> None:
    """Each pool gets as many engines of the newest revision as are wanted; all others are let go."""
    for name, deployment in draft.world.deployments.items():
        there = draft.of(name)
        for role in Role:
            _fill_pool(draft, deployment, role, [e for e in there if e.role is role])


def _fill_pool(draft: Draft, deployment: DeploymentRecord, role: Role, there: list[EngineRecord]) -> None:
    pool = deployment.spec.pools.get(role)
    wanted = pool.replicas if pool is not None and not deployment.deleting else 0
    filling = [e for e in there if e.state in WANTED]
    kept = [e for e in filling if e.revision == deployment.revision]
    kept.sort(key=lambda e: (_SCALE_DOWN_FIRST.get(e.state, 1), -e.index))
    surplus = kept[: max(0, len(kept) - wanted)]
    for engine in filling:
        if deployment.deleting:
            draft.move(engine, Event.DRAIN, "Its deployment is being deleted.")
        elif engine.revision != deployment.revision:
            draft.move(engine, Event.DRAIN, f"Revision {deployment.revision} replaces it.")
        elif engine in surplus:
            draft.move(engine, Event.DRAIN, "Its pool was scaled down.")
    taken = {e.index for e in there if e.state is not State.STOPPED}
    for _ in range(wanted - len(kept)):
        index = next(i for i in range(len(taken) + 1) if i not in taken)
        taken.add(index)
        draft.create(deployment, role, index)


def end_drains(draft: Draft) -> None:
    """A draining engine whose last requests have finished may stop; on a removed node nothing is waited for."""
    for engine in draft.all():
        if engine.state not in (State.DRAINING, State.STOPPING):
            continue
        if draft.presence_of(engine) is None:
            if engine.state is State.DRAINING:
                engine = draft.move(engine, Event.OVERRUN, "Its node was removed.")
            draft.move(engine, Event.GONE, "Its node was removed.")
        elif engine.state is State.DRAINING and (why := _drained(draft, engine)):
            draft.move(engine, Event.DRAINED, why)


def _drained(draft: Draft, engine: EngineRecord) -> str:
    """Why it may be stopped; empty: it may not yet."""
    load = engine.observation.load if engine.observation else None
    if engine.left_version is None or (load is not None and load.running + load.waiting):
        return ""
    if not draft.world.routers:
        blind = draft.now - engine.since >= DRAIN_BLIND
        return "It has no requests, as far as the engine itself reports. No router reports." if blind else ""
    for router in draft.world.routers:
        if router.snapshot_version < engine.left_version or router.in_flight.get(engine.id, 0):
            return ""
    return "Its last requests have finished."


def retry(draft: Draft) -> None:
    """A failed engine gets a new attempt when its back-off has passed, or at once when somebody asked for it."""
    for engine in draft.all():
        if engine.state is not State.FAILED:
            continue
        if engine.retry_asked or draft.now - engine.since >= backoff_seconds(engine.failures):
            draft.try_again(engine, "Waiting for a node.")


def place(draft: Draft) -> None:
    """Pending engines get a place or say what they wait for; then engines lost for long move where there is room."""
    placer = Placer(draft.world.nodes.values(), draft.all(), draft.world.specs, now=draft.now)
    waiting = sorted((e for e in draft.all() if e.state is State.PENDING), key=lambda e: (e.index, e.role))
    pending: dict[str, int] = {}
    for engine in waiting:
        pending[engine.deployment] = pending.get(engine.deployment, 0) + 1
    for engine in waiting:
        answer = placer.place(_need(draft, engine), revision=engine.revision, pending=pending[engine.deployment])
        if isinstance(answer, Place):
            pending[engine.deployment] -= 1
            _put(draft, engine, answer)
        elif engine.reason != answer.reason:
            draft.note(engine, reason=answer.reason)
    _replace_lost(draft, placer)


def _need(draft: Draft, engine: EngineRecord) -> Need:
    avoid = engine.node if engine.failures else None
    return Need(
        engine.id, engine.deployment, engine.role, draft.world.specs[(engine.deployment, engine.revision)], avoid
    )


def _put(draft: Draft, engine: EngineRecord, place: Place) -> None:
    draft.move(
        engine,
        Event.PLACE,
        f"Placed on {place.node}. Waiting for the agent on {place.node}.",
        node=place.node,
        runtime=place.runtime,
        gpus=place.gpus,
        memory_fraction=place.memory_fraction,
    )


def _network_is_cut(world: World, node: NodeRecord) -> bool:
    """When most nodes fall silent at once, the network is the likelier cause. Nodes that fell silent at another time say
    nothing about that, nor do those that never reported."""
    silences = [other.silent_seconds for other in world.nodes.values()]
    reporting = sum(presence(silence) is Presence.REPORTING for silence in silences)
    at_once = sum(
        presence(silence) is not Presence.REPORTING and abs(silence - node.silent_seconds) <= AT_ONCE
        for silence in silences
    )
    return reporting < at_once


def _replace_lost(draft: Draft, placer: Placer) -> None:
    """One engine of each deployment per step: never all at once."""
    done: set[str] = set()
    for engine in sorted((e for e in draft.all() if e.state is State.LOST), key=lambda e: e.since):
        heard = draft.presence_of(engine)
        if engine.deployment in done or not _may_move(draft, engine):
            continue
        answer = placer.place(_need(draft, engine), revision=engine.revision, pending=1)
        if isinstance(answer, Place):
            engine = draft.move(engine, Event.REPLACE, f"Its node did not come back. It moves to {answer.node}.")
            _put(draft, draft.try_again(engine, "Waiting for a node."), answer)
        elif heard is None:
            engine = draft.move(engine, Event.REPLACE, "Its node was removed.")
            draft.try_again(engine, answer.reason)
        else:
            continue
        done.add(engine.deployment)


def _may_move(draft: Draft, engine: EngineRecord) -> bool:
    """Whether a lost engine's node is gone for good, as far as anybody can tell."""
    node = draft.world.nodes.get(engine.node or "")
    if node is None:
        return True
    lost_for = draft.now - engine.since
    if not draft.world.steady or lost_for < LOST_FOR or presence(node.silent_seconds) is not Presence.LOST:
        return False
    return lost_for > NETWORK_HEALS or not _network_is_cut(draft.world, node)


def prove(draft: Draft) -> None:
    """Engines that answer may serve when their pairs are proved; those that serve say what is wrong with their pairs."""
    proofs = proofs_of(draft.engines)
    for engine in draft.all():
        if not engine.answers:
            continue
        partners = _partners(draft, engine)
        verdict = may_serve(
            engine.incarnation,
            engine.role,
            up=[p.incarnation for p in partners if p.answers],
            coming=any(p.state in BOOT and not p.answers for p in partners),
            proofs=proofs,
            accused=draft.blamed,
        )
        if engine.state is State.WARMING and verdict.ready:
            draft.move(engine, Event.PROVE, verdict.reason, ready_at=engine.ready_at or draft.now)
        elif engine.reason != verdict.reason:
            draft.note(engine, reason=verdict.reason)


def _partners(draft: Draft, engine: EngineRecord) -> list[EngineRecord]:
    other = Role.DECODE if engine.role is Role.PREFILL else Role.PREFILL
    return [e for e in draft.of(engine.deployment) if e.role is other and e.revision == engine.revision]


def keep_limits(draft: Draft) -> None:
    """What has waited longer than its state allows goes on: most to a failure and a new attempt."""
    if not draft.world.steady:
        return
    for engine in draft.all():
        limit = LIMITS.get(engine.state)
        if engine.is_blamed and _pool_is_on_its_way(draft, engine):
            continue  # one after the other: what still gets requests is worth more than nothing
        if limit is None or not allowed(engine.state, Event.OVERRUN):
            continue
        if draft.now - _waits_since(draft, engine) <= limit.seconds:
            continue
        waited = f"Waited {_duration(limit.seconds)} for {limit.awaits}."
        if engine.state in (State.DRAINING, State.STOPPING):
            draft.move(engine, Event.OVERRUN, waited)
        elif engine.state is State.PENDING:
            draft.move(engine, Event.OVERRUN, f"{waited} {engine.reason}")
        else:
            last = engine.reason if engine.state is not State.PLACED else ""
            draft.fail(engine, Event.OVERRUN, f"{waited} {last}".strip())


def _pool_is_on_its_way(draft: Draft, engine: EngineRecord) -> bool:
    return any(
        other.role is engine.role and other.state in (State.PENDING, State.FAILED, *BOOT)
        for other in draft.of(engine.deployment)
    )


def _waits_since(draft: Draft, engine: EngineRecord) -> float:
    """When the wait that a limit bounds began.

    An engine that warms up cannot prove a pair before a partner is up that is not at fault itself. Nor is it made to start
    again because a transfer fails, or is not tried, by another's fault: decode's agent is the one that tries.
    """
    if engine.state is not State.WARMING or not engine.answers:
        return engine.since
    up = [p for p in _partners(draft, engine) if p.answers and p.incarnation not in draft.blamed]
    if engine.incarnation in draft.blamed:
        return max(engine.since, *(p.since for p in up)) if up else engine.since
    tried = proofs_of({engine.id: engine})
    untried = [p.since for p in up if (p.incarnation, engine.incarnation) not in tried]
    return max(engine.since, *untried) if untried and engine.role is Role.DECODE else draft.now


def forget_failures(draft: Draft) -> None:
    """An engine that has been ready for a while begins its back-off anew when it fails again."""
    for engine in draft.all():
        if engine.state is State.READY and engine.failures and draft.now - engine.since >= STEADY_AFTER:
            draft.note(engine, failures=0)


def clear_away(draft: Draft) -> None:
    """Rows of engines that stopped long ago go; a deployment that is being deleted goes with its last engine."""
    for name, deployment in draft.world.deployments.items():
        there = draft.of(name)
        stopped = [e for e in there if e.state is State.STOPPED]
        if deployment.deleting and len(stopped) == len(there):
            draft.ended.append(name)
            draft.removed += [e.id for e in stopped]
        else:
            draft.removed += [e.id for e in stopped if draft.now - e.since >= STOPPED_KEPT]


def _duration(seconds: float) -> str:
    return (
        f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds / 60:g} min" if seconds >= 120 else f"{seconds:g} s"
    )
