"""What a request would cost at each engine of a pool, in seconds. Pure.

Numbers are kept as they were when the choice was made, one row per engine; the parts of a cost are told only to those who ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from frontend_api.kv.evidence import USUAL_BLOCK_SIZE, Prompt
from frontend_api.routing.view import Engine


class Part(StrEnum):
    """What an engine would do of a request."""

    PREFILL = "prefill"
    """Compute the prompt for another engine."""
    DECODE = "decode"
    """Fetch the prompt's KV and answer."""
    LOCAL = "local"
    """Compute the prompt and answer, while others could compute it without a stream standing still."""
    ALONE = "alone"
    """The same where nobody else can or is to: the streams of some engine will stand still, so that is not weighed."""


class Cost(NamedTuple):
    """What a part of a request would cost at one engine, in seconds: the total, and what it is made of."""

    engine: Engine
    part: Part
    total: float
    overlap: int
    """Tokens of the prompt that it has."""
    queue: float
    """Prompts that wait or are being read there."""
    compute: float
    """The tokens it lacks, computed."""
    transfer: float
    """The KV blocks it lacks, fetched whole."""
    stalls: float
    """The requests that run there and stand still while it computes."""
    streams: float
    """The requests that run there: about one step each."""
    wait: float
    """Until enough KV is free there: an estimate; 0: there is enough, or nobody knows."""


LARGEST_BLOCK = 1_024
"""Tokens."""
NO_ROOM = 1e6
"""Seconds that outweigh everything else: a request goes where it must wait for KV only if it would have to everywhere."""


class Need:
    """The KV that a request needs: `prompt`: tokens of it, estimated where not known; `answer`: tokens expected."""

    __slots__ = ("answer", "prompt")

    def __init__(self, prompt: int = 0, answer: int = 0) -> None:
        self.prompt = prompt
        self.answer = answer

    def at(self, engine: Engine, prompt: Prompt | None, *, answers: bool) -> int:
        """KV tokens that it takes from what is free at an engine. `answers`: it is answered there."""
        lacking = self.prompt
        if prompt is not None:
            lacking = prompt.lacking(engine)
        elif engine.spec.max_model_len:
            lacking = min(lacking, engine.spec.max_model_len)
        return lacking + (self.answer if answers else 0)


def waits_of(engines: Sequence[Engine], need: Need, prompt: Prompt | None, *, answers: bool) -> Sequence[float]:
    """Seconds that a request would wait at each engine for KV to become free, estimated from how many answers run there and how
    long they take. Empty: it need not wait anywhere, as far as known."""
    most = need.prompt + need.answer + LARGEST_BLOCK
    for engine in engines:
        if engine.room < most:
            break
    else:
        return ()
    waits = []
    for engine in engines:
        size = engine.spec.block_size or USUAL_BLOCK_SIZE
        tokens = -(-need.at(engine, prompt, answers=answers) // size) * size
        short = tokens - engine.room
        waits.append(engine.answer * engine.step.pace * (1 / (engine.load + 1) + short / tokens) if short > 0 else 0.0)
    return waits if any(waits) else ()


def fetched(engine: Engine, prompt: Prompt) -> int:
    """Tokens that come over the link when the engine fetches what it lacks: whole KV blocks."""
    size = engine.spec.block_size or USUAL_BLOCK_SIZE
    return -(-prompt.lacking(engine) // size) * size


Row = tuple[int, int, float, int, float]
"""One engine as it is now: prompt tokens that wait there, tokens of this prompt that it lacks, seconds in which it computes
one, requests it has, seconds of a step."""


def rows_of(engines: Sequence[Engine], prompt: Prompt | None) -> list[Row]:
    """What all parts are weighed by. `prompt`: None: not known, so that only load is weighed."""
    if prompt is None:
        return [(e.queued + e.others_queued, 0, e.read.pace, e.in_flight + e.others, e.step.pace) for e in engines]
    tokens, has = prompt.tokens, prompt.overlap.get
    return [  # of a prompt that it has whole, an engine computes the last token
        (e.queued + e.others_queued, tokens - has(e, 0) or 1, e.read.pace, e.in_flight + e.others, e.step.pace)
        for e in engines
    ]


class Weighed:
    """A pool weighed for one part of a request. `rows`: of its engines; `waits`: at each for KV, empty: at none."""

    __slots__ = ("_fetches", "bare", "engines", "overlap", "part", "rows", "totals", "waits")

    def __init__(
        self,
        engines: Sequence[Engine],
        part: Part,
        rows: Sequence[Row],
        prompt: Prompt | None,
        waits: Sequence[float] = (),
    ) -> None:
        self.engines = engines
        self.part = part
        self.rows = rows
        self.waits = waits
        self.overlap = prompt.overlap if prompt is not None else None
        """Tokens of the prompt by engine. Not the prompt itself: costs outlive the request, and its hashes need not."""
        self._fetches: Sequence[float] = ()
        if part is Part.DECODE:
            usual = USUAL_BLOCK_SIZE
            self._fetches = fetches = [
                -(-row[1] // (size := e.spec.block_size or usual)) * size * e.pull.pace
                for e, row in zip(engines, rows, strict=True)
            ]
            self.totals = [q * r + n * s + f for (q, _, r, n, s), f in zip(rows, fetches, strict=True)]
        elif part is Part.LOCAL:
            self.totals = [(q + t + t * n) * r + n * s for q, t, r, n, s in rows]
        else:
            self.totals = [(q + t) * r + n * s for q, t, r, n, s in rows]
        self.bare = self.totals
        """Without what it would wait for KV."""
        if waits:
            self.totals = [t + w + NO_ROOM if w else t for t, w in zip(self.totals, waits, strict=True)]

    def costs(self) -> list[Cost]:
        """Each engine's, in the order of the pool."""
        overlap = self.overlap or {}
        computes, stalls = self.part is not Part.DECODE, self.part is Part.LOCAL
        told = []
        for at, (engine, (queued, lacking, pace, load, step)) in enumerate(zip(self.engines, self.rows, strict=True)):
            compute = lacking * pace if computes else 0.0
            wait = self.waits[at] if self.waits else 0.0
            told.append(
                Cost(
                    engine=engine,
                    part=self.part,
                    total=self.bare[at] + wait,
                    overlap=overlap.get(engine, 0),
                    queue=queued * pace,
                    compute=compute,
                    transfer=0.0 if computes else self._fetches[at],
                    stalls=compute * load if stalls else 0.0,
                    streams=load * step,
                    wait=wait,
                )
            )
        return told

    def sorted(self) -> list[int]:
        """Positions in the pool, the cheapest first; of equal ones the engine taken longest ago."""
        turns = [engine.last_taken for engine in self.engines]
        return sorted(range(len(turns)), key=lambda at: (self.totals[at], turns[at]))


def costs_of(weighed: Sequence[Weighed]) -> list[Cost]:
    """Of every engine that was weighed, in each part that it could have had."""
    return [cost for pool in weighed for cost in pool.costs()]
