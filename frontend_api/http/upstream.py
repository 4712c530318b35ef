"""Connections to engines: pooled HTTP/1.1 on httptools. One request at a time on each; the framing of replies is followed.

It knows no retry rule: a leg that fails says how far it came, and `flow` decides. Cancelling a leg closes its connection, so
that the engine notices at once. No TLS: engines live on loopback or one private network.
"""

from __future__ import annotations

import asyncio
import logging
from enum import Enum
from functools import lru_cache
from time import monotonic
from typing import NamedTuple, Protocol, cast
from urllib.parse import urlsplit

import httptools

from frontend_api.http import vanished
from frontend_api.http.heads import Head, head_of
from frontend_api.http.outbox import Outbox
from frontend_api.routing.view import Engine

log = logging.getLogger(__name__)

CONNECT_SECONDS = 3.0
IDLE_SECONDS = 4.0
"""vLLM's server closes idle connections after 5 s; ours go first, so that a request never meets that close."""
ENDING_SECONDS = 1.0
"""For which a reply may go on after its answer is whole."""
MAX_HEAD = 64 << 10
"""Bytes of a reply's head."""


class Broken(Enum):
    """Why a leg ended without a whole reply."""

    CONNECT = "connect"
    """No connection: refused, unreachable."""
    CONNECT_TIMEOUT = "connect-timeout"
    STALE = "stale"
    """A kept connection was closed by the engine just when it was used again: says nothing about the engine."""
    RESET = "reset"
    """The connection broke before the reply was whole."""
    PROTOCOL = "protocol"
    """Not HTTP/1.1, or framing that contradicts itself."""
    SILENT = "silent"
    """No byte for too long."""


class Failure(NamedTuple):
    kind: Broken
    sent: bool
    """The request may have reached the engine."""


class Receiver(Protocol):
    """Who a leg reports to. After `ended` or `failed` nothing more is called."""

    def sending(self) -> None: ...
    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None: ...
    def body(self, data: bytes, last: bool, framed: bytes = b"") -> None:
        """`framed`: the very bytes that were received, where they are just this as one chunk."""

    def ended(self) -> None: ...
    def failed(self, failure: Failure) -> None: ...
    def crashed(self) -> None:
        """One of the calls above raised: end what can be ended."""


class Leg:
    """One request to one engine, from before the connection to the end of the reply."""

    __slots__ = ("connection", "last_byte_at", "receiver")

    def __init__(self, receiver: Receiver) -> None:
        self.receiver: Receiver | None = receiver
        self.connection: Connection | None = None
        self.last_byte_at = monotonic()

    def cancel(self) -> None:
        """Nobody wants the reply any more. Closes the connection; the receiver hears nothing."""
        self.receiver = None  # a connection still being made goes to the pool instead
        if self.connection is not None:
            self.connection.abort()

    def let_end(self) -> None:
        """Nobody needs what may still come: the answer is whole. Where the reply ends soon its connection is kept."""
        connection, self.connection = self.connection, None
        self.receiver = None
        if connection is not None:
            connection.let_end()

    def give_up(self, kind: Broken) -> None:
        """Cancel, and report it as a failure."""
        receiver, sent = self.receiver, self.connection is not None
        self.cancel()
        if receiver is not None:
            receiver.failed(Failure(kind, sent))

    def pause(self) -> None:
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        if self.connection is not None:
            self.connection.resume()


