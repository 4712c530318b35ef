"""What is known of one request when it ends: its times, its counts, and the record made of them. No IO, no decision."""

from __future__ import annotations

from time import perf_counter, time
from typing import TYPE_CHECKING

from controlplane.fleet.wire import RequestRecord, Result
from frontend_api.formats.openai import Endpoint, Shape, Usage, read_counts
from frontend_api.limits.charges import Estimate

if TYPE_CHECKING:
    from frontend_api.formats.sse import EventReader
    from frontend_api.trace import Trace

STAGES = ("read", "tokenise", "choose", "send", "limit")
"""Of the router's own time before the first byte to an engine: key, model and fields; token ids; engines; body and
connection; and, for keys that have some, their limits."""


class Used:
    """The tokens that a request has used: what its record, the metrics, its key's limits and decisions say alike."""

    __slots__ = ("cached", "estimated", "output", "prompt")

    def __init__(self, prompt: int | None, cached: int | None, output: int | None, estimated: int = 0) -> None:
        self.prompt = prompt
        self.cached = min(cached, prompt) if cached and prompt is not None else cached  # engines may tell nonsense
        self.output = output
        self.estimated = estimated
        """Of prompt and output, those that no engine told of: the router's own count or estimate."""

    @property
    def total(self) -> int:
        return (self.prompt or 0) + (self.output or 0)


