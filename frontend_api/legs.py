"""The two ends of a leg: what becomes of the bytes that an engine sends.

A prefill engine's reply is collected and read; the answering engine's is relayed, a stream as it comes. Whatever they see they
tell the exchange; what follows from it is the flow's business.
"""

from __future__ import annotations

from time import monotonic, perf_counter
from typing import TYPE_CHECKING

from frontend_api import steps
from frontend_api.formats import openai
from frontend_api.formats.openai import Problem, Shape
from frontend_api.formats.sse import EventReader, EventTooLong
from frontend_api.http.upstream import Broken, Failure
from frontend_api.routing.view import Engine

if TYPE_CHECKING:
    from frontend_api.exchange import Exchange

MAX_REPLY = 256 << 20
"""Bytes of a reply that is not streamed."""
MAX_PREFILL = 16 << 20
"""The same of one token and its KV params."""
MAX_ERROR = 1 << 20
"""The same of an error."""
LONGEST_RETRY = 3_600.0
"""Seconds after which an engine may ask to be asked again."""
MAX_ANNOUNCEMENT = 256 << 10
"""Bytes of a stream before its first token that wait for it."""
_WHOLE = steps.Began(whole=True)
_STREAM_HEADERS = b"cache-control: no-cache\r\nx-accel-buffering: no\r\n"


class PrefillLeg:
    """Collects a prefill engine's reply; nothing of it reaches the client but its errors."""

    __slots__ = ("_began_at", "_exchange", "_headers", "_parts", "_size", "_status", "keeps")

    def __init__(self, exchange: Exchange, *, keeps: bool) -> None:
        self._exchange = exchange
        self.keeps = keeps
        """The engine is to keep the KV."""
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._parts: list[bytes] = []
        self._size = 0
        self._began_at = perf_counter()

    def sending(self) -> None:
        self._exchange.account.sending()

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._status = status
        self._headers = headers

    def body(self, data: bytes, last: bool, framed: bytes = b"") -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._size > MAX_PREFILL:
            _too_long(self._exchange)

    def ended(self) -> None:
        body = b"".join(self._parts)
        exchange = self._exchange
        if not exchange.left:
            exchange.account.prefill_seconds = perf_counter() - self._began_at
        if self._status == 200:
            exchange.account.prefill_reply = body
            exchange.advance(steps.Prefilled(openai.read_params(body), monotonic()))
        else:
            exchange.advance(steps.Replied(self._status, body, _retry_after(self._headers)))

    def failed(self, failure: Failure) -> None:
        self._exchange.advance(steps.Lost(failure.kind, failure.sent))

    def crashed(self) -> None:
        self._exchange.crashed()


class FreeingLeg:
    """Hears that a decode engine refused KV that nobody needs any more: the prefill engine is told so, and frees it."""

    __slots__ = ("_exchange", "_status")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._status = 0

    def sending(self) -> None:
        """It is no part of the request."""

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._status = status

    def body(self, data: bytes, last: bool, framed: bytes = b"") -> None:
        """Only its status counts."""

    def ended(self) -> None:
        self._exchange.freed(done=self._status < 500)

    def failed(self, failure: Failure) -> None:
        self._exchange.freed(done=False)

    def crashed(self) -> None:
        self._exchange.freed(done=False)


