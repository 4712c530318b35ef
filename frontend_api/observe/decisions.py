"""The last routing choices of all processes behind the port, and what spoke for each. Holds no text of a prompt and no key.

A finished request leaves a few references here; words are made of them only when somebody asks. Whichever process is asked
asks the others, through shared memory that each of them looks at ten times a second.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import struct
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qs
from zlib import crc32

import msgspec
from msgspec import Struct

from controlplane.fleet.errors import InvalidInput
from controlplane.fleet.wire import RequestRecord
from frontend_api.formats.openai import Problem, error_body
from frontend_api.observe.account import STAGES
from frontend_api.observe.explain import below_one_block
from frontend_api.routing.choice import Choice, explain_costs
from frontend_api.routing.costs import costs_of
from frontend_api.routing.reason import Reason

if TYPE_CHECKING:
    from frontend_api.http.server import ClientConnection
    from frontend_api.kv.evidence import Cache, Standing
    from frontend_api.routing.costs import Cost, Weighed
    from frontend_api.routing.view import Deployment
    from frontend_api.trace import Trace

log = logging.getLogger(__name__)

KEPT = 200
"""Decisions of one process."""
USUAL_LIMIT = 50
STANDING_SECONDS = 0.25
"""For so long a deployment's state is taken as it was found."""
LOOK_SECONDS = 0.1
WATCHED_SECONDS = 60.0
"""For so long after somebody asked, choices are weighed in all modes."""
ANSWER_SECONDS = 2.0
"""For which the other processes are waited for."""


class Candidate(Struct):
    """What a part of a request would have cost at one engine, in seconds and tokens: see `costs.Cost`."""

    engine: str
    role: str
    part: str
    taken: bool
    total: float
    overlap: int
    queue: float
    compute: float
    transfer: float
    stalls: float
    streams: float
    wait: float


class Decision(Struct):
    """One request's last routing choice, and what came of it."""

    at: float
    """When the request ended, Unix seconds."""
    process: int
    id: str
    deployment: str
    model: str
    endpoint: str
    mode: str
    prefill: str | None
    decode: str | None
    reason: str
    fallback: bool
    fallback_cause: str
    tried: list[str]
    """Legs that gave nothing, one sentence each."""
    left_out: list[str]
    """Why engines and pairs were no candidates, as requests and probes had shown by then: one sentence each."""
    state: str | None
    """How exact cache-aware routing was when it was chosen; None: it is not asked for."""
    state_because: dict[str, str]
    prompt_tokens: int | None
    """As the router counted them; None: not known."""
    overlap_tokens: int | None
    overlap_because: str
    """Why nothing of the prompt can be cached; empty: it can."""
    cached_tokens: int | None
    """As the engine reported them."""
    used: dict[str, int]
    """Tokens that it used, as its record and its key count them: prompt, output, and, of both, estimated."""
    result: str
    status: int
    queue_seconds: float | None
    """Waiting for an engine with room; None: it never had to."""
    prefill_seconds: float | None
    ttft: float | None
    e2e: float
    overhead_us: float
    stages_us: dict[str, float]
    weighed: str
    """When the candidates were: `then`, by the choice itself; `now`, with the load of the moment you ask (modes that weigh
    nothing; for a while after you asked they do)."""
    candidates: list[Candidate]


class Kept(NamedTuple):
    """What a decision is told from."""

    record: RequestRecord
    trace: Trace
    deployment: Deployment
    standing: Standing | None
    prompt_tokens: int | None
    stages: tuple[float, ...]
    below_block: int = 0
    """See `Prompt.below_block`."""


