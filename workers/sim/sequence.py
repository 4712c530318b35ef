"""One sequence being generated: its tokens, its place in the KV cache, and when it ends."""

from __future__ import annotations

import asyncio
import time
from enum import Enum, auto
from typing import NamedTuple

from msgspec import Struct

from workers.sim.kv import Block
from workers.sim.text import EOS, FULL_STOP, Answer
from workers.sim.transfer import Remote


class Phase(Enum):
    NEW = auto()
    WAITING = auto()
    RECEIVING = auto()
    """Its KV is being pulled from a prefill engine."""
    RUNNING = auto()
    FINISHED = auto()


class Sampling(Struct, frozen=True):
    """The sampling fields that decide where an answer ends and what is told of it."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    logprobs: int | None = None
    """How many alternatives per token; None: no log probabilities."""
    script: tuple[str, ...] = ()
    """Text to write instead of the answer's words (a forced tool call), piece by piece."""


class TokenLogprob(NamedTuple):
    token: str
    logprob: float
    alternatives: list[tuple[str, float]]


class Output(NamedTuple):
    """What one step adds to one choice."""

    choice: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Sequence:
    """Mutable, owned by the engine; the requester reads `outputs`."""

    def __init__(
        self,
        id: str,
        prompt: list[int],
        sampling: Sampling,
        outputs: asyncio.Queue[Output],
        *,
        index: int = 0,
        variant: int = 0,
        salt: str | None = None,
        remote: Remote | None = None,
        keep_for_reader: bool = False,
    ) -> None:
        self.id = id
        self.index = index
        self.tokens = list(prompt)
        self.prompt_length = len(prompt)
        self.sampling = sampling
        self.variant = variant
        self.salt = salt
        self.remote = remote
        self.remote_cached_tokens = remote.cached_tokens if remote else None
        self.keep_for_reader = keep_for_reader
        self.phase = Phase.NEW
        self.blocks: list[Block] = []
        self.digests: list[bytes] = []
        self.published = 0
        """Full blocks that later prompts may find."""
        self.computed = 0
        """Tokens whose KV is in the cache."""
        self.cached = 0
        self.transferred = 0
        self.answer: Answer | None = None
        self.arrived_at = time.monotonic()
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.kv_transfer_params: dict[str, object] | None = None
        self._outputs = outputs
        self._text = ""
        self._emitted = 0
        self._stop_reason: int | str | None = None
        self._last: Output | None = None

    @property
    def missing(self) -> int:
        """Tokens whose KV must be computed before the next one can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        return len(self.tokens) > self.prompt_length and self.missing == 1

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def cached_tokens(self) -> int:
        """What `usage` reports. A transferred prompt repeats prefill's figure, as in vLLM 0.32."""
        if self.remote_cached_tokens is not None:
            return self.remote_cached_tokens
        return self.cached + self.transferred

    def preempt(self) -> None:
        """Back into the queue, to be computed anew from the tokens it has."""
        self.phase = Phase.WAITING
        self.blocks = []
        self.computed = self.published = 0

    def _next(self, position: int) -> tuple[int, str]:
        answer, sampling = self.answer, self.sampling
        assert answer is not None
        if sampling.script:
            if position < len(sampling.script):
                return answer.token(position)[0], sampling.script[position]
            return EOS, ""
        ends = not sampling.ignore_eos and position >= sampling.min_tokens
        if ends and position == answer.natural_length:
            return FULL_STOP, "."
        if ends and position > answer.natural_length:
            return EOS, ""
        return answer.token(position)

    def sample(self) -> str | None:
        """Adds one token and hands it out; the reason when it was the last one."""
        position, sampling = self.generated, self.sampling
        assert self.answer is not None
        token, text = self._next(position)
        self.tokens.append(token)
        self._text += text
        logprobs: tuple[TokenLogprob, ...] = ()
        if sampling.logprobs is not None:
            alternatives = self.answer.alternatives(position, max(sampling.logprobs - 1, 0))
            logprobs = (TokenLogprob(text, self.answer.logprob(position), alternatives),)
        reason = self._ending(token)
        delta = self._release(reason is not None)
        output = Output(self.index, delta, (token,), logprobs)
        if reason is None:
            self._outputs.put_nowait(output)
        else:
            self._last = output
        return reason

    def _ending(self, token: int) -> str | None:
        sampling = self.sampling
        if self.generated >= sampling.min_tokens:
            if token == EOS and not sampling.ignore_eos:
                return "stop"
            if token in sampling.stop_token_ids:
                self._stop_reason = token
                return "stop"
            for stop in sampling.stop:
                at = self._text.find(stop, self._emitted)
                if at >= 0:
                    self._text = self._text[: at + (len(stop) if sampling.include_stop else 0)]
                    self._stop_reason = stop
                    return "stop"
        return "length" if self.generated >= sampling.max_tokens else None

    def _release(self, last: bool) -> str:
        """Text that may be shown now: the tail that could still become a stop string is held back."""
        hold = 0 if last or not self.sampling.stop else max(map(len, self.sampling.stop)) - 1
        upto = max(self._emitted, len(self._text) - hold)
        delta, self._emitted = self._text[self._emitted : upto], upto
        return delta

    def finished(self, reason: str, params: dict[str, object] | None) -> None:
        """Hands out the last output, with the reason."""
        self.kv_transfer_params = params
        last = self._last or Output(self.index, "", (), ())
        self._outputs.put_nowait(last._replace(finish_reason=reason, stop_reason=self._stop_reason))
