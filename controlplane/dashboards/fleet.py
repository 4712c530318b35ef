"""The Fleet page: the whole in one sentence, four totals, every deployment as a small picture, the newest events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from django.http import HttpRequest, HttpResponse

from controlplane.dashboards import lanes, looks, words
from controlplane.dashboards.looks import Look
from controlplane.dashboards.page import page, signed_in
from controlplane.dashboards.words import Quantity
from controlplane.deployments import queries
from controlplane.deployments.queries import DeploymentRow
from controlplane.fleet.lifecycle import State
from controlplane.fleet.model import Role
from controlplane.fleet.status import Status
from controlplane.nodes import queries as nodes
from controlplane.nodes.presence import Presence
from controlplane.nodes.queries import NodeRow

MOST_DOTS = 24
MOST_CARDS = 60


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
    in_flight: Quantity

    @property
    def serves(self) -> bool:
        return sum(self.row.condition.ready.values()) > 0


class Tile(NamedTuple):
    label: str
    quantity: Quantity
    of: str
    source: str


def mini(row: DeploymentRow) -> Mini:
    """The small picture of one deployment."""
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
    wire = lanes.link(prefills, decodes) if row.spec.disaggregated else None
    flight = words.count(lanes.total([e.in_flight for e in row.engines]))
    return Mini(row, looks.DEPLOYMENT[row.condition.status], tuple(found), wire, flight)


def summary(rows: Sequence[DeploymentRow], node_rows: Sequence[NodeRow]) -> tuple[Look, str]:
    """One sentence for the whole fleet, with the look of the worst thing in it."""
    if not node_rows:
        return Look("No nodes", "dashed", "wait"), "No node has joined yet, so nothing can be deployed."
    counts = Counter(row.condition.status for row in rows)
    gone = [n.node.name for n in node_rows if n.status in (Presence.SILENT, Presence.LOST)]
    parts = []
    if counts[Status.READY]:
        serving = words.plural(counts[Status.READY], "deployment")
        parts.append(f"{serving} {'serves' if counts[Status.READY] == 1 else 'serve'} with all engines wanted.")
    for status, said in (
        (Status.FAILED, "not serving: an engine failed"),
        (Status.DEGRADED, "serving with fewer engines than wanted"),
        (Status.WAITING, "waiting for a node with room"),
        (Status.STARTING, "starting"),
        (Status.STOPPED, "stopped"),
    ):
        names = [row.deployment.name for row in rows if row.condition.status is status]
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            parts.append(f"{shown}: {said}.")
    if gone:
        shown = ", ".join(gone[:3]) + (f" and {len(gone) - 3} more" if len(gone) > 3 else "")
        parts.append(f"No report from {shown}.")
    if not rows:
        parts.append("Nothing is deployed.")
    worst = next((s for s in looks.SEVERITY if counts[s]), None)
    if worst is Status.FAILED:
        return Look("Failing", "cross", "bad"), " ".join(parts)
    if worst is Status.DEGRADED or gone:
        return Look("Degraded", "half", "warn"), " ".join(parts)
    if worst in (Status.WAITING, Status.STARTING):
        return looks.DEPLOYMENT[worst], " ".join(parts)
    return Look("All well", "disc", "ok") if rows else Look("Idle", "dashed", "wait"), " ".join(parts)


def tiles(rows: Sequence[DeploymentRow], node_rows: Sequence[NodeRow]) -> tuple[Tile, ...]:
    """The fleet's totals; each says its source and window."""
    engines = [e for row in rows for e in row.engines]
    wanted = sum(sum(row.condition.wanted.values()) for row in rows)
    ready = sum(sum(row.condition.ready.values()) for row in rows)
    loads = [load for e in engines if (load := lanes.load_of(e))]
    received = sum(load.nixl_bytes for load in loads) if loads else None
    reporting = sum(n.status is Presence.REPORTING for n in node_rows)
    return (
        Tile("Nodes reporting", words.count(reporting), f"of {len(node_rows):,}", "node reports · now"),
        Tile("Engines ready", words.count(ready), f"of {wanted:,} wanted", "engine states · now"),
        Tile(
            "Requests in flight",
            words.count(lanes.total([e.in_flight for e in engines])),
            "",
            "routers, counted at engines · now",
        ),
        Tile(
            "KV moved",
            words.moved(received),
            "",
            f"NIXL counters of {words.plural(len(loads), 'engine')} · since each started",
        ),
    )


@signed_in
def fleet(request: HttpRequest) -> HttpResponse:
    """The home page."""
    rows = queries.deployment_rows()
    node_rows = nodes.node_rows()
    look, said = summary(rows, node_rows)
    order = {status: i for i, status in enumerate(looks.SEVERITY)}
    rows = sorted(rows, key=lambda row: (order[row.condition.status], row.deployment.name))
    context = {
        "title": "Fleet",
        "look": look,
        "sentence": said,
        "tiles": tiles(rows, node_rows),
        "minis": [mini(row) for row in rows[:MOST_CARDS]],
        "more": max(len(rows) - MOST_CARDS, 0),
        "node_rows": node_rows,
        "events": [(e, looks.of_event(e.kind, e.new_state)) for e in queries.events(limit=12)],
    }
    return page(request, "fleet/page.html", context, live="fleet/live.html")
