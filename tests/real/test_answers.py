"""A real prompt through router, prefill, NIXL and decode gives the text that one aggregated engine gives, and the counters
prove that the KV moved."""

from __future__ import annotations

import math
import secrets
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.contract.exchange import BYTES_MOVED
from tests.real.conftest import Counters, Site
from tests.real.engines import BLOCK_SIZE, KEY, KV_BYTES_PER_TOKEN, MODEL

LOCAL = 'vllm:prompt_tokens_by_source_total{source="local_compute"}'
TRANSFERRED = 'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}'
SENTENCES = (
    "The river rises in the hills and turns east before it meets the sea.",
    "Two riders share one bicycle: the first reads the road, the second keeps the pace.",
    "In the market a woman sells bread, apples and a map of the old town.",
    "Nobody in the village remembers who built the bridge, or why it bends.",
)


def long_text(tokens: int) -> str:
    """Plain English of about so many tokens that no engine has seen: it begins with a number of its own."""
    text = f"Note {secrets.randbelow(10**9)}. "
    while len(text) < tokens * 4.4:
        text += SENTENCES[len(text) % len(SENTENCES)] + " "
    return text + "What is this text about?"


def ask(url: str, body: dict, path: str = "/v1/chat/completions") -> dict:
    reply = httpx.post(url + path, json=body, headers={"authorization": f"Bearer {KEY}"}, timeout=120, trust_env=False)
    assert reply.status_code == 200, reply.text
    return reply.json()


def ask_both(site: Site, body: dict, path: str = "/v1/chat/completions") -> tuple[dict, dict]:
    """What the aggregated engine says and what the router says, asked at once: they compute on a core each."""
    with ThreadPoolExecutor(2) as pool:
        expected, answer = pool.map(lambda url: ask(url, body, path), (site.aggregated.url, site.router_url))
    return expected, answer


def chat(text: str, **fields: object) -> dict:
    return {
        "model": MODEL, "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 16,
        "logprobs": True, "top_logprobs": 5, **fields,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "least"),
    [("What is the capital of France?", 20), (long_text(400), 380), (long_text(1200), 1100)],
    ids=["short", "400 tokens", "1200 tokens"],
)
def test_the_text_is_an_aggregated_engines_text(site: Site, decode_counters: Counters, text: str, least: int) -> None:
    expected, answer = ask_both(site, chat(text))
    tokens = answer["usage"]["prompt_tokens"]
    assert least <= tokens == expected["usage"]["prompt_tokens"]
    assert answer["choices"][0]["message"]["content"] == expected["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == expected["choices"][0]["finish_reason"]
    mine, theirs = (reply["choices"][0]["logprobs"]["content"][0] for reply in (answer, expected))
    assert mine["token"] == theirs["token"]
    likely = {entry["token"]: entry["logprob"] for entry in theirs["top_logprobs"]}
    for entry in mine["top_logprobs"][:3]:
        assert entry["logprob"] == pytest.approx(likely[entry["token"]], abs=1e-3)
    assert not answer.get("kv_transfer_params")

    grown = decode_counters.grown(BYTES_MOVED)
    assert grown[LOCAL] == 0
    assert grown[TRANSFERRED] == tokens
    blocks = math.ceil(tokens / BLOCK_SIZE)
    assert grown[BYTES_MOVED] == blocks * BLOCK_SIZE * KV_BYTES_PER_TOKEN
    assert grown["vllm:nixl_num_failed_transfers_total"] == 0


def test_the_capital_of_france(site: Site) -> None:
    answer = ask(site.router_url, chat("What is the capital of France?"))
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_openais_own_client_streams_and_does_not(site: Site, decode_counters: Counters) -> None:
    text = long_text(60)
    client = openai.OpenAI(base_url=site.router_url + "/v1", api_key="unused", timeout=120, max_retries=0)
    assert [model.id for model in client.models.list()] == [MODEL]
    messages = [{"role": "user", "content": text}]
    with ThreadPoolExecutor(1) as pool:
        direct = pool.submit(ask, site.aggregated.url, chat(text))
        whole = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=16)
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, max_tokens=16, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    expected = direct.result()["choices"][0]["message"]["content"]
    assert streamed == whole.choices[0].message.content == expected
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 16
    assert decode_counters.grown(BYTES_MOVED)[LOCAL] == 0


def test_a_list_of_prompts_is_answered_as_an_aggregated_engine_does(site: Site) -> None:
    """One set of params serves one sequence: through the exchange the second text would be wrong."""
    prompts = [long_text(40), "Count: one, two, three,"]
    body = {"model": MODEL, "prompt": prompts, "temperature": 0, "max_tokens": 12}
    expected, answer = (reply["choices"] for reply in ask_both(site, body, "/v1/completions"))
    assert [choice["text"] for choice in answer] == [choice["text"] for choice in expected]
    assert [choice["index"] for choice in answer] == [0, 1]


def test_several_answers_are_those_of_an_aggregated_engine(site: Site, decode_counters: Counters) -> None:
    body = chat(long_text(40), n=2, temperature=0.7, seed=11)
    expected, answer = (reply["choices"] for reply in ask_both(site, body))
    assert [c["message"]["content"] for c in answer] == [c["message"]["content"] for c in expected]
    assert decode_counters.grown()["vllm:nixl_bytes_transferred_count"] == 0
