"""What an engine's counters rose by in the last minute: a rate since the engine started hides what happens now. Pure."""

from __future__ import annotations

from collections import deque

from msgspec.structs import replace

from controlplane.fleet.model import EngineLoad, Recent

WINDOW_SECONDS = 60.0
_RISING = ("nixl_bytes", "nixl_seconds", "nixl_transfers", "prompt_tokens_local", "prompt_tokens_cached")


class LastMinute:
    """The counters of one engine process as they were read."""

    def __init__(self) -> None:
        self._read: deque[tuple[float, EngineLoad]] = deque()
        """The oldest one, and no other, is older than the window, once there is one."""

    def of(self, load: EngineLoad, now: float) -> EngineLoad:
        """The same load with what rose since a minute ago, or since the first reading. `now`: monotonic."""
        read = self._read
        if read and any(getattr(load, name) < getattr(read[-1][1], name) for name in _RISING):
            read.clear()  # another process counts from 0
        read.append((now, load))
        while len(read) > 1 and read[1][0] <= now - WINDOW_SECONDS:
            read.popleft()
        since, before = read[0]
        if since == now:
            return load
        rose = {name: getattr(load, name) - getattr(before, name) for name in _RISING}
        return replace(load, recent=Recent(seconds=now - since, **rose))
