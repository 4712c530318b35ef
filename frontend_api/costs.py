"""What a request would cost at each engine of a pool, in seconds. Pure.

Columns of numbers are kept, one row per engine, as they were when the choice was made; the parts of a cost are told only to
those who ask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from frontend_api.evidence import USUAL_BLOCK_SIZE, Prompt
from frontend_api.view import Engine


class Part(StrEnum):
    """What an engine would do of a request."""

    PREFILL = "prefill"
    """Compute the prompt for another engine."""
    DECODE = "decode"
    """Fetch the prompt's KV and answer."""
    LOCAL = "local"
    """Compute the prompt and answer, while others could compute it without a stream standing still."""
    ALONE = "alone"
    """The same where nobody else can: the streams of some engine will stand still, so that is not weighed."""


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


def fetched(engine: Engine, prompt: Prompt) -> int:
    """Tokens that come over the link when the engine fetches what it lacks: whole KV blocks."""
    size = engine.spec.block_size or USUAL_BLOCK_SIZE
    return -(-prompt.lacking(engine) // size) * size


class Weighed:
    """A pool weighed for one part of a request. `prompt`: None: not known, so that only load is weighed."""

    __slots__ = (
        "_fetches",
        "_loads",
        "_overlap",
        "_queued",
        "_reads",
        "_steps",
        "engines",
        "lacking",
        "part",
        "totals",
    )

    def __init__(self, engines: Sequence[Engine], part: Part, prompt: Prompt | None) -> None:
        self.engines = engines
        self.part = part
        self._overlap: Mapping[Engine, int] = {}
        if prompt is None:
            lacking = [0] * len(engines)
        else:
            tokens = prompt.tokens
            if prompt.overlap:
                self._overlap = prompt.overlap
                has = prompt.overlap.get
                lacking = [tokens - has(engine, 0) or 1 for engine in engines]
            else:
                lacking = [tokens or 1] * len(engines)
        self.lacking = lacking
        """Tokens that each engine has to compute or fetch. The last one of a prompt is always computed."""
        self._loads = loads = [engine.in_flight + engine.others for engine in engines]
        self._queued = queued = [engine.queued + engine.others_queued for engine in engines]
        self._reads = reads = [engine.read.pace for engine in engines]
        self._steps = steps = [engine.step.pace for engine in engines]
        self._fetches: Sequence[float] = ()
        rows = zip(queued, lacking, reads, loads, steps, strict=True)
        if part is Part.LOCAL:
            self.totals = [(q + t + t * n) * r + n * s for q, t, r, n, s in rows]
        elif part is not Part.DECODE:
            self.totals = [(q + t) * r + n * s for q, t, r, n, s in rows]
        else:
            usual = USUAL_BLOCK_SIZE
            self._fetches = fetches = [
                -(-t // (size := e.spec.block_size or usual)) * size * e.pull.pace
                for e, t in zip(engines, lacking, strict=True)
            ]
            self.totals = [q * r + f + n * s for (q, _, r, n, s), f in zip(rows, fetches, strict=True)]

    def costs(self) -> list[Cost]:
        """Each engine's, in the order of the pool."""
        told = []
        computes, stalls = self.part is not Part.DECODE, self.part is Part.LOCAL
        for at, engine in enumerate(self.engines):
            pace, load = self._reads[at], self._loads[at]
            compute = self.lacking[at] * pace if computes else 0.0
            told.append(
                Cost(
                    engine,
                    self.part,
                    self.totals[at],
                    self._overlap.get(engine, 0),
                    self._queued[at] * pace,
                    compute,
                    0.0 if computes else self._fetches[at],
                    compute * load if stalls else 0.0,
                    load * self._steps[at],
                )
            )
        return told

    def sorted(self) -> list[int]:
        """Rows, the cheapest first; of equal ones the one taken longest ago."""
        turns = [engine.last_taken for engine in self.engines]
        return sorted(range(len(turns)), key=lambda at: (self.totals[at], turns[at]))
