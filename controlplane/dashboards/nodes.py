"""The Nodes pages: the list, one machine in full, and what people may do to it. Joining is by a token shown once."""

from __future__ import annotations

from typing import NamedTuple

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_GET

from controlplane.access.actors import actor_of
from controlplane.dashboards import cards, looks
from controlplane.dashboards.asking import ask, mistyped
from controlplane.dashboards.looks import Look
from controlplane.dashboards.page import errors_of, is_htmx, page, posted, signed_in, whole_number
from controlplane.deployments import effects
from controlplane.deployments import queries as deployments
from controlplane.deployments.queries import EngineRow
from controlplane.fleet.errors import InvalidInput
from controlplane.fleet.lifecycle import HOLDS_NODE
from controlplane.nodes import queries, services
from controlplane.nodes.joining import host_of, join_address
from controlplane.nodes.queries import NodeRow

TOKEN_HOURS = (1, 8, 24)


class Line(NamedTuple):
    row: NodeRow
    look: Look
    gpus: str
    """`2 × H200`, or empty."""
    foreign: int
    """Processes on its GPUs that Tandem did not start."""


def _line(row: NodeRow) -> Line:
    gpus = row.facts.gpus if row.facts else ()
    kinds: dict[str, int] = {}
    for gpu in gpus:
        name = gpu.name.removeprefix("NVIDIA ")
        kinds[name] = kinds.get(name, 0) + 1
    said = ", ".join(f"{count} × {name}" for name, count in kinds.items())
    return Line(row, looks.NODE[row.status], said, sum(len(gpu.foreign) for gpu in gpus))


@signed_in
@require_GET
def nodes(request: HttpRequest) -> HttpResponse:
    """Every machine, and how to add one."""
    context = {"title": "Nodes", "lines": [_line(row) for row in queries.node_rows()], "choices": TOKEN_HOURS}
    return page(request, "nodes/list.html", context, live="nodes/list_live.html")


class Placed(NamedTuple):
    """An engine on a node."""

    row: EngineRow
    deployment: str
    look: Look
    sentence: str
    place: str


class Share(NamedTuple):
    """A part of a whole, in bytes, with the part's fraction."""

    used: int
    whole: int
    fraction: float | None


def _share(free: int, whole: int) -> Share:
    used = max(whole - free, 0)
    return Share(used, whole, used / whole if whole else None)


@signed_in
@require_GET
def node(request: HttpRequest, name: str) -> HttpResponse:
    """One machine: what it is, what runs on it, and its GPUs with the processes that are not ours."""
    return _detail(request, name)


def _detail(request: HttpRequest, name: str, confirm_error: str = "") -> HttpResponse:
    row = queries.node_row(name)
    facts = row.facts
    placed = [
        Placed(
            e, d.deployment.name, looks.ENGINE[e.state], cards.sentence(e), cards.place(e, facts.gpus if facts else ())
        )
        for d in deployments.deployment_rows()
        for e in d.engines
        if e.node_name == name and e.state in HOLDS_NODE
    ]
    context = {
        "title": name,
        "line": _line(row),
        "row": row,
        "look": looks.NODE[row.status],
        "facts": facts,
        "memory": _share(facts.memory_free_bytes, facts.memory_bytes) if facts else None,
        "gpus": [(g, _share(g.memory_free_bytes, g.memory_bytes)) for g in facts.gpus] if facts else [],
        "placed": placed,
        "stops": effects.of_node_removal(name),
        "confirm_error": confirm_error,
    }
    status = 400 if confirm_error else 200
    return page(request, "nodes/detail.html", context, live="nodes/detail_live.html", status=status)


@signed_in
@posted
def cordon(request: HttpRequest, name: str) -> HttpResponse:
    """Take the node out of placement, or back in (`cordoned` 1 or 0)."""
    change = services.cordon if request.POST.get("cordoned") == "1" else services.uncordon
    change(actor=actor_of(request), name=name)
    return redirect("node", name)


@signed_in
@posted
def remove(request: HttpRequest, name: str) -> HttpResponse:
    """Forget the node and take its access away, after its name was typed."""
    if request.POST.get("name", "").strip() != name:
        return _detail(request, name, mistyped(name, "remove"))
    services.remove(actor=actor_of(request), name=name, untrusted=request.POST.get("untrusted") == "1")
    messages.success(request, f"{name} is removed. Its access has ended.", extra_tags="link")
    return redirect("nodes")


def _refused(request: HttpRequest, error: InvalidInput) -> HttpResponse:
    """The form of a join command as it was sent, with what is wrong in it."""
    context = {"title": "Nodes", "choices": TOKEN_HOURS, "values": request.POST, "errors": errors_of(error)}
    if not is_htmx(request):
        lines = [_line(row) for row in queries.node_rows()]
        return page(request, "nodes/list.html", {**context, "lines": lines}, live="nodes/list_live.html", status=400)
    answer = page(request, "nodes/join_form.html", context, status=error.status)
    answer.headers["HX-Retarget"], answer.headers["HX-Reswap"] = "#join-form", "outerHTML"
    return answer


@signed_in
@posted
def join_token(request: HttpRequest) -> HttpResponse:
    """A new one-time token inside the command that uses it. Shown in this answer and never again. Whether another machine is to
    take a node over is asked first."""
    actor, sent = actor_of(request), request.POST
    name = sent.get("node", "").strip()
    if name in [row.node.name for row in queries.node_rows()] and "confirmed" not in sent:
        said = f"Whoever joins with this command is {name}: the machine that is {name} now loses its access, and its engines are started again."
        said = " ".join(filter(None, [said, effects.of_node_removal(name)]))
        return ask(
            request,
            title=f"Let another machine take over {name}?",
            sentence=said,
            button="Make the command",
            target="#join",
        )
    hours = whole_number(sent.get("hours", "1"))
    try:
        if hours is None:
            raise InvalidInput("hours: enter a whole number", field="hours")
        token = services.create_join_token(actor=actor, hours=hours, node=name, once=sent.get("once", ""))
    except InvalidInput as error:
        return _refused(request, error)
    at = join_address(host_of(request))
    context = {"title": "Add a node", "token": token, "at": at, "hours": hours, "name": name}
    context |= {"part": is_htmx(request), "choices": TOKEN_HOURS}
    template = "nodes/token.html" if is_htmx(request) else "nodes/token_page.html"
    answer = page(request, template, context)
    answer.headers["Cache-Control"] = "no-store"
    return answer
