"""The client's side of HTTP/1.1: requests in, replies and streams out, one at a time on each connection.

It owns keep-alive, pipelining, timeouts, back-pressure and drain; `reading` makes requests of bytes. It knows neither keys
nor engines: an `Application` does. No TLS and no HTTP/2: a proxy in front does both.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import sys
import termios
from contextlib import suppress
from fcntl import ioctl
from http import HTTPStatus
from time import monotonic, perf_counter
from typing import Protocol, cast

from frontend_api.formats.openai import Problem, error_body
from frontend_api.http.outbox import Outbox
from frontend_api.http.reading import Limits, Request, RequestReader
from frontend_api.processes.handout import Entrance

log = logging.getLogger(__name__)


class Exchange(Protocol):
    """What answers a request over time."""

    def client_gone(self, *, cut: bool = False) -> None:
        """`cut`: by the router."""

    def client_slow(self) -> None: ...
    def client_ready(self) -> None: ...


class Application(Protocol):
    def judge(self, request: Request, peer: str) -> Problem | None:
        """Called when the head is complete: a reason to refuse before the body is read (it is read and dropped)."""

    def serve(self, request: Request, connection: ClientConnection) -> None:
        """Called with the whole request: reply at once, or set `connection.exchange` and reply later."""

    def refused(self, request: Request, problem: Problem, connection: ClientConnection) -> None:
        """Reply with a problem, in the shape of the request's endpoint."""

    def cors(self, request: Request) -> bytes:
        """`Request.cors` of a request that was refused before it could be judged."""

    def count_refused(self, status: int) -> None:
        """A request that was refused below HTTP's grammar: nobody else sees it."""


_DEFECT = Problem(500, "internal_error", "The router failed; its log has the reason.")
MOST_IN_TURN = 16
"""Requests of one connection that are answered at once: then all others have their turn."""
_RESET = struct.pack("ii", 1, 0)
"""To end a connection with a reset: what was not sent is dropped."""
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


