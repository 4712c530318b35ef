"""How fast engines lately were, in seconds per token, learned from traffic. Pure.

A rate is a ratio of fading sums that begins at a default until there is a measurement. It stays sane: a later one moves it
only so far, so that a stall is soon forgotten; a rate that nobody measures any more, because its engine looks dear and gets
nothing, goes back to that of its kind and is tried again; a new engine begins at the rate of its kind instead of a
default that may be far too good (it would be flooded) or too bad (it would get nothing).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

USUAL_READ = 1e-4
"""Seconds in which an engine computes one token of a prompt."""
USUAL_PULL = 1e-5
"""Seconds per token of a KV transfer: 128 KiB per token at 13 GB/s."""
USUAL_STEP = 0.02
"""Seconds between two tokens of an answer."""
FASTEST, SLOWEST = 1e-7, 2.0
FADE = 0.8
"""What is left of the earlier tokens' weight at each measurement."""
MOST_WEIGHT = 4_096
"""Tokens that one measurement counts as at most."""
FARTHEST = 8.0
"""The factor by which one measurement may differ from what was known before."""
FRESH_SECONDS = 30.0
"""Older than this a rate begins to go back to that of its kind …"""
RETURN = 0.05
"""… by this share of the way (of its logarithm) each second."""


class Rate:
    """Seconds per token of one kind of work at one engine. `least`: tokens below which a measurement tells nothing."""

    __slots__ = ("_least", "_weight", "learned_at", "measured", "pace")

    def __init__(self, usual: float, least: int) -> None:
        self.pace = usual
        self.learned_at = -inf
        """Monotonic time of the last measurement; -inf: there was none."""
        self.measured = 0
        """How often; after a few times only the pace is more than a guess."""
        self._least = least
        self._weight = 0.0  # a default counts for nothing: engines measured once and often are compared

    def learn(self, tokens: int, seconds: float, now: float) -> None:
        """So many tokens took so long. `now`: monotonic."""
        if tokens < self._least:
            return
        measured = seconds / tokens
        if self.measured:
            measured = min(max(measured, self.pace / FARTHEST), self.pace * FARTHEST)
        weight = min(tokens, MOST_WEIGHT)
        self._weight = self._weight * FADE + weight
        self.pace += weight / self._weight * (min(max(measured, FASTEST), SLOWEST) - self.pace)
        self.learned_at = now
        self.measured += 1

    def approach(self, pace: float) -> None:
        """Others of its kind were measured lately, this one was not. The first time it takes over all of theirs."""
        share = RETURN if self.measured else 1.0
        self.pace *= (pace / self.pace) ** share


def settle(rates: Sequence[Rate], kin: Iterable[Rate], now: float) -> None:
    """Once a second: rates that are not fresh go toward the median of those that are; where a pool has none, of its kin's."""
    since = now - FRESH_SECONDS
    fresh = [r.pace for r in rates if r.learned_at > since] or [r.pace for r in kin if r.learned_at > since]
    if fresh:
        usual = sorted(fresh)[len(fresh) // 2]
        for rate in rates:
            if rate.learned_at <= since:
                rate.approach(usual)
