"""`/v1/messages` as the chat that an engine makes of it. Pure.

The rules are vLLM 0.32's (`entrypoints/anthropic/serving.py`). What they do not name raises `Unknown`.
"""

from __future__ import annotations

import json
from typing import Any

from frontend_api.tokens.chat_messages import BILLING, Unknown, function_tool, text_in, validated
from frontend_api.tokens.chat_template import ChatTemplate, Message
from frontend_api.tokens.prompts import Body, Prompt, Templates, conversation

_EFFORTS = ("low", "medium", "high", "xhigh", "max")


def messages(fields: Body, templates: Templates) -> Prompt:
    """`/v1/messages`. Raises `Unknown`."""
    merge = templates.plain.system_first or templates.with_tools.system_first
    given = fields.get("messages")
    if type(given) is not list:
        raise Unknown("messages")
    system = _system_texts(fields.get("system"))
    later = [message for message in given if type(message) is dict and message.get("role") == "system"]
    if merge:
        system += filter(None, map(_inline_system, later))
    converted: list[Message] = [{"role": "system", "content": "".join(system)}] if system else []
    for message in given:
        if type(message) is not dict or message.get("role") not in ("user", "assistant", "system"):
            raise Unknown("messages")
        if message["role"] != "system":
            converted += _converted(message)
        elif not merge and (text := _inline_system(message)):
            converted.append({"role": "system", "content": text})
    tools = fields.get("tools")
    if tools is not None:
        if type(tools) is not list:
            raise Unknown("tools")
        tools = [_tool(tool) for tool in tools]
    return conversation(
        [validated(message) for message in converted],
        templates,
        tools=tools,
        fields=fields,
        effort=_effort(fields, templates.plain),
    )


def _effort(fields: Body, template: ChatTemplate) -> object:
    output, thinking = fields.get("output_config") or {}, fields.get("thinking") or {}
    if type(output) is not dict or type(thinking) is not dict:
        raise Unknown("thinking")
    if thinking.get("type") == "disabled":
        return _least_effort(template)
    return output.get("effort")


def _least_effort(template: ChatTemplate) -> str:
    """What vLLM says to the template when thinking is off: `none`, unless that renders as no text or as some effort does."""
    if not (template.names("reasoning_effort") or template.names("enable_thinking")):
        return "none"
    templates = Templates(template, template)

    def rendered(effort: str) -> str | None:
        try:
            return conversation(
                [{"role": "user", "content": "Hi"}], templates, tools=None, fields={}, effort=effort
            ).text
        except Unknown:
            return None

    none = rendered("none")
    return "low" if none is None or any(rendered(effort) == none for effort in _EFFORTS) else "none"


def _blocks(content: Any) -> list[Body]:
    if type(content) is not list or any(type(block) is not dict for block in content):
        raise Unknown("content")
    return content


def _system_texts(system: Any) -> list[str]:
    if not system:
        return []
    if type(system) is str:
        return [system]
    return _texts_of_blocks(system)


def _inline_system(message: Body) -> str:
    content = message.get("content")
    if type(content) is str:
        return "" if content.startswith(BILLING) else content
    return "".join(_texts_of_blocks(content))


def _texts_of_blocks(content: Any) -> list[str]:
    texts = []
    for block in _blocks(content):
        if block.get("type") != "text":
            raise Unknown("system")
        text = text_in(block.get("text") or "", "system")
        if text and not text.startswith(BILLING):
            texts.append(text)
    return texts


def _converted(message: Body) -> list[Message]:
    """One message as those of a chat: results of tools come first, as messages of their own."""
    role, content = message["role"], message.get("content")
    if type(content) is str:
        return [{"role": role, "content": content}]
    results: list[Message] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in _blocks(content):
        kind = block.get("type")
        if kind == "text":
            if text := block.get("text"):
                texts.append(text_in(text, "content"))
        elif kind == "thinking":
            thoughts.append(text_in(block.get("thinking"), "content"))
        elif kind == "tool_use":
            calls.append(_tool_use(block))
        elif kind == "tool_result" and role == "user":
            identity = text_in(block.get("tool_use_id") or "", "content")
            results.append({"role": "tool", "tool_call_id": identity, "content": _result_text(block.get("content"))})
        elif kind != "redacted_thinking":
            raise Unknown("content")
    shown: Message = {"role": role}
    if thoughts:
        shown["reasoning"] = "".join(thoughts)
    if calls:
        shown["tool_calls"] = calls
    if texts:
        shown["content"] = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
    if role == "user" and (thoughts or calls):
        raise Unknown("content")
    return [*results, shown] if role == "assistant" or texts else results


def _tool_use(block: Body) -> dict[str, Any]:
    given = block.get("input")
    if type(given) is not dict and given is not None:
        raise Unknown("content")
    identity, name = text_in(block.get("id"), "content"), text_in(block.get("name") or "", "content")
    if not identity:
        raise Unknown("content")  # the engine makes up one from its clock
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": json.dumps(given or {})}}


def _result_text(content: Any) -> str:
    if content is None or type(content) is str:
        return content or ""
    parts = list(_blocks(content))
    if any(part.get("type") != "text" for part in parts):
        raise Unknown("content")
    return "\n".join(text_in(part.get("text", ""), "content") for part in parts)


def _tool(tool: Any) -> dict[str, Any]:
    if type(tool) is not dict or type(tool.get("input_schema")) is not dict:
        raise Unknown("tools")
    parameters = tool["input_schema"] if "type" in tool["input_schema"] else {**tool["input_schema"], "type": "object"}
    named = {key: tool.get(key) for key in ("name", "description", "strict", "defer_loading")}
    return function_tool({**named, "parameters": parameters})
