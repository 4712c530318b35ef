"""Database rows as the records of `world.py`: the gather step of the reconcile loop. A fixed number of queries, no writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from math import inf
from typing import Any

import msgspec
from django.db.models import OuterRef, Q, Subquery
from msgspec.structs import replace

from controlplane.access.models import ApiKey
from controlplane.deployments.models import Deployment, Engine, Lease, Published, Revision
from controlplane.deployments.world import DeploymentRecord, EngineRecord, NodeRecord, World
from controlplane.fleet.lifecycle import State
from controlplane.fleet.model import Observation, Phase, Role, Runtime
from controlplane.fleet.spec import DeploymentSpec, PoolSpec
from controlplane.fleet.wire import NodeReport, RouterStatus, RoutingPolicy, Scope, SnapshotKey
from controlplane.nodes import addresses
from controlplane.nodes.models import Node
from controlplane.nodes.queries import barred
from controlplane.nodes.reports import Age, age, facts_of, latest

SNAPSHOT = "snapshot"
GRACE = 15.0
"""Seconds after a pause of the loop in which no limit passes: the reports come first."""


@dataclass
class Gathered:
    """What a step works on: the world, and the rows that its changes go to."""

    world: World
    stored: dict[str, EngineRecord]
    """The engines as their rows have them, before this step's reports."""
    nodes: dict[str, Node]
    reports: dict[str, NodeReport]
    """Those that are not older than what was known, and not of an agent process that is heard for the first time."""
    deployment_ids: dict[str, int]
    revision_ids: dict[tuple[str, int], int]
    keys: list[SnapshotKey]
    published: Published


def gather(
    lease: Lease,
    nodes: Mapping[str, Node],
    reports: Mapping[str, NodeReport],
    routers: Iterable[RouterStatus],
    *,
    now: datetime,
    heard: datetime | None,
) -> Gathered:
    """Everything that `decide` needs, as of now. `heard`: when the reports that are new came, at the earliest."""
    ages = {name: age(nodes[name], report) for name, report in reports.items() if name in nodes}
    reports = {name: reports[name] for name, how in ages.items() if how in (Age.NEW, Age.KNOWN)}
    came = {name: heard for name, how in ages.items() if how is Age.NEW}
    resumed = lease.resumed_at or now
    rows = list(Engine.objects.select_related("deployment", "revision", "node"))
    newest = _newest_revisions()
    revisions = {(r.deployment.name, r.number): r for r in newest.values()}
    revisions |= {(row.deployment.name, row.revision.number): row.revision for row in rows}
    deployments = list(Deployment.objects.all())
    stored, engines = _engine_records(rows, nodes, reports)
    world = World(
        nodes={name: _node_record(node, reports.get(name), came.get(name), now) for name, node in nodes.items()},
        deployments={d.name: deployment_record(d, newest[d.pk].number) for d in deployments if d.pk in newest},
        engines=engines,
        specs={which: spec_of(revision.spec) for which, revision in revisions.items()},
        routers=tuple(routers),
        steady=(now - resumed).total_seconds() >= GRACE,
    )
    return Gathered(
        world=world,
        stored=stored,
        nodes=dict(nodes),
        reports=reports,
        deployment_ids={d.name: d.pk for d in deployments},
        revision_ids={which: revision.pk for which, revision in revisions.items()},
        keys=keys_of(now),
        published=Published.objects.get_or_create(name=SNAPSHOT)[0],
    )


def spec_of(stored: dict[str, Any]) -> DeploymentSpec:
    """A stored document as the spec it was made from. It was checked when it came; rules that are newer than it do not stop
    what runs, nor do fields that only a newer version of Tandem knows."""
    return _spec_of_json(msgspec.json.encode(stored))


@lru_cache(maxsize=4096)
def _spec_of_json(data: bytes) -> DeploymentSpec:
    try:
        return msgspec.json.decode(data, type=DeploymentSpec)
    except msgspec.ValidationError:
        known = _known(msgspec.json.decode(data), DeploymentSpec)
        known["routing"] = _known(known.get("routing", {}), RoutingPolicy)
        known["pools"] = {role: _known(pool, PoolSpec) for role, pool in known["pools"].items()}
        return msgspec.convert(known, DeploymentSpec)


