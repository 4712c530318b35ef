"""Whether an engine that calls itself healthy still answers: one token asked of it, while nothing else shows that it does.

Counters of tokens that rise are proof enough; where they stand still, or routers blame the engine, a completion asks. It works
in a short thread of its own, so that one that hangs delays no health probe.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from controlplane.fleet.model import EngineAssignment, EngineLoad
from workers.probe import EngineClient, Unanswered

log = logging.getLogger(__name__)

LONGEST_SECONDS = 30.0
"""For one token, while no other of the engine's counters moves either."""
AGAIN_SECONDS = 5.0
"""After a failure, and while routers blame the engine."""
REFUSALS = 2
"""In a row make a verdict; silence until the time is up makes one at once."""


class AnswerCheck:
    """Of one engine process. `trouble` is the verdict: empty, or why it cannot be said to answer."""

    def __init__(self, *, every: float, changed: Callable[[], None]) -> None:
        self._every = every
        self._changed = changed
        self._seen: tuple[float, ...] | None = None
        self._moved_at = self._asked_at = time.monotonic()
        self._failures = 0
        self._busy = False
        self.trouble = ""

    def advance(self, assignment: EngineAssignment, url: str, load: EngineLoad | None) -> None:
        """Takes the engine's newest counters in, and begins to ask where that is due."""
        now = time.monotonic()
        if load is not None and (seen := _progress(load)) != self._seen:
            self._seen, self._moved_at = seen, now
        doubted = self._failures > 0 or assignment.doubted
        since = self._asked_at if doubted else max(self._asked_at, self._moved_at)
        if now - since >= (min(AGAIN_SECONDS, self._every) if doubted else self._every) and not self._busy:
            self._busy, self._asked_at = True, now
            threading.Thread(
                target=self._ask, args=(assignment, url), name=f"{assignment.engine} answers", daemon=True
            ).start()

    def _ask(self, assignment: EngineAssignment, url: str) -> None:
        try:
            with EngineClient(url, assignment.secret) as client:
                client.answer(assignment.spec.served_name, timeout=LONGEST_SECONDS)
        except Unanswered as error:
            self._take_failure(error)
        except Exception:
            log.exception("%s: the check whether it answers failed in the agent.", assignment.engine)
        else:
            self._failures, self.trouble = 0, ""
        finally:
            self._asked_at, self._busy = time.monotonic(), False
        self._changed()

    def _take_failure(self, error: Unanswered) -> None:
        if not error.in_time and time.monotonic() - self._moved_at < LONGEST_SECONDS / 2:
            return  # it is busy: others get on meanwhile
        self._failures += 1 if error.in_time else REFUSALS
        if self._failures >= REFUSALS:
            self.trouble = f"It says that it is healthy, but a test completion failed: {error}"


def _progress(load: EngineLoad) -> tuple[float, ...]:
    """What moves while an engine gets on with requests, and not by taking them alone."""
    return (
        load.prompt_tokens_local,
        load.prompt_tokens_cached,
        load.prompt_tokens_transferred,
        load.generated_tokens,
        load.kv_usage,
    )
