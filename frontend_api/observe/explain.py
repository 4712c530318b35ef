"""Why a request went where it went, told to the client that asks for it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, islice

from frontend_api.kv.evidence import Cache, Prompt
from frontend_api.observe.account import STAGES
from frontend_api.routing.costs import Cost, costs_of
from frontend_api.routing.failures import Failure
from frontend_api.trace import Trace

MOST = 16
"""Candidates of each part, and reasons, that are told: clients have limits for a reply's head. `/debug/decisions` tells all."""


def headers(
    trace: Trace,
    mode: str,
    cache: Cache | None,
    prompt: Prompt | None,
    overhead_us: float,
    stages: Sequence[float],
) -> bytes:
    """Header lines of the reply, each ended. `cache`: None where cache-aware routing is not asked for. `stages`: the parts of
    `overhead_us`."""
    spent = " ".join(f"{stage}={microseconds:.0f}" for stage, microseconds in zip(STAGES, stages, strict=False)) or "-"
    return (
        f"x-tandem-prefill: {trace.prefill or '-'}\r\nx-tandem-decode: {trace.decode or '-'}\r\n"
        f"x-tandem-mode: {mode}\r\n"
        f"x-tandem-reason: {trace.reason}\r\nx-tandem-fallback: {trace.cause if trace.fallback else '-'}\r\n"
        f"x-tandem-tried: {_failures(trace.tried)}\r\nx-tandem-left-out: {_failures(trace.left_out)}\r\n"
        f"x-tandem-overhead-us: {overhead_us:.0f}\r\nx-tandem-overhead-stages: {spent}\r\n"
        f"{_of_cache(trace, cache, prompt) if cache is not None else ''}"
        f"x-tandem-candidates: {'; '.join(_candidates(costs_of(trace.weighed))) or '-'}\r\n"
    ).encode()


def _failures(failures: Sequence[Failure]) -> str:
    told = [f"{failure} via={failure.channel}" if failure.channel else str(failure) for failure in failures[:MOST]]
    if len(failures) > MOST:
        told.append(f"{len(failures) - MOST} more")
    return "; ".join(told) or "-"


def _of_cache(trace: Trace, cache: Cache, prompt: Prompt | None) -> str:
    state, reasons = cache.standing()
    overlap = f"{trace.overlap or 0}/{prompt.tokens}" if prompt is not None else "unknown"
    told = [f"{who}={why}" for who, why in islice(reasons.items(), MOST)]
    if len(reasons) > MOST:
        told.append(f"{len(reasons) - MOST} more")
    because = "; ".join(told) or "-"
    lines = f"x-tandem-state: {state}\r\nx-tandem-state-because: {because}\r\nx-tandem-overlap: {overlap}\r\n"
    if prompt is not None and prompt.below_block:
        lines += f"x-tandem-overlap-because: {below_one_block(prompt.below_block)}\r\n"
    return lines


def below_one_block(tokens: int) -> str:
    return f"no longer than one KV block ({tokens} tokens): cannot be cached"


def _candidates(costs: Sequence[Cost]) -> list[str]:
    told = []
    for part, group in groupby(costs, key=lambda cost: cost.part):
        found = sorted(group, key=lambda cost: cost.total)
        told += [
            f"{c.engine.id} {part} total={c.total:.6f} overlap={c.overlap} queue={c.queue:.6f} compute={c.compute:.6f} "
            f"transfer={c.transfer:.6f} stalls={c.stalls:.6f} streams={c.streams:.6f} wait={c.wait:.6f}"
            for c in found[:MOST]
        ]
        if len(found) > MOST:
            told.append(f"{len(found) - MOST} more for {part}")
    return told
