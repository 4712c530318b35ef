"""Which engines serve a request. Pure: engines with their loads in, a choice and its reason out.

Every mode is an order over the engines of one pool, smallest first; ties go to the engine taken longest ago, so that a
newcomer is not flooded. What cannot be disaggregated, and why, is named here too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import StrEnum
from typing import NamedTuple

from controlplane.fleet.wire import RoutingMode
from frontend_api.view import Deployment, Engine, Health


class Reason(StrEnum):
    """Why a request went where it went: metric label and text for people."""

    LEAST_LOAD = "least-load"
    ROUND_ROBIN = "round-robin"
    AGGREGATED = "aggregated"
    """The deployment has only aggregated engines."""
    RELAYED = "relayed"
    """The endpoint generates nothing: any engine answers."""
    NO_PREFILL_POOL = "no-prefill-pool"
    """The deployment wants no prefill engines now."""
    SEVERAL_SEQUENCES = "several-sequences"
    """n or best_of above 1, or beam search: one set of KV params serves one sequence."""
    SEVERAL_PROMPTS = "several-prompts"
    PROMPT_LOGPROBS = "prompt-logprobs"
    """Log-probabilities of the prompt, or its echo, need the prompt computed where it is answered."""
    EMBEDDED_PROMPT = "embedded-prompt"
    BACKGROUND = "background"
    """A background response lives on the engine that took it."""
    PREFILL_UNAVAILABLE = "prefill-unavailable"
    PREFILL_FAILED = "prefill-failed"
    PAIRS_BROKEN = "pairs-broken"
    """Every usable prefill engine's KV transfer to every usable decode engine failed its probe."""
    NO_ENGINE = "no-engine"


class Choice(NamedTuple):
    prefill: Engine | None
    decode: Engine | None
    """The engine that answers the client (decode or aggregated); None: nobody can."""
    reason: Reason
    fallback: bool = False
    """It should have been disaggregated and is not."""


def _by_load(engine: Engine) -> tuple[int, int]:
    return engine.in_flight, engine.last_taken


def _by_turn(engine: Engine) -> tuple[int, int]:
    return 0, engine.last_taken


ORDERS: dict[RoutingMode, tuple[Callable[[Engine], tuple[int, int]], Reason]] = {
    RoutingMode.LEAST_LOAD: (_by_load, Reason.LEAST_LOAD),
    RoutingMode.ROUND_ROBIN: (_by_turn, Reason.ROUND_ROBIN),
}


def usable(pool: Sequence[Engine], avoid: Collection[Engine], now: float) -> Sequence[Engine]:
    """The engines of a pool that may be tried, best kind only: healthy, else suspect, else down but not hanging."""
    healthy = []
    suspect = []
    last = []
    for engine in pool:
        if engine in avoid:
            continue
        if engine.health is Health.DOWN:
            if engine.retry_at <= now:
                last.append(engine)
        elif engine.health is Health.HALF_OPEN and engine.in_flight:
            last.append(engine)
        elif engine.spec.suspect:
            suspect.append(engine)
        else:
            healthy.append(engine)
    return healthy or suspect or last


def choose(
    deployment: Deployment,
    *,
    now: float,
    alone: Reason | None = None,
    avoid: Collection[Engine] = (),
    prefill: Engine | None = None,
) -> Choice:
    """Where a request goes. `alone`: why it must not be disaggregated. `prefill`: the engine that holds its KV already."""
    order, reason = ORDERS[deployment.routing.mode]
    answering = usable(deployment.answering, avoid, now)
    if alone is Reason.RELAYED and not answering:
        answering = usable(deployment.prefill, avoid, now)
    if not answering:
        return Choice(None, None, Reason.NO_ENGINE)
    if alone is None and not deployment.decode:
        alone = Reason.AGGREGATED
    if alone is None and not deployment.wants_prefill and not deployment.prefill:
        alone = Reason.NO_PREFILL_POOL
    if alone is not None:
        return Choice(None, min(answering, key=order), alone)
    prefills = (prefill,) if prefill is not None else usable(deployment.prefill, avoid, now)
    if not prefills:
        return Choice(None, min(answering, key=order), Reason.PREFILL_UNAVAILABLE, True)
    broken = deployment.broken_pairs
    if not broken:
        return Choice(min(prefills, key=order), min(answering, key=order), reason)
    for first in sorted(prefills, key=order):
        for second in sorted(answering, key=order):
            if (first.id, second.id) not in broken:
                return Choice(first, second, reason)
    return Choice(None, min(answering, key=order), Reason.PAIRS_BROKEN, True)
