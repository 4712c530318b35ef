"""Which engines serve a request. Pure: engines with their loads in, a choice and its reason out.

Every mode is an order over the engines of one pool, smallest first; ties go to the engine taken longest ago, so that a
newcomer is not flooded. What cannot be disaggregated, and why, is named here too.

Where tokens are known the order is a cost in seconds: the prompts that wait at an engine, the tokens of this one that it
lacks, and the streams that run there. Load is part of the sum, so a hot prefix moves on before its engine drowns. A prompt
that may be disaggregated is: whether computing it on the decode engine would be cheaper is not asked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import StrEnum
from random import getrandbits
from typing import NamedTuple

from controlplane.fleet.wire import RoutingMode
from frontend_api.evidence import CACHE_AWARE, Prompt
from frontend_api.view import Deployment, Engine, Health


class Reason(StrEnum):
    """Why a request went where it went: metric label and text for people."""

    LEAST_LOAD = "least-load"
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"
    OVERLAP = "overlap"
    """No engine has more of the prompt than the one taken."""
    LOAD_WINS = "load-wins"
    """Another engine has more of the prompt, and its load would cost more than that saves."""
    NO_OVERLAP = "no-overlap"
    """No engine has any of the prompt: load decides."""
    NO_TOKENS = "no-tokens"
    """The prompt's tokens are not known: load alone decides."""
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
    STORED_RESPONSE = "stored-response"
    """It goes on from a response that only an answering engine can have."""
    UNUSUAL_LIMITS = "unusual-limits"
    """A field that prefill never sees may be refused by decode: it judges before any KV is kept for it."""
    PREFILL_UNAVAILABLE = "prefill-unavailable"
    PREFILL_FAILED = "prefill-failed"
    PAIRS_BROKEN = "pairs-broken"
    """Every usable prefill engine's KV transfer to every usable decode engine failed its probe."""
    NO_ENGINE = "no-engine"


class Cost(NamedTuple):
    """What a prompt would cost at one engine, in seconds by part. The smallest is the best, and no two are equal."""

    total: float
    turn: int
    """When the engine was taken last."""
    position: int
    engine: Engine
    overlap: int
    """Tokens that it has."""
    queue: float
    """Prompts that wait or are being read there."""
    compute: float
    """The tokens it lacks."""
    transfer: float
    """The same tokens, where they come from a prefill engine."""
    streams: float
    """The requests that run there."""


STREAM_SECONDS = 0.02
"""What one more request beside it costs a request: about one step of the others, again and again."""
TRANSFER_PACE = 1e-5
"""Seconds per token of a KV transfer: 128 KiB per token at 13 GB/s. The same for all engines until links are measured."""


class Choice(NamedTuple):
    prefill: Engine | None
    decode: Engine | None
    """The engine that answers the client (decode or aggregated); None: nobody can."""
    reason: Reason
    fallback: bool = False
    """It should have been disaggregated and is not."""
    costs: tuple[Cost, ...] = ()
    """Of every engine that was weighed, where tokens are known."""


def _by_load(engine: Engine) -> tuple[int, int]:
    return engine.in_flight, engine.last_taken


def _by_turn(engine: Engine) -> tuple[int, int]:
    return 0, engine.last_taken


def _by_chance(engine: Engine) -> tuple[int, int]:
    return getrandbits(32), 0


ORDERS: dict[RoutingMode, tuple[Callable[[Engine], tuple[int, int]], Reason]] = {
    RoutingMode.LEAST_LOAD: (_by_load, Reason.LEAST_LOAD),
    RoutingMode.ROUND_ROBIN: (_by_turn, Reason.ROUND_ROBIN),
    RoutingMode.RANDOM: (_by_chance, Reason.RANDOM),
    RoutingMode.KV: (_by_load, Reason.NO_TOKENS),
    RoutingMode.KV_APPROXIMATE: (_by_load, Reason.NO_TOKENS),
}


def usable(pool: Sequence[Engine], avoid: Collection[Engine], now: float) -> Sequence[Engine]:
    """The engines of a pool that may be tried, best kind only: healthy, else suspect, else down but not hanging."""
    up = Health.UP
    healthy = [engine for engine in pool if engine.health is up and not engine.spec.suspect]
    if len(healthy) == len(pool) and not avoid:
        return pool
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


