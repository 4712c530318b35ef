"""When bytes leave: the first write at once, others together, once no more come with the next turn of the event loop.

Every write wakes whoever reads it, and a reader that is woken for one message at a time sleeps again before the next comes:
under load that doubles what a write costs. One write alone, as on a quiet router, waits for nothing.
"""

from __future__ import annotations

import asyncio

ENOUGH = 16
"""Writes that are held for another turn at most: with more the turns grow long, and there is nothing to gain."""
LARGE = 16 << 10
"""Bytes of a write that is never held: there is nothing to gain, and the transport has to see at once that it is too much."""


class Outbox:
    """The writes to one kind of peer. Whoever closes a transport gracefully calls `flush` before."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        """Asked for once: Python 3.11 makes a system call of each `get_running_loop`."""
        self._held: list[tuple[asyncio.Transport, bytes]] = []
        self._holds = False
        """Something was written, and whether more comes is not known yet."""
        self._seen = 0
        """Of what is held, at the end of the turn before."""

    def write(self, transport: asyncio.Transport, data: bytes) -> None:
        if not self._holds:
            self._holds = True
            self._seen = 0
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
            self._loop.call_soon(self._end)
        elif len(data) < LARGE:
            self._held.append((transport, data))
            return
        else:
            self.flush()
        transport.write(data)

    def flush(self) -> None:
        """What is held leaves now. What is for a transport that was broken off meanwhile is dropped."""
        held, self._held = self._held, []
        for transport, data in held:
            if not transport.is_closing():
                transport.write(data)

    def _end(self) -> None:
        held = len(self._held)
        if self._seen < held < ENOUGH:
            self._seen = held
            assert self._loop is not None
            self._loop.call_soon(self._end)
            return
        self._holds = False
        if held:
            self.flush()
