"""The same request to an engine and through the router: a table of bodies, and what may differ between the two replies."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import httpx

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
RANDOM = re.compile(
    rb'(?<="id":")(?:chatcmpl-tool-|call_|msg_|fc_|resp_|rs_)[^"]*|(?<="call_id":")[^"]*|(?<="item_id":")[^"]*'
    rb'|(?<="created":)\d+|(?<="created_at":)\d+'
)
"""Ids that an engine makes up, and times. A reply's own id repeats the request's, which both requests share."""


class Said(NamedTuple):
    """A reply without what differs from call to call."""

    status: int
    kind: str
    body: bytes


def ask(client: httpx.Client, url: str, path: str, body: dict[str, Any] | bytes, request_id: str) -> Said:
    data = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
    headers = {"content-type": "application/json", "x-request-id": request_id}
    reply = client.post(url + path, content=data, headers=headers)
    return Said(reply.status_code, reply.headers["content-type"], RANDOM.sub(b"0", reply.content))


def in_the_endpoints_shape(path: str, said: Said) -> Said:
    """vLLM refuses what is no message at all in OpenAI's words; Anthropic's clients look for a mark, which the router adds."""
    if path.startswith(MESSAGES) and said.body.startswith(b'{"error":'):
        return said._replace(body=b'{"type":"error",' + said.body[1:])
    return said


def by_choice(said: Said) -> Said:
    """A stream with the events of each choice together: in which order those of several come is the engine's mood."""
    events = said.body.split(b"\n\n")
    index = re.compile(rb'"choices":\[\{"index":(\d+)')
    events.sort(key=lambda event: int(found[1]) if (found := index.search(event)) else 1 << 20)
    return said._replace(body=b"\n\n".join(events))


def words(said: Said) -> Any:
    """What the reply says, without counts: what two ways through different engines must agree in."""
    if said.kind.startswith("text/event-stream"):
        data = [line[6:] for line in said.body.split(b"\n") if line.startswith(b"data: ")]
        return [_words(json.loads(d)) if d != b"[DONE]" else d for d in data]
    return _words(json.loads(said.body))


def _words(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _words(v) for k, v in value.items() if k not in ("usage", "system_fingerprint")}
    return [_words(item) for item in value] if isinstance(value, list) else value


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "size": {"type": "integer"}},
    "required": ["city"],
}
USER = [{"role": "user", "content": "Tell me of the river, the bridge and the old town. " * 4}]


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA}}


TOOLS = [tool("weather"), tool("news")]
CALL = {"id": "c1", "type": "function", "function": {"name": "news", "arguments": "{}"}}
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Red?"}, {"type": "text", "text": "Or é ✓ 日本 🚲?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "Green."},
    {"role": "user", "content": 'Say "usage" [DONE] {"error": 1}'},
]


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": USER, "temperature": 0, "max_tokens": 7} | more


def text(**more: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "Red, green, é ✓ " * 6, "temperature": 0, "max_tokens": 7} | more


ANSWERED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, chat()),
    "turns": (CHAT, chat(messages=TURNS)),
    "to its end": (CHAT, chat(max_tokens=None)),
    "both limits": (CHAT, chat(max_tokens=50, max_completion_tokens=3)),
    "stop": (CHAT, chat(stop="b", max_tokens=90, ignore_eos=True)),
    "several stops, shown": (CHAT, chat(stop=["ba", "ke"], max_tokens=90, include_stop_str_in_output=True)),
    "at least": (CHAT, chat(min_tokens=5)),
    "log probabilities": (CHAT, chat(logprobs=True, top_logprobs=4)),
    "three answers": (CHAT, chat(n=3, temperature=0.8, seed=5)),
    "seed": (CHAT, chat(temperature=1.3, seed=9)),
    "json": (CHAT, chat(response_format={"type": "json_object"}, max_tokens=60)),
    "json schema": (
        CHAT,
        chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}, max_tokens=60),
    ),
    "unknown fields": (CHAT, chat(x_unknown={"a": [1.50, None]}, user="u", metadata={"k": "v"})),
    "sampling": (CHAT, chat(top_p=0.9, top_k=4, min_p=0.1, presence_penalty=0.2, logit_bias={"5": 1})),
    "salt": (CHAT, chat(cache_salt="s")),
    "text": (TEXT, text()),
    "token ids": (TEXT, text(prompt=[300, 301, 302] * 9)),
    "one in a list": (TEXT, text(prompt=["Red, green, blue and"])),
    "two prompts": (TEXT, text(prompt=["Red, green, blue and", "One, two, three and"])),
    "two prompts, two answers": (TEXT, text(prompt=["Red, green", "One, two"], n=2, temperature=0.9, seed=2)),
    "text with log probabilities": (TEXT, text(logprobs=2)),
    "text to a stop": (TEXT, text(stop=["a b", "o l"], max_tokens=90)),
    "text with the default limit": (TEXT, text(max_tokens=None)),
    "response": (RESPONSES, {"model": "m", "input": "Red, green?", "temperature": 0, "max_output_tokens": 7}),
    "response to turns": (
        RESPONSES,
        {"model": "m", "input": [{"role": "user", "content": "Red?"}], "instructions": "Be brief.", "temperature": 0},
    ),
    "message": (MESSAGES, {"model": "m", "messages": USER, "temperature": 0, "max_tokens": 7}),
    "message with a system text": (
        MESSAGES,
        {"model": "m", "messages": USER, "system": "Be brief.", "temperature": 0, "max_tokens": 50},
    ),
    "message to a stop": (
        MESSAGES,
        {"model": "m", "messages": USER, "temperature": 0, "max_tokens": 90, "stop_sequences": ["ba", "ke"]},
    ),
}
"""Each is asked whole and streamed."""

