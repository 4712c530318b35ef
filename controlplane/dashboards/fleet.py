"""The Fleet page: the whole in one sentence, four totals, every deployment as a small picture, the newest events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from django.http import HttpRequest, HttpResponse

from controlplane.dashboards import figures, lanes, looks, words
from controlplane.dashboards.connect import connect
from controlplane.dashboards.events import recent
from controlplane.dashboards.looks import Look
from controlplane.dashboards.page import page, signed_in
from controlplane.dashboards.words import Quantity
from controlplane.deployments import queries
from controlplane.deployments.queries import DeploymentRow
from controlplane.fleet.lifecycle import State
from controlplane.fleet.model import Role
from controlplane.fleet.plural import plural
from controlplane.fleet.status import Status
from controlplane.nodes import queries as nodes
from controlplane.nodes.presence import Presence
from controlplane.nodes.queries import NodeRow

MOST_DOTS = 24
MOST_CARDS = 24


class MiniLane(NamedTuple):
    role: Role
    title: str
    ready: int
    wanted: int
    dots: tuple[Look, ...]
    more: int


class Mini(NamedTuple):
    """A deployment as a small picture."""

    row: DeploymentRow
    look: Look
    lanes: tuple[MiniLane, ...]
    link: lanes.Link | None
    width: float
    """Of the link's line, by the KV bytes moved, against the other cards'."""
    in_flight: Quantity

    @property
    def serves(self) -> bool:
        return self.row.condition.serves


class Tile(NamedTuple):
    label: str
    quantity: Quantity
    of: str
    source: str


def minis(rows: Sequence[DeploymentRow]) -> list[Mini]:
    """The small pictures, drawn to one scale."""
    pictures = [_mini(row) for row in rows]
    scale = figures.widths([p.link.bytes_moved if p.link else None for p in pictures], widest=6.0)
    return [p._replace(width=width) for p, width in zip(pictures, scale, strict=True)]


def _mini(row: DeploymentRow) -> Mini:
    found = []
    for role in Role:
        engines = [e for e in row.engines if e.engine.role == role and e.state is not State.STOPPED]
        if role not in row.spec.pools and not engines:
            continue
        dots = tuple(looks.ENGINE[e.state] for e in engines[:MOST_DOTS])
        ready, wanted = row.condition.ready.get(role, 0), row.condition.wanted.get(role, 0)
        found.append(MiniLane(role, role.value.capitalize(), ready, wanted, dots, len(engines) - len(dots)))
    prefills = [e for e in row.engines if e.engine.role == Role.PREFILL]
    decodes = [e for e in row.engines if e.engine.role == Role.DECODE]
    wire = lanes.link(prefills, decodes, row.moved) if row.spec.disaggregated else None
    flight = words.count(lanes.requests_in_flight(row.engines))
    return Mini(row, looks.DEPLOYMENT[row.condition.status], tuple(found), wire, figures.THINNEST, flight)


_SAID = (
    (Status.FAILED, "does not serve: an engine failed.", "do not serve: engines failed."),
    (Status.NOT_SERVING, "does not serve: no decode engine is wanted.", "do not serve: no decode engines are wanted."),
    (Status.DEGRADED, "serves, but not with all that was asked for.", "serve, but not with all that was asked for."),
    (Status.WAITING, "waits for a node with room.", "wait for a node with room."),
    (Status.STARTING, "is starting.", "are starting."),
    (Status.SCALING, "serves while more engines start.", "serve while more engines start."),
    (Status.DELETING, "is being deleted.", "are being deleted."),
    (Status.STOPPED, "is stopped.", "are stopped."),
)
"""What is said of one and of several deployments, worst first. Those that are well are only counted."""


_MISLED = ("routes with poor knowledge of where its KV is.", "route with poor knowledge of where their KV is.")


class Clause(NamedTuple):
    """A part of the fleet's sentence: names with links, and what is said of them."""

    route: str
    names: tuple[str, ...]
    more: int
    said: str


def _clause(route: str, names: Sequence[str], one: str, several: str) -> Clause:
    return Clause(route, tuple(names[:3]), max(len(names) - 3, 0), one if len(names) == 1 else several)


