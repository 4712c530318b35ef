"""Messages and tools of a chat as a template gets them. Pure.

The rules are vLLM 0.32's (`renderers/chat_utils.py`, `entrypoints/openai/chat_completion/protocol.py`): what its validation
does to a message, and what its renderer makes of it then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from frontend_api.tokens.chat_template import Message


class Unknown(Exception):
    """It is not known here what the engine makes of this request."""


def flag(fields: Mapping[str, Any], name: str, default: bool) -> bool:
    """A boolean of the request. Raises `Unknown`."""
    value = fields.get(name, default)
    if type(value) is not bool:
        raise Unknown(name)
    return value


def refuse(fields: Mapping[str, Any], *names: str) -> None:
    """Raises `Unknown` where one of these fields is set: it changes the prompt in a way that is not followed here."""
    for name in names:
        if fields.get(name) is not None:
            raise Unknown(name)


def text_in(value: Any, name: str) -> str:
    """The value of a field that must be a text. Raises `Unknown`."""
    if type(value) is not str:
        raise Unknown(name)
    return value


def listed(value: object, name: str) -> list[Any]:
    """A list that is not empty. Raises `Unknown`."""
    if type(value) is not list or not value:
        raise Unknown(name)
    return value


def chat_tool(tool: Any) -> dict[str, Any]:
    """A tool as the template gets it: the fields that the API names, in its order. Raises `Unknown`."""
    if type(tool) is not dict or tool.get("type", "function") != "function":
        raise Unknown("tools")
    if type(tool.get("function")) is not dict or tool.get("defer_loading") is not None:
        raise Unknown("tools")
    return function_tool(tool["function"])


def function_tool(function: Mapping[str, Any]) -> dict[str, Any]:
    """A tool from its function. Raises `Unknown`."""
    name, description, parameters = (function.get(key) for key in ("name", "description", "parameters"))
    if type(name) is not str or not (description is None or type(description) is str):
        raise Unknown("tools")
    if not (parameters is None or type(parameters) is dict):
        raise Unknown("tools")
    shown: dict[str, Any] = {"name": name, "description": description, "parameters": parameters}
    for key in ("strict", "defer_loading"):
        if function.get(key) is not None:
            shown[key] = flag(function, key, False)
    return {"type": "function", "function": shown}


_FOREIGN_FIELDS = ("audio", "function_call", "channel", "recipient", "author", "content_type")
"""Of speech, of old function calls, and of another message format that the engine also tries."""


def validated(message: Any) -> Message:
    """A message of a chat request as it comes out of the engine's validation. Raises `Unknown`."""
    if type(message) is not dict or type(message.get("role")) is not str:
        raise Unknown("messages")
    refuse(message, *_FOREIGN_FIELDS)
    if "reasoning_content" in message:  # the older name
        message = dict(message)
        older = message.pop("reasoning_content")
        if older is not None and message.get("reasoning") is None:
            message["reasoning"] = older
    if message["role"] != "assistant":
        if message.get("content") is None or message.get("tool_calls") is not None:
            raise Unknown("messages")
        if message["role"] == "developer":
            refuse(message, "tools")
        return message
    calls = message.get("tool_calls")
    if calls is not None:
        if type(calls) is not list:
            raise Unknown("tool_calls")
        message = {**message, "tool_calls": [_call(call) for call in calls]}
    return message


def _call(call: Any) -> dict[str, Any]:
    """A tool call with its named fields in the API's order and all others after them."""
    function = call.get("function") if type(call) is dict else None
    if type(function) is not dict or call.get("type") != "function":
        raise Unknown("tool_calls")
    named = {key: text_in(function.get(key), "tool_calls") for key in ("arguments", "name")}
    first = {"id": text_in(call.get("id"), "tool_calls"), "function": {**named, **function}, "type": "function"}
    return {**first, **call, "function": first["function"]}


BILLING = "x-anthropic-billing-header"
"""A line of one client that changes with each request; the engine takes it out of system texts."""
_TEXT_PARTS = frozenset(("text", "input_text", "output_text"))
_SHOWN_FIELDS = frozenset(("type", "text", "cache_control"))
Part = dict[str, Any]


def for_template(message: Message, takes_parts: bool) -> Message:
    """A message as the template sees it. Raises `Unknown`."""
    role = message["role"]
    parts = _parts(message.get("content"), takes_parts)
    if role == "system":
        parts = _without_billing(parts)
    content: Any = parts
    if not takes_parts:
        content = "\n".join(part["text"] for part in parts if part["text"])
    elif role == "tool":
        content = "\n".join(part["text"] for part in parts)
    shown: Message = {"role": role, "content": content}
    if role == "assistant":
        if message.get("tool_calls"):
            shown["tool_calls"] = [_with_parsed_arguments(call) for call in message["tool_calls"]]
        if message.get("reasoning") is not None:
            if type(message["reasoning"]) is not str:
                raise Unknown("reasoning")
            shown["reasoning"] = shown["reasoning_content"] = message["reasoning"]
    elif role == "tool" and "tool_call_id" in message:
        shown["tool_call_id"] = message["tool_call_id"]
    for key in ("name", "task"):
        if type(message.get(key)) is str:
            shown[key] = message[key]
    if role == "developer":
        shown["tools"] = None
    return shown


def _without_billing(parts: list[Part]) -> list[Part]:
    kept = []
    for part in parts:
        if part["text"].startswith(BILLING):
            part = {**part, "text": part["text"].partition("\n")[2]}
            if not part["text"]:
                continue
        kept.append(part)
    return kept


def _parts(content: Any, exact: bool) -> list[Part]:
    """The text parts of a content; `exact`: a part's other fields reach the template."""
    if type(content) is str:
        return [{"type": "text", "text": content}]
    if content is None:
        return []
    if type(content) is not list:
        raise Unknown("content")
    parts = []
    for part in content:
        if type(part) is not dict or part.get("type") not in _TEXT_PARTS or part.get("uuid") is not None:
            raise Unknown("content")
        if exact and not _SHOWN_FIELDS.issuperset(part):
            raise Unknown("content")
        shown = {"type": "text", "text": text_in(part.get("text"), "content")}
        if len(part) > 2:
            shown |= {key: value for key, value in part.items() if key not in shown}
        parts.append(shown)
    return parts


def _with_parsed_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as an object, which is what templates expect; anything else becomes an empty one."""
    try:
        arguments = json.loads(call["function"]["arguments"] or "{}")
    except json.JSONDecodeError:
        arguments = {}
    if type(arguments) is not dict:
        arguments = {}
    return {**call, "function": {**call["function"], "arguments": arguments}}
