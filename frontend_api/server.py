"""The client's side of HTTP/1.1, on httptools: requests in, replies and streams out, one at a time on each connection.

It owns limits, keep-alive, pipelining, timeouts, back-pressure and drain, and refuses every request whose framing could be
read in two ways. It knows neither keys nor engines: an `Application` does. No TLS and no HTTP/2: a proxy in front does both.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from http import HTTPStatus
from time import monotonic, perf_counter
from typing import Protocol, cast

import httptools
from msgspec import Struct

from controlplane.fleet.wire import SnapshotKey
from frontend_api.openai import Problem, error_body

log = logging.getLogger(__name__)


class Limits(Struct, frozen=True):
    """Sizes in bytes, times in seconds."""

    head_bytes: int = 32 << 10
    body_bytes: int = 64 << 20
    head_seconds: float = 20.0
    """From a request's first byte to the end of its head."""
    body_seconds: float = 60.0
    """Between two pieces of a body."""
    idle_seconds: float = 75.0
    """A kept connection without a request."""
    write_seconds: float = 60.0
    """A client that takes no byte of its reply."""
    linger_seconds: float = 2.0
    """How long a refused client's further bytes are read away, so that it sees the refusal and not a reset."""
    pipelined: int = 16
    """Requests read ahead on one connection."""


class Request:
    """One request. Header names are lower case; of a repeated name the last value counts."""

    __slots__ = ("body", "headers", "http10", "keep_alive", "key", "method", "path", "query", "received_at", "refusal")

    def __init__(self) -> None:
        self.method = b""
        self.path = b""
        self.query = b""
        self.headers: dict[bytes, bytes] = {}
        self.http10 = False
        self.keep_alive = True
        self.body = b""
        self.received_at = 0.0
        """`perf_counter` when its last byte came."""
        self.refusal: Problem | None = None
        self.key: SnapshotKey | None = None
        """The API key it came with."""


class Exchange(Protocol):
    """What answers a request over time."""

    def client_gone(self) -> None: ...
    def client_slow(self) -> None: ...
    def client_ready(self) -> None: ...


class Application(Protocol):
    def judge(self, request: Request, peer: str) -> Problem | None:
        """Called when the head is complete: a reason to refuse before the body is read (it is read and dropped)."""

    def serve(self, request: Request, connection: ClientConnection) -> None:
        """Called with the whole request: reply at once, or set `connection.exchange` and reply later."""

    def refused(self, request: Request, problem: Problem, connection: ClientConnection) -> None:
        """Reply with a problem, in the shape of the request's endpoint."""

    def count_refused(self, status: int) -> None:
        """A request that was refused below HTTP's grammar: nobody else sees it."""


_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
_BODILESS = (b"GET", b"HEAD", b"OPTIONS", b"DELETE")


