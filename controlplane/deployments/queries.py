"""Every read of deployments, for pages and REST: a fixed number of queries, whatever the number of rows. No writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NamedTuple

from django.db.models import Case, F, Max, OuterRef, Q, QuerySet, Subquery, When

from controlplane import publish
from controlplane.access.roles import SYSTEM
from controlplane.deployments import evidence_words
from controlplane.deployments.loop import LEASE
from controlplane.deployments.models import Attempt, Deployment, Engine, Event, Lease
from controlplane.deployments.rows import deployment_record, engine_record
from controlplane.deployments.snapshot import condition_of
from controlplane.deployments.world import EngineRecord
from controlplane.fleet.errors import NotFound, Unavailable
from controlplane.fleet.lifecycle import HOLDS_NODE, State, backoff_seconds
from controlplane.fleet.model import Observation, Role, Runtime
from controlplane.fleet.plural import plural
from controlplane.fleet.spec import DeploymentSpec
from controlplane.fleet.status import Condition
from controlplane.fleet.wire import CacheState, RouterStatus


@dataclass(frozen=True)
class EngineRow:
    engine: Engine
    state: State
    name: str
    node_name: str | None
    """None: it has no place yet."""
    reason: str
    since: datetime
    observation: Observation | None
    in_flight: int | None
    """Requests now, as the routers count them; None: no router was heard of."""
    retry_at: datetime | None
    """When a failed engine is tried again; None: it has not failed."""
    last_failure: str
    """Why the attempt before ended, of an engine that is being tried again after failures."""
    failing_since: datetime | None
    """When the first of its failures in a row was; None: it has not failed."""


class Transfers(NamedTuple):
    """KV transfers between engines."""

    bytes: int
    transfers: int
    failures: int


@dataclass(frozen=True)
class DeploymentRow:
    deployment: Deployment
    spec: DeploymentSpec
    condition: Condition
    engines: list[EngineRow]
    """Those that have not stopped; by role, then index."""
    moved: Transfers | None
    """What its decode engines received since it was created, engines that have ended included; None: nobody told yet."""
    cache: CacheState | None
    """How exact cache-aware routing is, by the router that knows least and engines' short names; None: none asked for."""
    advice: list[str]
    """What else its owner should know though nothing has failed."""

    @property
    def stands_in(self) -> bool:
        """Some engine of it is a stand-in: what it answers is made up."""
        return any(row.engine.runtime == Runtime.SIM for row in self.engines)

    @property
    def cache_sentence(self) -> str:
        """Empty: no cache-aware routing."""
        return "" if self.cache is None else evidence_words.sentence(self.cache)

    @property
    def cache_fails(self) -> bool:
        """It serves, but routes without the evidence that it was asked to route by."""
        return self.condition.serves and self.cache is not None and self.cache.state in ("blind", "degraded")

    @property
    def notices(self) -> list[str]:
        return [*([self.cache_sentence] if self.cache else []), *self.advice]


def deployment_rows() -> list[DeploymentRow]:
    """All deployments, by name."""
    return _rows(list(_deployments().order_by("name")))


def served_names() -> dict[str, str]:
    """What clients may send as `model`, by deployment name; those that are being deleted are left out."""
    found = Deployment.objects.filter(deleting_since=None).order_by("name")
    return dict(found.values_list("name", "served_name"))


def deployment_row(name: str) -> DeploymentRow:
    """Raises `NotFound`."""
    found = list(_deployments().filter(name=name))
    if not found:
        raise NotFound(f"there is no deployment {name}")
    return _rows(found)[0]


EVENT_KINDS: Final = {
    "failures": Q(new_state__in=(State.FAILED, State.UNHEALTHY, State.LOST)),
    "engines": ~Q(engine_id=""),
    "changes": ~Q(actor=SYSTEM.name),
}
"""What events can be asked for: engines that failed, all of engines, what people changed."""


def events(
    *,
    deployment: str | None = None,
    engine: str | None = None,
    kind: str | None = None,
    text: str = "",
    limit: int = 50,
    before: int | None = None,
) -> list[Event]:
    """History, newest first. `kind`: a key of `EVENT_KINDS`; `text`: in the message, its deployment or its node, each word of
    it; `before`: only rows older than that one."""
    rows = Event.objects.order_by("-id")
    if kind is not None:
        rows = rows.filter(EVENT_KINDS[kind])
    for word in text.split():
        rows = rows.filter(
            Q(message__icontains=word) | Q(deployment_name__icontains=word) | Q(node_name__icontains=word)
        )
    if deployment is not None:
        rows = rows.filter(deployment_name=deployment)
    if engine is not None:
        rows = rows.filter(engine_id=engine)
    if before is not None:
        rows = rows.filter(id__lt=before)
    return list(rows[:limit])


def last_step() -> datetime | None:
    """When the reconcile loop stepped last; None: never yet."""
    return Lease.objects.filter(name=LEASE).values_list("stepped_at", flat=True).first()


def attempts(engine_id: str) -> list[Attempt]:
    """The engine's processes, newest first."""
    return list(Attempt.objects.filter(engine_id=engine_id).order_by("-number"))


def _deployments() -> QuerySet[Deployment]:
    return Deployment.objects.annotate(newest=Max("revisions__number")).select_related("moved")


