"""The reconcile loop, one step at a time: gather → decide → apply → publish. The only writer of Engine and Attempt.

A step takes the lease by a conditional update and never waits for it. What it sends goes out after its transaction; what
could not be sent is sent by a later step, because every step compares what is wanted with what was sent.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Q
from msgspec.structs import replace

from controlplane.access.services import note_uses
from controlplane.deployments import node_events, plans, snapshot
from controlplane.deployments.apply import apply
from controlplane.deployments.decide import decide
from controlplane.deployments.models import Lease, Published
from controlplane.deployments.rows import SNAPSHOT, Gathered, gather, keys_of
from controlplane.deployments.world import Decision
from controlplane.fleet.bounds import MOST_GENERATIONS
from controlplane.fleet.errors import Unavailable
from controlplane.fleet.lifecycle import Event, State
from controlplane.fleet.wire import FleetSnapshot, NodePlan, NodeReport, RouterStatus
from controlplane.nodes import reports
from controlplane.nodes.models import Node
from controlplane.publish import Mail, Publisher

log = logging.getLogger(__name__)

LEASE = "reconcile"
LEASE_SECONDS = 30.0
PAUSE = 5.0
"""A gap between two steps that is longer than this is a pause. It makes nobody lost and lets no limit pass, and a report
found at its end tells only that its node lived after the step before it."""
RESEND_AFTER = 10.0
"""Seconds after which a plan that its agent has not taken in is sent again."""


class _LeaseLost(Exception):
    """Another controller took over while this step was thinking. Nothing was written."""


def one_step(now: datetime, publisher: Publisher) -> bool:
    """Bring what is closer to what is wanted. False: another controller has the lease, or Redis is away (then nothing is
    concluded from missing reports, and the next steps count as the end of a pause).

    A node's report can stop no step: one that cannot be read, or that fails what is made of it, hurts its node alone. Keys wait
    for nobody: where a step fails all the same, the snapshot goes out with the keys of now before the error is raised.
    """
    holder = secrets.token_hex(8)
    with _lease(holder, now) as lease:
        if lease is None:
            return False
        try:
            return _step(holder, lease, now, publisher)
        except _LeaseLost:
            return False
        except Exception:
            _publish_keys(publisher, now)
            raise


def _step(holder: str, lease: Lease, now: datetime, publisher: Publisher) -> bool:
    nodes = list(Node.objects.all())
    try:
        mail = publisher.read_reports([node.name for node in nodes])
        routers = publisher.router_statuses()
        stored_version = publisher.snapshot_version()
    except Unavailable as error:
        log.warning("step skipped: %s", error)
        return False
    heard: datetime | None = now
    if lease.stepped_at is None or now - lease.stepped_at > timedelta(seconds=PAUSE):
        lease.resumed_at, heard = now, lease.stepped_at
    gathered, decision, refusals = _think(lease, nodes, mail, routers, now=now, heard=heard)
    fresh = snapshot.build(gathered.world.deployments.values(), decision.engines, gathered.keys)
    newest = max([stored_version or 0, *(status.snapshot_version for status in routers)])
    version, digest = _version(gathered.published, fresh, newest)
    _mark_drains(decision, version)
    with transaction.atomic():
        _confirm(holder, lease, now)
        changed_nodes = reports.record(nodes, mail.reports, heard=heard, now=now if heard == now else None)
        Node.objects.bulk_update(refusals, ["report_error"])
        node_events.tell_refusals(refusals)
        apply(decision, gathered, now=now)
        to_send = _renew_plans(decision, gathered, now)
        if version != gathered.published.version:
            Published.objects.filter(pk=gathered.published.pk).update(version=version, digest=digest)
    if version != stored_version:
        _publish_snapshot(publisher, replace(fresh, version=version, made_at=now.timestamp()))
    _send_plans(publisher, to_send, now)
    _note_keys(routers)
    _let_agents_in(publisher, nodes)
    _push(publisher, _topics(decision, gathered, [*changed_nodes, *refusals]))
    return True


def _think(
    lease: Lease,
    nodes: Iterable[Node],
    mail: Mail,
    routers: list[RouterStatus],
    *,
    now: datetime,
    heard: datetime | None,
) -> tuple[Gathered, Decision, list[Node]]:
    """Gather and decide; with the nodes whose reports are refused since now, or no more. A report on which it fails is refused,
    as one is that cannot be read."""
    known = {node.name: node for node in nodes}
    refusals = reports.note_refusals(known.values(), mail.reports, mail.refused)

    def think(found: Mapping[str, NodeReport]) -> tuple[Gathered, Decision]:
        gathered = gather(lease, known, found, routers, now=now, heard=heard)
        return gathered, decide(gathered.world, now=now.timestamp(), token=secrets.token_hex)

    try:
        return *think(mail.reports), refusals
    except Exception as error:
        log.exception("reports are looked at one by one, because a step failed on them")
        sound = {}
        for name, report in mail.reports.items():
            try:
                think({name: report})
                sound[name] = report
            except Exception as its:
                mail.refused[name] = f"the control plane fails on it ({type(its).__name__})"
        if len(sound) == len(mail.reports):
            raise error
        mail.reports.clear()
        mail.reports.update(sound)
        refusals += reports.note_refusals(known.values(), sound, mail.refused)
        return *think(sound), refusals


@contextmanager
def _lease(holder: str, now: datetime) -> Iterator[Lease | None]:
    free = Lease.objects.filter(Q(holder="") | Q(until__lt=now), name=LEASE)
    until = now + timedelta(seconds=LEASE_SECONDS)
    if not free.update(holder=holder, until=until):
        _, is_first = Lease.objects.get_or_create(name=LEASE)
        if not (is_first and free.update(holder=holder, until=until)):
            yield None
            return
    mine = Lease.objects.filter(name=LEASE, holder=holder)
    try:
        yield mine.first()
    finally:
        mine.update(holder="", until=None)


def _confirm(holder: str, lease: Lease, now: datetime) -> None:
    """Inside the transaction: the lease is still this step's, and stays so until the transaction ends."""
    mine = Lease.objects.filter(name=LEASE, holder=holder)
    if not mine.update(stepped_at=now, resumed_at=lease.resumed_at):
        raise _LeaseLost


