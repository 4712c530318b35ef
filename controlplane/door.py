"""The door of the web process: how large a request may be and how long it may take to come, held before anybody has read it.

Whoever reaches the port may send; nobody needs a login for that. So a body has one small limit for all, is in memory before
Django sees it (never in a temporary file), and whoever is slow to send, or to read, loses the connection.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_BYTES = 256 << 10
"""Of a body. The largest that means anything is a deployment's document, at most 64 KiB, percent-encoded in a form."""
MOST_HEAD_BYTES = 32 << 10
HEAD_SECONDS = 10.0
"""From a connection, or the first byte of its next request, to the end of that request's head."""
BODY_SECONDS = 20.0
"""From there to the end of the body."""
READ_SECONDS = 30.0
"""In which a client must take something of an answer that waits for it."""
PER_ADDRESS = 200
"""Connections of one address. This machine's own are not counted: a proxy's are many people's."""
MOST_CONNECTIONS = 2_000

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[..., Awaitable[None]]


class Door:
    """ASGI: gives `app` whole requests, bounded, or answers 413 and 408 itself."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await _body(scope, receive)
        except ValueError:
            return await _refuse(scope, send, 413, "too_large", f"the body is longer than {MOST_BYTES} bytes")
        except TimeoutError:
            return await _refuse(scope, send, 408, "timeout", f"the body did not come within {BODY_SECONDS:g} seconds")
        if body is None:
            return None
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return whole.pop() if whole else await receive()

        return await self._app(scope, again, send)


async def _body(scope: Message, receive: Receive) -> bytes | None:
    """None: the client has left. Raises `ValueError` when it is too long; by its own word, before anything is read."""
    said = dict(scope["headers"]).get(b"content-length", b"0")
    if not said.isdigit() or int(said[:20]) > MOST_BYTES:
        raise ValueError
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MOST_BYTES:
            raise ValueError
        if not message.get("more_body", False):
            return b"".join(parts)


async def _refuse(scope: Message, send: Send, status: int, code: str, sentence: str) -> None:
    if scope["path"].startswith("/api/"):
        kind = b"application/json"
        text = json.dumps({"error": {"code": code, "message": sentence, "field": None, "retryable": False}})
    else:
        kind, text = b"text/plain; charset=utf-8", f"{sentence}\n"
    headers = [(b"content-type", kind), (b"content-length", b"%d" % len(text)), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})


class Protocol(H11Protocol):
    """uvicorn's, which waits for ever for a head and for a slow reader; this one does not."""

    _per_address: ClassVar[Counter[str]] = Counter()
    _done = False
    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._per_address[self._address] += 1
        if self._per_address[self._address] > PER_ADDRESS and not _is_own(self._address):
            transport.abort()
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._left()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._await_head()

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before and self._late is not None:
            self._late.cancel()
            self._late = None

    def handle_websocket_upgrade(self, event: Any) -> None:
        said = dict(self.headers)
        if b"transfer-encoding" in said or said.get(b"content-length", b"0") != b"0":
            # What takes over waits for it for ever, and has no deadline.
            self.send_400_response("A WebSocket's first request has no body.")
            return
        self._left()
        super().handle_websocket_upgrade(event)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        super().resume_writing()

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def _await_head(self) -> None:
        if self._late is None and not self._done and not self.transport.is_closing():
            self._late = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _left(self) -> None:
        """This connection is none of HTTP's any more: it is closed, or a WebSocket's."""
        self._done = True
        for timer in (self._late, self._unread):
            if timer is not None:
                timer.cancel()
        if self._per_address[self._address] > 1:
            self._per_address[self._address] -= 1
        else:
            del self._per_address[self._address]


def _is_own(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return True  # a unix socket
