"""Requests that go well: what reaches the engines, what reaches the client, what the record says."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from controlplane.fleet.model import Role
from controlplane.fleet.wire import Result
from frontend_api.formats import openai
from frontend_api.formats.openai import ENDPOINTS
from frontend_api.http import vanished
from frontend_api.legs import MAX_ERROR
from frontend_api.limits import charges
from tests.frontend_api.client import PROMPT, Client, ask, events
from tests.frontend_api.conftest import MakeSite, Site, until
from tests.frontend_api.scripted import (
    DONE,
    LAST,
    PARAMS,
    ROLE,
    STREAM_HEAD,
    USAGE,
    Answer,
    Heard,
    chat_reply,
    chunk,
    dribble,
    event,
    framed,
    unary,
)

CHAT = "/v1/chat/completions"


def says(data: bytes) -> Answer:
    async def answer(heard: Heard, writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    return answer


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/completions", {"prompt": [1, 2, 3]}),
        ("/v1/completions", {"prompt": ["only one"]}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"max_tokens": 9}),
        (CHAT, {"n": 1, "best_of": 1, "use_beam_search": False}),
    ],
)
async def test_two_legs(pair: Site, path: str, more: dict[str, Any]) -> None:
    body = {**PROMPT, **more, "unknown": {"kept": [1, None]}}
    reply = await ask(pair.port, path, body)
    assert reply.status == 200
    (first,), (second,) = pair.engines["p"].heard, pair.engines["d"].heard
    assert first.target == second.target == path
    assert first.body["unknown"] == second.body["unknown"] == {"kept": [1, None]}
    assert first.body["kv_transfer_params"]["do_remote_decode"] is True
    assert second.body == {**body, "kv_transfer_params": PARAMS}
    assert reply.json == chat_reply()
    assert "server" not in reply.headers
    assert first.headers["x-request-id"] == second.headers["x-request-id"] == reply.headers["x-request-id"]
    await pair.settled()
    record = pair.record
    assert (record.prefill, record.decode, record.reason, record.fallback) == ("p", "d", "least-load", False)
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (7, 2, 3)
    assert (record.result, record.status, record.stream, record.ttft) == (Result.OK, 200, False, None)
    assert record.prefill_seconds is not None
    assert record.overhead_us > 0


@pytest.mark.parametrize(
    ("path", "more", "reason"),
    [
        (CHAT, {"n": 2}, "several-sequences"),
        (CHAT, {"n": "2"}, "several-sequences"),  # the engine reads a number in a string
        ("/v1/completions", {"prompt": "a", "best_of": 3}, "several-sequences"),
        (CHAT, {"use_beam_search": True}, "several-sequences"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "several-prompts"),
        ("/v1/completions", {"prompt": [[1, 2], [3]]}, "several-prompts"),
        ("/v1/completions", {"prompt": "a", "echo": True}, "prompt-logprobs"),
        (CHAT, {"prompt_logprobs": 0}, "prompt-logprobs"),
        ("/v1/completions", {"prompt_embeds": "AAAA"}, "embedded-prompt"),
        ("/v1/responses", {"input": "a", "background": True}, "background"),
        ("/v1/responses", {"input": "a", "previous_response_id": "resp_1"}, "stored-response"),
        ("/v1/embeddings", {"input": "a"}, "relayed"),
        ("/tokenize", {"prompt": "a"}, "relayed"),
    ],
)
async def test_one_leg_is_no_fallback(pair: Site, path: str, more: dict[str, Any], reason: str) -> None:
    assert (await ask(pair.port, path, {**PROMPT, **more})).status == 200
    assert pair.engines["p"].heard == []
    assert "kv_transfer_params" not in pair.engines["d"].heard[0].body
    await pair.settled()
    assert (pair.record.reason, pair.record.fallback, pair.record.prefill) == (reason, False, None)


ASKED = {"include_usage": True}
DROPPED = {"stream_options": ASKED, "min_tokens": 5}
KEPT = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "logprobs": True, "top_logprobs": 3, "n": 1,
    "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required", "parallel_tool_calls": True,
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
    "stop": ["x"], "stop_token_ids": [9], "include_stop_str_in_output": True, "ignore_eos": True, "bad_words": ["b"],
    "logit_bias": {"5": 1.5}, "presence_penalty": 0.1, "repetition_penalty": 1.1, "cache_salt": "s", "user": "u",
    "priority": 0, "chat_template_kwargs": {"a": 1}, "metadata": {"k": "v"}, "an_unknown_field": [1, {"x": None}],
}  # fmt: skip
"""What decides an answer must decide the prefill's prompt in the same way; what is unknown may."""