def _known(stored: dict[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    names = kind.__struct_fields__
    return {name: value for name, value in stored.items() if name in names}


def deployment_record(row: Deployment, revision: int) -> DeploymentRecord:
    return DeploymentRecord(row.name, spec_of(row.intent), revision, deleting=row.deleting_since is not None)


def engine_record(row: Engine) -> EngineRecord:
    """The row as a record (it should come with its deployment, revision and node: each is read)."""
    return EngineRecord(
        id=row.id,
        deployment=row.deployment.name,
        revision=row.revision.number,
        role=Role(row.role),
        index=row.index,
        state=State(row.state),
        since=row.since.timestamp(),
        secret=row.secret,
        reason=row.reason,
        attempt=row.attempt,
        failures=row.failures,
        node=row.node.name if row.node else None,
        gpus=tuple(row.gpus),
        runtime=Runtime(row.runtime) if row.runtime else None,
        memory_fraction=row.memory_fraction,
        observation=observation_of(row),
        ready_at=row.ready_at.timestamp() if row.ready_at else None,
        left_version=row.left_version,
        retry_asked=row.retry_asked == row.attempt,
    )


def observation_of(row: Engine) -> Observation | None:
    """None: there is none, or one that an older version stored and this one takes no more; the next report brings another."""
    try:
        return None if row.observation is None else msgspec.convert(row.observation, Observation)
    except msgspec.ValidationError:
        return None


def _node_record(node: Node, report: NodeReport | None, came: datetime | None, now: datetime) -> NodeRecord:
    facts = facts_of(node) if report is None else report.facts
    heard = latest(node.last_report_at, came)
    silent = inf if heard is None else max(0.0, (now - heard).total_seconds())
    took = report is not None and report.holds_plan and 0 < node.plan_generation <= report.plan_generation
    leaves = "is stopping its agent" if report is not None and report.leaving else ""
    return NodeRecord(node.name, facts, node.cordoned, silent, took, barred=barred(node, facts) or leaves)


def _newest_revisions() -> dict[int, Revision]:
    of_same = Revision.objects.filter(deployment=OuterRef("deployment")).order_by("-number")
    found = Revision.objects.select_related("deployment").filter(number=Subquery(of_same.values("number")[:1]))
    return {revision.deployment_id: revision for revision in found}


def _engine_records(
    rows: Iterable[Engine], nodes: Mapping[str, Node], reports: Mapping[str, NodeReport]
) -> tuple[dict[str, EngineRecord], dict[str, EngineRecord]]:
    """The engines as stored, and as the newest reports show them. Only what its own node says of its own attempt counts; one
    that listens where it may not is not used, and says so."""
    seen = {(name, o.engine, o.attempt): o for name, report in reports.items() for o in report.engines}
    stored = {row.id: engine_record(row) for row in rows}
    now = dict(stored)
    for engine in stored.values():
        if (found := seen.get((engine.node or "", engine.id, engine.attempt))) is not None:
            facts = reports[engine.node or ""].facts
            pinned = nodes[engine.node or ""].address or facts.address
            if found.phase is not Phase.EXITED and (why := addresses.objection(found, pinned=pinned, facts=facts)):
                found = replace(found, phase=Phase.STARTING, detail=why, progress=None, ports=None, load=None)
            now[engine.id] = replace(engine, observation=found, reported=True)
    return stored, now


def keys_of(now: datetime) -> list[SnapshotKey]:
    """One entry per secret that works: the id is what use is counted under, so that a rotated key is one key all the same."""
    valid = ApiKey.objects.filter(Q(expires_at=None) | Q(expires_at__gt=now), revoked_at=None)
    found = []
    for key in valid.prefetch_related("retired"):
        entry = SnapshotKey(
            id=key.id,
            digest=key.digest,
            scope=Scope(key.scope),
            expires_at=key.expires_at.timestamp() if key.expires_at else None,
            models=tuple(key.models_allowed),
            requests_per_minute=key.requests_per_minute,
            tokens_per_minute=key.tokens_per_minute,
            concurrency=key.concurrency,
            priority=key.priority,
            silence_seconds=key.silence_seconds,
            gap_seconds=key.gap_seconds,
        )
        found.append(entry)
        for old in key.retired.all():
            if old.works_until > now:
                until = min(filter(None, (old.works_until, key.expires_at)))
                found.append(replace(entry, digest=old.digest, expires_at=until.timestamp()))
    return found