WITH_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "tools": (CHAT, chat(tools=TOOLS, tool_choice="required", max_tokens=90)),
    "a tool by name": (CHAT, chat(tools=TOOLS, tool_choice=tool("news"), max_tokens=90)),
    "no tool": (CHAT, chat(tools=TOOLS, tool_choice="none")),
    "a tool without parameters": (
        CHAT,
        chat(tools=[{"type": "function", "function": {"name": "now"}}], tool_choice="required", max_tokens=20),
    ),
    "one call only": (CHAT, chat(tools=TOOLS, tool_choice="required", max_tokens=90, parallel_tool_calls=False)),
    "a call cut short": (CHAT, chat(tools=TOOLS, tool_choice="required", max_tokens=4)),
    "response with tools": (
        RESPONSES,
        {
            "model": "m", "input": "Red?", "temperature": 0, "tool_choice": "required",
            "tools": [{"type": "function", "name": n, "parameters": SCHEMA} for n in ("weather", "news")],
        },
    ),
    "message with tools": (
        MESSAGES,
        {
            "model": "m", "messages": USER, "temperature": 0, "max_tokens": 90, "tool_choice": {"type": "any"},
            "tools": [{"name": n, "input_schema": SCHEMA} for n in ("weather", "news")],
        },
    ),
}  # fmt: skip
"""As `ANSWERED`, for an engine that reads tool calls."""

STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "counts": (CHAT, chat(stream=True, stream_options={"include_usage": True})),
    "counts in every chunk": (
        CHAT,
        chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}),
    ),
    "no counts, said so": (CHAT, chat(stream=True, stream_options={"include_usage": False})),
    "no options": (CHAT, chat(stream=True, stream_options=None)),
    "options of no effect": (CHAT, chat(stream=True, stream_options={"continuous_usage_stats": True})),
    "counts of three answers": (
        CHAT,
        chat(stream=True, stream_options={"include_usage": True}, n=3, temperature=0.8, seed=5),
    ),
    "counts of a text": (TEXT, text(stream=True, stream_options={"include_usage": True})),
    "counts of two texts": (
        TEXT,
        text(prompt=["Red, green", "One, two"], stream=True, stream_options={"include_usage": True}),
    ),
}

REFUSED: dict[str, tuple[str, dict[str, Any] | bytes]] = {
    "no messages": (CHAT, {"model": "m"}),
    "messages of another kind": (CHAT, chat(messages="x")),
    "a limit of zero": (CHAT, chat(max_tokens=0)),
    "a limit below zero": (CHAT, chat(max_tokens=-1)),
    "a limit in words": (CHAT, chat(max_tokens="seven")),
    "a limit that streams": (CHAT, chat(max_tokens=-1, stream=True)),
    "more than the model's length": (CHAT, chat(max_tokens=10**6)),
    "more at least than at most": (CHAT, chat(min_tokens=9)),
    "at least as words": (CHAT, chat(min_tokens="x")),
    "stream as an object": (CHAT, chat(stream={})),
    "options without a stream": (CHAT, chat(stream_options={"include_usage": True})),
    "options of another kind": (CHAT, chat(stream=True, stream_options=[1])),
    "odd options": (CHAT, chat(stream=True, stream_options={"continuous_usage_stats": "odd"})),
    "temperature": (CHAT, chat(temperature=9)),
    "n of zero": (CHAT, chat(n=0)),
    "n while greedy": (CHAT, chat(n=2)),
    "an empty stop": (CHAT, chat(stop="")),
    "a tool that is not there": (CHAT, chat(tools=TOOLS, tool_choice=tool("none such"))),
    "top without log probabilities": (CHAT, chat(top_logprobs=2)),
    "too long": (CHAT, chat(messages=[{"role": "user", "content": "w " * 9000}])),
    "too long, streamed": (CHAT, chat(messages=[{"role": "user", "content": "w " * 9000}], stream=True)),
    "no prompt": (TEXT, {"model": "m"}),
    "an empty prompt": (TEXT, text(prompt="")),
    "no prompts": (TEXT, text(prompt=[])),
    "text too long": (TEXT, text(prompt=[300] * 9000)),
    "response without input": (RESPONSES, {"model": "m"}),
    "response that goes on from nothing": (
        RESPONSES,
        {"model": "m", "input": "x", "previous_response_id": "resp_none"},
    ),
    "message without a limit": (MESSAGES, {"model": "m", "messages": USER}),
    "message with a limit of zero": (MESSAGES, {"model": "m", "messages": USER, "max_tokens": 0}),
    "count without messages": (MESSAGES + "/count_tokens", {"model": "m"}),
    "message too long": (
        MESSAGES,
        {"model": "m", "messages": [{"role": "user", "content": "w " * 9000}], "max_tokens": 5},
    ),
}
"""By the engine: its words and its status reach the client."""

BROKEN: dict[str, bytes] = {
    "nothing": b"",
    "half an object": b'{"model": "m", "messages": [',
    "a list": b"[1]",
    "no json": b"model=m",
    "not utf-8": b'{"model": "m", "messages": [{"role": "user", "content": "\xff"}]}',
    "something after it": b'{"model": "m"} x',
}
"""Refused by the router itself: with status 400, as the engine does."""
