"""One request in motion: drives `flow` with real legs, relays the answer, and tells what became of it.

It holds no rule about retries or fallbacks; it does what the flow says and reports how that went. Whatever happens (answer,
refusal, client gone, defect) it ends exactly once: legs cancelled, load given back, one record written.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from time import monotonic, perf_counter, time
from typing import TYPE_CHECKING

from controlplane.fleet.wire import RequestRecord, Result
from frontend_api import flow, openai
from frontend_api.evidence import Cache, Prompt
from frontend_api.openai import Ask, Endpoint, Problem, Shape
from frontend_api.reading import Request
from frontend_api.server import ClientConnection
from frontend_api.sse import EventReader, EventTooLong
from frontend_api.upstream import Broken, Failure, Leg
from frontend_api.view import Deployment

if TYPE_CHECKING:
    from frontend_api.gate import Router

log = logging.getLogger(__name__)

MAX_REPLY = 256 << 20
"""Bytes of a reply that is not streamed."""
_PASSED_UP = (b"traceparent", b"tracestate", b"anthropic-version", b"anthropic-beta")
"""Request headers that an engine gets besides the router's own."""
_NOT_PASSED_DOWN = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"trailer", b"upgrade", b"server", b"x-request-id")
)
_STREAM_HEADERS = b"cache-control: no-cache\r\nx-accel-buffering: no\r\n"