class Board:
    """Shared memory in which processes ask each other for their decisions, made by the parent before it forks."""

    SLOT = 4 << 20
    """Bytes of one process's answer. Memory is used only once somebody asks."""
    _ASKED = struct.Struct("<d")
    _HEAD = struct.Struct("<dII")

    def __init__(self, count: int) -> None:
        self.count = count
        self._memory = mmap.mmap(-1, mmap.PAGESIZE + count * self.SLOT)

    @property
    def asked_at(self) -> float:
        """When somebody asked last, monotonic; 0: never."""
        return float(self._ASKED.unpack_from(self._memory, 0)[0])

    def ask(self, now: float) -> None:
        self._ASKED.pack_into(self._memory, 0, now)

    def answer(self, index: int, data: bytes, now: float) -> None:
        at = self._at(index)
        self._memory[at : at + self._HEAD.size + len(data)] = self._HEAD.pack(now, len(data), crc32(data)) + data

    def answered(self, index: int, since: float) -> bytes | None:
        """What a process has answered since then; None: nothing whole yet."""
        at = self._at(index)
        answered_at, length, checksum = self._HEAD.unpack_from(self._memory, at)
        if answered_at < since:
            return None
        data = self._memory[at + self._HEAD.size : at + self._HEAD.size + min(length, self.SLOT)]
        return data if crc32(data) == checksum else None

    def _at(self, index: int) -> int:
        return mmap.PAGESIZE + index * self.SLOT


class Decisions:
    """The last decisions of one process, and its way to the others'."""

    def __init__(self, board: Board | None = None, index: int = 0) -> None:
        self._board = board if board is not None and board.count > 1 else None
        self._index = index
        self._kept: deque[Kept] = deque(maxlen=KEPT)
        self._standings: dict[str, tuple[float, Standing]] = {}
        """By deployment: nobody says when one leaves, and its cache is not to be kept alive."""
        self._answered_at = 0.0
        self.watched_until = 0.0
        """Until this `perf_counter` time somebody is expected to ask again: choices that weigh nothing are to be weighed."""

    def standing(self, cache: Cache, now: float) -> Standing:
        """A deployment's state, at most `STANDING_SECONDS` old. `now`: of any one clock, seconds."""
        found = self._standings.get(cache.name)
        if found is None or now - found[0] > STANDING_SECONDS:
            found = self._standings[cache.name] = now, cache.standing()
        return found[1]

    def add(self, kept: Kept) -> None:
        """A request ended."""
        self._kept.append(kept)

    async def told(self, model: str, limit: int) -> bytes:
        """The newest decisions of all processes, as JSON. `model`: of one deployment only, by either of its names."""
        self.watched_until = perf_counter() + WATCHED_SECONDS
        decisions = [decision async for decision in self._own()]
        silent: list[int] = []
        if self._board is not None:
            others, silent = await self._others(self._board)
            decisions += others
        found = [d for d in decisions if not model or model in (d.model, d.deployment)]
        found.sort(key=lambda decision: decision.at, reverse=True)
        processes = self._board.count if self._board is not None else 1
        return msgspec.json.encode({"decisions": found[:limit], "processes": processes, "silent_processes": silent})

    async def run(self) -> None:
        """For ever: answer when another process asks."""
        while self._board is not None:
            asked_at = self._board.asked_at
            if asked_at > self._answered_at:
                self._answered_at = asked_at
                self.watched_until = perf_counter() + WATCHED_SECONDS
                decisions = [decision async for decision in self._own()]
                self._board.answer(self._index, _fitting(decisions, Board.SLOT - 64), monotonic())
            await asyncio.sleep(LOOK_SECONDS)

    async def _own(self) -> AsyncIterator[Decision]:
        for number, kept in enumerate(reversed(tuple(self._kept))):
            if number % 16 == 15:
                await asyncio.sleep(0)  # requests go first
            yield _decision(kept, self._index)

    async def _others(self, board: Board) -> tuple[list[Decision], list[int]]:
        """The decisions of the other processes, and which of them did not answer in time."""
        asked_at = monotonic()
        board.ask(asked_at)
        waiting = {index for index in range(board.count) if index != self._index}
        decisions: list[Decision] = []
        while waiting and monotonic() - asked_at < ANSWER_SECONDS:
            await asyncio.sleep(LOOK_SECONDS / 4)
            for index in sorted(waiting):
                data = board.answered(index, asked_at)
                if data is not None:
                    waiting.discard(index)
                    decisions += _decoder.decode(data)
        return decisions, sorted(waiting)