@pytest.mark.parametrize(
    ("path", "changed", "same"),
    [
        (CHAT, {"max_tokens": 50, "max_completion_tokens": 60}, {}),
        (CHAT, {"max_tokens": 50}, {"max_output_tokens": 70}),
        (CHAT, {}, {}),
        ("/v1/completions", {"max_tokens": 50}, {"prompt": "p"}),
        ("/v1/messages", {"max_tokens": 50}, {"system": "s", "stop_sequences": ["x"]}),
        ("/v1/responses", {"max_output_tokens": 70}, {"input": "i", "max_tokens": 50}),
    ],
)
async def test_what_the_prefill_leg_drops_changes_and_keeps(
    pair: Site, path: str, changed: dict[str, int], same: dict[str, Any]
) -> None:
    """Cases peer-S9, dyn-B1."""
    body = {**PROMPT, **KEPT, **DROPPED, **changed, **same, "stream": True}
    await ask(pair.port, path, body)
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    sent = pair.engines["p"].heard[0].body
    assert sent.pop("kv_transfer_params")["do_remote_decode"] is True
    assert sent == {**PROMPT, **KEPT, **same, **dict.fromkeys({*changed, limit}, 1), "stream": False}
    assert pair.engines["d"].heard[0].body == {**body, "kv_transfer_params": PARAMS}


@pytest.mark.parametrize(
    ("path", "more"),
    [
        *((CHAT, {"max_tokens": value}) for value in (-1, 0, 1.5, "9", True, [], {}, 1e3)),
        (CHAT, {"max_tokens": 9, "max_completion_tokens": -1}),
        *((CHAT, {"stream": value}) for value in ("yes", "false", 1, 0, [], {})),
        (CHAT, {"stream_options": ASKED}),
        (CHAT, {"stream": False, "stream_options": ASKED}),
        *((CHAT, {"stream": True, "stream_options": value}) for value in (True, "x", [])),
        (CHAT, {"stream": True, "stream_options": {"include_usage": "yes"}}),
        (CHAT, {"stream": True, "stream_options": {"continuous_usage_stats": "odd"}}),
        *((CHAT, {"min_tokens": value}) for value in (-1, "5", None, 2.5)),
        ("/v1/completions", {"prompt": "a", "max_tokens": "9"}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 0}),
        *(("/v1/messages", more) for more in ({}, {"max_tokens": None}, {"max_tokens": 0})),
        ("/v1/completions", {}),
        ("/v1/responses", {}),
    ],
)
async def test_what_decode_may_refuse_is_not_prefilled(pair: Site, path: str, more: dict[str, Any]) -> None:
    """Prefill never sees these fields: KV would be kept for half a minute for a request that decode then refuses; or it
    would speak of fields that the client never sent."""
    await ask(pair.port, path, {**PROMPT, **more})
    assert pair.engines["p"].heard == []
    assert pair.engines["d"].heard[0].body == {**PROMPT, **more}
    await pair.settled()
    assert (pair.record.reason, pair.record.fallback) == ("unusual-fields", False)


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"max_tokens": None, "max_completion_tokens": None, "stream": None, "stream_options": None}),
        (CHAT, {"max_tokens": 10**30, "min_tokens": 0, "max_output_tokens": "of another endpoint"}),
        ("/v1/responses", {"input": "a", "max_output_tokens": None, "max_tokens": "of another endpoint"}),
        ("/v1/messages", {"max_tokens": 1}),
    ],
)
async def test_what_every_engine_takes_is_prefilled(pair: Site, path: str, more: dict[str, Any]) -> None:
    await ask(pair.port, path, {**PROMPT, **more})
    await pair.settled()
    assert pair.record.prefill == "p"


COUNTS = {"stream_options": ASKED}


