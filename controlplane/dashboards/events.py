"""History on pages: repeated events in one line, filtered by kind, engine and words, by pages. The newest also on Fleet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from django.http import HttpRequest, HttpResponse, QueryDict
from django.views.decorators.http import require_GET

from controlplane.dashboards import looks, words
from controlplane.dashboards.deployments import tab_page
from controlplane.dashboards.looks import Look
from controlplane.dashboards.page import page, signed_in, whole_number
from controlplane.deployments import history, queries
from controlplane.deployments.history import Happening
from controlplane.deployments.models import Event

A_PAGE = 200
"""Events read for one page; folded they are fewer lines."""
RECENT, RECENT_EACH, RECENT_READ = 12, 4, 400
"""Lines on Fleet, of them of one deployment while others have something to tell; events read for them."""
KINDS: Final = {"": "Everything", "failures": "Failures", "engines": "Engines", "changes": "Changes by people"}


class Line(NamedTuple):
    event: Event
    look: Look
    times: int
    span: str
    """From the first to the newest, in words."""


def _lines(happenings: Iterable[Happening]) -> list[Line]:
    return [
        Line(event, looks.of_event(event.kind, event.new_state), times, words.age(max(seconds, 1)))
        for event, times, seconds in happenings
    ]


def recent() -> list[Line]:
    """The newest events of the fleet."""
    found = history.fold(queries.events(limit=RECENT_READ))
    return _lines(history.fair(found, limit=RECENT, each=RECENT_EACH))


def _context(query: QueryDict, deployment: str | None) -> dict[str, Any]:
    kind, text, engine, before = (query.get(field, "") for field in ("kind", "q", "engine", "before"))
    found = queries.events(
        deployment=deployment,
        engine=engine or None,
        kind=kind if kind in queries.EVENT_KINDS else None,
        text=text[:200],
        limit=A_PAGE,
        before=whole_number(before, 18),
    )
    asked = query.copy()
    for field in ("part", "before"):
        asked.pop(field, None)
    return {
        "events": _lines(history.fold(found)),
        "kinds": KINDS.items(),
        "kind": kind,
        "q": text,
        "engine": engine,
        "filtered": bool(kind or text or engine),
        "query": asked.urlencode(),
        "older": found[-1].pk if len(found) == A_PAGE else None,
        "before": before,
    }


@signed_in
@require_GET
def events(request: HttpRequest) -> HttpResponse:
    """The whole fleet's history, newest first."""
    context = {"title": "Events", **_context(request.GET, None)}
    return page(request, "fleet/events.html", context, live="parts/history.html")


@signed_in
@require_GET
def of_deployment(request: HttpRequest, name: str) -> HttpResponse:
    """The deployment's history, newest first."""
    row = queries.deployment_row(name)
    context = {"history_live": request.GET.get("part") == "history", **_context(request.GET, name)}
    if context["history_live"]:
        return page(
            request,
            "parts/history.html",
            {"one_deployment": True, **context},
            live="parts/history.html",
            only_live=True,
        )
    return tab_page(request, row, "events", "deployments/head_live.html", **context)
