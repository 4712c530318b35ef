"""One deployment's page, tab by tab. Reads only; `changing.py` has what people do there."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.views.decorators.http import require_GET
from msgspec.structs import asdict

from controlplane.dashboards import form, lanes, looks
from controlplane.dashboards.clash import Clash, seen
from controlplane.dashboards.connect import connect
from controlplane.dashboards.page import errors_of, page, problems_of, signed_in
from controlplane.deployments import effects, queries
from controlplane.deployments.models import Revision
from controlplane.deployments.queries import DeploymentRow
from controlplane.deployments.services import Applied
from controlplane.fleet.errors import InvalidInput, TandemError
from controlplane.nodes import queries as nodes


def tab_page(
    request: HttpRequest,
    row: DeploymentRow,
    tab: str,
    live: str,
    only_live: bool = False,
    status: int = 200,
    **context: Any,
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
    return page(request, f"deployments/{tab}.html", full, live=live, only_live=only_live, status=status)


def _shape(row: DeploymentRow) -> str:
    """`2 prefill · 3 decode`, as wanted."""
    return " · ".join(f"{n} {role}" for role, n in row.condition.wanted.items())


def overview(request: HttpRequest, row: DeploymentRow, *, only_live: bool = False) -> HttpResponse:
    node_rows = {n.node.name: n for n in nodes.node_rows()}
    picture = lanes.picture(row, node_rows)
    reached = connect(request, row.deployment.served_name)
    return tab_page(
        request, row, "overview", "deployments/overview_live.html", only_live, picture=picture, connect=reached
    )


@signed_in
@require_GET
def deployment(request: HttpRequest, name: str) -> HttpResponse:
    """The lanes with every engine and the link between them."""
    return overview(request, queries.deployment_row(name))


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


class Changes(NamedTuple):
    """What a changed document would do, or why it cannot be."""

    applied: Applied | None
    error: str = ""
    clash: Clash | None = None
    """Somebody else changed the document meanwhile."""


def settings_page(
    request: HttpRequest,
    row: DeploymentRow,
    text: str,
    changes: Changes | None = None,
    refused: tuple[Mapping[str, str], InvalidInput] | None = None,
    confirm_error: str = "",
    clash: Clash | None = None,
    sent: Mapping[str, str] | None = None,
) -> HttpResponse:
    """`text`: the document as it stands in its field. `refused`: the routing policy as it was sent, and what is wrong in it.
    `confirm_error`: what is wrong with the name that was typed to delete it. `clash`: what somebody else changed in the routing
    policy, `sent`, meanwhile."""
    values = {key.removeprefix("routing."): value for key, value in form.values_of(row.deployment.intent).items()}
    errors: dict[str, str] = {}
    problems: Sequence[TandemError] = ()
    if refused is not None:
        sent, error = refused
        problems = problems_of(error)
        errors = {field.removeprefix("routing."): said for field, said in errors_of(error).items()}
    values |= sent or {}
    live, status = "deployments/head_live.html", 409 if clash else 400 if errors or confirm_error else 200
    context: dict[str, Any] = {
        "yaml": text,
        "changes": changes,
        "values": values,
        "errors": errors,
        "confirm_error": confirm_error,
        "clash": clash,
        "seen": seen(routing_values(row)),
        "stored": form.yaml_of(row.deployment.intent),
    }
    context |= {"problems": problems, "elsewhere": [p for p in problems if not p.field]}
    context["stops"] = effects.of_deletion(row.deployment, row.spec)
    return tab_page(request, row, "settings", live, status=status, **context)


def routing_values(row: DeploymentRow) -> dict[str, Any]:
    """The routing policy, all fields, as its form is made from."""
    return asdict(row.spec.routing)


@signed_in
@require_GET
def settings(request: HttpRequest, name: str) -> HttpResponse:
    """Routing policy, the document as YAML, and the end of it."""
    row = queries.deployment_row(name)
    return settings_page(request, row, form.yaml_of(row.deployment.intent))


@signed_in
@require_GET
def export(request: HttpRequest, name: str) -> HttpResponse:
    """The document as a YAML file: the same that `tandem apply` takes."""
    row = queries.deployment_row(name)
    head = f"# {name}, generation {row.deployment.generation}, {timezone.now():%F %R} UTC\n"
    answer = HttpResponse(head + form.yaml_of(row.deployment.intent), content_type="application/yaml; charset=utf-8")
    answer.headers["Content-Disposition"] = f'attachment; filename="{name}.yaml"'
    return answer