class Telling:
    """The answer to one who asks for decisions: given when it is there, dropped when the client leaves."""

    def __init__(self, connection: ClientConnection, headers: bytes, decisions: Decisions, query: bytes) -> None:
        """Raises `InvalidInput` for a query that makes no sense."""
        self._connection = connection
        self._headers = headers
        model, limit = read_query(query)
        self._work = asyncio.ensure_future(decisions.told(model, limit))
        self._work.add_done_callback(self._done)

    def _done(self, work: asyncio.Future[bytes]) -> None:
        if work.cancelled():
            return
        if work.exception() is not None:
            log.error("defect in the router", exc_info=work.exception())
            problem = Problem(500, "internal_error", "The router failed; its log has the reason.")
            self._connection.reply(problem.status, self._headers, error_body(problem))
            return
        self._connection.reply(200, self._headers, work.result())

    def client_gone(self, *, cut: bool = False) -> None:
        self._work.cancel()

    def client_slow(self) -> None:
        """The answer is sent whole: nothing can wait."""

    def client_ready(self) -> None:
        """See `client_slow`."""


def read_query(query: bytes) -> tuple[str, int]:
    """`model` and `limit`. Raises `InvalidInput`."""
    fields = parse_qs(query.decode("latin-1"))
    limit = fields.get("limit", [str(USUAL_LIMIT)])[-1]
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= 10_000:
        raise InvalidInput("limit: send a whole number from 1 to 10000", field="limit")
    return fields.get("model", [""])[-1], int(limit)


_decoder = msgspec.msgpack.Decoder(list[Decision])
_encode = msgspec.msgpack.encode


def _fitting(decisions: Iterable[Decision], size: int) -> bytes:
    """As many of them, from the first on, as fit."""
    parts: list[msgspec.Raw] = []
    for data in map(_encode, decisions):
        size -= len(data)
        if size < 0:
            break
        parts.append(msgspec.Raw(data))
    return _encode(parts)


def _decision(kept: Kept, process: int) -> Decision:
    record, trace, deployment = kept.record, kept.trace, kept.deployment
    standing = kept.standing
    weighed = trace.weighed or _weighed_now(kept)
    return Decision(
        at=record.at,
        process=process,
        id=record.id,
        deployment=record.deployment,
        model=deployment.served_name,
        endpoint=record.endpoint,
        mode=deployment.routing.mode,
        prefill=record.prefill,
        decode=record.decode,
        reason=record.reason,
        fallback=record.fallback,
        fallback_cause=record.fallback_cause,
        tried=[failure.sentence(private=True) for failure in trace.tried],
        left_out=[failure.sentence(private=True) for failure in trace.left_out],
        state=standing.state if standing is not None else None,
        state_because=dict(standing.reasons) if standing is not None else {},
        prompt_tokens=kept.prompt_tokens,
        overlap_tokens=record.overlap_tokens,
        overlap_because=below_one_block(kept.below_block) if kept.below_block else "",
        cached_tokens=record.cached_tokens,
        used={
            "prompt": record.prompt_tokens or 0,
            "output": record.output_tokens or 0,
            "estimated": record.estimated_tokens,
        },
        result=record.result,
        status=record.status,
        queue_seconds=record.queue_seconds,
        prefill_seconds=record.prefill_seconds,
        ttft=record.ttft,
        e2e=record.e2e,
        overhead_us=record.overhead_us,
        stages_us=dict(zip(STAGES, kept.stages, strict=False)),
        weighed="then" if trace.weighed else "now",
        candidates=[_candidate(cost, record) for cost in costs_of(weighed)],
    )


def _weighed_now(kept: Kept) -> Sequence[Weighed]:
    """What would be weighed if the same choice were made now."""
    deployment, record = kept.deployment, kept.record
    engines = {engine.id: engine for engine in (*deployment.prefill, *deployment.answering)}
    prefill, decode = (engines.get(name or "") for name in (record.prefill, record.decode))
    choice = Choice(prefill, decode, Reason.NO_ENGINE)
    return explain_costs(deployment, choice, now=monotonic())


def _candidate(cost: Cost, record: RequestRecord) -> Candidate:
    engine = cost.engine
    return Candidate(
        engine=engine.id,
        role=engine.spec.role,
        part=cost.part,
        taken=engine.id in (record.prefill, record.decode),
        total=cost.total,
        overlap=cost.overlap,
        queue=cost.queue,
        compute=cost.compute,
        transfer=cost.transfer,
        stalls=cost.stalls,
        streams=cost.streams,
        wait=cost.wait,
    )
