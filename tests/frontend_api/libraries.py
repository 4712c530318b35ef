"""What the official libraries return, as plain data that can be compared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def essence(value: Any) -> Any:
    """An object of the library as plain data, without what differs from call to call, is null, or streams alone have."""
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if isinstance(value, dict):
        odd = {
            "id",
            "created",
            "created_at",
            "call_id",
            "item_id",
            "object",
            "parsed",
            "parsed_arguments",
            "completed_at",
        }
        return {k: essence(v) for k, v in value.items() if k not in odd and v not in (None, [], "") and k != "index"}
    return [essence(item) for item in value] if isinstance(value, list) else value


def added_up(chunks: Iterable[Any]) -> list[dict[str, Any]]:
    """The choices of a chat stream, put together from its deltas."""
    choices: dict[int, dict[str, Any]] = {}
    for part in chunks:
        for choice in part.choices:
            whole = choices.setdefault(choice.index, {"message": {}, "finish_reason": None})
            message, given = whole["message"], choice.to_dict()
            delta = given["delta"]
            message.setdefault("role", delta.get("role"))
            message["content"] = message.get("content", "") + (delta.get("content") or "")
            for call in delta.get("tool_calls") or ():
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    calls.append(call)
                    call["function"].setdefault("arguments", "")
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"].get("arguments") or ""
            if given.get("logprobs"):
                whole.setdefault("logprobs", {"content": []})["content"] += given["logprobs"]["content"]
            for name in ("finish_reason", "stop_reason"):
                whole[name] = given.get(name) or whole.get(name)
    return [choices[index] for index in sorted(choices)]
