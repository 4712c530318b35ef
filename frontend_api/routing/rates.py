"""How fast engines are, in seconds per token, learned from traffic. Pure.

What is measured at one engine is a ratio of fading sums; what costs are reckoned with is the pace of the engine's pool, as long
as the engine differs from that by no more than noise. Engines alike so cost exactly alike and take turns, instead of the one
that was measured luckiest getting every new prompt. A rate stays sane: one measurement moves it only so far, so that a stall is
soon forgotten; one that nobody measures any more, because its engine looks dear and gets nothing, goes back to that of its
kind and is tried again; a new engine begins as one of its kind, instead of with a default that may be far too good (it would
be flooded) or too bad (it would get nothing).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

USUAL_READ = 1e-4
"""Seconds in which an engine computes one token of a prompt."""
USUAL_PULL = 1e-5
"""Seconds per token of a hand-over: 128 KiB per token at 13 GB/s. What is learned holds all that decode's first token takes
beyond a step, so it is no measure of the link."""
USUAL_STEP = 0.02
"""Seconds between two tokens of an answer."""
FASTEST, SLOWEST = 1e-7, 2.0
FADE = 0.8
"""What is left of the earlier tokens' weight at each measurement."""
MOST_WEIGHT = 4_096
"""Tokens that one measurement counts as at most."""
FARTHEST = 8.0
"""The factor by which one measurement may differ from what was known before."""
NOISE = 1.5
"""The factor by which equal engines may seem to differ …"""
ENOUGH = 8
"""… after so many measurements. One tells little: an engine's first prompt may take many times as long."""
FRESH_SECONDS = 30.0
"""Older than this a rate begins to go back to that of its kind …"""
RETURN = 0.05
"""… by this share of the way (of its logarithm) each second."""


class Rate:
    """Seconds per token of one kind of work at one engine. `least`: tokens below which a measurement tells nothing."""

    __slots__ = ("_least", "_weight", "learned_at", "measured", "own", "pace")

    def __init__(self, usual: float, least: int) -> None:
        self.pace = usual
        """What costs are reckoned with."""
        self.own = usual
        """What was measured here."""
        self.measured = 0
        """How often."""
        self.learned_at = -inf
        """Monotonic time of the last measurement."""
        self._least = least
        self._weight = 0.0

    def learn(self, tokens: int, seconds: float, now: float) -> None:
        """So many tokens took so long. `now`: monotonic."""
        if tokens < self._least:
            return
        measured = seconds / tokens
        if self.measured:
            measured = min(max(measured, self.own / FARTHEST), self.own * FARTHEST)
        weight = min(tokens, MOST_WEIGHT)
        self._weight = self._weight * FADE + weight
        self.own += weight / self._weight * (min(max(measured, FASTEST), SLOWEST) - self.own)
        self.measured += 1
        self.learned_at = now

    def settle(self, usual: float, *, fresh: bool) -> None:
        """`usual`: what its kind shows. `fresh`: it was measured lately itself."""
        if not fresh:
            self.own *= (usual / self.own) ** (RETURN if self.measured else 1.0)
        differs = self.measured >= ENOUGH and not usual / NOISE <= self.own <= usual * NOISE
        self.pace = self.own if differs else usual


def settle(pool: Sequence[Rate], kin: Iterable[Rate], now: float, usual: float | None = None) -> None:
    """Once a second: draw the pace of a pool from what was measured lately; of its kin where it has nothing. `usual`: where they
    have nothing either; None: then it stays. `now`: monotonic."""
    since = now - FRESH_SECONDS
    fresh = [r for r in pool if r.learned_at > since] or [r for r in kin if r.learned_at > since]
    if fresh:
        known = sorted(rate.own for rate in [r for r in fresh if r.measured >= ENOUGH] or fresh)
        usual = known[(len(known) - 1) // 2]
    if usual is not None:
        for rate in pool:
            rate.settle(usual, fresh=rate.learned_at > since)
