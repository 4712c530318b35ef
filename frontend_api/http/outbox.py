"""When bytes leave: the first write of a turn of the event loop at once, the others of that turn together at its end.

Every write wakes whoever reads it, and a reader that is woken for one message at a time sleeps again before the next comes:
under load that doubles what a write costs. A turn with one write, as on a quiet router, is not slowed at all.
"""

from __future__ import annotations

import asyncio


class Outbox:
    """The writes to one kind of peer. Whoever closes a transport gracefully calls `flush` before."""

    def __init__(self) -> None:
        self._held: list[tuple[asyncio.Transport, bytes]] = []
        self._wrote = False
        """In this turn."""

    def write(self, transport: asyncio.Transport, data: bytes) -> None:
        if self._wrote:
            self._held.append((transport, data))
        else:
            self._wrote = True
            asyncio.get_running_loop().call_soon(self._end)
            transport.write(data)

    def flush(self) -> None:
        """What is held leaves now. What is for a transport that was broken off meanwhile is dropped."""
        held, self._held = self._held, []
        for transport, data in held:
            if not transport.is_closing():
                transport.write(data)

    def _end(self) -> None:
        self._wrote = False
        if self._held:
            self.flush()
