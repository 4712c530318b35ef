"""`/v1/completions`: request to job, outputs to vLLM's JSON and chunks (`entrypoints/openai/completion`)."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable

from workers.sim.chat import answer_length, json_script
from workers.sim.generation import Choice, Generation, check_length, job_of
from workers.sim.http import DONE, ApiError, event, invalid
from workers.sim.model_tokens import ids, vocabulary
from workers.sim.requests import CompletionRequest, Json, parse
from workers.sim.sequence import TokenLogprob
from workers.sim.settings import FINGERPRINT, Settings


def prompts_of(prompt: object, settings: Settings) -> tuple[list[int], ...]:
    """A string, a list of strings, one list of token ids, or several.

    Raises `ApiError` for anything else.
    """
    if isinstance(prompt, str):
        prompts = [ids(prompt, settings, special=True)]
    elif isinstance(prompt, list) and prompt and all(isinstance(part, int) for part in prompt):
        prompts = [list(prompt)]
    elif isinstance(prompt, list):
        prompts = [
            ids(part, settings, special=True) if isinstance(part, str) else part
            for part in prompt
            if not isinstance(part, int)
        ]
    else:
        prompts = []
    if not prompts or not all(prompts):
        raise invalid("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if any(not 0 <= token < vocabulary(settings) for tokens in prompts for token in tokens):
        raise invalid("Token id is out of vocabulary", "prompt")
    return tuple(prompts)


def logprobs_of(entries: Iterable[TokenLogprob], top: int, offset: int) -> tuple[Json, int]:
    """vLLM's four lists, and the offset after them."""
    offsets, values, tokens, tops = [], [], [], []
    for entry in entries:
        offsets.append(offset)
        values.append(entry.logprob)
        tokens.append(entry.token)
        tops.append(dict([(entry.token, entry.logprob), *entry.alternatives][: max(top, 1)]))
        offset += len(entry.token)
    lists: Json = {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}
    return lists, offset


class Completion:
    """One text completion: one or many prompts, n answers each."""

    prefix = "cmpl-"

    @classmethod
    def read(cls, body: bytes, settings: Settings) -> Completion:
        """Raises `ApiError`."""
        return cls(parse(body, CompletionRequest), settings)

    def __init__(self, request: CompletionRequest, settings: Settings) -> None:
        """Raises `ApiError`."""
        self.request = request
        request.check()
        self.asked_model, self.model = request.model, settings.served_model_name
        self.created = int(time.time())
        if request.echo:
            raise invalid("The stand-in engine does not support `echo`.", "echo")
        prompts = prompts_of(request.prompt, settings)
        for prompt in prompts:
            check_length(prompt, settings.max_model_len)
        most, longest = max(map(len, prompts)), settings.max_model_len
        self.job = job_of(
            request,
            prompts,
            max_tokens=answer_length(request.max_tokens, "max_tokens", request.min_tokens, most, longest),
            logprobs=request.logprobs,
            script=json_script(request.response_format),
        )

    def refuse(self, error: ApiError) -> ApiError:
        return error

    def failed(self, error: ApiError) -> list[bytes]:
        return [event(error.body), DONE]

    def whole(self, request_id: str, generation: Generation, choices: list[Choice]) -> Json:
        top = self.request.logprobs
        return {
            "id": request_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [
                {
                    "index": choice.index,
                    "text": choice.text,
                    "logprobs": None if top is None else logprobs_of(choice.logprobs, top, 0)[0],
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                    "token_ids": None,
                    "prompt_logprobs": None,
                    "prompt_token_ids": None,
                    "routed_experts": None,
                }
                for choice in choices
            ],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": generation.usage.openai(created=False),
            "kv_transfer_params": generation.kv_transfer_params,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _frame(self, request_id: str, choices: list[Json], **more: object) -> Json:
        return {
            "id": request_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        } | more

    async def chunks(self, request_id: str, generation: Generation) -> AsyncIterator[bytes]:
        options, top = self.request.stream_options, self.request.logprobs
        usage = bool(options and options.include_usage)
        continuous = usage and bool(options and options.continuous_usage_stats)
        offsets = [0] * len(generation.sequences)
        async for output in generation.outputs():
            logprobs: Json | None = None
            if top is not None:
                logprobs, offsets[output.choice] = logprobs_of(output.logprobs, top, offsets[output.choice])
            choice: Json = {
                "index": output.choice,
                "text": output.text,
                "logprobs": logprobs,
                "finish_reason": output.finish_reason,
                "stop_reason": output.stop_reason,
                "prompt_token_ids": None,
                "token_ids": None,
            }
            frame = self._frame(request_id, [choice])
            if output.finish_reason is not None and not usage:
                frame["system_fingerprint"] = FINGERPRINT
            if continuous:
                frame["usage"] = generation.usage.brief()
            yield event(frame)
        if usage:
            yield event(
                self._frame(
                    request_id, [], usage=generation.usage.streamed(created=False), system_fingerprint=FINGERPRINT
                )
            )
        yield DONE
