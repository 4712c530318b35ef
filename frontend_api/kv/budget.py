"""How much of this process the events of one engine rank may take: a burst at once, and for good a share of its time. Pure.

No engine needs that much: a replay of all that a publisher keeps takes half a second, 50,000 blocks a second a tenth of a core.
"""

from __future__ import annotations

BURST_SECONDS = 3.0
SHARE = 0.1
PAUSE_SECONDS = 6.0
"""For which a rank that has used up its budget is not followed: what comes back meanwhile it may use at once."""


class Budget:
    """Seconds of computing. `now`: monotonic."""

    __slots__ = ("_at", "_left")

    def __init__(self, now: float) -> None:
        self._left = BURST_SECONDS
        self._at = now

    def spend(self, seconds: float, now: float) -> bool:
        """So much was used. Returns whether the budget is used up."""
        self._left = min(self._left + (now - self._at) * SHARE, BURST_SECONDS) - seconds
        self._at = now
        return self._left < 0