def weigh(pool: Sequence[Engine], prompt: Prompt, *, transferred: bool) -> list[Cost]:
    """What the prompt would cost at each engine. `transferred`: what one lacks is computed elsewhere and comes over the link."""
    costs: list[Cost] = []
    new, add = tuple.__new__, costs.append
    tokens, overlaps = prompt.tokens, prompt.overlap
    compute = transfer = 0.0
    for position, engine in enumerate(pool):
        overlap = overlaps.get(engine, 0)
        pace = engine.pace
        if transferred:
            transfer = (tokens - overlap or 1) * TRANSFER_PACE
        else:
            compute = (tokens - overlap or 1) * pace
        queue = engine.queued * pace
        streams = engine.in_flight * STREAM_SECONDS
        total = queue + compute + transfer + streams
        # the class's own constructor takes twice as long
        add(new(Cost, (total, engine.last_taken, position, engine, overlap, queue, compute, transfer, streams)))
    return costs


def _why(costs: Sequence[Cost], taken: Cost) -> Reason:
    most = max([cost.overlap for cost in costs])
    if not most:
        return Reason.NO_OVERLAP
    return Reason.OVERLAP if taken.overlap == most else Reason.LOAD_WINS


def _first(pool: Sequence[Engine], order: Callable[[Engine], tuple[int, int]]) -> Engine:
    return pool[0] if len(pool) == 1 else min(pool, key=order)


class _Ranked(NamedTuple):
    """A pool in the order of one request."""

    engines: Sequence[Engine]
    order: Callable[[Engine], tuple[int, int]]
    reason: Reason
    costs: Sequence[Cost]

    def best(self) -> tuple[Engine, Reason]:
        if self.costs:
            cost = min(self.costs)
            return cost.engine, _why(self.costs, cost)
        return _first(self.engines, self.order), self.reason

    def all(self) -> list[Engine]:
        return [cost.engine for cost in sorted(self.costs)] if self.costs else sorted(self.engines, key=self.order)


def _rank(pool: Sequence[Engine], mode: RoutingMode, prompt: Prompt | None, transferred: bool = False) -> _Ranked:
    return _Ranked(pool, *ORDERS[mode], weigh(pool, prompt, transferred=transferred) if prompt is not None else ())


def choose(
    deployment: Deployment,
    *,
    now: float,
    alone: Reason | None = None,
    avoid: Collection[Engine] = (),
    prefill: Engine | None = None,
    prompt: Prompt | None = None,
) -> Choice:
    """Where a request goes. `alone`: why it must not be disaggregated. `prefill`: the engine that holds its KV already."""
    mode = deployment.routing.mode
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
        return _alone(answering, mode, prompt, alone)
    prefills = (prefill,) if prefill is not None else usable(deployment.prefill, avoid, now)
    if not prefills:
        return _alone(answering, mode, prompt, Reason.PREFILL_UNAVAILABLE, fallback=True)
    if prompt is None and not deployment.broken_pairs:  # the same as below, in a quarter of the time
        order, reason = ORDERS[mode]
        return Choice(_first(prefills, order), _first(answering, order), reason)
    reading = _rank(prefills, mode, prompt)
    writing = _rank(answering, mode, prompt, True)
    broken = deployment.broken_pairs
    costs = (*reading.costs, *writing.costs)
    if not broken:
        first, reason = reading.best()
        return Choice(first, writing.best()[0], reason, False, costs)
    for first in reading.all():
        for second in writing.all():
            if (first.id, second.id) not in broken:
                reason = next((_why(reading.costs, c) for c in reading.costs if c.engine is first), reading.reason)
                return Choice(first, second, reason, False, costs)
    return _alone(answering, mode, prompt, Reason.PAIRS_BROKEN, fallback=True)


def _alone(
    answering: Sequence[Engine], mode: RoutingMode, prompt: Prompt | None, reason: Reason, *, fallback: bool = False
) -> Choice:
    """One engine reads and answers. What decided between several is the reason where being alone is nothing special."""
    if prompt is None:
        order, why = ORDERS[mode]
        in_mode = reason in (Reason.AGGREGATED, Reason.NO_PREFILL_POOL) and mode in CACHE_AWARE
        return Choice(None, _first(answering, order), why if in_mode else reason, fallback)
    ranked = _rank(answering, mode, prompt)
    taken, why = ranked.best()
    if reason in (Reason.AGGREGATED, Reason.NO_PREFILL_POOL) and mode in CACHE_AWARE:
        reason = why
    return Choice(None, taken, reason, fallback, tuple(ranked.costs))