def _rows(deployments: Sequence[Deployment]) -> list[DeploymentRow]:
    routers = _routers()
    by_deployment: dict[int, list[Engine]] = {deployment.pk: [] for deployment in deployments}
    unstopped = Engine.objects.exclude(state=State.STOPPED).filter(deployment__in=deployments)
    ended = Attempt.objects.filter(engine=OuterRef("pk"), ended_at__isnull=False).order_by("-number")
    first = F("attempt") - F("failures") + Case(When(state=State.FAILED, then=1), default=0)
    in_a_row = ended.filter(number__gte=OuterRef("first_failure")).order_by("number")
    unstopped = unstopped.annotate(
        first_failure=first,
        last_failure=Subquery(ended.values("reason")[:1]),
        failing_since=Subquery(in_a_row.values("ended_at")[:1]),
    )
    for engine in unstopped.select_related("deployment", "revision", "node").order_by("role", "index", "created_at"):
        by_deployment[engine.deployment_id].append(engine)
    return [_deployment_row(deployment, by_deployment[deployment.pk], routers) for deployment in deployments]


def _deployment_row(deployment: Deployment, engines: list[Engine], routers: list[RouterStatus]) -> DeploymentRow:
    wanted = deployment_record(deployment, getattr(deployment, "newest") or 0)  # noqa: B009  (an annotation)
    records = [engine_record(engine) for engine in engines]
    rows = [_engine_row(engine, record, routers) for engine, record in zip(engines, records, strict=True)]
    order = list(Role)
    rows.sort(key=lambda row: order.index(Role(row.engine.role)))
    cache = _cache(deployment.name, records, routers)
    moved = _moved(deployment, records)
    return DeploymentRow(deployment, wanted.spec, condition_of(wanted, records), rows, moved, cache, _advice(records))


def _moved(deployment: Deployment, engines: list[EngineRecord]) -> Transfers | None:
    holding = [e for e in engines if e.role is Role.DECODE and e.state in HOLDS_NODE and e.observation is not None]
    loads = [e.observation.load for e in holding if e.observation is not None and e.observation.load is not None]
    past = getattr(deployment, "moved", None)
    if past is None and not loads:
        return None
    return Transfers(
        bytes=sum(load.nixl_bytes for load in loads) + (past.bytes if past else 0),
        transfers=sum(load.nixl_transfers for load in loads) + (past.transfers if past else 0),
        failures=sum(load.nixl_failures for load in loads) + (past.failures if past else 0),
    )


def _engine_row(engine: Engine, record: EngineRecord, routers: list[RouterStatus]) -> EngineRow:
    return EngineRow(
        engine=engine,
        state=record.state,
        name=record.name,
        node_name=None if record.state is State.PENDING else record.node,
        reason=record.reason,
        since=engine.since,
        observation=record.observation,
        in_flight=sum(router.in_flight.get(engine.id, 0) for router in routers) if routers else None,
        retry_at=_retry_at(record) if record.state is State.FAILED else None,
        last_failure=(getattr(engine, "last_failure") or "") if record.failures else "",  # noqa: B009  (an annotation)
        failing_since=getattr(engine, "failing_since") if record.failures else None,  # noqa: B009  (an annotation)
    )


def _retry_at(engine: EngineRecord) -> datetime:
    return datetime.fromtimestamp(engine.since + (0 if engine.retry_asked else backoff_seconds(engine.failures)), UTC)


def _routers() -> list[RouterStatus]:
    try:
        return publish.current().router_statuses()
    except Unavailable:
        return []


_CACHE_STATES = ("blind", "degraded", "approximate", "exact")
"""Worst first."""


def _cache(name: str, engines: list[EngineRecord], routers: list[RouterStatus]) -> CacheState | None:
    told = [router.caches[name] for router in routers if name in router.caches]
    if not told:
        return None
    worst = min(told, key=lambda cache: _CACHE_STATES.index(cache.state) if cache.state in _CACHE_STATES else -1)
    names = {engine.id: engine.name for engine in engines}
    return CacheState(
        worst.state,
        {names.get(who, who): reason for who, reason in worst.reasons.items()},
        sum(cache.prompts for cache in told),
        sum(cache.short_prompts for cache in told),
        max(cache.short_block for cache in told),
    )


def _advice(engines: list[EngineRecord]) -> list[str]:
    notices = []
    holding = [e for e in engines if e.state in HOLDS_NODE]
    if stand_ins := sum(e.runtime is Runtime.SIM for e in holding):
        one = stand_ins == 1
        notices.append(f"{'Stand-in engine: its' if one else 'Stand-in engines: their'} answers are made up.")
    cards: dict[tuple[str | None, int], set[Role]] = {}
    for engine in holding:
        for gpu in engine.gpus:
            cards.setdefault((engine.node, gpu), set()).add(engine.role)
    for (node, gpu), roles in sorted(cards.items(), key=str):
        if {Role.PREFILL, Role.DECODE} <= roles:
            notices.append(
                f"Prefill and decode share GPU {gpu} of {node}. On one card this only delays the first token (4.7 to 7.2 times, "
                "measured). Use an aggregated pool, or add a card."
            )
    names = {engine.id: engine.name for engine in engines}
    attempts_now = {engine.id: engine.attempt for engine in holding}
    for engine in holding:
        for pair in engine.observation.pairs if engine.observation else ():
            if not pair.ok and attempts_now.get(pair.prefill) == pair.prefill_attempt:
                notices.append(f"The KV transfer {names[pair.prefill]} → {engine.name} failed: {pair.detail}")
    leaving = sum(e.state in (State.DRAINING, State.STOPPING) for e in engines)
    if leaving:
        notices.append(f"{plural(leaving, 'engine finishes its', 'engines finish their')} last requests.")
    return notices
