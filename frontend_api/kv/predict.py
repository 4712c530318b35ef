"""What engines are about to hold: the blocks of prompts that are on their way to them, until events tell of them. Pure.

Between a request and its events lie hundreds of milliseconds for a long prompt. Without this each request of a burst with
one new prefix would be taken for one that nobody has begun, and every engine's queue for longer than it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from frontend_api.routing.view import Engine

SENT_SECONDS = 10.0
"""For which a prompt that was sent is believed to be computed."""
COMPUTED_SECONDS = 1.0
"""From the first token to the events that tell of the prompt's blocks, at most."""
MOST = 20_000
"""Blocks per engine; with more the oldest are forgotten."""


class Predicted:
    """Blocks by their own hashes, per engine. `tick` tells the time."""

    def __init__(self) -> None:
        self._until: dict[Engine, dict[int, float]] = {}
        self._end: dict[Engine, float] = {}
        """When the last of an engine's blocks is over."""
        self._now = 0.0

    @property
    def engines(self) -> tuple[Engine, ...]:
        """To which something is on its way."""
        return tuple(self._until)

    def tick(self, now: float) -> None:
        """Forget what is over. Several times a second."""
        self._now = now
        for engine in [engine for engine, end in self._end.items() if end <= now]:
            self.forget(engine)

    def sent(self, engine: Engine, hashes: Sequence[int], now: float) -> None:
        """A prompt of these blocks is on its way. `now`: monotonic."""
        if hashes:
            self._put(engine, hashes, now + SENT_SECONDS)

    def computed(self, engine: Engine, hashes: Sequence[int], now: float) -> None:
        """The engine has computed it: events follow."""
        if hashes and engine in self._until:
            self._put(engine, hashes, now + COMPUTED_SECONDS)

    def failed(self, engine: Engine, hashes: Sequence[int]) -> None:
        """It will not be computed there."""
        until = self._until.get(engine)
        if until is not None:
            for own in hashes:
                until.pop(own, None)
            if not until:
                self.forget(engine)

    def forget(self, engine: Engine) -> None:
        """It is gone, or nothing is on its way to it any more."""
        self._until.pop(engine, None)
        self._end.pop(engine, None)

    def depth(self, engine: Engine, hashes: Sequence[int], held: int) -> int:
        """How many blocks from the first on the engine will have, where it has `held` of them."""
        until = self._until.get(engine)
        if until is not None:
            now = self._now
            while held < len(hashes) and until.get(hashes[held], 0.0) > now:
                held += 1
        return held

    def ahead(self, hashes: Sequence[int], size: int, have: Mapping[Engine, int]) -> list[tuple[Engine, int]]:
        """The engines that will have more than they have, and how many blocks. `have`: tokens, in blocks of `size`."""
        now, count = self._now, len(hashes)
        found = []
        for engine, until in self._until.items():
            held = have.get(engine, 0) // size
            if held < count and until.get(hashes[held], 0.0) > now:
                found.append((engine, self.depth(engine, hashes, held)))
        return found

    def _put(self, engine: Engine, hashes: Sequence[int], end: float) -> None:
        until = self._until.setdefault(engine, {})
        if len(until) > MOST:
            self._until[engine] = until = {own: at for own, at in until.items() if at > self._now}
            if len(until) > MOST:
                until.clear()
        until |= dict.fromkeys(hashes, end)
        self._end[engine] = max(end, self._end.get(engine, 0.0))
