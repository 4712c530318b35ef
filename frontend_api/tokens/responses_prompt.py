"""`/v1/responses` as the chat that an engine makes of it. Pure.

The rules are vLLM 0.32's (`entrypoints/openai/responses/utils.py`). What they do not name raises `Unknown`.
"""

from __future__ import annotations

from typing import Any

from frontend_api.tokens.chat_messages import Unknown, function_tool, refuse, text_in
from frontend_api.tokens.chat_template import Message
from frontend_api.tokens.prompts import Body, Prompt, Templates, conversation


def responses(fields: Body, templates: Templates) -> Prompt:
    """`/v1/responses`. Raises `Unknown`: also for a follow-up, whose history lies on one engine."""
    refuse(
        fields, "previous_response_id", "previous_input_messages", "prompt", "media_io_kwargs", "mm_processor_kwargs"
    )
    if fields.get("truncation", "disabled") != "disabled":
        raise Unknown("truncation")
    variables = fields.get("chat_template_kwargs") or {}
    if type(variables) is not dict or any(value is None or value == "auto" for value in variables.values()):
        raise Unknown("chat_template_kwargs")  # here, and here alone, these are not taken for unset
    messages: list[Message] = []
    instructions = fields.get("instructions")
    if instructions:
        messages.append({"role": "system", "content": text_in(instructions, "instructions")})
    items = fields.get("input")
    if type(items) is str:
        messages.append({"role": "user", "content": items})
    elif type(items) is list:
        for item in items:
            _add_item(messages, item)
    else:
        raise Unknown("input")
    tools = fields.get("tools") or None
    if tools is not None:
        if type(tools) is not list or any(type(t) is not dict or t.get("type") != "function" for t in tools):
            raise Unknown("tools")
        tools = [function_tool(tool) for tool in tools]
    reasoning = fields.get("reasoning") or {}
    if type(reasoning) is not dict:
        raise Unknown("reasoning")
    return conversation(messages, templates, tools=tools, fields=fields, effort=reasoning.get("effort"), special=True)


def _add_item(messages: list[Message], item: Any) -> None:
    """One input item: a message of its own, or a part of the assistant's message before it."""
    if type(item) is not dict or item.get("status", "completed") not in ("completed", None):
        raise Unknown("input")  # an unfinished item is one to continue
    before = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    kind = item.get("type", "message")
    if kind == "message" and item.get("role") == "assistant":
        _add_to(before, messages, "content", _answer(item))
    elif kind == "message" and item.get("role") in ("user", "system", "developer"):
        if item.get("content") is None:
            raise Unknown("input")
        refuse(item, "tools")
        messages.append(item)
    elif kind == "function_call":
        refuse(item, "namespace")
        name, arguments, identity = (text_in(item.get(key), "input") for key in ("name", "arguments", "call_id"))
        call = {"id": identity, "function": {"name": name, "arguments": arguments}, "type": "function"}
        if before is not None and "tool_calls" in before:
            before["tool_calls"].append(call)
        else:
            _add_to(before, messages, "tool_calls", [call])
    elif kind == "function_call_output":
        output, identity = (text_in(item.get(key), "input") for key in ("output", "call_id"))
        messages.append({"role": "tool", "content": output, "tool_call_id": identity})
    elif kind == "reasoning":
        _add_to(before, messages, "reasoning", _thought(item))
    else:
        raise Unknown("input")


def _add_to(before: Message | None, messages: list[Message], field: str, value: Any) -> None:
    if before is not None and before.get(field) is None:
        before[field] = value
    else:
        messages.append({"role": "assistant", field: value})


def _answer(item: Body) -> str:
    content = item.get("content")
    if type(content) is str:
        return content
    if "type" not in item or type(content) is not list or not content:
        raise Unknown("input")
    if any(type(part) is not dict or part.get("type") != "output_text" for part in content):
        raise Unknown("input")
    return text_in(content[0].get("text"), "input")  # the engine leaves the others out


def _thought(item: Body) -> str:
    refuse(item, "encrypted_content")
    for field, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        parts = item.get(field) or []
        if type(parts) is not list or any(type(p) is not dict or p.get("type") != kind for p in parts):
            raise Unknown("input")
        if parts:
            return text_in(parts[0].get("text"), "input")
    return ""
