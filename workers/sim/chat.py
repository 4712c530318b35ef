"""`/v1/chat/completions`: request to job, outputs to vLLM's JSON and chunks (`entrypoints/openai/chat_completion`)."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Iterable

from workers.sim.generation import Choice, Generation, Job, check_length
from workers.sim.http import DONE, ApiError, event, invalid
from workers.sim.model_tokens import chat_text, ids
from workers.sim.requests import ChatRequest, Json, parse
from workers.sim.schema import script
from workers.sim.sequence import Sampling, TokenLogprob
from workers.sim.settings import FINGERPRINT, Settings


class ForcedTool:
    """The one call that `tool_choice` forces."""

    def __init__(self, name: str, schema: object, *, required: bool) -> None:
        self.name = name
        self.schema = schema
        self.required = required
        """By `"required"`, not by name: only then is the finish reason `tool_calls`."""


def forced_tool(tools: Iterable[Json] | None, choice: object) -> ForcedTool | None:
    """Raises `ApiError` when the tool that is asked for is not there."""
    functions = [f for tool in tools or () if isinstance(f := tool.get("function"), dict)]
    if choice == "required":
        if not functions:
            raise invalid("When using `tool_choice`, `tools` must be set.", "tool_choice")
        return ForcedTool(str(functions[0].get("name")), functions[0].get("parameters"), required=True)
    if not isinstance(choice, dict):
        return None
    wanted = choice.get("function")
    name = wanted.get("name") if isinstance(wanted, dict) else None
    for function in functions:
        if function.get("name") == name:
            return ForcedTool(str(name), function.get("parameters"), required=False)
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
        self.tool = forced_tool(request.tools, request.tool_choice)
        self._top = request.top_logprobs or 0
        if self._top and not request.logprobs:
            raise invalid("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
        prompt = ids(chat_text(request.messages, request.tools, settings), settings, special=False)
        check_length(prompt, settings.max_model_len)
        asked = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        room = settings.max_model_len - len(prompt)
        self.job = Job(
            prompts=(prompt,),
            sampling=Sampling(
                max_tokens=positive(room if asked is None else min(asked, room)),
                min_tokens=request.min_tokens,
                ignore_eos=request.ignore_eos,
                stop=request.stops(),
                stop_token_ids=tuple(request.stop_token_ids or ()),
                include_stop=request.include_stop_str_in_output,
                logprobs=max(self._top, 1) if request.logprobs else None,
                script=script(self.tool.schema) if self.tool else json_script(request.response_format),
            ),
            n=request.n or 1,
            stream=bool(request.stream),
            temperature=1.0 if request.temperature is None else request.temperature,
            seed=request.seed,
            cache_salt=request.cache_salt,
            kv_transfer_params=request.kv_transfer_params,
        )

    def _finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if self.tool and self.tool.required and reason == "stop" else reason

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
        if self.tool:
            message["content"] = ""
            function = {"name": self.tool.name, "arguments": choice.text}
            message["tool_calls"] = [{"id": tool_call_id(), "type": "function", "function": function}]
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
        opened, calls = False, set[int]()
        try:
            async for output in generation.outputs():
                if not opened:
                    opened = True
                    for first in self._opening(request_id, generation, continuous=continuous):
                        yield first
                delta: Json = {"content": output.text}
                if self.tool:
                    delta = self._tool_delta(output.choice, output.text, calls)
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

    def _tool_delta(self, index: int, text: str, calls: set[int]) -> Json:
        assert self.tool is not None
        if index not in calls:
            calls.add(index)
            function = {"name": self.tool.name, "arguments": text}
            return {"tool_calls": [{"id": tool_call_id(), "type": "function", "index": 0, "function": function}]}
        return {"tool_calls": [{"index": 0, "function": {"arguments": text}}]} if text else {}


def tool_call_id() -> str:
    return f"chatcmpl-tool-{secrets.token_hex(8)}"


def positive(max_tokens: int) -> int:
    """Raises `ApiError` for zero, as vLLM's sampling parameters do."""
    if max_tokens < 1:
        raise invalid(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens", max_tokens)
    return max_tokens
