"""`/v1/responses`: OpenAI's Responses words around a chat completion (`entrypoints/openai/responses`).

Nothing is stored: a `previous_response_id` is answered 404, as vLLM does for one that it does not have.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Any

from workers.sim.chat import Chat
from workers.sim.generation import Choice, Generation, Usage
from workers.sim.http import ApiError, named_event
from workers.sim.requests import ChatRequest, Json, ResponsesRequest, parse
from workers.sim.settings import Settings


def chat_messages(request: ResponsesRequest) -> list[Json]:
    """The conversation in chat form."""
    messages: list[Json] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    for item in request.input:
        match item.get("type", "message"):
            case "message":
                messages.append({"role": item.get("role", "user"), "content": item.get("content")})
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            case "function_call_output":
                messages.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
    return messages


def chat_tools(request: ResponsesRequest) -> tuple[list[Json] | None, str | Json | None]:
    """Tools and tool choice in chat form."""
    tools: list[Json] = [
        {"type": "function", "function": {"name": tool.get("name"), "parameters": tool.get("parameters")}}
        for tool in request.tools
        if tool.get("type") == "function"
    ]
    choice = request.tool_choice
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    return tools or None, choice


def usage_of(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.created_tokens,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": 0,
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class Responses:
    """One response."""

    prefix = "resp_"

    @classmethod
    def read(cls, body: bytes, settings: Settings) -> Responses:
        """Raises `ApiError`."""
        return cls(parse(body, ResponsesRequest), settings)

    def __init__(self, request: ResponsesRequest, settings: Settings) -> None:
        if request.previous_response_id:
            raise ApiError(
                f"Response with id '{request.previous_response_id}' not found.",
                status=404,
                kind="invalid_request_error",
                param="response_id",
            )
        self._request = request
        tools, tool_choice = chat_tools(request)
        self._chat = Chat(
            ChatRequest(
                model=request.model,
                messages=chat_messages(request),
                max_tokens=request.max_output_tokens,
                stream=request.stream,
                stop=request.stop,
                ignore_eos=request.ignore_eos,
                temperature=request.temperature,
                seed=request.seed,
                tools=tools,
                tool_choice=tool_choice,
                parallel_tool_calls=request.parallel_tool_calls,
                cache_salt=request.cache_salt,
                kv_transfer_params=request.kv_transfer_params,
            ),
            settings,
        )
        self.job = self._chat.job
        self.asked_model = request.model

    def refuse(self, error: ApiError) -> ApiError:
        return error

    def _response(self, request_id: str, status: str, output: list[Json], generation: Generation | None) -> Json:
        request = self._request
        return {
            "id": request.request_id or request_id,
            "created_at": self._chat.created,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "metadata": request.metadata,
            "model": self._chat.model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "tool_choice": request.tool_choice,
            "tools": request.tools,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "background": bool(request.background),
            "max_output_tokens": self.job.sampling.max_tokens,
            "max_tool_calls": None,
            "previous_response_id": None,
            "prompt": None,
            "reasoning": request.reasoning,
            "service_tier": request.service_tier or "auto",
            "status": status,
            "text": request.text,
            "top_logprobs": None,
            "truncation": request.truncation or "disabled",
            "usage": usage_of(generation.usage) if generation else None,
            "user": request.user,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": generation.kv_transfer_params if generation else None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }

    def _item(self, id: str, text: str, status: str, name: str | None) -> Json:
        """`name`: of the tool that is called; None: it is text."""
        if name is not None:
            return {
                "arguments": text,
                "call_id": "chatcmpl-tool-" + id.removeprefix("fc_"),
                "name": name,
                "type": "function_call",
                "id": id,
                "async": None,
                "caller": None,
                "namespace": None,
                "status": status,
            }
        content = [self._part(text)] if text else []
        return {
            "id": id,
            "content": content,
            "role": "assistant",
            "status": status,
            "type": "message",
            "phase": None,
        }

    def _part(self, text: str, logprobs: list[Json] | None = None) -> Json:
        return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}

    def _parts(self, text: str, written: int) -> list[tuple[int, str | None, str]]:
        """Number and tool of the output items that `text` adds to, after `written` characters of them."""
        if calls := self._chat.calls:
            return [(n, calls.names[n], part) for n, part in calls.split(text, written)]
        return [(0, None, text)] if text else []

    def whole(self, request_id: str, generation: Generation, choices: list[Choice]) -> Json:
        choice = choices[0]
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        parts = self._parts(choice.text, 0) or [(0, None, "")]
        output = [self._item(item_id(name), text, "completed", name) for _, name, text in parts]
        return self._response(request_id, status, output, generation)

    async def chunks(self, request_id: str, generation: Generation) -> AsyncIterator[bytes]:
        number = -1

        def frame(kind: str, **fields: object) -> bytes:
            nonlocal number
            number += 1
            return named_event(fields | {"sequence_number": number, "type": kind})

        begun = self._response(request_id, "in_progress", [], None)
        yield frame("response.created", response=begun)
        yield frame("response.in_progress", response=begun)
        item: _Item | None = None
        output_items: list[Json] = []
        written, status = 0, "completed"
        async for output in generation.outputs():
            if output.finish_reason == "length":
                status = "incomplete"
            for n, name, text in self._parts(output.text, written):
                if item is None or item.number != n:
                    if item is not None:
                        for done in self._closing(item, output_items):
                            yield frame(**done)
                    item = _Item(n, name)
                    opened = self._item(item.id, "", "in_progress", name)
                    yield frame("response.output_item.added", item=opened, output_index=n)
                    if name is None:
                        part = self._part("", [])
                        yield frame("response.content_part.added", **item.place, content_index=0, part=part)
                item.text += text
                if name is None:
                    yield frame("response.output_text.delta", **item.place, delta=text, content_index=0, logprobs=[])
                else:
                    yield frame("response.function_call_arguments.delta", **item.place, delta=text)
            written += len(output.text)
        if item is not None:
            for done in self._closing(item, output_items):
                yield frame(**done)
        finished = self._response(request_id, status, output_items, generation)
        yield frame("response.completed", response=finished)

    def _closing(self, item: _Item, output: list[Json]) -> list[dict[str, Any]]:
        """The frames that end an output item, which is added to `output`."""
        whole = self._item(item.id, item.text, "completed", item.name)
        output.append(whole)
        last: dict[str, Any] = {"kind": "response.output_item.done", "item": whole, "output_index": item.number}
        if item.name is not None:
            arguments = {"arguments": item.text, "name": item.name}
            return [{"kind": "response.function_call_arguments.done", **item.place, **arguments}, last]
        text = {"kind": "response.output_text.done", "content_index": 0, "logprobs": [], "text": item.text}
        part = {"kind": "response.content_part.done", "content_index": 0, "part": self._part(item.text)}
        return [{**text, **item.place}, {**part, **item.place}, last]

    def failed(self, error: ApiError) -> list[bytes]:
        """vLLM 0.32 cannot word a failure in this stream: it breaks off."""
        raise error


class _Item:
    """One output item of a stream."""

    def __init__(self, number: int, name: str | None) -> None:
        self.number, self.name, self.text = number, name, ""
        self.id = item_id(name)

    @property
    def place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.number}


def item_id(name: str | None) -> str:
    """A new id, as vLLM begins them for text and for calls."""
    return ("fc_" if name is not None else "msg_") + secrets.token_hex(8)
