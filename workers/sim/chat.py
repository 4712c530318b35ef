"""`/v1/chat/completions`: request to job, outputs to vLLM's JSON and chunks (`entrypoints/openai/chat_completion`)."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Sequence

from workers.sim.generation import Choice, Generation, check_length, job_of
from workers.sim.http import DONE, ApiError, event, invalid, late
from workers.sim.model_tokens import chat_text, ids
from workers.sim.requests import ChatRequest, Json, parse
from workers.sim.schema import script
from workers.sim.sequence import TokenLogprob
from workers.sim.settings import FINGERPRINT, Settings


class ForcedCalls:
    """The calls that `tool_choice` forces: the one named, or by `"required"` one of each tool."""

    def __init__(self, functions: Sequence[Json], *, required: bool) -> None:
        self.names = [str(function.get("name")) for function in functions]
        self._scripts = [script(function.get("parameters")) for function in functions]
        self.required = required
        """By `"required"`, not by name: only then is the finish reason `tool_calls`."""

    @property
    def script(self) -> tuple[str, ...]:
        return tuple(itertools.chain.from_iterable(self._scripts))

    def split(self, text: str, start: int = 0) -> list[tuple[int, str]]:
        """To which call each part of `text` belongs. `start`: characters that were written before it."""
        parts, end = [], 0
        for index, pieces in enumerate(self._scripts):
            begin, end = end, end + sum(map(len, pieces))
            if part := text[max(begin - start, 0) : max(end - start, 0)]:
                parts.append((index, part))
        return parts


def forced_calls(request: ChatRequest) -> ForcedCalls | None:
    """Raises `ApiError` when the tool that is asked for is not there."""
    functions = [f for tool in request.tools or () if isinstance(f := tool.get("function"), dict)]
    choice = request.tool_choice
    if choice == "required":
        if not functions:
            raise invalid("When using `tool_choice`, `tools` must be set.", "tool_choice")
        return ForcedCalls(functions[:1] if request.parallel_tool_calls is False else functions, required=True)
    if not isinstance(choice, dict):
        return None
    wanted = choice.get("function")
    name = wanted.get("name") if isinstance(wanted, dict) else None
    for function in functions:
        if function.get("name") == name:
            return ForcedCalls([function], required=False)
    raise invalid("The tool specified in `tool_choice` does not match any of the specified `tools`", "tools")


def json_script(response_format: Json | None) -> tuple[str, ...]:
    """The JSON text that a response format asks for; empty when plain text will do."""
    kind = response_format.get("type") if response_format else None
    if kind == "json_object":
        return script({"type": "object", "properties": {"answer": {"type": "string"}}})
    if kind != "json_schema" or not response_format:
        return ()
    outer = response_format.get("json_schema")
    return script(outer.get("schema") if isinstance(outer, dict) else None)


def logprob_entry(token: str, value: float) -> Json:
    return {"token": token, "logprob": value, "bytes": list(token.encode())}


def logprobs_content(entries: Iterable[TokenLogprob], top: int) -> Json:
    content = []
    for entry in entries:
        ranked = [(entry.token, entry.logprob), *entry.alternatives][:top]
        content.append(
            logprob_entry(entry.token, entry.logprob) | {"top_logprobs": [logprob_entry(*pair) for pair in ranked]}
        )
    return {"content": content}


class Chat:
    """One chat completion."""

    prefix = "chatcmpl-"

    @classmethod
    def read(cls, body: bytes, settings: Settings) -> Chat:
        """Raises `ApiError`."""
        return cls(parse(body, ChatRequest), settings)

    def __init__(self, request: ChatRequest, settings: Settings) -> None:
        """Raises `ApiError`."""
        self.request = request
        request.check()
        self.asked_model, self.model = request.model, settings.served_model_name
        self.created = int(time.time())
        self.calls = forced_calls(request)
        self._top = request.top_logprobs or 0
        if self._top and not request.logprobs:
            raise invalid("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
        generate, resume = request.add_generation_prompt, request.continue_final_message
        text = chat_text(request.messages, request.tools, settings, generate=generate, resume=resume)
        prompt = ids(text, settings, special=False)
        check_length(prompt, settings.max_model_len)
        asked = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        self.job = job_of(
            request,
            (prompt,),
            max_tokens=answer_length(asked, name, request.min_tokens, len(prompt), settings.max_model_len),
            logprobs=max(self._top, 1) if request.logprobs else None,
            script=self.calls.script if self.calls else json_script(request.response_format),
        )

    def _finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if self.calls and self.calls.required and reason == "stop" else reason

    def _message(self, choice: Choice) -> Json:
        message: Json = {
            "role": "assistant",
            "content": choice.text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
        if self.calls:
            message["content"] = ""
            functions = [{"name": self.calls.names[n], "arguments": text} for n, text in self.calls.split(choice.text)]
            message["tool_calls"] = [{"id": tool_call_id(), "type": "function", "function": f} for f in functions]
        return message

    def refuse(self, error: ApiError) -> ApiError:
        return error

    def failed(self, error: ApiError) -> list[bytes]:
        return [event(error.body), DONE]

    def whole(self, request_id: str, generation: Generation, choices: list[Choice]) -> Json:
        return {
            "id": request_id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": [
                {
                    "index": choice.index,
                    "message": self._message(choice),
                    "logprobs": logprobs_content(choice.logprobs, self._top) if self.request.logprobs else None,
                    "finish_reason": self._finish_reason(choice.finish_reason),
                    "stop_reason": choice.stop_reason,
                    "token_ids": None,
                    "routed_experts": None,
                }
                for choice in choices
            ],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": generation.usage.openai(created=True),
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "prompt_text": None,
            "kv_transfer_params": generation.kv_transfer_params,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _frame(self, request_id: str, choices: list[Json], **more: object) -> Json:
        return {
            "id": request_id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        } | more

    async def chunks(self, request_id: str, generation: Generation) -> AsyncIterator[bytes]:
        options = self.request.stream_options
        usage = bool(options and options.include_usage)
        continuous = usage and bool(options and options.continuous_usage_stats)
        opened, written = False, [0] * len(generation.sequences)
        try:
            async for output in generation.outputs():
                if not opened:
                    opened = True
                    for first in self._opening(request_id, generation, continuous=continuous):
                        yield first
                delta: Json = {"content": output.text}
                if self.calls:
                    delta = self._tool_delta(self.calls, output.text, written[output.choice])
                    written[output.choice] += len(output.text)
                entry: Json = {
                    "index": output.choice,
                    "delta": delta,
                    "logprobs": logprobs_content(output.logprobs, self._top) if self.request.logprobs else None,
                    "finish_reason": self._finish_reason(output.finish_reason),
                }
                if output.finish_reason is not None:
                    entry["stop_reason"] = output.stop_reason
                frame = self._frame(request_id, [entry | {"token_ids": None}])
                if output.finish_reason is not None and not usage:
                    frame["system_fingerprint"] = FINGERPRINT
                if continuous:
                    frame["usage"] = generation.usage.continuous(generation.sequences[output.choice].generated)
                yield event(frame)
        except ApiError:
            if not opened:  # vLLM's stream begins with its first output, be it a failure
                for first in self._opening(request_id, generation, continuous=continuous):
                    yield first
            raise
        if usage:
            yield event(
                self._frame(
                    request_id, [], usage=generation.usage.streamed(created=True), system_fingerprint=FINGERPRINT
                )
            )
        yield DONE

    def _opening(self, request_id: str, generation: Generation, *, continuous: bool) -> list[bytes]:
        """The first chunk of each choice: its role and no text."""
        frames = []
        for index in range(self.job.n):
            delta: Json = {"role": "assistant", "content": ""}
            choice: Json = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            first = self._frame(request_id, [choice], prompt_token_ids=None, prompt_text=None)
            frames.append(event(first | {"usage": generation.usage.continuous(0)} if continuous else first))
        return frames

    def _tool_delta(self, calls: ForcedCalls, text: str, written: int) -> Json:
        """What `text` adds to the calls, after `written` characters of them."""
        begun = {index for index, _ in calls.split("".join(calls.script)[:written])}
        parts: list[Json] = []
        for index, part in calls.split(text, written):
            if index in begun:
                parts.append({"index": index, "function": {"arguments": part}})
            else:
                function = {"name": calls.names[index], "arguments": part}
                parts.append({"id": tool_call_id(), "type": "function", "index": index, "function": function})
        return {"tool_calls": parts} if parts else {}


def tool_call_id() -> str:
    return f"chatcmpl-tool-{secrets.token_hex(8)}"


def answer_length(asked: int | None, name: str, least: int, prompt: int, longest: int) -> int:
    """The most tokens of an answer. `name`: of the field that asks; `longest`: the model's length.

    Raises `ApiError` for zero and more than the model's length, and for less than `least`, in vLLM's words.
    """
    if asked is not None and asked > longest:
        say = f"{name}={asked} cannot be greater than max_model_len={longest}. Please request fewer output tokens."
        raise late(invalid(say, name, asked))
    length = longest - prompt if asked is None else min(asked, longest - prompt)
    if length < 1:
        raise late(invalid(f"max_tokens must be at least 1, got {length}.", "max_tokens", length))
    if least > length:
        raise late(ApiError(f"min_tokens must be less than or equal to max_tokens={length}, got {least}."))
    return length