def _version(published: Published, fresh: FleetSnapshot, newest: int) -> tuple[int, str]:
    """The version for this content: it rises when the content changed, or when someone knows a higher one (a database that
    was restored from a backup)."""
    digest = snapshot.digest(fresh)
    if digest == published.digest and newest <= published.version:
        return published.version, digest
    return max(published.version, newest) + 1, digest


def _mark_drains(decision: Decision, version: int) -> None:
    """A draining engine has left the snapshot: routers that acknowledge this version give it no more requests."""
    for engine in decision.engines.values():
        if engine.state is State.DRAINING and engine.left_version is None:
            decision.engines[engine.id] = replace(engine, left_version=version)


def _renew_plans(decision: Decision, gathered: Gathered, now: datetime) -> list[NodePlan]:
    """Store the generation of every plan that changed; the plans that are to be sent."""
    wanted = plans.assignments(decision.engines.values(), gathered.world.specs, gathered.world.routers)
    renewed: list[Node] = []
    to_send: list[NodePlan] = []
    for name, node in gathered.nodes.items():
        engines = wanted.get(name, ())
        digest = plans.digest(name, engines)
        report = gathered.reports.get(name)
        applied = report.plan_generation if report and report.plan_generation < MOST_GENERATIONS else 0
        if digest != node.plan_digest or applied > node.plan_generation:
            node.plan_generation = max(node.plan_generation, applied) + 1
            node.plan_digest, node.plan_sent_at = digest, None
            renewed.append(node)
        behind = report is not None and (applied < node.plan_generation or not report.holds_plan)
        overdue = node.plan_sent_at is None or now - node.plan_sent_at > timedelta(seconds=RESEND_AFTER)
        if node.plan_sent_at is None or (behind and overdue):
            to_send.append(NodePlan(name, node.plan_generation, engines))
    if renewed:
        Node.objects.bulk_update(renewed, ["plan_generation", "plan_digest", "plan_sent_at"])
    return to_send


def _send_plans(publisher: Publisher, to_send: list[NodePlan], now: datetime) -> None:
    sent: list[str] = []
    for plan in to_send:
        try:
            publisher.send_plan(plan)
        except Unavailable as error:
            log.warning("plan %d of node %s was not sent: %s", plan.generation, plan.node, error)
            break
        sent.append(plan.node)
    if sent:
        Node.objects.filter(name__in=sent).update(plan_sent_at=now)


def _let_agents_in(publisher: Publisher, nodes: Iterable[Node]) -> None:
    try:
        publisher.ensure_node_users({node.name: node.redis_digest for node in nodes if node.redis_digest})
    except Unavailable as error:
        log.warning("Redis users of nodes were not seen to: %s", error)


def _note_keys(routers: Iterable[RouterStatus]) -> None:
    seen: dict[str, float] = {}
    for status in routers:
        for key, at in status.keys_seen.items():
            seen[key] = max(at, seen.get(key, 0.0))
    if seen:
        note_uses(seen)


def _publish_snapshot(publisher: Publisher, fresh: FleetSnapshot) -> None:
    try:
        publisher.publish_snapshot(fresh)
    except Unavailable as error:
        log.warning("snapshot %d was not published: %s", fresh.version, error)


def _publish_keys(publisher: Publisher, now: datetime) -> None:
    """The stored snapshot with the keys of now: a revoked one ends to work whatever else fails."""
    try:
        stored = publisher.read_snapshot()
        if stored is None:
            return
        published, _ = Published.objects.get_or_create(name=SNAPSHOT)
        fresh = replace(stored, version=0, made_at=0.0, keys=snapshot.ordered(keys_of(now)))
        version, digest = _version(published, fresh, stored.version)
        if version != stored.version:
            Published.objects.filter(pk=published.pk).update(version=version, digest=digest)
            publisher.publish_snapshot(replace(fresh, version=version, made_at=now.timestamp()))
    except Exception:
        log.exception("the keys were not published")


def _topics(decision: Decision, gathered: Gathered, changed_nodes: Iterable[Node]) -> list[str]:
    """What browsers may want to fetch again, each once."""
    names = {decision.engines[key].deployment for key in decision.engines if _changed(key, decision, gathered)}
    names |= {gathered.world.engines[key].deployment for key in decision.removed} | set(decision.ended)
    topics = [f"deployment:{name}" for name in sorted(names)]
    topics += ["deployments"] if names else []
    seen = {node.name for node in changed_nodes}
    seen |= {m.engine.node for m in decision.moves if m.event is Event.SILENCE and m.engine.node}
    return topics + [f"node:{name}" for name in sorted(seen)] + (["nodes"] if seen else [])


def _changed(engine_id: str, decision: Decision, gathered: Gathered) -> bool:
    return replace(decision.engines[engine_id], reported=False) != gathered.stored.get(engine_id)


def _push(publisher: Publisher, topics: list[str]) -> None:
    try:
        publisher.push_live(*topics)
    except Unavailable as error:
        log.warning("browsers were not told: %s", error)
