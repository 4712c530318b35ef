"""The Logs tab: the tail of one attempt's log, and what came after a cursor. Also of attempts that crashed."""

from __future__ import annotations

from typing import NamedTuple

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.http import require_GET

from controlplane.dashboards import cards, looks
from controlplane.dashboards.deployments import tab_page
from controlplane.dashboards.page import signed_in
from controlplane.deployments import logs, queries
from controlplane.deployments.models import Attempt
from controlplane.deployments.queries import DeploymentRow, EngineRow
from controlplane.fleet.errors import NotFound, TandemError, Unavailable

WAIT = 5.0
"""Seconds one request waits for new lines before it answers with none."""


class Choice(NamedTuple):
    """The log being read."""

    engine: EngineRow
    attempt: int
    attempts: list[Attempt]

    @property
    def said(self) -> str:
        """The line under the log: how the attempt ended, or what the engine does now."""
        if not (attempt := self.ended):
            return self.engine.reason
        how = cards.ending(attempt.exit_code)
        return f"This attempt ended{f', {how}' if how else ''}. {attempt.reason}".strip()

    @property
    def ended(self) -> Attempt | None:
        """The attempt, if its process is gone."""
        return next((a for a in self.attempts if a.number == self.attempt and a.ended_at), None)


def choose(row: DeploymentRow, engine: str, attempt: str) -> Choice | None:
    """The engine and attempt asked for; without a question the first engine and its newest attempt.

    Raises `NotFound` for an engine or attempt that this deployment has not.
    """
    if not row.engines:
        return None
    found = next((e for e in row.engines if e.engine.pk == engine), None) if engine else row.engines[0]
    if found is None:
        raise NotFound(f"{row.deployment.name} has no engine {engine}")
    attempts = list(queries.attempts(found.engine.pk))
    number = int(attempt) if attempt.isdigit() else found.engine.attempt
    if number != found.engine.attempt and number not in [a.number for a in attempts]:
        raise NotFound(f"{found.name} has no attempt {number}")
    return Choice(found, number, attempts)


@signed_in
@require_GET
def deployment_logs(request: HttpRequest, name: str) -> HttpResponse:
    """The newest lines of one engine's attempt, with a reader that follows."""
    row = queries.deployment_row(name)
    choice = choose(row, request.GET.get("engine", ""), request.GET.get("attempt", ""))
    chunk, trouble = None, ""
    if choice:
        try:
            chunk = logs.tail(engine=choice.engine.engine.pk, attempt=choice.attempt)
        except (Unavailable, NotFound) as error:
            trouble = error.message
    engines = [(e, looks.ENGINE[e.state]) for e in row.engines]
    return tab_page(
        request, row, "logs", "deployments/head_live.html", choice=choice, chunk=chunk, trouble=trouble, engines=engines
    )


@signed_in
@require_GET
def more(request: HttpRequest, name: str) -> HttpResponse:
    """What was written after `cursor`, as JSON; waits a little when there is nothing yet."""
    try:
        choice = choose(queries.deployment_row(name), request.GET.get("engine", ""), request.GET.get("attempt", ""))
        if choice is None:
            raise NotFound(f"{name} has no engine")
        chunk = logs.follow(
            engine=choice.engine.engine.pk,
            attempt=choice.attempt,
            cursor=request.GET.get("cursor", ""),
            wait_seconds=0 if choice.ended else WAIT,
        )
    except TandemError as error:
        return JsonResponse({"message": error.message}, status=error.status)
    return JsonResponse(
        {"lines": chunk.lines, "cursor": chunk.cursor, "ended": bool(choice.ended), "said": choice.said}
    )
