"""The Deployments pages: the list, one deployment's tabs, and the changes made there. Each change is one service call."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, NamedTuple

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_GET, require_POST

from controlplane.access.actors import actor_of
from controlplane.dashboards import form, lanes, looks
from controlplane.dashboards.looks import Look
from controlplane.dashboards.page import is_htmx, page, signed_in
from controlplane.deployments import queries, services
from controlplane.deployments.models import Revision
from controlplane.deployments.queries import DeploymentRow
from controlplane.fleet.errors import Conflict, InvalidInput
from controlplane.fleet.model import Role
from controlplane.nodes import queries as nodes

EVENTS_A_PAGE = 50


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


_COLUMNS = (("name", "Deployment"), ("status", "Status"), ("engines", "Engines ready"), ("in-flight", "In flight"))


def _sorted(lines: list[Line], key: str, down: bool) -> list[Line]:
    order = {status: i for i, status in enumerate(looks.SEVERITY)}
    lines = sorted(lines, key=lambda line: line.row.deployment.name, reverse=down and key == "name")
    if key == "status":
        lines.sort(key=lambda line: order[line.row.condition.status], reverse=down)
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
            lanes.total([e.in_flight for e in row.engines]),
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
    return f"{d.name} {d.served_name} {line.row.spec.model} {line.look.word} {line.row.condition.sentence}".lower()


def tab_page(
    request: HttpRequest, row: DeploymentRow, tab: str, live: str, only_live: bool = False, **context: Any
) -> HttpResponse:
    """One deployment's page with its head and tabs."""
    full = {
        "title": row.deployment.name,
        "row": row,
        "look": looks.DEPLOYMENT[row.condition.status],
        "since": lanes.since(row),
        "tab": tab,
        "shape": _shape(row),
        **context,
    }
    return page(request, f"deployments/{tab}.html", full, live=live, only_live=only_live)


def _shape(row: DeploymentRow) -> str:
    """`2 prefill · 3 decode`, as wanted."""
    return " · ".join(f"{n} {role}" for role, n in row.condition.wanted.items())


def _overview(request: HttpRequest, row: DeploymentRow, *, only_live: bool = False) -> HttpResponse:
    node_rows = {n.node.name: n for n in nodes.node_rows()}
    picture = lanes.picture(row, node_rows)
    return tab_page(request, row, "overview", "deployments/overview_live.html", only_live, picture=picture)


@signed_in
@require_GET
def deployment(request: HttpRequest, name: str) -> HttpResponse:
    """The lanes with every engine and the link between them."""
    return _overview(request, queries.deployment_row(name))


@signed_in
@require_POST
def scale(request: HttpRequest, name: str) -> HttpResponse:
    """Set one pool's replicas; answers the picture as it is now."""
    try:
        replicas = int(request.POST.get("replicas", ""))
        role = Role(request.POST.get("role", ""))
    except ValueError:
        raise InvalidInput("replicas: give a pool and a whole number", field="replicas") from None
    services.scale(actor=actor_of(request), name=name, role=role, replicas=replicas)
    if is_htmx(request):
        return _overview(request, queries.deployment_row(name), only_live=True)
    return redirect("deployment", name)


class RevisionRow(NamedTuple):
    revision: Revision
    engines: int
    current: bool
    diff: tuple[tuple[str, str], ...]
    """(class, line) against the revision before."""


def _engine_yaml(revision: Revision) -> list[str]:
    """What decides an engine: a revision's replicas and routing are placeholders, so they are not shown."""
    spec = {key: value for key, value in revision.spec.items() if key != "routing"}
    spec["pools"] = {role: {k: v for k, v in pool.items() if k != "replicas"} for role, pool in spec["pools"].items()}
    return form.yaml_of(spec).splitlines()


def revision_rows(revisions: Sequence[Revision], row: DeploymentRow) -> list[RevisionRow]:
    """Newest first, each with what it changed. `revisions` newest first."""
    found = []
    for i, revision in enumerate(revisions):
        new = _engine_yaml(revision)
        old = _engine_yaml(revisions[i + 1]) if i + 1 < len(revisions) else []
        diff = tuple(
            ("added" if line[0] == "+" else "removed" if line[0] == "-" else "same", line)
            for line in difflib.unified_diff(old, new, n=2, lineterm="")
            if not line.startswith(("---", "+++", "@@"))
        )
        engines = sum(e.engine.revision_id == revision.pk for e in row.engines)
        found.append(RevisionRow(revision, engines, i == 0, diff))
    return found