class Connection:
    """One TCP connection to an engine: an `asyncio.Protocol`, not by inheritance (see `ClientConnection`)."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self.leg: Leg | None = None
        self.ending_since = 0.0
        """Since when all that is awaited is the reply's end; 0: there is more to it, or there is no reply."""
        self.idle_since = 0.0
        self._reused = False
        self._paused = False
        self._known: Head | None = None
        """Of a good reply, if it may come again …"""
        self._known_headers: list[tuple[bytes, bytes]] = []
        """… with these headers."""
        self._reset()

    def _reset(self) -> None:
        self.ending_since = 0.0
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._hops: list[bytes] = []
        """Headers that are for this connection only."""
        self._parts: list[bytes] = []
        self._began = False
        self._head_done = False
        self._complete = False
        self._between = False
        """Nothing of a next chunk has come yet."""
        self._violated = False
        self._keep_alive = False
        self._head_bytes = 0
        self._length = False
        self._chunked = False

    # from the pool

    def send(self, leg: Leg, request: bytes) -> None:
        self.leg = leg
        leg.connection = self
        leg.last_byte_at = monotonic()
        assert self._transport is not None
        assert leg.receiver is not None
        leg.receiver.sending()  # before: a write that wakes the engine may let it run first
        self._pool.outbox.write(self._transport, request)

    @property
    def began(self) -> bool:
        """Some of a reply has come."""
        return self._began

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def abort(self) -> None:
        self.leg = None
        if self._transport is not None:
            self._transport.abort()

    def let_end(self) -> None:
        if self._pool.closed:  # nobody would look after it
            self.abort()
        else:
            self.ending_since = monotonic()
            self.resume()

    def pause(self) -> None:
        if not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
            if self.leg is not None:
                self.leg.last_byte_at = monotonic()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._pool.opened.add(self)

    def data_received(self, data: bytes) -> None:
        leg = self.leg
        if leg is None:  # bytes that nobody asked for
            self.abort()
            return
        leg.last_byte_at = monotonic()
        receiver = leg.receiver
        if self._between and receiver is not None:
            head = _head_of_chunk(len(data))
            if head and data.startswith(head) and data.endswith(b"\r\n"):  # the parser need not see it
                try:
                    receiver.body(data[len(head) : -2], False, data)
                except Exception:
                    self._defect(receiver)
                return
        headed = self._head_done
        if self._began or self._known is None or not self._recall(self._known, data):
            self._parse(data)
        if self._violated:
            self._fail(Broken.PROTOCOL)
            return
        try:
            if self._head_done and not headed and receiver is not None:
                receiver.head(self._status, self._headers)
            parts = self._parts
            if parts:
                self._parts = []
                if leg.receiver is not None:
                    leg.receiver.body(parts[0] if len(parts) == 1 else b"".join(parts), self._complete)
            if self._complete and self.leg is leg:  # the receiver may have cancelled it just now
                self._finish(self._keep_alive)
        except Exception:
            self._defect(receiver)

    def _recall(self, known: Head, data: bytes) -> bool:
        """Whether this is a whole reply with the head of the one before."""
        body = known.body_in(data)
        if body is None:
            return False
        self._began = self._head_done = self._length = self._keep_alive = self._complete = True
        self._status, self._headers, self._parts = 200, self._known_headers, [body]
        return True

    def _parse(self, data: bytes) -> None:
        begins = not self._began
        self._began = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._violated = True
        if not self._head_done and not self._violated:
            self._head_bytes += len(data)
            self._violated = self._head_bytes > MAX_HEAD
        if self._between and not data.endswith(b"\r\n"):  # some of a chunk's size
            self._between = False
        if begins:
            whole = self._complete and self._keep_alive and not self._chunked and not self._violated
            self._known = head_of(data, sum(map(len, self._parts)), b"HTTP/1.1 200 ") if whole else None
            self._known_headers = self._headers

    def _defect(self, receiver: Receiver | None) -> None:
        log.exception("defect in the router")
        self.abort()
        if receiver is not None:
            receiver.crashed()

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.lost(self)
        leg = self.leg
        if leg is None:
            return
        if self._head_done and error is None and not self._length and not self._chunked:
            self._finish(False)  # a reply whose end is the end of the connection
        elif self._reused and not self._began:
            self._fail(Broken.STALE)
        else:
            self._fail(Broken.RESET)

    def eof_received(self) -> None:
        """The transport is closed after it."""

    def pause_writing(self) -> None:
        """An engine that takes a request slowly: it is bounded, and waits in memory."""

    def resume_writing(self) -> None: ...

    def _finish(self, keep: bool) -> None:
        leg, self.leg = self.leg, None
        assert leg is not None
        receiver = leg.receiver
        leg.receiver = leg.connection = None
        transport = self._transport
        framed = self._length or self._chunked
        # One that answered before it took the request may never take the rest, nor what would stand behind it.
        if keep and framed and transport is not None and self.usable and not transport.get_write_buffer_size():
            self.resume()
            self._reused = True
            self._reset()
            self._pool.keep(self)
        else:
            self.abort()
        if receiver is not None:
            receiver.ended()

    def _fail(self, kind: Broken) -> None:
        leg = self.leg
        self.abort()
        if leg is not None and leg.receiver is not None:
            receiver = leg.receiver
            leg.receiver = leg.connection = None
            receiver.failed(Failure(kind, True))

    # httptools

    def on_message_begin(self) -> None:
        if self._complete:  # a second reply to one request
            self._violated = True
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_done:
            return  # a trailer
        name = name.lower()
        if name == b"content-length":
            self._length = True
        elif name == b"transfer-encoding":
            if self._chunked or value.lower() != b"chunked":
                self._violated = True
            self._chunked = True
        elif name == b"connection":
            self._hops += value.lower().replace(b" ", b"").split(b",")
        else:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._status = status = self._parser.get_status_code()
        if status < 200:
            if self._length or self._chunked:  # the parser would take what follows for a body, and that for the reply's
                self._violated = True
            return
        if self._hops:
            self._headers = [header for header in self._headers if header[0] not in self._hops]
        self._head_done = True
        self._keep_alive = self._parser.should_keep_alive()
        if status in (204, 304):
            self._length = True
        self._between = self._chunked

    def on_chunk_header(self) -> None:
        self._between = False

    def on_chunk_complete(self) -> None:
        self._between = True

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        self._between = False
        if self._head_done:
            self._complete = True


