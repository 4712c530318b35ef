"""How requests and tokens of the last minute are counted: a window that slides by the second. Pure.

In no 60 seconds, wherever they begin, more is granted than the limit: a second's use counts until it is wholly more than
60 seconds old. `counter` holds the same rules as a script for Redis; one test runs on both.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

SPAN = 60
"""Seconds."""
BUSY_WAIT = 1.0
"""Seconds after which a key with all its requests at a time in use may try again: nobody knows when one ends."""


class Bound(IntEnum):
    """What a request ran into."""

    NONE = 0
    REQUESTS = 1
    TOKENS = 2
    CONCURRENCY = 3


class Caps(NamedTuple):
    """A key's limits; 0: none."""

    requests: int
    tokens: int
    concurrency: int

    def share(self, of: int) -> Caps:
        """One process's part where `of` processes count for themselves: at least 1 of each, so that none is shut out."""
        return self if of == 1 else Caps(*(max(1, cap // of) if cap else 0 for cap in self))


class Judged(NamedTuple):
    bound: Bound
    wait: float = 0.0
    """Seconds until there may be room; 0: granted."""


class Window:
    """The use of one key. Seconds are whole, of one clock; `now` is a moment of it."""

    __slots__ = ("_seconds", "_slid", "last", "requests", "tokens")

    def __init__(self) -> None:
        self._seconds: dict[int, list[int]] = {}
        self._slid = 0
        self.requests = 0
        self.tokens = 0
        self.last = 0
        """The newest second in it."""

    def slide(self, now: float) -> None:
        """Forget what is too old; also what lies ahead, after a clock was set back."""
        newest = int(now)
        if newest == self._slid:
            return
        self._slid = newest
        for second in [s for s in self._seconds if s < newest - SPAN or s > newest + 1]:
            requests, tokens = self._seconds.pop(second)
            self.requests -= requests
            self.tokens -= tokens
        if not self._seconds:
            self.last = 0

    def add(self, second: int, requests: int, tokens: int) -> None:
        """Count more, or (negative) give back: never more than that second holds."""
        at = self._seconds.setdefault(second, [0, 0])
        requests, tokens = max(requests, -at[0]), max(tokens, -at[1])
        at[0] += requests
        at[1] += tokens
        self.requests += requests
        self.tokens += tokens
        self.last = max(self.last, second)

    def seconds(self) -> dict[int, tuple[int, int]]:
        """All that is in it: requests and tokens by second."""
        return {second: (requests, tokens) for second, (requests, tokens) in self._seconds.items()}

    def judge(self, caps: Caps, held: int, tokens: int, now: float) -> Judged:
        """Whether one more request with these tokens may come, with `held` there already. Counts nothing."""
        self.slide(now)
        if caps.requests and self.requests + 1 > caps.requests:
            return Judged(Bound.REQUESTS, self._wait(self.requests + 1 - caps.requests, 0, now))
        if caps.tokens and self.tokens + tokens > caps.tokens:
            return Judged(Bound.TOKENS, self._wait(0, self.tokens + tokens - caps.tokens, now))
        if caps.concurrency and held + 1 > caps.concurrency:
            return Judged(Bound.CONCURRENCY, BUSY_WAIT)
        return Judged(Bound.NONE)

    def _wait(self, requests: int, tokens: int, now: float) -> float:
        """Seconds until so much has left."""
        for second in sorted(self._seconds):
            requests -= self._seconds[second][0]
            tokens -= self._seconds[second][1]
            if requests <= 0 and tokens <= 0:
                return second + SPAN + 1 - now
        return SPAN + 1.0

    def __bool__(self) -> bool:
        return bool(self._seconds)