class AnswerLeg:
    """Relays the answering engine's reply: a stream as it comes, anything else once it is whole."""

    __slots__ = ("_engine", "_exchange", "_fetches", "_headers", "_heard_at", "_parts", "_size", "_status")

    def __init__(self, exchange: Exchange, engine: Engine, *, fetches: bool = False) -> None:
        self._exchange = exchange
        self._engine = engine
        self._fetches = fetches
        """It has KV to fetch. Until it has, the answer may still come another way: what only announces it waits."""
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._parts: list[bytes] = []
        self._size = 0
        self._heard_at = 0.0
        """When what is held back began; monotonic."""

    def sending(self) -> None:
        self._exchange.account.sending()

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._status = status
        self._headers = headers
        if status == 200:
            for name, value in headers:
                if name == b"content-type" and value.startswith(b"text/event-stream"):
                    exchange = self._exchange
                    account = exchange.account
                    account.reader = EventReader(
                        exchange.endpoint.shape,
                        account.usage,
                        unasked=exchange.metered,
                        fingerprint=self._engine.fingerprint,
                    )

    def body(self, data: bytes, last: bool, framed: bytes = b"") -> None:
        exchange = self._exchange
        account = exchange.account
        reader = account.reader
        if reader is None:
            self._parts.append(data)
            self._size += len(data)
            if self._size > (MAX_REPLY if self._status < 300 else MAX_ERROR):
                _too_long(exchange)
            return
        try:
            events = reader.feed(data)
        except EventTooLong:
            _too_long(exchange)
            return
        if reader.done and reader.fingerprint:
            self._engine.fingerprint = reader.fingerprint
        over = reader.over
        leg = exchange.leg
        if self._fetches and not account.streamed and reader.announced and leg is not None:
            # the client hears nothing of it: neither pings nor what only announces a token end the engine's silence
            self._heard_at = self._heard_at or leg.last_byte_at
            leg.last_byte_at = self._heard_at
        if not events and not over:
            return
        if not exchange.account.streamed:
            announced = reader.announced
            if reader.failed and announced:  # the client has no byte yet: it gets a plain error
                self._status, body = openai.event_error(events)
                exchange.account.reader = None
                if exchange.leg is not None:
                    exchange.leg.cancel()
                exchange.advance(steps.Replied(self._status, body))
                return
            if reader.empty:
                self._status = 502
                exchange.account.reader = None
                if exchange.leg is not None:
                    exchange.leg.cancel()
                exchange.advance(steps.Replied(502, openai.error_body(openai.EMPTY_ANSWER)))
                return
            early = exchange.endpoint.shape is Shape.RESPONSES and not reader.texts
            if announced and self._fetches and not over and self._size < MAX_ANNOUNCEMENT:
                self._parts.append(events)
                self._size += len(events)
                return
            if self._parts:
                events = b"".join([*self._parts, events])
                self._parts.clear()
            exchange.connection.begin(200, exchange.answer_headers(self._headers) + _STREAM_HEADERS)
            exchange.account.streamed = True
            exchange.advance(steps.Began(token=not early))
        if reader.texts:
            account.relaying()
        if reader.failed and not reader.done:
            events += openai.end_after_error(exchange.endpoint.shape)
        exchange.relay(events, over, framed if events is data else b"")
        if over and not last:  # the engine may take its time to end the reply, or never do it
            if exchange.leg is not None:
                exchange.leg.let_end()
            self.ended()

    def ended(self) -> None:
        exchange = self._exchange
        reader = exchange.account.reader
        if reader is None:
            body = b"".join(self._parts)
            if self._status >= 300:
                exchange.advance(steps.Replied(self._status, body, _retry_after(self._headers)))
                return
            endpoint = exchange.endpoint
            told = openai.read_reply(
                body, exchange.account.usage, endpoint.shape if endpoint.generates else Shape.PLAIN
            )
            if isinstance(told, openai.NotAnAnswer):
                exchange.advance(steps.Replied(*told))
                return
            exchange.connection.reply(self._status, exchange.answer_headers(self._headers), told)
            exchange.advance(_WHOLE)
        elif not exchange.account.streamed:
            exchange.account.reader = None
            exchange.advance(steps.Lost(Broken.RESET, True))
        elif reader.over:
            count, seconds = exchange.account.written() if not exchange.held_back else (0, 0.0)
            exchange.advance(steps.Ended(count, seconds, error=reader.failed))
        else:
            self._break_off("The engine ended the stream before the answer was whole.")

    def failed(self, failure: Failure) -> None:
        exchange = self._exchange
        if not exchange.account.streamed:
            exchange.account.reader = None
            exchange.advance(steps.Lost(failure.kind, failure.sent))
        elif failure.kind is Broken.SILENT:
            self._break_off("The engine stopped sending in the middle of the answer.")
        else:
            self._break_off("The connection to the engine broke in the middle of the answer.")

    def crashed(self) -> None:
        self._exchange.crashed()

    def _break_off(self, message: str) -> None:
        exchange = self._exchange
        account = exchange.account
        account.truncated = True
        rest = account.reader.waiting() if account.reader is not None else b""
        event = openai.error_event(Problem(502, "stream_truncated", message), exchange.endpoint.shape)
        exchange.connection.send(rest + event, last=True)
        exchange.advance(steps.Ended(whole=False))


def _retry_after(headers: list[tuple[bytes, bytes]]) -> float | None:
    """The seconds after which an engine wants to be asked again. A date says nothing that is worth a look at the clock."""
    value = next((value for name, value in headers if name == b"retry-after"), b"")
    return min(float(value), LONGEST_RETRY) if value.isdigit() and len(value) < 10 else None


def _too_long(exchange: Exchange) -> None:
    if exchange.leg is not None:
        exchange.leg.give_up(Broken.PROTOCOL)
