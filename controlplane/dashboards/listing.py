"""The list of deployments: filtered by words, sorted by a column."""

from __future__ import annotations

from typing import NamedTuple

from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_GET

from controlplane.dashboards import lanes, looks
from controlplane.dashboards.looks import Look
from controlplane.dashboards.page import page, signed_in
from controlplane.deployments import queries
from controlplane.deployments.queries import DeploymentRow
from controlplane.fleet.model import Role


class Line(NamedTuple):
    """One deployment in the list."""

    row: DeploymentRow
    look: Look
    pools: tuple[tuple[Role, int, int], ...]
    """Role, ready, wanted."""
    in_flight: int | None


class Column(NamedTuple):
    key: str
    title: str
    sort: str
    """Query string that sorts by it, or turns the order round."""
    direction: str
    """aria-sort."""


_COLUMNS = (
    ("name", "Deployment"),
    ("status", "Status"),
    ("model", "Model"),
    ("engines", "Engines ready"),
    ("in-flight", "In flight"),
)


def _sorted(lines: list[Line], key: str, down: bool) -> list[Line]:
    order = {status: i for i, status in enumerate(looks.SEVERITY)}
    lines = sorted(lines, key=lambda line: line.row.deployment.name, reverse=down and key == "name")
    if key == "status":
        lines.sort(key=lambda line: order[line.row.condition.status], reverse=down)
    elif key == "model":
        lines.sort(key=lambda line: line.row.spec.model, reverse=down)
    elif key == "engines":
        lines.sort(key=lambda line: sum(ready for _, ready, _ in line.pools), reverse=down)
    elif key == "in-flight":
        lines.sort(key=lambda line: -1 if line.in_flight is None else line.in_flight, reverse=down)
    return lines


@signed_in
@require_GET
def deployments(request: HttpRequest) -> HttpResponse:
    """All deployments as a table: filtered by words, sorted by a column."""
    wanted = request.GET.get("q", "").strip().lower()
    key = request.GET.get("sort", "name")
    down = request.GET.get("down") == "1"
    lines = [
        Line(
            row,
            looks.DEPLOYMENT[row.condition.status],
            tuple((r, row.condition.ready.get(r, 0), n) for r, n in row.condition.wanted.items()),
            lanes.requests_in_flight(row.engines),
        )
        for row in queries.deployment_rows()
    ]
    found = [x for x in lines if all(w in _haystack(x) for w in wanted.split())]
    query = request.GET.copy()
    query.pop("part", None)
    columns = []
    for column, title in _COLUMNS:
        turned = query.copy()
        turned["sort"], turned["down"] = column, "1" if column == key and not down else "0"
        direction = ("descending" if down else "ascending") if column == key else "none"
        columns.append(Column(column, title, turned.urlencode(), direction))
    context = {
        "title": "Deployments",
        "lines": _sorted(found, key, down),
        "count": len(lines),
        "q": request.GET.get("q", ""),
        "sort": key,
        "down": "1" if down else "0",
        "columns": columns,
        "query": query.urlencode(),
    }
    return page(request, "deployments/list.html", context, live="deployments/list_live.html")


def _haystack(line: Line) -> str:
    d = line.row.deployment
    words = (
        d.name,
        d.served_name,
        line.row.spec.model,
        line.look.word,
        line.row.condition.sentence,
        line.row.cache_sentence,
        "stand-ins" if line.row.stands_in else "",
    )
    return " ".join(words).lower()
