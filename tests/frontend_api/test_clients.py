"""The official clients of OpenAI and Anthropic through the router, in front of stand-ins: a disaggregated pair, and one
aggregated engine. What a stream adds up to is what the same request gives whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from controlplane.fleet.model import Role
from tests.frontend_api.conftest import MakeSite
from tests.frontend_api.libraries import added_up, essence
from tests.frontend_api.scripted import DONE, LAST, ROLE, STREAM_HEAD, USAGE, chunk, dribble, event, framed

TEXT = "Tell me of the river, the bridge and the old town. " * 8
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "size": {"type": "integer"}},
    "required": ["city"],
}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "Looks it up.", "parameters": SCHEMA}}


TOOLS = {"tools": [tool("weather"), tool("news")], "tool_choice": "required"}


@pytest.fixture(params=["pair", "alone"])
def url(request: pytest.FixtureRequest, urls: dict[str, str]) -> str:
    return urls[request.param]


@pytest.fixture(scope="module")
def api() -> Iterator[Callable[[str], openai.OpenAI]]:
    client = openai.OpenAI(base_url="http://unset", api_key="none", max_retries=0, timeout=30)
    with client:
        yield lambda url: client.with_options(base_url=url + "/v1")


@pytest.fixture(scope="module")
def claude() -> Iterator[Callable[[str], anthropic.Anthropic]]:
    client = anthropic.Anthropic(base_url="http://unset", api_key="none", max_retries=0, timeout=30)
    with client:
        yield lambda url: client.with_options(base_url=url)


@pytest.fixture
def fault(urls: dict[str, str]) -> Iterator[Callable[[str], None]]:
    """Makes the engines that answer misbehave."""

    def set_faults(*names: str) -> None:
        for role in ("decode", "aggregated"):
            httpx.post(urls[role] + "/sim/faults", json={"faults": names}).raise_for_status()

    yield set_faults
    set_faults()


CHATS: dict[str, dict[str, Any]] = {
    "plain": {"max_tokens": 12},
    "to its end": {},
    "stop": {"stop": ["ba", "ke"], "max_tokens": 200, "extra_body": {"ignore_eos": True}},
    "log probabilities": {"max_tokens": 5, "logprobs": True, "top_logprobs": 3},
    "json": {"response_format": {"type": "json_object"}},
    "json schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    "parallel tools": TOOLS,
    "no parallel tools": {**TOOLS, "parallel_tool_calls": False},
    "one tool by name": {**TOOLS, "tool_choice": {"type": "function", "function": {"name": "news"}}},
    "a tool call cut short": {**TOOLS, "max_tokens": 6},
    "several answers": {"n": 3, "max_tokens": 9, "temperature": 0.7, "seed": 3},
}


@pytest.mark.parametrize("case", CHATS)
def test_chat(api: Callable[[str], openai.OpenAI], url: str, case: str) -> None:
    """Cases dyn-C8, dyn-C10."""
    body = {"model": "m", "messages": [{"role": "user", "content": TEXT}], "temperature": 0, **CHATS[case]}
    chat = api(url).chat.completions
    whole = chat.create(**body)
    chunks = list(chat.create(**body, stream=True, stream_options={"include_usage": True}))
    assert essence(added_up(chunks)) == essence(whole.choices)
    assert len(whole.choices) == body.get("n", 1)
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens > 0
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens > 0
    calls = whole.choices[0].message.tool_calls or []
    names = {"parallel tools": ["weather", "news"], "no parallel tools": ["weather"], "one tool by name": ["news"]}
    if case in names:
        assert [call.function.name for call in calls] == names[case]
        assert all(call.function.arguments.startswith('{"city":') for call in calls)
    reasons = {"plain": "length", "to its end": "stop", "stop": "stop", "parallel tools": "tool_calls"}
    if case in reasons:
        assert {choice.finish_reason for choice in whole.choices} == {reasons[case]}


def test_streamed_tool_calls_keep_their_index(api: Callable[[str], openai.OpenAI], url: str) -> None:
    """Case dyn-C8."""
    messages = [{"role": "user", "content": TEXT}]
    stream = api(url).chat.completions.create(model="m", messages=messages, stream=True, **TOOLS)  # type: ignore[call-overload]
    deltas = [call for chunk in stream for choice in chunk.choices for call in choice.delta.tool_calls or ()]
    opened = [(call.index, call.function.name) for call in deltas if call.function.name]
    assert opened == [(0, "weather"), (1, "news")]
    assert len({call.id for call in deltas if call.id}) == 2
    for index in (0, 1):
        text = "".join(call.function.arguments or "" for call in deltas if call.index == index)
        assert text.startswith('{"city":')
        assert text.endswith("}")


@pytest.mark.parametrize("asked", [None, False, True])
def test_counts_come_to_those_who_ask(api: Callable[[str], openai.OpenAI], url: str, asked: bool | None) -> None:
    """Case peer-S6."""
    options: dict[str, Any] = {} if asked is None else {"stream_options": {"include_usage": asked}}
    client = api(url)
    messages: Any = [{"role": "user", "content": TEXT}]
    chat = client.chat.completions.create(model="m", messages=messages, max_tokens=4, stream=True, **options)
    text = client.completions.create(model="m", prompt=TEXT, max_tokens=4, stream=True, **options)
    for chunks in (list(chat), list(text)):
        *others, last = chunks
        assert all(chunk.choices and chunk.usage is None for chunk in others)
        if asked:
            assert last.choices == []
            assert last.usage.completion_tokens == 4
        else:
            assert last.choices[0].finish_reason == "length"
            assert last.usage is None


COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {"max_tokens": 8},
    "two prompts": {"max_tokens": 8, "prompt": [TEXT, "other " * 60]},
    "token ids": {"max_tokens": 8, "prompt": [[300, 301, 302, 303] * 9]},
    "several answers": {"max_tokens": 5, "n": 2, "temperature": 0.9, "seed": 1},
    "log probabilities": {"max_tokens": 5, "logprobs": 2},
    "stop": {"stop": ["ba", "ke"], "max_tokens": 200, "extra_body": {"include_stop_str_in_output": True}},
}


@pytest.mark.parametrize("case", COMPLETIONS)
def test_completions(api: Callable[[str], openai.OpenAI], url: str, case: str) -> None:
    body = {"model": "m", "prompt": TEXT, "temperature": 0, **COMPLETIONS[case]}
    completions = api(url).completions
    whole = completions.create(**body)
    texts = [""] * len(whole.choices)
    reasons: list[Any] = [None] * len(whole.choices)
    tokens: list[list[str]] = [[] for _ in whole.choices]
    for part in completions.create(**body, stream=True):
        for choice in part.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            tokens[choice.index] += (choice.logprobs and choice.logprobs.tokens) or []
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert tokens == [(choice.logprobs and choice.logprobs.tokens) or [] for choice in whole.choices]


RESPONSES: dict[str, dict[str, Any]] = {
    "plain": {"max_output_tokens": 12},
    "to its end": {"instructions": "Be brief."},
    "tools": {
        "tools": [{"name": n, "type": "function", "parameters": SCHEMA, "strict": None} for n in ("weather", "news")]
    },
}
RESPONSES["tools"]["tool_choice"] = "required"


@pytest.mark.parametrize("case", RESPONSES)
def test_responses(api: Callable[[str], openai.OpenAI], url: str, case: str) -> None:
    body: dict[str, Any] = {"model": "m", "input": TEXT, "temperature": 0, **RESPONSES[case]}
    responses = api(url).responses
    whole = responses.create(**body)
    with responses.stream(**body) as stream:
        types = [event.type for event in stream]
        streamed = stream.get_final_response()
    assert (types[0], types[-1]) == ("response.created", "response.completed")
    assert essence(streamed.output) == essence(whole.output)
    assert whole.usage is not None
    assert streamed.usage is not None
    assert (streamed.status, streamed.usage.total_tokens) == (whole.status, whole.usage.total_tokens)
    if case == "tools":
        assert [item.name for item in whole.output] == ["weather", "news"]  # type: ignore[union-attr]
    else:
        assert streamed.output_text == whole.output_text != ""


MESSAGES: dict[str, dict[str, Any]] = {
    "plain": {"max_tokens": 12},
    "to its end": {"max_tokens": 100, "system": "Be brief."},
    "stop": {"max_tokens": 200, "stop_sequences": ["ba", "ke"]},
    "tools": {
        "max_tokens": 100,
        "tools": [{"name": name, "input_schema": SCHEMA} for name in ("weather", "news")],
        "tool_choice": {"type": "any"},
    },
}


@pytest.mark.parametrize("case", MESSAGES)
def test_messages(claude: Callable[[str], anthropic.Anthropic], url: str, case: str) -> None:
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": TEXT}], **MESSAGES[case]}
    extra = {"extra_body": {"temperature": 0}}
    messages = claude(url).messages
    whole = messages.create(**body, **extra)
    with messages.stream(**body, **extra) as stream:
        streamed = stream.get_final_message()
    assert essence(streamed.content) == essence(whole.content)
    assert (streamed.stop_reason, streamed.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert streamed.usage.output_tokens == whole.usage.output_tokens > 0
    if case == "tools":
        assert [(block.name, block.input) for block in whole.content] == [  # type: ignore[union-attr]
            (name, {"city": "text", "size": 1}) for name in ("weather", "news")
        ]
        assert whole.stop_reason == "tool_use"
    assert whole.stop_reason == {"plain": "max_tokens", "to its end": "end_turn"}.get(case, whole.stop_reason)


def test_tokens_are_counted(claude: Callable[[str], anthropic.Anthropic], urls: dict[str, str], url: str) -> None:
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": TEXT}], "system": "Be brief."}
    counted, expected = (claude(at).messages.count_tokens(**body).input_tokens for at in (url, urls["aggregated"]))
    assert counted == expected > 0


# ---- what goes wrong


def test_refusals_have_their_own_class(
    api: Callable[[str], openai.OpenAI], claude: Callable[[str], anthropic.Anthropic], url: str
) -> None:
    """The router's own and the engine's, streamed or not: a plain JSON error with its status."""
    chat, messages = api(url).chat.completions, claude(url).messages
    user: Any = [{"role": "user", "content": TEXT}]
    long: Any = [{"role": "user", "content": "w " * 50_000}]
    for stream in (False, True):
        with pytest.raises(openai.NotFoundError) as unknown:
            chat.create(model="no-such", messages=user, stream=stream)
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError, match="maximum context length") as refused:
            chat.create(model="m", messages=long, stream=stream)
        assert refused.value.type == "BadRequestError"
        with pytest.raises(openai.BadRequestError) as forged:
            chat.create(
                model="m", messages=user, stream=stream, extra_body={"kv_transfer_params": {"remote_host": "x"}}
            )
        assert forged.value.param == "kv_transfer_params"
        with pytest.raises(openai.BadRequestError):
            chat.create(model="m", messages=user, stream=stream, max_tokens=-1)
        with pytest.raises(anthropic.NotFoundError):
            messages.create(model="no-such", messages=user, max_tokens=5, stream=stream)
        with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
            messages.create(model="m", messages=long, max_tokens=5, stream=stream)


@pytest.mark.parametrize("name", ["http-500", "empty-stream"])
def test_an_error_before_the_first_byte_is_a_plain_one(
    api: Callable[[str], openai.OpenAI], url: str, fault: Callable[[str], None], name: str
) -> None:
    fault(name)
    with pytest.raises(openai.InternalServerError) as failed:
        api(url).chat.completions.create(model="m", messages=[{"role": "user", "content": TEXT}], stream=True)
    assert failed.value.status_code == {"http-500": 500, "empty-stream": 502}[name]
    assert failed.value.response.headers["content-type"] == "application/json"


@pytest.mark.parametrize("name", ["in-band-error", "truncated-stream"])
def test_an_error_inside_a_stream_reaches_the_client(
    api: Callable[[str], openai.OpenAI],
    claude: Callable[[str], anthropic.Anthropic],
    url: str,
    fault: Callable[[str], None],
    name: str,
) -> None:
    fault(name)
    user: Any = [{"role": "user", "content": TEXT}]
    parts = api(url).chat.completions.create(model="m", messages=user, stream=True)
    assert next(parts).choices
    with pytest.raises(openai.APIError):
        list(parts)
    answer = api(url).responses.create(model="m", input=TEXT, stream=True)
    assert next(answer).type == "response.created"
    with pytest.raises(openai.APIError):
        list(answer)
    events = claude(url).messages.create(model="m", messages=user, max_tokens=50, stream=True)
    assert next(events).type == "message_start"
    with pytest.raises(anthropic.APIError):
        list(events)


ODD = 'é ✓ 日本 🚲 [DONE] data: [DONE]\n\n "finish_reason":"stop" "usage"'


async def test_text_cut_anywhere_and_marks_inside_it(make_site: MakeSite) -> None:
    """Inside a character, inside an event, inside the framing of a chunk."""
    parts = [ROLE, *(chunk(ODD[at : at + 7]) for at in range(0, len(ODD), 7)), chunk(ODD)]
    finish = {"id": "c-1", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    counts = event({"choices": [], "usage": USAGE, "system_fingerprint": "f"})
    raw = STREAM_HEAD + framed(b"".join(parts)) + framed(event(finish) + counts + DONE) + LAST

    site = await make_site()
    await site.engine("a", Role.AGGREGATED, dribble(raw))
    site.publish()
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{site.port}/v1", api_key="none", max_retries=0) as client:
        for step in (1, 3, 64):
            stream = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x"}], stream=True, extra_body={"step": step}
            )
            got = [part async for part in stream]
            assert "".join(part.choices[0].delta.content or "" for part in got) == ODD * 2
            assert (got[-1].choices[0].finish_reason, got[-1].system_fingerprint) == ("stop", "f")
    await site.settled()
    assert {record.output_tokens for record in site.telemetry.records} == {3}


CLAUDE_CODE = {
    "anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    "anthropic-dangerous-direct-browser-access": "true", "x-app": "cli", "user-agent": "claude-cli/2.0.0 (external, cli)",
    "x-stainless-lang": "js", "accept-encoding": "br, gzip, deflate", "x-api-key": "none",
}  # fmt: skip
BASH = {
    "name": "Bash", "description": "Runs a command.", "cache_control": {"type": "ephemeral"},
    "input_schema": {"$schema": "http://json-schema.org/draft-07/schema#", **SCHEMA, "additionalProperties": False},
}  # fmt: skip
SAID = [{"type": "text", "text": "Look.", "cache_control": {"type": "ephemeral"}}]
TURNS = [
    {"role": "user", "content": SAID},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"},
                                      {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"city": "Bern"}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "is_error": False, "content": SAID}]},
]  # fmt: skip
MESSAGE = {
    "model": "m",
    "max_tokens": 20,
    "system": SAID,
    "tools": [BASH],
    "metadata": {"user_id": "u"},
    "stream": True,
}
CODEX = {
    "originator": "codex_cli_rs", "session_id": "0199", "conversation_id": "0199", "version": "0.60.0",
    "openai-beta": "responses=experimental", "accept": "text/event-stream", "user-agent": "codex_cli_rs/0.60.0",
}  # fmt: skip
SHELL = {"type": "function", "name": "shell", "description": "Runs.", "strict": False, "parameters": SCHEMA}
RESPONSE = {
    "model": "m", "instructions": "You code.", "tools": [SHELL], "tool_choice": "auto", "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"}, "store": False, "stream": True, "prompt_cache_key": "0199",
    "include": ["reasoning.encrypted_content"], "text": {"verbosity": "low"},
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look."}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"},
        {"type": "function_call", "name": "shell", "arguments": "{}", "call_id": "c1"},
        {"type": "function_call_output", "call_id": "c1", "output": "a"},
    ],
}  # fmt: skip
CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": TEXT}],
    "stream": True,
    "stream_options": {"include_usage": True},
}
AS_SENT: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "claude code": ("/v1/messages?beta=true", {**MESSAGE, "messages": TURNS}, CLAUDE_CODE),
    "claude code, thinking": (
        "/v1/messages?beta=true",
        {**MESSAGE, "messages": TURNS, "max_tokens": 2_000, "thinking": {"type": "enabled", "budget_tokens": 1_024}},
        CLAUDE_CODE,
    ),
    "codex": ("/v1/responses", RESPONSE, CODEX),
    "codex, without a reasoning": ("/v1/responses", {**RESPONSE, "reasoning": None, "text": None, "service_tier": None}, CODEX),
    "cline": ("/v1/chat/completions", {**CHAT, "temperature": 0}, {"http-referer": "https://cline.bot", "x-title": "Cline"}),
    "continue": (
        "/v1/chat/completions",
        {**CHAT, "stop": None, "tools": None, "tool_choice": None, "top_p": None, "presence_penalty": None},
        {"api-key": "none", "x-api-key": "none", "content-type": "text/plain"},
    ),
    "cursor": ("/v1/chat/completions", {**CHAT, "user": "google-oauth2|1", "tools": [tool("a")], "tool_choice": "auto"}, {}),
    "open webui": ("/v1/chat/completions", CHAT, {"x-openwebui-user-name": "a", "x-openwebui-chat-id": "1", "origin": "http://h"}),
    "zed": ("/v1/chat/completions", {**CHAT, "stop": [], "tools": [], "parallel_tool_calls": None, "reasoning_effort": None}, {}),
    "copilot": ("/v1/chat/completions", {**CHAT, "intent": True, "snippy": {"enabled": False}, "thinking_budget": None}, {}),
    "aiperf": ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 9, "ignore_eos": True}, {"x-correlation-id": "a"}),
}  # fmt: skip


@pytest.mark.parametrize("client", AS_SENT)
def test_requests_as_the_fields_clients_send_them(urls: dict[str, str], client: str) -> None:
    """Those that no library of ours sends: their bodies and headers, seen at a router."""
    path, body, headers = AS_SENT[client]
    reply = httpx.post(urls["pair"] + path, json=body, headers=headers, timeout=30)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    last = {"/v1/messages": b"message_stop", "/v1/responses": b"response.completed"}.get(
        path.partition("?")[0], b"[DONE]"
    )
    assert last in reply.content.rstrip().rpartition(b"\n\n")[2]
    if path.startswith("/v1/messages"):
        counted = {name: body[name] for name in ("model", "messages", "tools", "system")}
        reply = httpx.post(urls["pair"] + "/v1/messages/count_tokens?beta=true", json=counted, headers=headers)
        assert reply.json()["input_tokens"] > 10