class ClientConnection:
    """One client connection: an `asyncio.Protocol`, not by inheritance, which would keep a compiler from making much of it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._outbox = server.outbox
        self._transport: asyncio.Transport | None = None
        self._reader = RequestReader(server.limits, self._judge)
        self._busy = False
        self._head = b""
        self._closing = False
        self._lingering = 0.0
        self._slow_since = 0.0
        """Since when the client has not taken (any) of what it was sent; 0: it has."""
        self._untaken = 0
        """Bytes of that, when it was last looked at."""
        self._goes_on = False
        """Others have their turn, and then the next requests."""
        self._paused_reading = False
        self._last_read = monotonic()
        self.exchange: Exchange | None = None
        self.current = Request()
        self.peer = ""

    # ---- writing: for the application

    def reply(self, status: int, headers: bytes, body: bytes) -> None:
        """A whole reply. `headers`: header lines, each ended; length and connection are added."""
        close = self._must_close()
        self._write(
            b"HTTP/1.1 %d %b\r\n%b%bcontent-length: %d\r\n%b\r\n%b"
            % (
                status,
                _REASONS.get(status, b"Unknown"),
                headers,
                self.current.cors,
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
        self._head = b"HTTP/1.1 %d %b\r\n%b%b%b%b\r\n" % (status, reason, headers, self.current.cors, framing, close)

    def send(self, data: bytes, *, last: bool = False, framed: bytes = b"") -> None:
        """More of a begun reply; `last`: it is whole now. `framed`: the data as one chunk, where that is at hand."""
        if not self.current.http10:
            if data:
                data = framed or b"%x\r\n%b\r\n" % (len(data), data)
            if last:
                data += b"0\r\n\r\n"
        if self._head:
            data = self._head + data
            self._head = b""
        if data and self._transport is not None:
            self._outbox.write(self._transport, data)
        if last:
            self._done(self._must_close())

    def keep(self, exchange: Exchange) -> bool:
        """The reply is whole, but the client has not taken it all: tell the exchange when it has, or is gone. False: there is
        nobody to take it any more."""
        if self._transport is not None:
            self.exchange = exchange
        return self._transport is not None

    def cut(self) -> None:
        """Break off so that the client sees that its reply is not whole."""
        self._closing = True
        self.exchange = None
        if self._transport is not None:
            if self.current.http10:  # there the end of the connection would pass for that of the reply
                sock = self._transport.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._transport.abort()

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._outbox.write(self._transport, data)

    def _close(self) -> None:
        self._closing = True
        if self._transport is not None:
            self._outbox.flush()
            self._transport.close()

    def _must_close(self) -> bool:
        return not self.current.keep_alive or self._server.draining

    def _done(self, close: bool) -> None:
        self.exchange = None
        self._busy = False
        self.current.body = b""  # an idle connection shall not hold it
        if close:
            self._close()
        elif self._reader.waits:
            self._turn()
            self._next_later()
        elif self._paused_reading:
            self._resume_reading()

    # ---- requests in their order

    def _turn(self) -> None:
        if self._reader.requests:  # that it waited for its turn is the client's doing
            self._reader.requests[0].received_at = perf_counter()

    def _next_later(self) -> None:
        if not self._goes_on:
            self._goes_on = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._goes_on = False
        self._turn()
        self._next()

    def _next(self) -> None:
        # Not while the client is slow: replies that nobody takes would fill the memory.
        answered = 0
        while not self._busy and not self._closing and not self._slow_since:
            if not self._reader.requests and self._reader.unread:
                self._reader.read_on()
            if self._reader.requests:
                answered += 1
                if answered > MOST_IN_TURN:
                    self._next_later()
                    return
                self.current = request = self._reader.requests.popleft()
                self._busy = True
                try:
                    if request.refusal is not None:
                        self._server.application.refused(request, request.refusal, self)
                    else:
                        self._server.application.serve(request, self)
                except Exception:
                    log.exception("defect in the router at %r", request.path)
                    self._reader.give_up(_DEFECT)
                    self._reader.requests.clear()  # a reply to the next would pass for one to this
                    self._busy = False
            elif self._reader.broken is not None:
                self._linger(self._reader.broken)
            else:
                if self._reader.wants_continue:
                    self._reader.wants_continue = False
                    self._reader.began = self._last_read = monotonic()  # it was not the client who let time pass
                    self._write(b"HTTP/1.1 100 Continue\r\n\r\n")
                break
        if self._paused_reading and not self._reader.full and not self._closing:
            self._resume_reading()

    def _linger(self, problem: Problem) -> None:
        """Tell a client whose bytes cannot be understood (any more), then read away what it still sends."""
        self._closing = True
        self._server.application.count_refused(problem.status)
        if problem.status == 413:  # whoever sent it may ask why, and the limit can be changed
            log.warning("Refused a request of %s: %s", self.peer, problem.message)
        body = error_body(problem)
        cors = self._server.application.cors(self._reader.present)
        self._write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (problem.status, _REASONS[problem.status], cors, len(body), body)
        )
        if self._transport is not None and not self._transport.is_closing():
            self._outbox.flush()
            self._transport.write_eof()
            self._resume_reading()
            self._lingering = monotonic() + self._server.limits.linger_seconds

    def _resume_reading(self) -> None:
        if self._paused_reading and self._transport is not None:
            self._paused_reading = False
            self._transport.resume_reading()

    def _judge(self, request: Request) -> Problem | None:
        return self._server.application.judge(request, self.peer)

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=256 << 10)
        peer = transport.get_extra_info("peername")
        self.peer = peer[0] if isinstance(peer, tuple) else ""
        self._server.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.left(self)
        self._transport = None
        if self.exchange is not None and not self._busy and error is None:
            self.exchange.client_ready()  # it took all of a reply that ended with the connection
        self._gone()
        self._reader.close()
        self.current = Request()

    def eof_received(self) -> bool:
        if self._busy:
            self._gone()
        self._closing = True
        self._outbox.flush()  # the transport closes now, and replies that are whole belong to the client
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
        if self.exchange is None and not self._busy:
            self._turn()
            self._next()

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        if self._closing or reader.broken is not None:
            return
        self._last_read = monotonic()
        reader.feed(data)
        self._next()
        if reader.full and self._transport is not None and not self._closing:
            self._paused_reading = True
            self._transport.pause_reading()

    # ---- once a second

    def check(self, now: float) -> None:
        """Enforce the time limits. `now`: monotonic."""
        limits = self._server.limits
        if self._lingering:
            if now > self._lingering:
                self.cut()
        elif self._slow_since or self._closing:
            self._last_read = now  # the client's own time begins when it has its reply
            if self._takes_nothing(now):
                exchange = self.exchange
                self.cut()
                if exchange is not None:
                    exchange.client_gone()
        elif self._busy or self._reader.waits:
            self._last_read = now
        elif self._reader.in_message:
            if self._reader.late(now, self._last_read):
                self._reader.give_up(Problem(408, "request_timeout", "The request did not come in time."))
                self._next()
        elif self._server.draining or now - self._last_read > limits.idle_seconds:
            self.close_if_idle()

    def _takes_nothing(self, now: float) -> bool:
        """Whether the client has taken no byte for too long, of all that the kernel has for it, too."""
        transport = self._transport
        if transport is None:
            return False
        untaken = transport.get_write_buffer_size()
        with suppress(OSError, ValueError):  # where a kernel does not tell, its part counts as taken
            told = ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
            untaken += int.from_bytes(told, sys.byteorder)
        if not self._slow_since or untaken < self._untaken:
            self._slow_since = now
        self._untaken = untaken
        return now - self._slow_since > self._server.limits.write_seconds

    def close_if_idle(self) -> None:
        """Close a kept connection that is between two requests."""
        if not self._busy and not self._reader.waits and not self._reader.in_message and self._transport is not None:
            self._close()


class Server:
    """All client connections of this process."""

    def __init__(self, application: Application, limits: Limits) -> None:
        self.application = application
        self.limits = limits
        self.connections: set[ClientConnection] = set()
        self.outbox = Outbox()
        self.draining = False
        self.arriving: set[asyncio.Task[None]] = set()
        """Connections that are being taken over from the parent."""
        self._listener: asyncio.Server | None = None
        self._entrance: Entrance | None = None

    async def listen(self, sock: socket.socket) -> None:
        """Accept on a socket that is bound already."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._connection, sock=sock, backlog=2048)

    def _connection(self) -> asyncio.Protocol:
        return cast(asyncio.Protocol, ClientConnection(self))

    def admit(self, entrance: Entrance) -> None:
        """Serve the connections that the parent accepts."""
        self._entrance = entrance
        asyncio.get_running_loop().add_reader(entrance.sock, self._take_arrivals, entrance)

    def _take_arrivals(self, entrance: Entrance) -> None:
        loop = asyncio.get_running_loop()
        for sock in entrance.arrivals():
            task = loop.create_task(self._take(entrance, sock))
            self.arriving.add(task)
            task.add_done_callback(self.arriving.discard)
        if entrance.over:
            loop.remove_reader(entrance.sock)

    async def _take(self, entrance: Entrance, sock: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._connection, sock)
        except OSError as error:
            log.info("A connection was gone before it could be served: %s", error)
            sock.close()
            entrance.ended()

    def left(self, connection: ClientConnection) -> None:
        """It is closed."""
        self.connections.discard(connection)
        if self._entrance is not None:
            self._entrance.ended()

    def sweep(self, now: float) -> None:
        """Once a second: enforce the time limits."""
        if self._entrance is not None:
            self._entrance.beat(now)
        for connection in list(self.connections):
            connection.check(now)

    def stop_accepting(self) -> None:
        """Drain: no new connections, idle ones closed, the others closed after their reply."""
        self.draining = True
        if self._listener is not None:
            self._listener.close()
        if self._entrance is not None:
            self._entrance.leave()
            self._take_arrivals(self._entrance)  # and what was handed over at this moment comes later
        for connection in list(self.connections):
            connection.close_if_idle()

    def cut_all(self) -> None:
        for connection in list(self.connections):
            exchange = connection.exchange
            connection.cut()
            if exchange is not None:
                exchange.client_gone(cut=True)
