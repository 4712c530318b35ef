"""Why a request went where it went, told to the client that asks for it. Pure."""

from __future__ import annotations

from frontend_api.evidence import Cache, Prompt
from frontend_api.flow import Trace


def headers(trace: Trace, cache: Cache | None, prompt: Prompt | None, overhead_us: float) -> bytes:
    """Header lines of the reply, each ended. `cache`: None where cache-aware routing is not asked for."""
    return (
        f"x-tandem-prefill: {trace.prefill or '-'}\r\nx-tandem-decode: {trace.decode or '-'}\r\n"
        f"x-tandem-reason: {trace.reason}\r\nx-tandem-fallback: {trace.cause if trace.fallback else '-'}\r\n"
        f"x-tandem-overhead-us: {overhead_us:.0f}\r\n{_of_cache(trace, cache, prompt) if cache is not None else ''}"
    ).encode()


def _of_cache(trace: Trace, cache: Cache, prompt: Prompt | None) -> str:
    state, reasons = cache.standing()
    overlap = f"{trace.overlap or 0}/{prompt.tokens}" if prompt is not None else "unknown"
    because = "; ".join(f"{who}={why}" for who, why in reasons.items()) or "-"
    costs = "; ".join(
        f"{c.engine.id} total={c.total:.6f} overlap={c.overlap} queue={c.queue:.6f} compute={c.compute:.6f} "
        f"transfer={c.transfer:.6f} streams={c.streams:.6f}"
        for c in trace.costs
    )
    return (
        f"x-tandem-state: {state}\r\nx-tandem-state-because: {because}\r\n"
        f"x-tandem-overlap: {overlap}\r\nx-tandem-candidates: {costs or '-'}\r\n"
    )