class Account:
    """Times and counts of one request. Times are `perf_counter` seconds; 0: has not happened."""

    __slots__ = (
        "admitted_at",
        "began_at",
        "chosen_at",
        "ended_at",
        "first_text_at",
        "last_text_at",
        "longest_gap",
        "prefill_reply",
        "prefill_seconds",
        "queue_seconds",
        "reader",
        "received_at",
        "sent_at",
        "streamed",
        "tokenised_at",
        "truncated",
        "usage",
        "waited_first",
    )

    def __init__(self, received_at: float) -> None:
        self.received_at = received_at
        self.began_at = perf_counter()
        """Key, model and fields are known."""
        self.tokenised_at = self.chosen_at = 0.0
        self.admitted_at = 0.0
        """Its key has room; 0: that was not asked, as the key is not limited."""
        self.ended_at = 0.0
        """Its client left, and what its engines still do is not its time any more."""
        self.sent_at = self.first_text_at = self.last_text_at = self.longest_gap = 0.0
        self.prefill_reply = b""
        """Of the last prefill leg that gave KV: it has counts, should the answer's never come."""
        self.prefill_seconds: float | None = None
        self.queue_seconds: float | None = None
        """Spent waiting for an engine with room; None: it never had to."""
        self.waited_first = 0.0
        """What of that was before the first leg: no overhead of the router."""
        self.usage = Usage()
        self.reader: EventReader | None = None
        """Of the stream that is relayed; None: the answer is no stream."""
        self.streamed = False
        """The client has the beginning of a stream."""
        self.truncated = False

    def tokenised(self) -> None:
        """Its tokens are known, or never will be."""
        self.tokenised_at = perf_counter()

    def admitted(self) -> None:
        """Its key's limits have answered."""
        self.admitted_at = perf_counter()

    def chosen(self) -> None:
        """The first leg has its engine."""
        if not self.chosen_at:
            self.chosen_at = perf_counter()

    def waited(self, seconds: float) -> None:
        """Engines were full for so long."""
        self.queue_seconds = (self.queue_seconds or 0.0) + seconds
        if not self.sent_at:
            self.waited_first += seconds

    def sending(self) -> None:
        """The first byte for an engine leaves now."""
        if not self.sent_at:
            self.sent_at = perf_counter()

    def relaying(self) -> None:
        """Events with text, or after it, are on their way to the client."""
        now = perf_counter()
        if not self.first_text_at:
            self.first_text_at = now
        elif now - self.last_text_at > self.longest_gap:
            self.longest_gap = now - self.last_text_at
        self.last_text_at = now

    @property
    def overhead_us(self) -> float:
        """The router's own time before the first byte to an engine, in microseconds."""
        return (self.sent_at - self.received_at - self.waited_first) * 1e6 if self.sent_at else 0.0

    def stages(self) -> tuple[float, ...]:
        """The parts of `overhead_us`, as `STAGES` names them; empty: no engine was asked."""
        if not self.sent_at:
            return ()
        ready_at = self.admitted_at or self.tokenised_at
        parts = (
            (self.began_at - self.received_at) * 1e6,
            (self.tokenised_at - self.began_at) * 1e6,
            (self.chosen_at - ready_at - self.waited_first) * 1e6,
            (self.sent_at - self.chosen_at) * 1e6,
        )
        return (*parts, (ready_at - self.tokenised_at) * 1e6) if self.admitted_at else parts

    def result(self, endpoint: Endpoint) -> Result:
        """What an answer with status 200 was worth: without a token it is a failure."""
        if self.truncated:
            return Result.TRUNCATED
        if not endpoint.generates:
            return Result.OK
        reader = self.reader
        if reader is not None:
            silent = reader.texts <= (1 if endpoint.shape is Shape.CHAT else 0)
            if reader.failed or silent:
                return Result.FAILED
        return Result.FAILED if self.usage.output == 0 else Result.OK

    def written(self) -> tuple[int, float]:
        """Tokens of the stream that came after the first, and the seconds they took."""
        if not self.first_text_at or self.reader is None:
            return 0, 0.0
        return (self.usage.output or self.reader.texts) - 1, self.last_text_at - self.first_text_at

    @property
    def counted(self) -> Used | None:
        """What the request has used, if the engine told all of it."""
        usage, reader = self.usage, self.reader
        if usage.prompt is None or usage.output is None or not (reader is None or reader.done):
            return None
        return Used(usage.prompt, usage.cached, usage.output)

    def used(self, endpoint: Endpoint, result: Result, status: int, before: Estimate, reserved: int) -> Used:
        """What the request has used, however it ended. An engine that never answered costs nothing; a stream that was cut, what
        was seen of it; a client that left while its prompt was read, the prompt; an answer without counts, what was `reserved`,
        `before` of that for its prompt."""
        usage, reader = self.usage, self.reader
        seen = 0
        if reader is not None:
            seen = max(0, reader.texts - (1 if endpoint.shape is Shape.CHAT else 0))  # a chat's first event is its role
        output = max(usage.output or 0, seen)
        estimated = output - (usage.output or 0)
        if usage.prompt is not None:
            return Used(usage.prompt, usage.cached, output, estimated)
        begun = reader is not None and self.streamed
        if begun or (result is Result.ABORTED and self.sent_at):
            counts = Usage()
            read_counts(self.prefill_reply, counts)
            if counts.prompt is not None:
                return Used(counts.prompt, counts.cached, output, estimated)
            return Used(before.prompt, None, output, before.prompt + estimated)
        if status == 200 and reserved and result is not Result.ABORTED:
            prompt = min(before.prompt, reserved)
            return Used(prompt, None, reserved - prompt, reserved)
        return Used(None, None, usage.output)

    def record(
        self,
        request_id: str,
        deployment: str,
        endpoint: Endpoint,
        key: str,
        trace: Trace,
        status: int,
        result: Result,
        used: Used,
    ) -> RequestRecord:
        """The request ends now."""
        now = self.ended_at or perf_counter()
        steps, seconds = self.written()
        first = self.first_text_at
        return RequestRecord(
            id=request_id,
            at=time(),
            deployment=deployment,
            endpoint=endpoint.path,
            status=status,
            result=result,
            stream=self.streamed,
            key=key,
            prefill=trace.prefill,
            decode=trace.decode,
            reason=trace.reason,
            fallback=trace.fallback,
            fallback_cause=trace.cause if trace.fallback else "",
            tried=tuple(map(str, trace.tried)) if trace.tried else (),
            prompt_tokens=used.prompt,
            cached_tokens=used.cached,
            output_tokens=used.output,
            estimated_tokens=used.estimated,
            overlap_tokens=trace.overlap,
            prefill_seconds=self.prefill_seconds,
            ttft=first - self.received_at if first else None,
            itl_mean=seconds / steps if steps > 0 else None,
            longest_gap=self.longest_gap if steps > 0 else None,
            e2e=now - self.received_at,
            overhead_us=self.overhead_us,
            queue_seconds=self.queue_seconds,
            stranded=trace.stranded,
        )