@signed_in
@require_GET
def revisions(request: HttpRequest, name: str) -> HttpResponse:
    """Every spec engines were started from, and what each changed."""
    row = queries.deployment_row(name)
    found = revision_rows(list(row.deployment.revisions.order_by("-number")), row)
    return tab_page(request, row, "revisions", "deployments/head_live.html", revisions=found)


@signed_in
@require_GET
def events(request: HttpRequest, name: str) -> HttpResponse:
    """The deployment's history, newest first, by pages."""
    row = queries.deployment_row(name)
    before = request.GET.get("before", "")
    found = list(queries.events(deployment=name, limit=EVENTS_A_PAGE, before=int(before) if before.isdigit() else None))
    rows = [(e, looks.of_event(e.kind, e.new_state)) for e in found]
    older = found[-1].pk if len(found) == EVENTS_A_PAGE else None
    return tab_page(request, row, "events", "deployments/events_live.html", events=rows, older=older, before=before)


class Changes(NamedTuple):
    """What a changed document would do, or why it cannot be."""

    applied: services.Applied | None
    error: str = ""


def _settings(request: HttpRequest, row: DeploymentRow, text: str, changes: Changes | None = None) -> HttpResponse:
    return tab_page(request, row, "settings", "deployments/head_live.html", yaml=text, changes=changes)


@signed_in
@require_GET
def settings(request: HttpRequest, name: str) -> HttpResponse:
    """Routing policy, the document as YAML, and the end of it."""
    row = queries.deployment_row(name)
    return _settings(request, row, form.yaml_of(row.deployment.intent))


@signed_in
@require_POST
def change_document(request: HttpRequest, name: str) -> HttpResponse:
    """Tell what the written document would change (`step` preview), or make it so (`step` apply).

    The change is meant for the generation the reader saw: one that came between is a conflict, not lost.
    """
    actor = actor_of(request)
    text = request.POST.get("yaml", "")
    generation = request.POST.get("generation", "")
    preview = request.POST.get("step") != "apply"
    try:
        document = form.parse_yaml(text)
        if document.get("name", name) != name:
            raise InvalidInput(
                f"name: this page changes {name}; a document of another name is another deployment", field="name"
            )
        if not generation.isdigit():
            raise InvalidInput("generation: reload the page", field="generation")
        applied = services.apply(
            actor=actor, document={"name": name, **document}, generation=int(generation), dry_run=preview
        )
    except (InvalidInput, Conflict) as error:
        changes = Changes(None, error.message)
    else:
        if not preview:
            messages.success(request, f"{name} is changed; what runs follows.", extra_tags="link")
            target = reverse("deployment-settings", args=[name])
            return HttpResponse(status=204, headers={"HX-Redirect": target}) if is_htmx(request) else redirect(target)
        changes = Changes(applied)
    if is_htmx(request):
        return page(request, "deployments/changes.html", {"changes": changes})
    return _settings(request, queries.deployment_row(name), text, changes)


@signed_in
@require_GET
def export(request: HttpRequest, name: str) -> HttpResponse:
    """The document as a YAML file: the same that `tandem apply` takes."""
    row = queries.deployment_row(name)
    head = f"# {name}, generation {row.deployment.generation}, {timezone.now():%F %R} UTC\n"
    answer = HttpResponse(head + form.yaml_of(row.deployment.intent), content_type="application/yaml; charset=utf-8")
    answer.headers["Content-Disposition"] = f'attachment; filename="{name}.yaml"'
    return answer


@signed_in
@require_POST
def routing(request: HttpRequest, name: str) -> HttpResponse:
    """Change the routing policy: applies at once, no engine restarts."""
    policy = {key: request.POST[key] for key in ("mode", "on_prefill_failure") if key in request.POST}
    services.patch(actor=actor_of(request), name=name, changes={"routing": policy})
    messages.success(
        request, "The routing policy is changed; routers follow with their next snapshot.", extra_tags="link"
    )
    return redirect("deployment-settings", name)


@signed_in
@require_POST
def delete(request: HttpRequest, name: str) -> HttpResponse:
    """Delete after the name was typed: engines drain first, then the row goes."""
    if request.POST.get("name", "") != name:
        raise InvalidInput(f"name: type {name} to delete it", field="name")
    services.delete(actor=actor_of(request), name=name)
    messages.success(request, f"{name} is being deleted: its engines finish their requests first.", extra_tags="link")
    return redirect("deployments")