@pytest.mark.parametrize(
    ("path", "given", "added"),
    [
        (CHAT, {}, COUNTS),
        ("/v1/completions", {"prompt": "a"}, COUNTS),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}, COUNTS),
        (CHAT, {"stream_options": None}, COUNTS),
        (CHAT, {"stream_options": {}}, COUNTS),
        (CHAT, {"stream_options": {"include_usage": False}}, COUNTS),
        (CHAT, {"stream_options": {"include_usage": None, "x": [1]}}, {"stream_options": {**ASKED, "x": [1]}}),
        (CHAT, {"stream_options": {"continuous_usage_stats": True}}, COUNTS),
        (CHAT, {"stream_options": ASKED}, {}),
        (CHAT, {"stream_options": {"include_usage": "yes"}}, {}),  # the engine reads that as true
        (CHAT, {"stream_options": {"continuous_usage_stats": "odd"}}, {}),  # the engine's to refuse
        (CHAT, {"stream_options": [1]}, {}),
        ("/v1/responses", {"input": "a"}, {}),
        ("/v1/messages", {"max_tokens": 5}, {}),
        ("/v1/embeddings", {"input": "a"}, {}),
        (CHAT, {"stream": False}, {}),
        (CHAT, {"stream": "true"}, {}),
    ],
)
async def test_who_is_asked_for_counts(alone: Site, path: str, given: dict[str, Any], added: dict[str, Any]) -> None:
    """Cases peer-S6, peer-S7: by endpoint, and only where the client did not: responses and messages refuse the field."""
    body = {"stream": True, **PROMPT, **given}
    await ask(alone.port, path, body)
    (heard,) = alone.engines["a"].heard
    assert heard.body == {**body, **added}
    assert heard.raw.startswith(json.dumps(body)[:-1].encode()), "the client's own bytes come first"


async def test_aggregated_gets_the_clients_own_bytes(alone: Site) -> None:
    raw = b'{"messages": [ ],\n "model":"m", "x": 1.50, "u": "\\u00e9\xc3\xa9"}'
    reply = await ask(alone.port, CHAT + "?beta=true", raw, traceparent="00-a-b-01", X_Other="dropped")
    (heard,) = alone.engines["a"].heard
    assert heard.raw == raw
    assert heard.target == CHAT + "?beta=true"
    assert heard.headers["traceparent"] == "00-a-b-01"
    assert "x-other" not in heard.headers
    assert reply.body == unary(chat_reply()).partition(b"\r\n\r\n")[2]
    await alone.settled()
    assert (alone.record.reason, alone.record.decode) == ("aggregated", "a")


FOREIGN = (
    "set-cookie: a=b\r\naccess-control-allow-origin: *\r\naccess-control-allow-credentials: true\r\nlocation: http://x/\r\n"
    "x-tandem-decode: other\r\nx-ratelimit-limit-requests: 9\r\nx-request-id: theirs\r\nserver: uvicorn\r\nvary: x\r\n"
    "refresh: 0\r\nlink: <x>; rel=preload\r\nwww-authenticate: Basic\r\nclear-site-data: *\r\nstrict-transport-security: a\r\n"
    "content-encoding: gzip\r\nx-anything: " + "y" * 30_000 + "\r\n"
)
OUR_OWN = {"content-type", "content-length", "x-request-id"}


@pytest.mark.parametrize("status", [200, 201, 302, 400, 404, 500])
async def test_no_header_of_an_engine_speaks_for_the_router(make_site: MakeSite, status: int) -> None:
    site = await make_site()
    await site.engine("a", Role.AGGREGATED, says(unary(chat_reply(), status, FOREIGN)))
    site.publish()
    reply = await ask(site.port, CHAT, PROMPT)
    assert set(reply.headers) - {"retry-after"} == OUR_OWN
    assert reply.headers["x-request-id"] != "theirs"
    assert reply.headers["content-type"] == "application/json"


async def test_nor_does_one_of_a_stream(make_site: MakeSite) -> None:
    site = await make_site()
    head = STREAM_HEAD.replace(b"\r\n\r\n", b"\r\n" + FOREIGN.encode() + b"\r\n")
    await site.engine("a", Role.AGGREGATED, says(head + framed(ROLE + chunk("a") + DONE) + LAST))
    site.publish()
    reply = await ask(site.port, CHAT, {**PROMPT, "stream": True})
    ours = {"content-type", "x-request-id", "cache-control", "x-accel-buffering", "transfer-encoding"}
    assert set(reply.headers) == ours


