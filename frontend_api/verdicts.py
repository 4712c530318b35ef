"""What the client hears where a request has no good answer: the engine's own words, or the router's. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from frontend_api.formats.openai import Problem
from frontend_api.http.upstream import Broken
from frontend_api.routing.failures import KEY_REFUSED, OVERLOAD, Failure, refuses
from frontend_api.routing.reason import Reason
from frontend_api.routing.view import Deployment, Engine
from frontend_api.steps import Lost, Outcome, Replied

RETRY_AFTER = 2


class PassOn(NamedTuple):
    """Give the client the engine's own error."""

    status: int
    body: bytes
    retry_after: int | None = None


Verdict = Problem | PassOn | None
"""None: the client has its answer."""


def is_refusal(outcome: Outcome) -> bool:
    """Whether an engine refuses the request itself."""
    return isinstance(outcome, Replied) and refuses(outcome.status)


def verdict(outcome: Outcome, failure: Failure | None, engine: Engine, now: float) -> Problem | PassOn:
    """What the client hears of a leg that gave nothing, if nothing else helps. `failure`: None: a kept connection was closed.
    `now`: monotonic."""
    says = failure.sentence() if failure is not None else "The connection to the engine broke."
    if isinstance(outcome, Replied):
        if outcome.status in KEY_REFUSED:
            return Problem(502, "engine_refused", "An engine does not accept the router's key.", None, RETRY_AFTER)
        if not 400 <= outcome.status < 600:  # a 304 would have no body, a redirect is none of the client's business
            return Problem(502, "engine_error", says, None, RETRY_AFTER)
        if outcome.status in OVERLOAD:
            return PassOn(outcome.status, outcome.body, max(ceil(engine.retry_at - now), 1))
        if failure is not None and failure.prefill is not None:
            return Problem(503, "transfer_failed", says, None, RETRY_AFTER)
        return PassOn(outcome.status, outcome.body)
    assert isinstance(outcome, Lost)
    if outcome.kind is Broken.SILENT:
        return Problem(504, "engine_timeout", says)
    return Problem(503, "engine_unreachable", f"{says} Try again.", None, RETRY_AFTER)


def no_engine(deployment: Deployment) -> Problem:
    says = deployment.status or "No engine is ready."
    return Problem(503, "no_engine", f"{deployment.served_name} cannot serve now. {says}", None, RETRY_AFTER)


def no_prefill(deployment: Deployment, reason: Reason, left_out: Iterable[Failure]) -> Problem:
    """`left_out`: why engines and pairs get no requests."""
    says = deployment.status or "No prefill engine is ready."
    if reason is Reason.PAIRS_BROKEN:
        says = "The KV transfer between every prefill and decode engine fails."
    seen = next((f for f in left_out if f.engine in deployment.prefill or f.engine in deployment.decode), None)
    if seen is not None:
        says = f"{says} {seen.sentence()}"
    return Problem(503, "no_prefill", f"{deployment.served_name} cannot serve now. {says}", None, RETRY_AFTER)
