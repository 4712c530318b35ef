"""One API request in the engine: its sequences, their outputs gathered, and what is reported of it at the end."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from collections.abc import Sequence as Many

from msgspec import Struct

from workers.sim.engine import Engine
from workers.sim.http import internal, invalid, late
from workers.sim.requests import Common
from workers.sim.sequence import Output, Sampling, Sequence, TokenLogprob
from workers.sim.transfer import remote_of


class Job(Struct, frozen=True):
    """What a request asks for, once its endpoint's own words are taken away."""

    prompts: tuple[list[int], ...]
    sampling: Sampling
    n: int = 1
    stream: bool = False
    temperature: float = 1.0
    seed: int | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, object] | None = None


def job_of(
    request: Common, prompts: tuple[list[int], ...], *, max_tokens: int, logprobs: int | None, script: tuple[str, ...]
) -> Job:
    """Of a chat or text completion."""
    return Job(
        prompts=prompts,
        sampling=Sampling(
            max_tokens=max_tokens,
            min_tokens=request.min_tokens,
            ignore_eos=request.ignore_eos,
            stop=request.stops(),
            stop_token_ids=tuple(request.stop_token_ids or ()),
            include_stop=request.include_stop_str_in_output,
            logprobs=logprobs,
            script=script,
        ),
        n=request.n or 1,
        stream=bool(request.stream),
        temperature=1.0 if request.temperature is None else request.temperature,
        seed=request.seed,
        cache_salt=request.cache_salt,
        kv_transfer_params=request.kv_transfer_params,
    )


class Choice(Struct):
    """One finished answer."""

    index: int
    text: str = ""
    tokens: int = 0
    logprobs: list[TokenLogprob] = []
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    created_tokens: int
    """Computed here and kept in the prefix cache."""

    def openai(self, *, created: bool) -> dict[str, object]:
        """`usage` as chat (`created`) and completions report it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": self.cached_tokens,
                "created_cache_tokens": self.created_tokens if created else None,
                "multimodal_tokens": None,
            },
            "completion_tokens_details": None,
        }

    def streamed(self, *, created: bool) -> dict[str, object]:
        """`usage` of a stream's last chunk: there vLLM leaves out what is null."""
        details = {"cached_tokens": self.cached_tokens}
        if created:
            details["created_cache_tokens"] = self.created_tokens
        return self.brief() | {"prompt_tokens_details": details}

    def continuous(self, completion_tokens: int) -> dict[str, object]:
        """`usage` of a chat chunk, where it was asked for with each."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
            "completion_tokens_details": None,
        }

    def brief(self) -> dict[str, object]:
        """The three sums alone."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
        }


class Generation:
    """The sequences of one job. Every way out goes through `abort`, which does nothing when all is done."""

    def __init__(self, engine: Engine, request_id: str, job: Job) -> None:
        self._engine = engine
        self._outputs: asyncio.Queue[Output] = asyncio.Queue()
        params = job.kv_transfer_params if engine.settings.disaggregated else None
        keep = bool(params and params.get("do_remote_decode"))
        remote = None if "computes-itself" in engine.faults else remote_of(params)
        sequences = []
        for prompt_index, prompt in enumerate(job.prompts):
            for n in range(job.n):
                variant = n
                if job.temperature > 0 and job.seed is not None:
                    variant += 1 + (job.seed & 0xFFFFFF)
                index = prompt_index * job.n + n
                sequences.append(
                    Sequence(
                        f"{request_id}-{index}-{secrets.token_hex(4)}",
                        prompt,
                        job.sampling,
                        self._outputs,
                        index=index,
                        variant=variant,
                        salt=job.cache_salt,
                        remote=remote,
                        keep_for_reader=keep,
                    )
                )
        self.sequences: Many[Sequence] = sequences
        self._prompts = job.prompts

    async def outputs(self) -> AsyncIterator[Output]:
        """Every output of every choice, until all are finished.

        Raises `ApiError` (500) when a sequence failed, as vLLM does for KV that could not be loaded.
        """
        for sequence in self.sequences:
            self._engine.submit(sequence)
        left = len(self.sequences)
        while left:
            output = await self._outputs.get()
            if output.finish_reason == "error":
                raise internal()
            if output.finish_reason is not None:
                left -= 1
            yield output

    async def choices(self) -> list[Choice]:
        """All answers, whole."""
        choices = [Choice(n) for n in range(len(self.sequences))]
        async for output in self.outputs():
            choice = choices[output.choice]
            choice.text += output.text
            choice.tokens += len(output.tokens)
            choice.logprobs += output.logprobs
            choice.finish_reason, choice.stop_reason = output.finish_reason, output.stop_reason
        return choices

    def abort(self) -> None:
        for sequence in self.sequences:
            self._engine.abort(sequence)

    @property
    def kv_transfer_params(self) -> dict[str, object] | None:
        return self.sequences[0].kv_transfer_params

    @property
    def usage(self) -> Usage:
        first, size = self.sequences[0], self._engine.settings.block_size
        return Usage(
            prompt_tokens=sum(map(len, self._prompts)),
            completion_tokens=sum(sequence.generated for sequence in self.sequences),
            cached_tokens=first.cached_tokens,
            created_tokens=max(0, first.prompt_length // size * size - first.cached - first.transferred),
        )


def check_length(prompt: Many[int], max_model_len: int) -> None:
    """Raises `ApiError` when the prompt leaves no room for one token, in vLLM's words."""
    if len(prompt) >= max_model_len:
        error = invalid(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains at least "
            f"{len(prompt)} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt.",
            "input_tokens",
            len(prompt),
        )
        raise late(error)
