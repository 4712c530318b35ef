"""The Logs tab: the tail of one attempt's log, and what came after a cursor. Also of attempts that crashed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.utils import timezone
from django.views.decorators.http import require_GET

from controlplane.dashboards import cards, looks, words
from controlplane.dashboards.deployments import tab_page
from controlplane.dashboards.page import signed_in, whole_number
from controlplane.deployments import logs, queries
from controlplane.deployments.models import Attempt
from controlplane.deployments.queries import DeploymentRow, EngineRow
from controlplane.fleet.errors import NotFound, TandemError, Unavailable
from controlplane.fleet.lifecycle import State
from controlplane.fleet.wire import LOG_MAXLEN

WAIT = 5.0
"""Seconds one request waits for new lines before it answers with none."""
SHOWN = 500
"""Lines that the page begins with; the download has all that are kept."""


class Choice(NamedTuple):
    """The log being read."""

    engine: EngineRow
    attempt: int
    attempts: list[Attempt]
    """Those that were placed, newest first."""

    @property
    def said(self) -> str:
        """The line under the log: how the attempt ended and what comes next, or what the engine does now."""
        if not (attempt := self.ended):
            return self.engine.reason
        how = cards.ending(attempt.exit_code)
        told = bool(how) and how in attempt.reason
        ended = attempt.reason if told else f"This attempt ended{f', {how}' if how else ''}. {attempt.reason}".strip()
        retry_at = self.engine.retry_at
        if retry_at is None or self.attempt != self.engine.engine.attempt:
            return ended
        left = (retry_at - timezone.now()).total_seconds()
        return f"{ended} {f'Tries again in {words.left(left)}.' if left > 0 else 'Tries again now.'}"

    @property
    def ended(self) -> Attempt | None:
        """The attempt, if its process is gone."""
        return next((a for a in self.attempts if a.number == self.attempt and a.ended_at), None)

    @property
    def newest(self) -> int:
        """The newest attempt that has, or will have, a log."""
        return self.attempts[0].number if self.attempts else self.engine.engine.attempt

    @property
    def following(self) -> int | None:
        """The attempt after this one, once it was placed."""
        return min((a.number for a in self.attempts if a.number > self.attempt), default=None)


def choose(row: DeploymentRow, engine: str, attempt: str) -> Choice | None:
    """The engine and attempt asked for; without a question the one in most trouble, and its newest attempt.

    Raises `NotFound` for an engine or attempt that this deployment has not.
    """
    if not row.engines:
        return None
    found = next((e for e in row.engines if e.engine.pk == engine), None) if engine else _in_trouble(row.engines)
    if found is None:
        raise NotFound(f"{row.deployment.name} has no engine {engine}")
    choice = Choice(found, found.engine.attempt, list(queries.attempts(found.engine.pk)))
    asked = whole_number(attempt)
    number = choice.newest if asked is None else asked
    if number != found.engine.attempt and number not in [a.number for a in choice.attempts]:
        raise NotFound(f"{found.name} has no attempt {number}")
    return choice._replace(attempt=number)


def _in_trouble(engines: Sequence[EngineRow]) -> EngineRow:
    """The engine that failed last; else one that is tried again, or is unwell; else the first."""

    def trouble(engine: EngineRow) -> tuple[int, float]:
        failed = engine.state is State.FAILED
        unwell = engine.engine.failures > 0 or engine.state in (State.UNHEALTHY, State.LOST)
        return (2 if failed else 1 if unwell else 0), engine.since.timestamp() if failed or unwell else 0.0

    return max(engines, key=trouble)


@signed_in
@require_GET
def deployment_logs(request: HttpRequest, name: str) -> HttpResponse:
    """The newest lines of one engine's attempt, with a reader that follows."""
    row = queries.deployment_row(name)
    choice = choose(row, request.GET.get("engine", ""), request.GET.get("attempt", ""))
    chunk, lines, trouble = None, [], ""
    if choice:
        try:
            chunk = logs.tail(engine=choice.engine.engine.pk, attempt=choice.attempt, lines=SHOWN)
            lines = [(_time(at), text) for at, text in zip(chunk.times, chunk.lines, strict=True)]
        except (Unavailable, NotFound) as error:
            trouble = error.message
    engines = [(e, looks.ENGINE[e.state]) for e in row.engines]
    return tab_page(
        request, row, "logs", "deployments/head_live.html",
        choice=choice, chunk=chunk, lines=lines, trouble=trouble, engines=engines,
    )  # fmt: skip


def _time(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


@signed_in
@require_GET
def more(request: HttpRequest, name: str) -> HttpResponse:
    """What was written after `cursor`, as JSON; waits a little when there is nothing yet. `next`: the attempt that came
    after this one, once all of this one was told."""
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
        {
            "lines": chunk.lines,
            "times": chunk.times,
            "cursor": chunk.cursor,
            "ended": bool(choice.ended),
            "next": None if chunk.lines else choice.following,
            "said": choice.said,
        }
    )


@signed_in
@require_GET
def download(request: HttpRequest, name: str) -> HttpResponse:
    """All that is kept of one attempt's log, as a text file; each line with the time at which it came, UTC."""
    choice = choose(queries.deployment_row(name), request.GET.get("engine", ""), request.GET.get("attempt", ""))
    if choice is None:
        raise NotFound(f"{name} has no engine")
    chunk = logs.tail(engine=choice.engine.engine.pk, attempt=choice.attempt, lines=LOG_MAXLEN)
    text = "".join(f"{_time(at):%FT%T.%f}Z {line}\n" for at, line in zip(chunk.times, chunk.lines, strict=True))
    answer = HttpResponse(text, content_type="text/plain; charset=utf-8")
    file = f"{choice.engine.engine.pk}-attempt-{choice.attempt}.log"
    answer.headers["Content-Disposition"] = f'attachment; filename="{file}"'
    return answer