class ClientConnection(asyncio.Protocol):
    """One client connection."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._queue: deque[Request] = deque()
        self._busy = False
        self._head = b""
        self._closing = False
        self._lingering = 0.0
        self._slow_since = 0.0
        self._paused_reading = False
        self._last_read = monotonic()
        self._in_message = False
        self._in_head = False
        self._upgrading = False
        self._replaying = False
        self._broken: Problem | None = None
        self._head_bytes = 0
        self._raw_bytes = 0
        self.exchange: Exchange | None = None
        self.current = Request()
        self.peer = ""

    # ---- writing: for the application

    def reply(self, status: int, headers: bytes, body: bytes) -> None:
        """A whole reply. `headers`: header lines, each ended; length and connection are added."""
        close = self._must_close()
        self._write(
            b"HTTP/1.1 %d %b\r\n%bcontent-length: %d\r\n%b\r\n%b"
            % (
                status,
                _REASONS.get(status, b"Unknown"),
                headers,
                len(body),
                b"connection: close\r\n" if close else b"",
                b"" if self.current.method == b"HEAD" else body,
            )
        )
        self._done(close)

    def begin(self, status: int, headers: bytes) -> None:
        """Begin a reply of unknown length. Its head leaves with the first data."""
        framing = b"" if self.current.http10 else b"transfer-encoding: chunked\r\n"
        close = b"connection: close\r\n" if self._must_close() else b""
        reason = _REASONS.get(status, b"Unknown")
        self._head = b"HTTP/1.1 %d %b\r\n%b%b%b\r\n" % (status, reason, headers, framing, close)

    def send(self, data: bytes, *, last: bool = False) -> None:
        """More of a begun reply; `last`: it is whole now."""
        if not self.current.http10:
            if data:
                data = b"%x\r\n%b\r\n" % (len(data), data)
            if last:
                data += b"0\r\n\r\n"
        if self._head:
            data = self._head + data
            self._head = b""
        if data:
            self._write(data)
        if last:
            self._done(self._must_close())

    def cut(self) -> None:
        """Break off so that the client sees that its reply is not whole."""
        self._closing = True
        self.exchange = None
        if self._transport is not None:
            self._transport.abort()

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _must_close(self) -> bool:
        return not self.current.keep_alive or self._server.draining

    def _done(self, close: bool) -> None:
        self.exchange = None
        self._busy = False
        if close:
            self._closing = True
            if self._transport is not None:
                self._transport.close()
        elif self._queue or self._broken is not None:
            asyncio.get_running_loop().call_soon(self._next)
        elif self._paused_reading:
            self._resume_reading()

    # ---- requests in their order

    def _next(self) -> None:
        while not self._busy and not self._closing:
            if self._queue:
                self.current = request = self._queue.popleft()
                self._busy = True
                try:
                    if request.refusal is not None:
                        self._server.application.refused(request, request.refusal, self)
                    else:
                        self._server.application.serve(request, self)
                except Exception:
                    log.exception("defect in the router at %r", request.path)
                    self._break(500, "internal_error", "The router failed; its log has the reason.")
                    self._busy = False
            elif self._broken is not None:
                self._linger(self._broken)
            else:
                break
        if self._paused_reading and len(self._queue) < self._server.limits.pipelined and not self._closing:
            self._resume_reading()

    def _linger(self, problem: Problem) -> None:
        """Tell a client whose bytes cannot be understood (any more), then read away what it still sends."""
        self._closing = True
        self._server.application.count_refused(problem.status)
        body = error_body(problem)
        self._write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (problem.status, _REASONS[problem.status], len(body), body)
        )
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()
            self._resume_reading()
            self._lingering = monotonic() + self._server.limits.linger_seconds

    def _resume_reading(self) -> None:
        if self._paused_reading and self._transport is not None:
            self._paused_reading = False
            self._transport.resume_reading()

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=256 << 10)
        peer = transport.get_extra_info("peername")
        self.peer = peer[0] if isinstance(peer, tuple) else ""
        self._server.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)
        self._transport = None
        self._gone()

    def eof_received(self) -> bool:
        self._gone()
        return False

    def _gone(self) -> None:
        self._closing = True
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.client_gone()

    def pause_writing(self) -> None:
        self._slow_since = monotonic()
        if self.exchange is not None:
            self.exchange.client_slow()

    def resume_writing(self) -> None:
        self._slow_since = 0.0
        if self.exchange is not None:
            self.exchange.client_ready()

    def data_received(self, data: bytes) -> None:
        if self._closing or self._broken is not None:
            return
        self._last_read = monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError:
            raise
        except httptools.HttpParserError as error:
            self._break(400, "bad_request", f"This is not valid HTTP/1.1: {error}.")
        if self._in_message and self._broken is None:
            self._count_raw(len(data))
        self._next()
        if len(self._queue) >= self._server.limits.pipelined and self._transport is not None and not self._closing:
            self._paused_reading = True
            self._transport.pause_reading()

    def _count_raw(self, size: int) -> None:
        limits = self._server.limits
        if self._in_head:
            self._head_bytes += size
            if self._head_bytes > limits.head_bytes:
                self._break(431, "header_too_large", f"The request's head is longer than {limits.head_bytes} bytes.")
        elif self._chunked:  # one-byte chunks and endless chunk extensions cost more than they carry
            self._raw_bytes += size
            if self._raw_bytes > 8 * limits.body_bytes:
                self._too_large()

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Offers of another protocol (h2c, sent by some clients with every first request) may be ignored: read on as HTTP/1.1."""
        if self._broken is not None:
            return
        self._parser = httptools.HttpRequestParser(self)
        framing = b"Transfer-Encoding: chunked" if self._chunked else b"Content-Length: %d" % self._length
        self._replaying = True
        self._upgrading = False
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n\r\n" % framing)
        if rest:
            self.data_received(rest)

    def _break(self, status: int, code: str, message: str) -> None:
        """After this nothing on the connection can be trusted: answer what came before, then say so and close."""
        if self._broken is None:
            self._broken = Problem(status, code, message)

    def _too_large(self) -> None:
        size = self._server.limits.body_bytes
        self._break(
            413, "body_too_large", f"The body is larger than {size} bytes; the router's --max-body-mb sets this."
        )

    # ---- httptools

    def on_message_begin(self) -> None:
        if self._replaying:
            return
        self._request = Request()
        self._in_message = self._in_head = True
        self._began = monotonic()
        self._target = b""
        self._head_bytes = self._raw_bytes = self._body_bytes = self._hosts = self._length = 0
        self._chunked = False
        self._body: list[bytes] = []

    def on_url(self, url: bytes) -> None:
        if not self._replaying:
            self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + 4
        if self._replaying or not self._in_head:
            return  # trailers say nothing that is used
        name = name.lower()
        headers = self._request.headers
        if name in headers and name in (b"authorization", b"x-api-key", b"host", b"expect"):
            self._break(400, "bad_request", f"The header {name.decode()} is given twice.")
        headers[name] = value

    def on_headers_complete(self) -> None:
        if self._replaying:
            self._replaying = False
            return None
        self._in_head = False
        request = self._request
        parser = self._parser
        request.method = parser.get_method()
        version = parser.get_http_version()
        request.http10 = version == "1.0"
        request.keep_alive = not request.http10 and parser.should_keep_alive()
        self._upgrading = parser.should_upgrade()
        headers = request.headers
        if self._head_bytes + len(self._target) > self._server.limits.head_bytes:
            size = self._server.limits.head_bytes
            return self._break(431, "header_too_large", f"The request's head is longer than {size} bytes.")
        if version not in ("1.1", "1.0"):
            return self._break(505, "http_version", "Only HTTP/1.1 and HTTP/1.0 are spoken here.")
        if not request.http10 and b"host" not in headers:
            return self._break(400, "bad_request", "The header host is missing.")
        if request.method == b"CONNECT":
            return self._break(405, "method_not_allowed", "This is no proxy.")
        coding = headers.get(b"transfer-encoding")
        if coding is not None:
            self._chunked = True
            if coding.lower() != b"chunked" or request.http10:
                return self._break(501, "transfer_encoding", "The only transfer encoding understood is chunked.")
        elif length := headers.get(b"content-length"):
            self._length = int(length)
            if self._length > self._server.limits.body_bytes:
                return self._too_large()
        target = self._target
        if not target.startswith(b"/"):
            target = _origin_form(target)
        request.path, _, request.query = target.partition(b"?")
        if b"content-encoding" in headers:
            request.refusal = Problem(415, "content_encoding", "Send the body without a content encoding.")
        else:
            request.refusal = self._server.application.judge(request, self.peer)
        expect = headers.get(b"expect")
        if expect is not None:
            if expect.lower() != b"100-continue":
                return self._break(417, "expectation_failed", "The only expectation understood is 100-continue.")
            if request.refusal is not None:
                self._broken = request.refusal
            elif not self._busy and not self._queue:
                self._write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return None

    def on_body(self, data: bytes) -> None:
        self._body_bytes += len(data)
        if self._body_bytes > self._server.limits.body_bytes:
            self._too_large()
        elif self._request.refusal is None and self._broken is None:
            self._body.append(data)

    def on_message_complete(self) -> None:
        if self._upgrading or self._broken is not None:
            return
        self._in_message = False
        request = self._request
        body = self._body
        request.body = body[0] if len(body) == 1 else b"".join(body)
        self._body = []
        request.received_at = perf_counter()
        self._queue.append(request)

    # ---- once a second

    def check(self, now: float) -> None:
        """Enforce the time limits. `now`: monotonic."""
        limits = self._server.limits
        if self._lingering:
            if now > self._lingering:
                self.cut()
        elif self._slow_since and now - self._slow_since > limits.write_seconds:
            exchange = self.exchange
            self.cut()
            if exchange is not None:
                exchange.client_gone()
        elif self._busy or self._queue or self._broken is not None:
            return
        elif self._in_message:
            late = (
                now - self._began > limits.head_seconds
                if self._in_head
                else now - self._last_read > limits.body_seconds
            )
            if late:
                self._break(408, "request_timeout", "The request did not come in time.")
                self._next()
        elif now - self._last_read > limits.idle_seconds:
            self.close_if_idle()

    def close_if_idle(self) -> None:
        """Close a kept connection that is between two requests."""
        if not self._busy and not self._queue and not self._in_message and self._transport is not None:
            self._closing = True
            self._transport.close()


def _origin_form(target: bytes) -> bytes:
    """`http://host/path?query` as `/path?query` (RFC 9112 §3.2.2); anything else stays and finds no route."""
    _, _, rest = target.partition(b"://")
    slash = rest.find(b"/")
    return rest[slash:] if slash >= 0 else target


class Server:
    """All client connections of this process."""

    def __init__(self, application: Application, limits: Limits) -> None:
        self.application = application
        self.limits = limits
        self.connections: set[ClientConnection] = set()
        self.draining = False
        self._listener: asyncio.Server | None = None

    async def listen(self, sock: socket.socket) -> None:
        """Accept on a socket that is bound already."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: ClientConnection(self), sock=sock, backlog=2048)

    def sweep(self, now: float) -> None:
        """Once a second: enforce the time limits."""
        for connection in list(self.connections):
            connection.check(now)

    def stop_accepting(self) -> None:
        """Drain: no new connections, idle ones closed, the others closed after their reply."""
        self.draining = True
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections):
            connection.close_if_idle()

    def cut_all(self) -> None:
        for connection in list(self.connections):
            exchange = connection.exchange
            connection.cut()
            if exchange is not None:
                exchange.client_gone()
