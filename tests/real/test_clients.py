"""The official clients of OpenAI and Anthropic on a real disaggregated pair: what a stream adds up to is what the same
request gives whole, and the KV moved each time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.frontend_api import differential as d
from tests.frontend_api.libraries import added_up, essence
from tests.frontend_api.test_relay import DROPPED, KEPT
from tests.real.conftest import Counters, Site
from tests.real.engines import KEY, MODEL
from tests.real.test_answers import LOCAL, TRANSFERRED

USER = [{"role": "user", "content": "Which is larger, Rome or Paris?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("weather", "news")]


@pytest.fixture(scope="module")
def api(site: Site) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=site.router_url + "/v1", api_key="unused", timeout=120, max_retries=0) as client:
        yield client


CHATS: dict[str, dict[str, Any]] = {
    "log probabilities": {"logprobs": True, "top_logprobs": 2, "max_tokens": 5},
    "json schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    "stop": {"stop": [" "], "max_tokens": 12},
}


def by_token(choices: Any) -> Any:
    """Log probabilities, rounded: two computations of one figure."""
    for choice in choices:
        for entry in (choice.get("logprobs") or {}).get("content", ()):
            for value in (entry, *entry["top_logprobs"]):
                value["logprob"] = round(value["logprob"], 2)
    return choices


@pytest.mark.parametrize("case", CHATS)
def test_chat(api: openai.OpenAI, decode_counters: Counters, case: str) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": USER, "temperature": 0, "max_tokens": 40, **CHATS[case]}
    whole = api.chat.completions.create(**body)
    chunks = list(api.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert by_token(essence(added_up(chunks))) == by_token(essence(whole.choices))
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    message = whole.choices[0].message
    if case == "json schema":
        assert json.loads(message.content)["city"] in ("Rome", "Paris")
    assert "<|im_end|>" not in message.content
    grown = decode_counters.grown(TRANSFERRED)
    assert grown[LOCAL] == 0
    assert grown[TRANSFERRED] == 2 * whole.usage.prompt_tokens


def test_prefill_takes_every_field_that_it_gets(site: Site, decode_counters: Counters) -> None:
    """Cases peer-S9, dyn-B1. Tools and formats have tests of their own here."""
    odd = ("tools", "tool_choice", "response_format", "stop", "stop_token_ids")
    body = {"model": MODEL, "messages": USER, **DROPPED, "max_tokens": 6, "max_completion_tokens": 7, "stream": True}
    body |= {name: value for name, value in KEPT.items() if name not in odd}
    headers = {"x-tandem-explain": "1"}
    reply = httpx.post(site.router_url + d.CHAT, json=body, headers=headers, timeout=120, trust_env=False)
    assert reply.status_code == 200, reply.text
    assert (reply.headers["x-tandem-prefill"], reply.headers["x-tandem-fallback"]) == (site.prefill.role, "-")
    assert decode_counters.grown(TRANSFERRED)[LOCAL] == 0


@pytest.mark.parametrize("choice", ["required", "auto", TOOLS[1]], ids=["some", "any", "by name"])
def test_tools(site: Site, api: openai.OpenAI, decode_counters: Counters, choice: Any) -> None:
    """Both legs take them. So small a model calls nothing rightly: what counts is that an aggregated engine says the same."""
    body: dict[str, Any] = {
        "model": MODEL, "messages": USER, "temperature": 0, "max_tokens": 16, "tools": TOOLS, "tool_choice": choice,
    }  # fmt: skip

    def asked(client: openai.OpenAI) -> tuple[Any, Any]:
        chat = client.chat.completions
        return chat.create(**body).choices, added_up(chat.create(**body, stream=True))

    url = site.aggregated.url + "/v1"
    with openai.OpenAI(base_url=url, api_key=KEY, timeout=120, max_retries=0) as direct, ThreadPoolExecutor(2) as pool:
        (whole, streamed), expected = pool.map(asked, (api, direct))
    assert (essence(whole), essence(streamed)) == tuple(map(essence, expected))
    assert decode_counters.grown(TRANSFERRED)[LOCAL] == 0


def test_responses(api: openai.OpenAI, decode_counters: Counters) -> None:
    body: dict[str, Any] = {"model": MODEL, "input": USER[0]["content"], "temperature": 0, "max_output_tokens": 8}
    whole = api.responses.create(**body)
    with api.responses.stream(**body) as stream:
        types = [event.type for event in stream]
        streamed = stream.get_final_response()
    assert types[0] == "response.created"
    assert streamed.output_text == whole.output_text != ""
    assert decode_counters.grown(TRANSFERRED)[LOCAL] == 0


def test_messages(site: Site, decode_counters: Counters) -> None:
    with anthropic.Anthropic(base_url=site.router_url, api_key="unused", timeout=120, max_retries=0) as client:
        body: dict[str, Any] = {"model": MODEL, "messages": USER, "max_tokens": 8, "extra_body": {"temperature": 0}}
        whole = client.messages.create(**body)
        with client.messages.stream(**body) as stream:
            streamed = stream.get_final_message()
        assert essence(streamed.content) == essence(whole.content) != []
        assert (streamed.stop_reason, streamed.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
        assert decode_counters.grown(TRANSFERRED)[LOCAL] == 0
        with pytest.raises(anthropic.BadRequestError, match=r"maximum|longer|length"):
            client.messages.create(model=MODEL, max_tokens=5, messages=[{"role": "user", "content": "word " * 3000}])
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="no-such", max_tokens=5, messages=USER)