@pytest.mark.parametrize(
    ("kind", "passed"),
    [
        ("application/json", True),
        ("Application/JSON; charset=utf-8", True),
        ("text/plain;charset=utf-8", True),
        ("text/html", False),
        ("text/html; a=application/json", False),
        ("application/json, text/html", False),
        ("image/svg+xml", False),
    ],
)
async def test_an_answer_is_no_page_that_a_browser_would_run(make_site: MakeSite, kind: str, passed: bool) -> None:
    site = await make_site()
    raw = unary(chat_reply()).replace(b"application/json", kind.encode())
    await site.engine("a", Role.AGGREGATED, says(raw))
    site.publish()
    reply = await ask(site.port, CHAT, PROMPT)
    assert reply.headers["content-type"] == (kind if passed else "application/octet-stream")


async def test_what_describes_binary_embeddings_comes_with_them(make_site: MakeSite) -> None:
    site = await make_site()
    head = b'HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\nmetadata: {"data":[]}\r\ncontent-length: 3\r\n\r\n'
    await site.engine("a", Role.AGGREGATED, says(head + b"\x00\xff\n"))
    site.publish()
    reply = await ask(site.port, "/v1/embeddings", {"model": "m", "input": "a"})
    assert (reply.headers["metadata"], reply.body) == ('{"data":[]}', b"\x00\xff\n")


async def test_an_error_of_any_length_is_not_passed_on(make_site: MakeSite) -> None:
    site = await make_site()
    await site.engine("a", Role.AGGREGATED, says(unary(b"x" * (MAX_ERROR + 1), 400)))
    site.publish()
    reply = await ask(site.port, CHAT, PROMPT)
    assert (reply.status, len(reply.body) < 1_000) == (503, True)