class Exchange:
    """A request to one of the engines' endpoints."""

    def __init__(
        self,
        router: Router,
        connection: ClientConnection,
        request: Request,
        request_id: bytes,
        endpoint: Endpoint,
        ask: Ask,
        deployment: Deployment,
    ) -> None:
        self.router = router
        self.connection = connection
        self.request = request
        self.request_id = request_id
        self.endpoint = endpoint
        self.usage = openai.Usage()
        self.reader: EventReader | None = None
        self.streamed = False
        self.truncated = False
        self.sent_at = self.first_text_at = self.last_text_at = self.longest_gap = 0.0
        self.prefill_seconds: float | None = None
        self._ask = ask
        self._deployment = deployment
        self._explain = request.headers.get(b"x-tandem-explain") == b"1"
        self.leg: Leg | None = None
        self._slow = connection.slow  # what it was sent before may still be on its way
        self._over = False
        self._trace = flow.Trace()
        self._cache: Cache | None = None
        self._prompt: Prompt | None = None
        self._flow: flow.Flow | None = None
        headers = request.headers
        passed = b"x-request-id: %b\r\n" % request_id
        for name in _PASSED_UP:
            if name in headers:
                passed += b"%b: %b\r\n" % (name, headers[name])
        self._headers = passed
        self._target = endpoint.path.encode() + (b"?" + request.query if request.query else b"")

    # ---- the flow

    def start(self) -> None:
        self.connection.exchange = self
        self.router.exchanges.add(self)
        cache = self._cache = self.router.evidence.of(self._deployment)
        tokens = None
        if cache is not None and cache.tokens is not None and self.endpoint.generates:
            tokens = cache.tokens.at_once(self.endpoint, self.request.body)
        if tokens is None or isinstance(tokens, array):
            self._route(tokens)
        else:
            work = asyncio.get_running_loop().run_in_executor(None, tokens.ids)
            work.add_done_callback(self._tokenised)

    def _tokenised(self, work: asyncio.Future[array[int] | None]) -> None:
        if self._over:
            return
        if work.cancelled() or work.exception() is not None:
            log.error("defect in the router", exc_info=work.exception() if not work.cancelled() else None)
            self.crashed()
        else:
            self._route(work.result())

    def _route(self, tokens: array[int] | None) -> None:
        """Begin the flow. `tokens`: of the prompt; None: not known."""
        if tokens is not None and self._cache is not None:
            self._prompt = self._cache.prompt(tokens, self._ask.salt)
        self._flow = flow.serve(self._deployment, self._ask.alone, self._trace, monotonic, self._prompt)
        self.advance(None)

    def advance(self, outcome: flow.Outcome) -> None:
        """Tell the flow how its last step went, and take its next."""
        if self._over or self._flow is None:
            return
        try:
            step = self._flow.send(outcome)
            if step is not None:
                self._start(step)
        except StopIteration as stop:
            self._finish(stop.value)
        except Exception:
            log.exception("defect in the router")
            self.crashed()

    def _start(self, step: flow.Prefill | flow.Decode) -> None:
        self.leg = None
        pool = self.router.upstreams.pool(step.engine)
        body = self.request.body
        if isinstance(step, flow.Prefill):
            receiver: PrefillLeg | AnswerLeg = PrefillLeg(self)
            body = openai.prefill_body(self.endpoint, body)
        else:
            receiver = AnswerLeg(self)
            if step.params is not None:
                body = openai.decode_body(body, step.params)
        self.leg = pool.start(receiver, self._target, self._headers, body, fresh=step.fresh)

    def crashed(self) -> None:
        """A defect of the router's own: the client is told, and nothing stays behind."""
        if self._over:
            return
        self._close_flow()
        problem = Problem(500, "internal_error", "The router failed; its log has the reason.")
        if self.streamed:
            self.connection.send(openai.error_event(problem, self.endpoint.shape), last=True)
            self._end(200, Result.TRUNCATED)
        else:
            self._finish(problem)

    def sending(self) -> None:
        if not self.sent_at:
            self.sent_at = perf_counter()

    # ---- the client's connection

    def client_gone(self) -> None:
        if not self._over:
            self._close_flow()
            self._end(499, Result.ABORTED)

    def _close_flow(self) -> None:
        if self._flow is not None:
            self._flow.close()

    def client_slow(self) -> None:
        self._slow = True
        if self.leg is not None:
            self.leg.pause()

    def client_ready(self) -> None:
        self._slow = False
        if self.leg is not None:
            self.leg.resume()

    # ---- once a second

    def check(self, now: float) -> None:
        """Give up on an engine that has been silent for too long. `now`: monotonic."""
        leg = self.leg
        if leg is None or self._slow or leg.connection is None:
            return
        limit = self.router.silence_seconds if not self.streamed else self.router.gap_seconds
        if now - leg.last_byte_at > limit:
            leg.give_up(Broken.SILENT)

    # ---- the answer

    def answer_headers(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        lines = [b"%b: %b\r\n" % header for header in headers if header[0] not in _NOT_PASSED_DOWN]
        lines.append(b"x-request-id: %b\r\n" % self.request_id)
        if self._explain:
            lines.append(self._explanation())
        return b"".join(lines)

    def _explanation(self) -> bytes:
        trace = self._trace
        return (
            f"x-tandem-prefill: {trace.prefill or '-'}\r\nx-tandem-decode: {trace.decode or '-'}\r\n"
            f"x-tandem-reason: {trace.reason}\r\nx-tandem-fallback: {trace.cause if trace.fallback else '-'}\r\n"
            f"x-tandem-overhead-us: {self.overhead_us():.0f}\r\n{self._cache_explanation()}"
        ).encode()

    def _cache_explanation(self) -> str:
        """What cache-aware routing knew: nothing is said where it is not asked for."""
        if self._cache is None:
            return ""
        state, reasons = self._cache.standing()
        prompt, trace = self._prompt, self._trace
        overlap = f"{trace.overlap or 0}/{prompt.tokens}" if prompt is not None else "unknown"
        because = "; ".join(f"{who}={why}" for who, why in reasons.items()) or "-"
        costs = "; ".join(
            f"{c.engine.id} total={c.total:.6f} overlap={c.overlap} queue={c.queue:.6f} compute={c.compute:.6f} "
            f"transfer={c.transfer:.6f} streams={c.streams:.6f}"
            for c in trace.costs
        )
        return (
            f"x-tandem-state: {state}\r\nx-tandem-state-because: {because}\r\n"
            f"x-tandem-overlap: {overlap}\r\nx-tandem-candidates: {costs or '-'}\r\n"
        )

    def overhead_us(self) -> float:
        return (self.sent_at - self.request.received_at) * 1e6 if self.sent_at else 0.0

    def relay(self, data: bytes, last: bool) -> None:
        """Whole events for the client, timed. `last`: the answer ends with them."""
        reader = self.reader
        assert reader is not None
        if reader.texts:
            now = perf_counter()
            if not self.first_text_at:
                self.first_text_at = now
            elif now - self.last_text_at > self.longest_gap:
                self.longest_gap = now - self.last_text_at
            self.last_text_at = now
        self.connection.send(data, last=last)
        if self._slow and self.leg is not None:
            self.leg.pause()

    def _finish(self, verdict: flow.Verdict) -> None:
        connection = self.connection
        if verdict is None:
            self._end(200, self._result())
            return
        status = verdict.status
        if isinstance(verdict, Problem):
            extra = self._explanation() if self._explain else b""
            self.router.reply_problem(connection, verdict, self.endpoint.shape, self.request_id, extra)
        else:
            body = openai.shaped_error(status, verdict.body, self.endpoint.shape)
            connection.reply(status, b"content-type: application/json\r\n" + self.answer_headers([]), body)
        self._end(status, Result.REFUSED if status < 500 else Result.FAILED)

    def _result(self) -> Result:
        if self.truncated:
            return Result.TRUNCATED
        if not self.endpoint.generates:
            return Result.OK
        reader = self.reader
        if reader is not None:
            silent = reader.texts <= (1 if self.endpoint.shape is Shape.CHAT else 0)
            if reader.failed or silent:
                return Result.FAILED
        return Result.FAILED if self.usage.output == 0 else Result.OK

    def _end(self, status: int, result: Result) -> None:
        self._over = True
        self.router.exchanges.discard(self)
        leg, self.leg = self.leg, None
        if leg is not None:
            leg.cancel()
        if self.connection.exchange is self:
            self.connection.exchange = None
        now = perf_counter()
        trace, usage, request = self._trace, self.usage, self.request
        steps = (usage.output or (self.reader.texts if self.reader else 0)) - 1
        first, last = self.first_text_at, self.last_text_at
        self.router.telemetry.record(
            RequestRecord(
                id=self.request_id.decode(),
                at=time(),
                deployment=self._deployment.name,
                endpoint=self.endpoint.path,
                status=status,
                result=result,
                stream=self.streamed,
                key=request.key.id if request.key else "",
                prefill=trace.prefill,
                decode=trace.decode,
                reason=trace.reason,
                fallback=trace.fallback,
                fallback_cause=trace.cause if trace.fallback else "",
                prompt_tokens=usage.prompt,
                cached_tokens=usage.cached,
                output_tokens=usage.output,
                overlap_tokens=trace.overlap,
                prefill_seconds=self.prefill_seconds,
                ttft=first - request.received_at if first else None,
                itl_mean=(last - first) / steps if first and steps > 0 else None,
                longest_gap=self.longest_gap if first and steps > 0 else None,
                e2e=now - request.received_at,
                overhead_us=self.overhead_us(),
            )
        )


class PrefillLeg:
    """Collects a prefill engine's reply; nothing of it reaches the client but its errors."""

    __slots__ = ("_began_at", "_exchange", "_parts", "_size", "_status")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._status = 0
        self._parts: list[bytes] = []
        self._size = 0
        self._began_at = perf_counter()

    def sending(self) -> None:
        self._exchange.sending()

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._status = status

    def body(self, data: bytes, last: bool) -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._size > MAX_REPLY:
            _too_long(self._exchange)

    def ended(self) -> None:
        body = b"".join(self._parts)
        exchange = self._exchange
        exchange.prefill_seconds = perf_counter() - self._began_at
        if self._status == 200:
            exchange.advance(flow.Prefilled(openai.read_params(body), monotonic()))
        else:
            exchange.advance(flow.Replied(self._status, body))

    def failed(self, failure: Failure) -> None:
        self._exchange.advance(flow.Lost(failure.kind, failure.sent))

    def crashed(self) -> None:
        self._exchange.crashed()


class AnswerLeg:
    """Relays the answering engine's reply: a stream as it comes, anything else once it is whole."""

    __slots__ = ("_exchange", "_headers", "_parts", "_size", "_status", "_whole")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._whole = False
        self._parts: list[bytes] = []
        self._size = 0

    def sending(self) -> None:
        self._exchange.sending()

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._status = status
        self._headers = headers
        if status == 200:
            for name, value in headers:
                if name == b"content-type" and value.startswith(b"text/event-stream"):
                    exchange = self._exchange
                    exchange.reader = EventReader(exchange.endpoint.shape, exchange.usage)

    def body(self, data: bytes, last: bool) -> None:
        exchange = self._exchange
        reader = exchange.reader
        if reader is None:
            self._parts.append(data)
            self._size += len(data)
            if self._size > MAX_REPLY:
                _too_long(exchange)
            return
        try:
            events = reader.feed(data)
        except EventTooLong:
            _too_long(exchange)
            return
        last = last and (reader.done or reader.failed)
        if not events and not last:
            return
        if not exchange.streamed:
            if reader.failed and not reader.texts:  # the client has no byte yet: it gets a plain error
                self._status, body = openai.event_error(events)
                exchange.reader = None
                if exchange.leg is not None:
                    exchange.leg.cancel()
                exchange.advance(flow.Replied(self._status, body))
                return
            if reader.empty:
                self._status = 502
                exchange.reader = None
                if exchange.leg is not None:
                    exchange.leg.cancel()
                problem = Problem(502, "empty_answer", "The engine ended its answer without a single token.")
                exchange.advance(flow.Replied(502, openai.error_body(problem)))
                return
            exchange.connection.begin(200, exchange.answer_headers(self._headers) + _STREAM_HEADERS)
            exchange.streamed = True
            exchange.advance(flow.Began())
        self._whole = last
        exchange.relay(events, last)

    def ended(self) -> None:
        exchange = self._exchange
        reader = exchange.reader
        if reader is None:
            body = b"".join(self._parts)
            if self._status >= 300:
                exchange.advance(flow.Replied(self._status, body))
                return
            body = openai.read_reply(body, exchange.usage)
            exchange.connection.reply(self._status, exchange.answer_headers(self._headers), body)
            exchange.advance(flow.Began(whole=True))
        elif not exchange.streamed:
            exchange.reader = None
            exchange.advance(flow.Lost(Broken.RESET, True))
        elif reader.done or reader.failed:
            if not self._whole:
                exchange.connection.send(b"", last=True)
            exchange.advance(flow.Ended())
        else:
            self._break_off("The engine ended the stream before the answer was whole.")

    def failed(self, failure: Failure) -> None:
        exchange = self._exchange
        if not exchange.streamed:
            exchange.reader = None
            exchange.advance(flow.Lost(failure.kind, failure.sent))
        elif failure.kind is Broken.SILENT:
            self._break_off("The engine fell silent in the middle of the answer.")
        else:
            self._break_off("The connection to the engine broke in the middle of the answer.")

    def crashed(self) -> None:
        self._exchange.crashed()

    def _break_off(self, message: str) -> None:
        exchange = self._exchange
        exchange.truncated = True
        shape = exchange.endpoint.shape
        exchange.connection.send(openai.error_event(Problem(502, "stream_truncated", message), shape), last=True)
        exchange.advance(flow.Ended())


def _too_long(exchange: Exchange) -> None:
    if exchange.leg is not None:
        exchange.leg.give_up(Broken.PROTOCOL)