def summary(rows: Sequence[DeploymentRow], node_rows: Sequence[NodeRow]) -> tuple[Look, tuple[Clause, ...]]:
    """The whole fleet in a sentence of clauses, worst first, with the look of the worst thing in it."""
    if not node_rows:
        return Look("No nodes", "dashed", "wait"), (
            Clause("", (), 0, "No node has joined yet, so nothing can be deployed."),
        )
    counts = Counter(row.condition.status for row in rows)
    misled = [row.deployment.name for row in rows if row.cache_fails]
    clauses = []
    for status, one, several in _SAID:
        names = [row.deployment.name for row in rows if row.condition.status is status]
        if names:
            clauses.append(_clause("deployment", names, one, several))
        if status is Status.DEGRADED and misled:
            clauses.append(_clause("deployment", misled, *_MISLED))
    gone = [n.node.name for n in node_rows if n.status in (Presence.SILENT, Presence.LOST)]
    if gone:
        clauses.append(_clause("node", gone, "has stopped reporting.", "have stopped reporting."))
    if counts[Status.READY]:
        well, rest = counts[Status.READY], len(rows) - counts[Status.READY]
        who = plural(well, "deployment") if rest else "The deployment" if well == 1 else f"All {well:,} deployments"
        clauses.append(Clause("", (), 0, f"{who} {'serves' if well == 1 else 'serve'} with all engines."))
    if not rows:
        clauses.append(Clause("", (), 0, "Nothing is deployed."))
    return _worst(counts, bool(gone or misled)), tuple(clauses)


def _worst(counts: Counter[Status], troubled: bool) -> Look:
    worst = next((status for status in looks.SEVERITY if counts[status]), None)
    if worst is Status.FAILED:
        return Look("Failing", "cross", "bad")
    if worst is Status.NOT_SERVING:
        return looks.DEPLOYMENT[worst]
    if worst is Status.DEGRADED or troubled:
        return Look("Degraded", "half", "warn")
    if worst in (Status.WAITING, Status.STARTING, Status.SCALING):
        return looks.DEPLOYMENT[worst]
    return Look("All well", "disc", "ok") if worst else Look("Idle", "dashed", "wait")


def tiles(rows: Sequence[DeploymentRow], node_rows: Sequence[NodeRow]) -> tuple[Tile, ...]:
    """The fleet's totals; each says its source and window."""
    engines = [e for row in rows for e in row.engines]
    wanted = sum(sum(row.condition.wanted.values()) for row in rows)
    ready = sum(sum(row.condition.ready.values()) for row in rows)
    received = lanes.total([row.moved.bytes if row.moved else None for row in rows])
    reporting = sum(n.status is Presence.REPORTING for n in node_rows)
    return (
        Tile("Nodes reporting", words.count(reporting), f"of {len(node_rows):,}", "node reports · now"),
        Tile("Engines ready", words.count(ready), f"of {wanted:,} wanted", "engine states · now"),
        Tile(
            "Requests in flight",
            words.count(lanes.requests_in_flight(engines)),
            "",
            "routers, at decode and aggregated engines · now",
        ),
        Tile(
            "KV moved",
            words.moved(received),
            "",
            "NIXL counters of decode engines, ended ones included · since each deployment was created",
        ),
    )


@signed_in
def fleet(request: HttpRequest) -> HttpResponse:
    """The home page."""
    rows = queries.deployment_rows()
    node_rows = nodes.node_rows()
    look, clauses = summary(rows, node_rows)
    order = {status: i for i, status in enumerate(looks.SEVERITY)}
    rows = sorted(rows, key=lambda row: (order[row.condition.status], not row.cache_fails, row.deployment.name))
    context = {
        "title": "Fleet",
        "look": look,
        "clauses": clauses,
        "tiles": tiles(rows, node_rows),
        "minis": minis(rows[:MOST_CARDS]),
        "more": max(len(rows) - MOST_CARDS, 0),
        "node_rows": node_rows,
        "events": recent(),
        "connect": connect(request, next((row.deployment.served_name for row in rows if row.condition.serves), "")),
        "serving": [row.deployment.served_name for row in rows if row.condition.serves],
    }
    return page(request, "fleet/page.html", context, live="fleet/live.html")