async def test_stream(pair: Site) -> None:
    reply = await ask(pair.port, CHAT, {**PROMPT, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.body == ROLE + b"".join(chunk(f"t{i}") for i in range(3)) + DONE
    await pair.settled()
    record = pair.record
    assert (record.stream, record.result, record.output_tokens) == (True, Result.OK, 3)
    assert record.ttft is not None
    assert record.ttft <= record.e2e
    assert record.itl_mean is not None
    assert record.longest_gap is not None


async def test_the_end_of_a_choice_waits_for_no_other_once_the_engine_is_known(make_site: MakeSite) -> None:
    def ending(index: int, **more: Any) -> bytes:
        return event({"choices": [{"index": index, "delta": {"content": "z"}, "finish_reason": "stop"}], **more})

    async def two_choices(heard: Heard, writer: asyncio.StreamWriter) -> None:
        counts = event({"choices": [], "usage": USAGE, "system_fingerprint": "f"})
        writer.write(STREAM_HEAD + framed(ROLE + ending(1) + chunk("a") + ending(0) + counts + DONE) + LAST)

    site = await make_site()
    await site.engine("a", Role.AGGREGATED, two_choices)
    site.publish()
    first, second = ending(1, system_fingerprint="f"), ending(0, system_fingerprint="f")
    bodies = [(await ask(site.port, CHAT, {**PROMPT, "stream": True, "n": 2})).body for _ in range(2)]
    assert bodies == [ROLE + chunk("a") + first + second + DONE, ROLE + first + chunk("a") + second + DONE]


@pytest.mark.parametrize("whole", [True, False])
async def test_a_client_that_leaves_with_the_last_event_had_its_answer(make_site: MakeSite, whole: bool) -> None:
    async def unended(heard: Heard, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + framed(ROLE + chunk("a")) + (framed(DONE) if whole else b""))
        await asyncio.Event().wait()

    site = await make_site()
    await site.engine("a", Role.AGGREGATED, unended)
    site.publish()
    async with Client(site.port) as client:
        client.post(CHAT, {**PROMPT, "stream": True})
        await client.head()
        while (await client.chunk())[-len(DONE) :] != (DONE if whole else chunk("a")[-len(DONE) :]):
            pass
    await site.settled()
    assert (site.record.result, site.record.status) == ((Result.OK, 200) if whole else (Result.ABORTED, 499))


async def test_first_byte_leaves_before_the_last_arrives_and_gaps_are_measured(make_site: MakeSite) -> None:
    """Cases dyn-C7, peer-K12, peer-M6."""
    go_on = asyncio.Event()

    async def slow(heard: Heard, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + framed(ROLE) + framed(chunk("a")))
        await go_on.wait()
        writer.write(framed(chunk("b")) + framed(DONE) + LAST)

    site = await make_site()
    await site.engine("a", Role.AGGREGATED, slow)
    site.publish()
    async with Client(site.port) as client:
        client.post(CHAT, {**PROMPT, "stream": True})
        await client.head()
        assert await client.chunk() == ROLE + chunk("a")
        await asyncio.sleep(0.05)
        go_on.set()
        assert await client.chunk() == chunk("b") + DONE
        assert await client.chunk() == b""
    await site.settled()
    assert site.record.longest_gap is not None
    assert 0.04 <= site.record.longest_gap <= site.record.e2e
    assert site.record.ttft is not None
    assert site.record.ttft < site.record.e2e - 0.04, "the time of the first token, not of the last"


async def test_events_split_anywhere_arrive_whole(make_site: MakeSite) -> None:
    """Also inside a character and inside the framing of a chunk."""
    text = ROLE + chunk("é ✓ [DONE]") + event({"choices": [], "usage": USAGE}) + DONE
    raw = STREAM_HEAD + framed(text[:60]) + framed(text[60:61]) + framed(text[61:]) + LAST

    site = await make_site()
    await site.engine("a", Role.AGGREGATED, dribble(raw))
    site.publish()
    for step in (1, 2, 3, 7, 50):
        reply = await ask(site.port, CHAT, {**PROMPT, "stream": True, "stream_options": ASKED, "step": step})
        assert reply.body == text
        reply = await ask(site.port, CHAT, {**PROMPT, "stream": True, "step": step})
        assert reply.body == ROLE + chunk("é ✓ [DONE]") + DONE
    await site.settled()
    assert {r.result for r in site.telemetry.records} == {Result.OK}
    assert {r.output_tokens for r in site.telemetry.records} == {3}


async def test_transfer_params_are_stripped_from_every_reply(make_site: MakeSite) -> None:
    params = {"remote_host": "10.0.0.1"}
    inner = {"type": "response.completed", "response": {"id": "r", "kv_transfer_params": params, "usage": USAGE}}

    async def leaky(heard: Heard, writer: asyncio.StreamWriter) -> None:
        if heard.target == "/v1/responses":
            text = event({"type": "response.output_text.delta", "delta": "x"}) + b"event: x\n" + event(inner)
            writer.write(STREAM_HEAD + framed(text) + LAST)
        elif heard.body.get("stream"):
            last = {"choices": [{"index": 0, "delta": {"content": "a"}}], "kv_transfer_params": params}
            writer.write(STREAM_HEAD + framed(ROLE + event(last) + DONE) + LAST)
        else:
            said = 'say "kv_transfer_params": 1'
            writer.write(unary(chat_reply(said, kv_transfer_params=params, ec_transfer_params={}, other=1.50)))

    site = await make_site()
    await site.engine("a", Role.AGGREGATED, leaky)
    site.publish()
    reply = await ask(site.port, CHAT, PROMPT)
    assert "kv_transfer_params" not in reply.json
    assert "ec_transfer_params" not in reply.json
    assert reply.json["choices"][0]["message"]["content"] == 'say "kv_transfer_params": 1'
    assert b'"other":1.5' in reply.body
    reply = await ask(site.port, CHAT, {**PROMPT, "stream": True})
    assert [e if isinstance(e, str) else sorted(e) for e in events(reply.body)][1:] == [["choices"], "[DONE]"]
    reply = await ask(site.port, "/v1/responses", {"model": "m", "input": "x", "stream": True})
    assert events(reply.body)[1] == {"type": "response.completed", "response": {"id": "r", "usage": USAGE}}
    assert b"event: x\ndata: " in reply.body


async def test_params_of_another_clients_are_not_cached(pair: Site) -> None:
    """Each request prefills for itself: one set of params serves one sequence."""
    await asyncio.gather(*(ask(pair.port, CHAT, PROMPT) for _ in range(5)))
    assert len(pair.engines["p"].heard) == len(pair.engines["d"].heard) == 5


async def test_engine_connections_are_reused(pair: Site) -> None:
    async with Client(pair.port) as client:
        for _ in range(5):
            client.post(CHAT, PROMPT)
            assert (await client.reply()).status == 200
    assert len(pair.engines["p"].open) == len(pair.engines["d"].open) == 1


async def test_the_kernel_looks_after_engines_that_vanish(pair: Site) -> None:
    await ask(pair.port, CHAT, PROMPT)
    for engine in pair.router.view.engines():
        (connection,) = pair.upstreams.pool(engine).opened
        transport = connection._transport
        assert transport is not None
        sock = transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == vanished.ENGINE_SECONDS * 1_000


async def test_the_clients_key_never_reaches_an_engine(make_site: MakeSite) -> None:
    site = await make_site(auth=True)
    await site.engine("p", Role.PREFILL)
    await site.engine("d", Role.DECODE)
    site.publish()
    await ask(site.port, CHAT, PROMPT, Authorization="Bearer tdm-inference", X_Api_Key="tdm-inference", Cookie="a=b")
    for name in ("p", "d"):
        (heard,) = site.engines[name].heard
        assert heard.headers["authorization"] == f"Bearer secret-{name}"
        assert "tdm-inference" not in json.dumps(heard.headers)
        assert "cookie" not in heard.headers
    await site.settled()
    assert site.record.key == "k-all"


async def test_explained_to_those_who_ask(pair: Site) -> None:
    plain = await ask(pair.port, CHAT, PROMPT)
    assert not [name for name in plain.headers if name.startswith("x-tandem")]
    told = await ask(pair.port, CHAT, PROMPT, x_tandem_explain="1")
    assert told.headers["x-tandem-prefill"] == "p"
    assert told.headers["x-tandem-decode"] == "d"
    assert told.headers["x-tandem-reason"] == "least-load"
    assert float(told.headers["x-tandem-overhead-us"]) > 0


@pytest.mark.parametrize(("given", "kept"), [("abc-1.2:3", True), ("a" * 129, False), ("a b", False), ("", False)])
async def test_request_id(alone: Site, given: str, kept: bool) -> None:
    reply = await ask(alone.port, CHAT, PROMPT, x_request_id=given)
    assert (reply.headers["x-request-id"] == given) is kept
    assert len(reply.headers["x-request-id"]) >= 9


async def test_in_flight_is_counted_before_the_connection_and_prefill_until_decodes_first_byte(
    make_site: MakeSite,
) -> None:
    """Case peer-M6."""
    steps = [asyncio.Event() for _ in range(3)]

    async def slow_decode(heard: Heard, writer: asyncio.StreamWriter) -> None:
        await steps[0].wait()
        writer.write(STREAM_HEAD)
        await steps[1].wait()
        writer.write(framed(ROLE + chunk("a")))
        await steps[2].wait()
        writer.write(framed(DONE) + LAST)

    site = await make_site()
    await site.engine("p", Role.PREFILL)
    await site.engine("d", Role.DECODE, slow_decode)
    site.publish()
    async with Client(site.port) as client:
        client.post(CHAT, {**PROMPT, "stream": True})
        await until(lambda: len(site.engines["d"].heard) == 1)
        assert site.in_flight == {"p": 1, "d": 1}
        steps[0].set()
        steps[1].set()
        await client.head()
        assert site.in_flight == {"d": 1}
        steps[2].set()
        await client.chunk()
        await site.settled()


@pytest.mark.parametrize(
    "prompt",
    ["[1,2]", "[ 1 ,\n2 ]", "[1]", "[[1,2]]", "[[1],[2]]", "[1,[2]]", '["1","2"]', '["1"]', "[1.5,2]", "[-1,2]", "[1,null]", '[1,"2"]'],
)  # fmt: skip
def test_very_many_ids_are_taken_for_what_few_are(prompt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = b'{"model":"m","prompt":%b}' % prompt.encode()
    endpoint = ENDPOINTS["/v1/completions"]
    few = openai.read_request(endpoint, body).alone
    monkeypatch.setattr(openai, "_LONG_IDS", 0)
    assert openai.read_request(endpoint, body).alone == few


def test_millions_of_ids_are_not_made_into_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "_list", None)
    monkeypatch.setattr(charges, "_list", None)
    body = b'{"model":"m","prompt":[%b]}' % b",".join([b"7"] * 50_000)
    endpoint = ENDPOINTS["/v1/completions"]
    assert openai.read_request(endpoint, body).alone is None
    assert charges.estimate(endpoint, body, 50_000, None).output == charges.COMPLETION_OUTPUT
