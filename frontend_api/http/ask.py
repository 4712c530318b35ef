"""A question of the router's own to an engine: one request, and its whole reply. Not for clients' requests."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from frontend_api.http.upstream import Broken, Failure, Pool

MAX_REPLY = 4 << 20
"""Bytes."""


class Reply(NamedTuple):
    status: int
    body: bytes


class _Asking:
    """The receiver of such a leg."""

    def __init__(self) -> None:
        self.done: asyncio.Future[Reply | Broken] = asyncio.get_running_loop().create_future()
        self._status = 0
        self._parts: list[bytes] = []
        self._size = 0

    def sending(self) -> None:
        pass

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._status = status

    def body(self, data: bytes, last: bool, framed: bytes = b"") -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._size > MAX_REPLY:
            self._settle(Broken.PROTOCOL)

    def ended(self) -> None:
        self._settle(Reply(self._status, b"".join(self._parts)))

    def failed(self, failure: Failure) -> None:
        self._settle(failure.kind)

    def crashed(self) -> None:
        self._settle(Broken.PROTOCOL)

    def _settle(self, result: Reply | Broken) -> None:
        if not self.done.done():
            self.done.set_result(result)


async def ask(
    pool: Pool, target: bytes, body: bytes, seconds: float, *, method: bytes = b"POST", fresh: bool = True
) -> Reply | Broken:
    """The engine's reply, of any status, or why there is none. `seconds`: the longest wait. `fresh`: on a new connection."""
    receiver = _Asking()
    leg = pool.start(receiver, target, b"", body, method=method, fresh=fresh)
    try:
        async with asyncio.timeout(seconds):
            return await receiver.done
    except TimeoutError:
        return Broken.SILENT
    finally:
        if leg.receiver is not None:
            leg.cancel()
