"""How long engine work takes: a clock that steps advance and that the event loop follows.

Steps shorter than a timer tick are gathered, so that the modelled *rate* is right although a single sleep is not.
"""

from __future__ import annotations

import asyncio
import time

_TICK = 0.001


class Pace:
    """Engine time. It may run behind real time (idle) and never far ahead of it."""

    def __init__(self, prefill_tokens_per_second: float, itl_seconds: float) -> None:
        self._prefill_rate = prefill_tokens_per_second
        self._itl = itl_seconds
        self._now = time.monotonic()

    def step_seconds(self, prefill_tokens: int, decoding: int) -> float:
        """Duration of one step that computes so many prompt tokens and one token for each decoding sequence.

        A step holds both kinds of work, so a long prefill delays the tokens of every running stream: the harm that
        disaggregation avoids.
        """
        prefill = prefill_tokens / self._prefill_rate if self._prefill_rate > 0 else 0.0
        return prefill + (self._itl if decoding else 0.0)

    async def spend(self, seconds: float) -> None:
        """Lets `seconds` of engine time pass; always yields to the event loop once."""
        self._now = max(self._now, time.monotonic()) + seconds
        ahead = self._now - time.monotonic()
        await asyncio.sleep(ahead if ahead > _TICK else 0)
