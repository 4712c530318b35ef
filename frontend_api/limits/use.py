"""What one router process knows of one key: its requests, what they reserved, and what the counter is still to be told. No IO;
what follows from it is `limits`' business."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from controlplane.fleet.wire import SnapshotKey
from frontend_api.limits.answers import Refusal, Standing
from frontend_api.limits.charges import Estimate
from frontend_api.limits.counter import Line
from frontend_api.limits.windows import SPAN, Bound, Caps, Judged, Window


class State(Enum):
    WAITING = 0
    HELD = 1
    OVER = 2


class Hold:
    """One request of a limited key. `answered` is called once: with None when it may go on, else with what it ran into;
    never after it was settled."""

    __slots__ = ("answered", "at", "estimate", "headers", "key", "second", "state", "tokens", "use")

    use: Use
    """Of its key; set when it asks for room."""

    def __init__(self, key: SnapshotKey, estimate: Estimate, answered: Callable[[Refusal | None], None]) -> None:
        self.key = key
        self.estimate = estimate
        self.tokens = estimate.within(key.tokens_per_minute)
        """Reserved."""
        self.answered = answered
        self.headers = b""
        """For the client, once answered."""
        self.state = State.WAITING
        self.second = 0
        """Under which it is counted."""
        self.at = 0.0
        """Loop time at which it began to wait."""


class Use:
    """What this process knows of one key."""

    __slots__ = ("asked", "caps", "held", "key", "last_heard", "owed", "since", "waiting", "window")

    def __init__(self) -> None:
        self.key: SnapshotKey | None = None
        self.caps = Caps(0, 0, 0)
        self.window = Window()
        """What this process granted."""
        self.held = 0
        """Its requests in motion."""
        self.owed: dict[int, tuple[int, int]] = {}
        """By second: requests and tokens that the counter is still to be told of."""
        self.waiting: list[Hold] = []
        self.asked = 0
        """Requests that the counter is being asked about."""
        self.last_heard = (0.0, 0, 0)
        """When the counter last spoke of the key, and what all routers had used by then."""
        self.since = (0, 0)
        """Requests and tokens granted without the counter after that."""

    def heard(self, now: float, requests: float, tokens: float) -> None:
        self.last_heard = now, int(requests), int(tokens)
        self.since = 0, 0

    def spare(self, share: int, tokens: int, now: float) -> Judged:
        """Whether this process may take one more of what was left when the counter last spoke, with the others taking theirs."""
        at, requests_then, tokens_then = self.last_heard
        wait = at + SPAN + 1 - now
        if 0 < wait <= SPAN + 1:  # else it is long ago, or the counter's clock was set back since
            requests, spent = self.since
            if self.caps.requests and requests + 1 > (self.caps.requests - requests_then) // share:
                return Judged(Bound.REQUESTS, wait)
            if self.caps.tokens and spent + tokens > (self.caps.tokens - tokens_then) // share:
                return Judged(Bound.TOKENS, wait)
        return Judged(Bound.NONE)

    def follow(self, key: SnapshotKey) -> None:
        if key is not self.key:
            self.key = key
            self.caps = Caps(key.requests_per_minute or 0, key.tokens_per_minute or 0, key.concurrency or 0)

    def owe(self, second: int, requests: int, tokens: int) -> None:
        before = self.owed.get(second, (0, 0))
        self.owed[second] = before[0] + requests, before[1] + tokens

    def standing(self, now: float) -> Standing:
        """As far as this process knows."""
        window = self.window
        return Standing(window.requests, window.tokens, window.last + SPAN + 1 - now if window else 0.0)

    @property
    def idle(self) -> bool:
        """Nothing would be lost by forgetting it."""
        return not (self.held or self.asked or self.owed or self.waiting or self.window)


class Sent:
    """What one call took along of a key."""

    __slots__ = ("asks", "owed", "use")

    def __init__(self, use: Use) -> None:
        self.use = use
        self.asks = [hold for hold in use.waiting if hold.state is State.WAITING]
        use.asked = len(self.asks)
        self.owed, use.owed, use.waiting = use.owed, {}, []

    def line(self, oldest: int) -> Line:
        use = self.use
        assert use.key is not None
        owed = [(second, *more) for second, more in self.owed.items() if second >= oldest]
        return Line(use.key.id, *use.caps, use.held, owed, [hold.tokens for hold in self.asks])
