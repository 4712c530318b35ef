"""The router over a pair of stand-in engines, as a client of OpenAI's own library sees it."""

from __future__ import annotations

import json
import random
import socket
import time
from urllib.parse import urlsplit

import httpx
import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from tests.frontend_api.standins import metric


def client(url: str) -> OpenAI:
    return OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)


LONG = "word " * 200


def test_chat_is_the_same_disaggregated_streamed_and_aggregated(urls: dict[str, str]) -> None:
    local = "vllm:prompt_tokens_by_source_total", "local_compute"
    computed = metric(urls["decode"], *local)
    moved = metric(urls["decode"], "vllm:nixl_bytes_transferred_sum")
    answers = []
    for url in (urls["pair"], urls["alone"]):
        chat = client(url).chat.completions
        messages = [{"role": "user", "content": LONG}]
        whole = chat.create(model="m", messages=messages, max_tokens=12, temperature=0)  # type: ignore[arg-type]
        stream = chat.create(
            model="m",
            messages=messages,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )  # type: ignore[call-overload]
        chunks = list(stream)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content
        assert whole.usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
        answers.append((text, whole.usage.prompt_tokens))
    assert answers[0] == answers[1]
    assert metric(urls["decode"], "vllm:nixl_bytes_transferred_sum") > moved
    assert metric(urls["decode"], *local) == computed


def test_text_completions_and_a_list_of_prompts(urls: dict[str, str]) -> None:
    for prompt in (LONG, [LONG, "other " * 150]):
        texts = []
        for url in (urls["pair"], urls["alone"]):
            got = client(url).completions.create(model="m", prompt=prompt, max_tokens=8, temperature=0)
            texts.append([choice.text for choice in got.choices])
        assert texts[0] == texts[1]
        assert len(texts[0]) == (1 if isinstance(prompt, str) else 2)


def test_responses_and_messages(urls: dict[str, str]) -> None:
    responses = client(urls["pair"]).responses
    whole = responses.create(model="m", input=LONG, max_output_tokens=8)
    assert whole.output_text
    events = [event.type for event in responses.create(model="m", input=LONG, max_output_tokens=8, stream=True)]
    assert events[-1] == "response.completed"
    body = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": LONG}]}
    for stream in (False, True):
        reply = httpx.post(
            urls["pair"] + "/v1/messages", json={**body, "stream": stream}, headers={"x-tandem-explain": "1"}
        )
        assert (reply.status_code, reply.headers["x-tandem-prefill"]) == (200, "prefill-0")
        assert ("message_stop" in reply.text) is stream
        assert "transfer_params" not in reply.text


def test_errors_as_the_library_sees_them(urls: dict[str, str]) -> None:
    chat = client(urls["pair"]).chat.completions
    with pytest.raises(NotFoundError) as unknown:
        chat.create(model="no-such", messages=[])
    assert unknown.value.code == "model_not_found"
    with pytest.raises(BadRequestError) as forged:
        chat.create(
            model="m",
            messages=[{"role": "user", "content": "x"}],
            extra_body={"kv_transfer_params": {"remote_host": "x"}},
        )
    assert forged.value.param == "kv_transfer_params"
    with pytest.raises(BadRequestError):  # the engine's own refusal
        chat.create(model="m", messages=[{"role": "user", "content": "w " * 50_000}], max_tokens=4)


def test_models_and_tokenize(urls: dict[str, str]) -> None:
    api = client(urls["pair"])
    assert [model.id for model in api.models.list()] == ["m"]
    assert api.models.retrieve("m").id == "m"
    assert httpx.post(urls["pair"] + "/tokenize", json={"model": "m", "prompt": "one two"}).json()["count"] > 0


def test_clients_that_leave_while_their_prompt_is_computed_leave_no_kv_behind(urls: dict[str, str]) -> None:
    """Many leave just as it is done. Without the router's help that KV stays until its lease ends, 30 s later."""
    dice, place = random.Random(14), urlsplit(urls["pair"])
    for number in range(60):
        prompt = f"{number} " + "word " * 1_000
        body = json.dumps({"model": "m", "max_tokens": 500, "stream": True, "prompt": prompt}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection((place.hostname, place.port), 10) as connection:
            connection.sendall(head + body)
            time.sleep(dice.uniform(0.002, 0.03))  # about as long as it takes
    deadline = time.monotonic() + 10
    while metric(urls["pair"], "tandem_router_in_flight") or metric(urls["prefill"], "vllm:kv_cache_usage_perc"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert metric(urls["pair"], "tandem_router_stranded_total") == 0
    assert metric(urls["pair"], "tandem_router_requests_total", 'result="aborted"') > 30
    assert metric(urls["prefill"], "vllm:nixl_num_kv_expired_reqs_total") == 0
