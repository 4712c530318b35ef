"""Reads the logs that agents send: one Redis stream per engine and attempt, capped, kept for a day after its last line.

An engine is given as its row or its id.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from controlplane import publish
from controlplane.deployments.models import Attempt, Engine
from controlplane.fleet.errors import InvalidInput, NotFound
from controlplane.fleet.wire import LOG_MAXLEN, log_key

MAX_WAIT_SECONDS = 60.0
START = "0-0"


@dataclass(frozen=True)
class LogChunk:
    attempt: int
    lines: list[str]
    cursor: str
    """Pass it to `follow` for what comes after these lines."""
    times: list[float]
    """When each line reached Redis, in seconds since 1970."""


def tail(*, engine: Engine | str, attempt: int | None = None, lines: int = 1000) -> LogChunk:
    """The last lines of an attempt (None: the newest one), in any state, also of one that crashed.

    Raises `NotFound` (no such attempt) or `Unavailable` (Redis).
    """
    number, key = _stream(engine, attempt)
    if key is None:
        return LogChunk(number, [], START, [])
    found = publish.current().tail_log(key, max(1, min(lines, LOG_MAXLEN)))
    return LogChunk(number, found.lines, found.cursor, found.times)


def follow(*, engine: Engine | str, attempt: int | None, cursor: str, wait_seconds: float) -> LogChunk:
    """Lines after the cursor, as soon as there are any; none after `wait_seconds`.

    Raises `InvalidInput` (cursor), `NotFound` or `Unavailable`.
    """
    if not re.fullmatch(r"\d{1,20}-\d{1,20}", cursor):
        raise InvalidInput("cursor: pass the one of the answer before, or 0-0", field="cursor")
    number, key = _stream(engine, attempt)
    if key is None:
        return LogChunk(number, [], cursor, [])
    found = publish.current().follow_log(key, cursor, min(max(wait_seconds, 0.0), MAX_WAIT_SECONDS))
    return LogChunk(number, found.lines, found.cursor, found.times)


def _stream(engine: Engine | str, attempt: int | None) -> tuple[int, str | None]:
    """Attempt number and stream; no stream: the engine has not been placed yet."""
    found = engine if isinstance(engine, Engine) else Engine.objects.filter(pk=engine).first()
    if found is None:
        raise NotFound(f"there is no engine {engine}")
    placed = Attempt.objects.filter(engine=found)
    row = (placed.filter(number=attempt) if attempt is not None else placed).order_by("-number").first()
    if row is None:
        if attempt is not None and attempt != found.attempt:
            raise NotFound(f"{found.id} has no attempt {attempt}")
        return found.attempt, None
    return row.number, log_key(row.node_name, found.id, row.number)