@lru_cache(8192)
def _head_of_chunk(size: int) -> bytes:
    """What `size` bytes begin with that are one whole chunk in the usual form; empty: they cannot be."""
    digits = len(b"%x" % max(size - 5, 0))
    for length in (size - digits - 4, size - digits - 3):
        head = b"%x\r\n" % max(length, 0)
        if length > 0 and len(head) + length + 2 == size:
            return head
    return b""


class Pool:
    """The connections to one engine."""

    def __init__(self, engine: Engine, outbox: Outbox) -> None:
        self.outbox = outbox
        url = urlsplit(engine.spec.url)
        self.host = url.hostname or ""
        self.port = url.port or 80
        self._path = url.path.rstrip("/").encode()
        secret = engine.spec.secret
        self._fixed = b" HTTP/1.1\r\nhost: %b\r\n%bcontent-type: application/json\r\n" % (
            url.netloc.rpartition("@")[2].encode(),
            b"authorization: Bearer %b\r\n" % secret.encode() if secret else b"",
        )
        self.idle: list[Connection] = []
        self.opened: set[Connection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self.closed = False

    def start(
        self,
        receiver: Receiver,
        target: bytes,
        headers: bytes,
        body: bytes,
        *,
        method: bytes = b"POST",
        fresh: bool = False,
    ) -> Leg:
        """Send a request. `headers`: further header lines, each ended. `fresh`: on a new connection only."""
        request = b"%b %b%b%b%bcontent-length: %d\r\n\r\n%b" % (
            method, self._path, target, self._fixed, headers, len(body), body,
        )  # fmt: skip
        leg = Leg(receiver)
        if not fresh:
            oldest = monotonic() - IDLE_SECONDS
            while self.idle:
                connection = self.idle.pop()
                if connection.usable and connection.idle_since > oldest:
                    connection.send(leg, request)
                    return leg
                connection.abort()
        task = asyncio.get_running_loop().create_task(self._connect(leg, request))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return leg

    async def _connect(self, leg: Leg, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        kind = Broken.CONNECT
        connection = Connection(self)
        protocol = cast(asyncio.Protocol, connection)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                transport, _ = await loop.create_connection(lambda: protocol, self.host, self.port)
            vanished.end_after(vanished.ENGINE_SECONDS, transport.get_extra_info("socket"))
        except TimeoutError:
            kind = Broken.CONNECT_TIMEOUT
        except OSError:
            pass
        receiver = leg.receiver
        if connection.usable:
            if receiver is not None:
                connection.send(leg, request)
            else:
                self.keep(connection)
            return
        if receiver is not None:
            leg.receiver = None
            receiver.failed(Failure(kind, False))

    def keep(self, connection: Connection) -> None:
        if self.closed:
            connection.abort()
            return
        connection.idle_since = monotonic()
        self.idle.append(connection)

    def lost(self, connection: Connection) -> None:
        self.opened.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)

    def heard_since(self, at: float) -> bool:
        """Whether the engine has written some of an answer since then (monotonic)."""
        return any(c.leg is not None and c.began and c.leg.last_byte_at > at for c in self.opened)

    @property
    def in_use(self) -> bool:
        return bool(self.opened or self._connecting)

    def cut_endless(self, now: float) -> None:
        """Close connections whose replies do not end although their answers are whole. `now`: monotonic."""
        for connection in list(self.opened):
            if connection.ending_since and now - connection.ending_since > ENDING_SECONDS:
                connection.abort()

    def close_idle(self, older_than: float) -> None:
        """Close connections that have been idle since before `older_than` (monotonic)."""
        while self.idle and self.idle[0].idle_since < older_than:
            self.idle.pop(0).abort()

    def close(self) -> None:
        """Keep no connection any more; those in use go when their reply ends."""
        self.closed = True
        self.close_idle(float("inf"))
        self.cut_endless(float("inf"))


class Upstreams:
    """A pool for each engine of the view."""

    def __init__(self) -> None:
        self._pools: dict[Engine, Pool] = {}
        self._outbox = Outbox()

    def pool(self, engine: Engine) -> Pool:
        pool = self._pools.get(engine)
        if pool is None:
            pool = self._pools[engine] = Pool(engine, self._outbox)
        return pool

    def forget(self, engine: Engine) -> None:
        pool = self._pools.pop(engine, None)
        if pool is not None:
            pool.close()

    def sweep(self, now: float) -> None:
        """Once a second: close what has been idle or ending for too long, and forget engines without connections: a request that began
        before an engine left the view may have gone there since."""
        for engine, pool in list(self._pools.items()):
            pool.close_idle(now - IDLE_SECONDS)
            pool.cut_endless(now)
            if not pool.in_use:
                del self._pools[engine]

    def open_connections(self) -> int:
        return sum(len(pool.opened) for pool in self._pools.values())

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


async def probe(engine: Engine) -> Broken | None:
    """Why the engine takes no TCP connection now; None: it takes one."""
    url = urlsplit(engine.spec.url)
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(url.hostname, url.port or 80)
    except TimeoutError:
        return Broken.CONNECT_TIMEOUT
    except OSError:
        return Broken.CONNECT
    writer.transport.abort()
    return None
