"""`/v1/messages`: Anthropic's words around a chat completion (`entrypoints/anthropic`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import msgspec

from workers.sim.chat import Chat, tool_call_id
from workers.sim.generation import Choice, Generation, Usage
from workers.sim.http import ApiError, named_event
from workers.sim.model_tokens import chat_text, ids
from workers.sim.requests import ChatRequest, CountRequest, Json, MessagesRequest, parse
from workers.sim.settings import Settings
from workers.sim.text import content_text


def chat_messages(request: CountRequest) -> list[Json]:
    """The conversation in chat form. Tool results become messages of role `tool`, tool uses become calls."""
    messages: list[Json] = []
    if request.system:
        messages.append({"role": "system", "content": content_text(request.system)})
    for message in request.messages:
        content = message.get("content")
        blocks = content if isinstance(content, list) else []
        for block in blocks:
            if isinstance(block, Mapping) and block.get("type") == "tool_result":
                result = content_text(block.get("content"))
                messages.append({"role": "tool", "content": result, "tool_call_id": block.get("tool_use_id")})
        turn: Json = {"role": message.get("role"), "content": content_text(content)}
        if calls := [block for block in blocks if isinstance(block, Mapping) and block.get("type") == "tool_use"]:
            turn["tool_calls"] = [_call(block) for block in calls]
        if turn["content"] or calls:
            messages.append(turn)
    return messages


def _call(block: Mapping[str, object]) -> Json:
    arguments = msgspec.json.encode(block.get("input") or {}).decode()
    return {"id": block.get("id"), "type": "function", "function": {"name": block.get("name"), "arguments": arguments}}


def chat_tools(request: CountRequest) -> tuple[list[Json] | None, str | Json | None]:
    """Tools and tool choice in chat form."""
    tools: list[Json] = [
        {"type": "function", "function": {"name": tool.get("name"), "parameters": tool.get("input_schema")}}
        for tool in request.tools or ()
    ]
    choice = request.tool_choice or {}
    if choice.get("type") == "tool":
        return tools, {"type": "function", "function": {"name": choice.get("name")}}
    return tools or None, "required" if choice.get("type") == "any" else None


def usage_of(usage: Usage) -> Json:
    """Anthropic's figures: what was read from and written to the cache is not counted as input."""
    read, written = usage.cached_tokens, usage.created_tokens
    return {
        "input_tokens": max(0, usage.prompt_tokens - read - written),
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": read,
    }


def count_tokens(request: CountRequest, settings: Settings) -> int:
    """The tokens of a message's prompt."""
    return len(ids(chat_text(chat_messages(request), chat_tools(request)[0], settings), settings, special=False))


class Messages:
    """One message."""

    prefix = "chatcmpl-"

    @classmethod
    def read(cls, body: bytes, settings: Settings) -> Messages:
        """Raises `ApiError`, in Anthropic's shape once the body itself is well formed."""
        request = parse(body, MessagesRequest)
        try:
            return cls(request, settings)
        except ApiError as error:
            raise in_anthropic_shape(error) from None

    def __init__(self, request: MessagesRequest, settings: Settings) -> None:
        tools, tool_choice = chat_tools(request)
        self._chat = Chat(
            ChatRequest(
                model=request.model,
                messages=chat_messages(request),
                max_tokens=request.max_tokens,
                stream=request.stream,
                stop=request.stop_sequences,
                temperature=request.temperature,
                tools=tools,
                tool_choice=tool_choice,
                cache_salt=request.cache_salt,
                kv_transfer_params=request.kv_transfer_params,
            ),
            settings,
        )
        self.job = self._chat.job
        self.asked_model: str | None = request.model

    def refuse(self, error: ApiError) -> ApiError:
        return in_anthropic_shape(error)

    def _stop(self, reason: str | None, stop_reason: int | str | None) -> tuple[str | None, str | None]:
        if reason == "length":
            return "max_tokens", None
        if self._chat.calls:
            return "tool_use", None
        return ("stop_sequence", stop_reason) if isinstance(stop_reason, str) else ("end_turn", None)

    def whole(self, request_id: str, generation: Generation, choices: list[Choice]) -> Json:
        choice = choices[0]
        content: list[Json] = []
        if calls := self._chat.calls:
            for n, text in calls.split(choice.text):
                content.append({"type": "tool_use", "id": tool_call_id(), "name": calls.names[n], "input": whole(text)})
        elif choice.text:
            content.append({"type": "text", "text": choice.text})
        reason, sequence = self._stop(choice.finish_reason, choice.stop_reason)
        reply: Json = {
            "id": request_id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self._chat.model,
            "stop_reason": reason,
        }
        if sequence is not None:
            reply["stop_sequence"] = sequence
        reply["usage"] = usage_of(generation.usage)
        if params := generation.kv_transfer_params:
            reply["kv_transfer_params"] = params
        return reply

    async def chunks(self, request_id: str, generation: Generation) -> AsyncIterator[bytes]:
        block, written = -1, 0
        reason: str | None = None
        stop_reason: int | str | None = None
        started = False
        async for output in generation.outputs():
            if not started:
                started = True
                message: Json = {
                    "id": request_id,
                    "type": "message",
                    "role": "assistant",
                    "content": [],
                    "model": self._chat.model,
                    "stop_reason": None,
                    "stop_sequence": None,
                    "usage": {"input_tokens": generation.usage.prompt_tokens, "output_tokens": 0},
                }
                yield named_event({"type": "message_start", "message": message})
            calls = self._chat.calls
            for n, text in calls.split(output.text, written) if calls else [(0, output.text)] if output.text else []:
                if n != block:
                    if block >= 0:
                        yield named_event({"type": "content_block_stop", "index": block})
                    block = n
                    yield named_event({"type": "content_block_start", "content_block": self._block(n), "index": n})
                yield named_event({"type": "content_block_delta", "delta": self._delta(text), "index": n})
            written += len(output.text)
            if output.finish_reason is not None:
                reason, stop_reason = output.finish_reason, output.stop_reason
        if block >= 0:
            yield named_event({"type": "content_block_stop", "index": block})
        kind, sequence = self._stop(reason, stop_reason)
        delta = {"stop_reason": kind, "stop_sequence": sequence}
        yield named_event({"type": "message_delta", "delta": delta, "usage": usage_of(generation.usage)})
        yield named_event({"type": "message_stop"})

    def _block(self, n: int) -> Json:
        if calls := self._chat.calls:
            return {"type": "tool_use", "id": tool_call_id(), "name": calls.names[n], "input": {}}
        return {"type": "text", "text": ""}

    def _delta(self, text: str) -> Json:
        if self._chat.calls:
            return {"type": "input_json_delta", "partial_json": text}
        return {"type": "text_delta", "text": text}

    def failed(self, error: ApiError) -> list[bytes]:
        inner = {"type": "internal_error", "message": error.message}
        return [named_event({"type": "error", "error": inner})]


def whole(arguments: str) -> object:
    """A call's arguments as an object; of a call that was cut short: none."""
    try:
        return msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return {}


def in_anthropic_shape(error: ApiError) -> ApiError:
    error.body = {"type": "error", "error": {"type": error.kind, "message": error.message}}
    return error
