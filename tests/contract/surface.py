"""Checks of the HTTP surface: JSON keys, stream frames, error shapes, metric names."""

from __future__ import annotations

import itertools

import httpx

from tests.contract import expected as e
from tests.contract.bodies import CHAT, COMPLETIONS, MESSAGES, RESPONSES, chat, completion
from tests.contract.pair import EnginePair


def check_open_endpoints(pair: EnginePair) -> None:
    with httpx.Client(base_url=pair.decode_url) as anonymous:
        health = anonymous.get("/health")
        assert (health.status_code, health.content) == (200, b"")
        assert anonymous.get("/version").json() == {"version": "0.32.0"}
        assert anonymous.get("/load").json().keys() == {"server_load"}
        assert anonymous.get("/metrics").headers["content-type"].startswith("text/plain")
        assert anonymous.get("/kv_event_sources").status_code == 200
        assert anonymous.post("/tokenize", json={"prompt": "x"}).status_code == 200


def check_key_guards_v1(pair: EnginePair) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {pair.key}"}):
        for method, path in (("GET", "/v1/models"), ("POST", CHAT), ("POST", MESSAGES)):
            reply = httpx.request(method, pair.decode_url + path, headers=headers)
            assert (reply.status_code, reply.json()) == (401, {"error": "Unauthorized"})


def check_models(pair: EnginePair) -> None:
    listing = pair.client.get(pair.decode_url + "/v1/models").json()
    assert listing.keys() == {"object", "data"}
    (card,) = listing["data"]
    assert card.keys() == e.MODEL_CARD
    assert (card["id"], card["object"], card["owned_by"]) == (pair.model, "model", "vllm")
    assert card["max_model_len"] > 0


def check_tokenize(pair: EnginePair) -> None:
    body = {"messages": [{"role": "user", "content": "Name a colour."}]}
    reply = pair.ok(pair.decode_url, "/tokenize", body)
    assert reply.keys() == {"count", "max_model_len", "tokens", "token_strs"}
    assert reply["count"] == len(reply["tokens"]) > 0
    assert all(isinstance(token, int) for token in reply["tokens"])
    for more in ({}, {"add_generation_prompt": False}):
        count = pair.ok(pair.decode_url, "/tokenize", {**body, **more})["count"]
        usage = pair.ok(pair.decode_url, CHAT, chat(pair, max_tokens=1, **more))["usage"]
        assert usage["prompt_tokens"] == count, more


def check_detokenize(pair: EnginePair) -> None:
    text = pair.ok(pair.decode_url, CHAT, chat(pair, max_tokens=4))["choices"][0]["message"]["content"]
    tokens = pair.ok(pair.decode_url, "/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
    reply = pair.ok(pair.decode_url, "/detokenize", {"tokens": tokens})
    assert reply.keys() == {"prompt"}
    assert reply["prompt"].strip() == text.strip()


def check_tokenize_forms(pair: EnginePair) -> None:
    def tokens(**body: object) -> list[int]:
        return pair.ok(pair.decode_url, "/tokenize", body)["tokens"]

    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Größe  of 42 世界 🙂?"}]
    whole, bare = tokens(messages=messages), tokens(messages=messages, add_generation_prompt=False)
    assert bare == whole[: len(bare)]
    assert len(bare) < len(whole)
    assert tokens(messages=messages, model=pair.model) == whole
    function = {"name": "weather", "description": "Now.", "parameters": {"type": "object", "properties": {}}}
    assert tokens(messages=messages, tools=[{"type": "function", "function": function}])
    text = " Plain text,  \n\twith spaces."
    assert tokens(prompt=text)[-len(tokens(prompt=text, add_special_tokens=False)) :] == tokens(
        prompt=text, add_special_tokens=False
    )
    named = pair.ok(pair.decode_url, "/tokenize", {"prompt": text, "return_token_strs": True})
    assert len(named["token_strs"]) == named["count"]
    assert pair.post(pair.decode_url, "/tokenize", {"model": "another", "prompt": text}).status_code == 404


def check_event_sources(pair: EnginePair) -> None:
    sources = pair.client.get(pair.prefill_url + "/kv_event_sources").json()
    assert sources.keys() == {"0"}
    assert sources["0"].keys() == e.EVENT_SOURCE
    assert sources["0"]["publisher"] == "zmq"
    assert sources["0"]["buffer_steps"] == 10_000


def check_chat(pair: EnginePair) -> None:
    reply = pair.ok(pair.decode_url, CHAT, chat(pair, logprobs=True, top_logprobs=2))
    assert reply.keys() == e.CHAT
    assert reply["id"].startswith("chatcmpl-")
    assert (reply["object"], reply["model"]) == ("chat.completion", pair.model)
    (choice,) = reply["choices"]
    assert choice.keys() == e.CHAT_CHOICE
    assert choice["message"].keys() == e.CHAT_MESSAGE
    assert choice["finish_reason"] in ("length", "stop")
    first = choice["logprobs"]["content"][0]
    assert first.keys() == e.CHAT_LOGPROB
    assert len(first["top_logprobs"]) == 2
    assert first["top_logprobs"][0].keys() == e.CHAT_LOGPROB - {"top_logprobs"}
    usage = reply["usage"]
    assert usage.keys() == e.USAGE
    assert usage["prompt_tokens_details"].keys() == e.PROMPT_DETAILS
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == len(choice["logprobs"]["content"])


def check_chat_stream(pair: EnginePair) -> None:
    whole = pair.ok(pair.decode_url, CHAT, chat(pair))
    frames = pair.stream(pair.decode_url, CHAT, chat(pair, stream_options={"include_usage": True}))
    assert frames.pop() == "[DONE]"
    usage = frames.pop()
    assert usage.keys() == e.CHUNK | {"usage", "system_fingerprint"}
    assert usage["choices"] == []
    assert usage["usage"].keys() == e.STREAM_USAGE
    assert usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    first = frames.pop(0)
    assert first.keys() == e.CHAT_FIRST_CHUNK
    assert first["choices"][0].keys() == e.CHAT_CHUNK_CHOICE - {"token_ids"}
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    for frame in frames:
        (choice,) = frame["choices"]
        ends = choice["finish_reason"] is not None
        assert frame.keys() == e.CHUNK
        assert choice.keys() == e.CHAT_CHUNK_CHOICE | ({"stop_reason"} if ends else set())
        assert choice["delta"].keys() == {"content"}
        assert ends == (frame is frames[-1])
    assert len({frame["id"] for frame in [first, *frames, usage]}) == 1
    text = "".join(frame["choices"][0]["delta"]["content"] for frame in frames)
    assert text == whole["choices"][0]["message"]["content"]
    assert frames[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]


def check_continuous_usage(pair: EnginePair) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *frames, last, done = pair.stream(pair.decode_url, CHAT, chat(pair, stream_options=options))
    assert done == "[DONE]"
    assert all(
        frame["usage"].keys() == e.STREAM_USAGE - {"prompt_tokens_details"} | {"completion_tokens_details"}
        for frame in frames
    )
    counts = [frame["usage"]["completion_tokens"] for frame in frames]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"]


def check_stream_without_usage(pair: EnginePair) -> None:
    for path, body in ((CHAT, chat(pair)), (COMPLETIONS, completion(pair))):
        frames = pair.stream(pair.decode_url, path, body)
        assert frames.pop() == "[DONE]"
        assert all(frame["choices"] and "usage" not in frame for frame in frames)
        assert frames[-1].keys() == e.CHUNK | {"system_fingerprint"}


def check_completion(pair: EnginePair) -> None:
    reply = pair.ok(pair.decode_url, COMPLETIONS, completion(pair, logprobs=1))
    assert reply.keys() == e.COMPLETION
    assert reply["id"].startswith("cmpl-")
    assert reply["object"] == "text_completion"
    (choice,) = reply["choices"]
    assert choice.keys() == e.COMPLETION_CHOICE
    assert choice["logprobs"].keys() == e.COMPLETION_LOGPROBS
    assert len(set(map(len, choice["logprobs"].values()))) == 1
    assert reply["usage"].keys() == e.USAGE


def check_completion_stream(pair: EnginePair) -> None:
    whole = pair.ok(pair.decode_url, COMPLETIONS, completion(pair))
    frames = pair.stream(pair.decode_url, COMPLETIONS, completion(pair, stream_options={"include_usage": True}))
    assert frames.pop() == "[DONE]"
    usage = frames.pop()
    assert usage.keys() == e.CHUNK | {"usage", "system_fingerprint"}
    assert usage["usage"].keys() == e.STREAM_USAGE
    assert all(frame.keys() == e.CHUNK for frame in frames)
    assert all(frame["choices"][0].keys() == e.COMPLETION_CHUNK_CHOICE for frame in frames)
    text = "".join(frame["choices"][0]["text"] for frame in frames)
    assert text == whole["choices"][0]["text"]


def check_prompt_forms(pair: EnginePair) -> None:
    tokens = pair.ok(pair.decode_url, "/tokenize", {"prompt": "Red, green,"})["tokens"]
    one = pair.ok(pair.decode_url, COMPLETIONS, completion(pair))
    by_ids = pair.ok(pair.decode_url, COMPLETIONS, completion(pair) | {"prompt": tokens})
    assert by_ids["choices"][0]["text"] == one["choices"][0]["text"]
    two = pair.ok(pair.decode_url, COMPLETIONS, completion(pair) | {"prompt": ["One, two,", "Red, green,"]})
    assert [choice["index"] for choice in two["choices"]] == [0, 1]
    assert two["choices"][1]["text"] == one["choices"][0]["text"]
    many = pair.ok(pair.decode_url, COMPLETIONS, completion(pair, n=3, temperature=1))
    assert [choice["index"] for choice in many["choices"]] == [0, 1, 2]
    assert many["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]


def check_ending(pair: EnginePair) -> None:
    long = pair.ok(pair.decode_url, CHAT, chat(pair, ignore_eos=True, max_tokens=12))
    assert long["choices"][0]["finish_reason"] == "length"
    assert long["usage"]["completion_tokens"] == 12
    text = long["choices"][0]["message"]["content"]
    stop = text[len(text) // 2 :][:3]
    body = chat(pair, ignore_eos=True, max_tokens=12, stop=[stop])
    ended = pair.ok(pair.decode_url, CHAT, body)["choices"][0]
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", stop)
    assert ended["message"]["content"] == text[: text.index(stop)]
    frames = pair.stream(pair.decode_url, CHAT, body)
    assert "".join(f["choices"][0]["delta"].get("content", "") for f in frames[:-1]) == ended["message"]["content"]


def _folded(frames: list) -> list[str]:
    return [kind for kind, _ in itertools.groupby(frame["type"] for frame in frames)]


def check_responses(pair: EnginePair) -> None:
    body = {"model": pair.model, "input": "Name a colour.", "temperature": 0, "max_output_tokens": 6}
    reply = pair.ok(pair.decode_url, RESPONSES, body)
    assert reply.keys() >= e.RESPONSE_AT_LEAST
    assert reply["object"] == "response"
    assert reply["usage"].keys() == e.RESPONSE_USAGE
    assert reply["status"] in ("completed", "incomplete")
    (item,) = reply["output"]
    assert item["type"] == "message"
    assert item["content"][0]["type"] == "output_text"
    frames = pair.stream(pair.decode_url, RESPONSES, body)
    assert _folded(frames) == e.RESPONSE_EVENTS
    assert [frame["sequence_number"] for frame in frames] == list(range(len(frames)))
    assert frames[-1]["response"].keys() >= e.RESPONSE_AT_LEAST
    text = "".join(frame["delta"] for frame in frames if frame["type"] == "response.output_text.delta")
    assert text == item["content"][0]["text"]


def check_messages(pair: EnginePair) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Name a colour."}]}]
    body = {"model": pair.model, "messages": messages, "temperature": 0, "max_tokens": 6}
    reply = pair.ok(pair.decode_url, MESSAGES, body)
    assert reply.keys() - {"stop_sequence"} == e.MESSAGE
    assert (reply["type"], reply["role"]) == ("message", "assistant")
    assert reply["usage"].keys() == e.MESSAGE_USAGE
    assert reply["stop_reason"] in ("max_tokens", "end_turn")
    frames = pair.stream(pair.decode_url, MESSAGES, body)
    assert _folded(frames) == e.MESSAGE_EVENTS
    text = "".join(frame["delta"]["text"] for frame in frames if frame["type"] == "content_block_delta")
    assert text == reply["content"][0]["text"]
    assert frames[0]["message"]["usage"].keys() == {"input_tokens", "output_tokens"}
    assert frames[-2]["delta"].keys() == {"stop_reason", "stop_sequence"}


def check_errors(pair: EnginePair) -> None:
    too_long = [7] * (pair.client.get(pair.decode_url + "/v1/models").json()["data"][0]["max_model_len"] + 1)
    cases = [
        (CHAT, {"model": pair.model}, 400, "Bad Request", "body.messages"),
        (CHAT, chat(pair, max_tokens="many"), 400, "Bad Request", "body.max_tokens"),
        (CHAT, chat(pair, stream_options={"include_usage": True}), 400, "BadRequestError", "stream_options"),
        (CHAT, chat(pair, model="no-such"), 404, "NotFoundError", "model"),
        (COMPLETIONS, completion(pair) | {"prompt": too_long}, 400, "BadRequestError", "input_tokens"),
        (COMPLETIONS, completion(pair, n=2), 400, "BadRequestError", None),
        (COMPLETIONS, completion(pair, n=0), 400, "BadRequestError", None),
        (CHAT, chat(pair, temperature=3), 400, "BadRequestError", "temperature"),
        (CHAT, chat(pair, max_tokens=0), 400, "BadRequestError", "max_tokens"),
        (CHAT, chat(pair, max_tokens=10**6), 400, "BadRequestError", "max_tokens"),
        (CHAT, chat(pair, max_completion_tokens=10**6), 400, "BadRequestError", "max_completion_tokens"),
        (CHAT, chat(pair, min_tokens=9), 400, "BadRequestError", None),
    ]
    for path, body, status, kind, param in cases:
        reply = pair.post(pair.decode_url, path, body)
        assert reply.status_code == status, (path, body, reply.text)
        error = reply.json()["error"]
        assert error.keys() == e.ERROR
        assert (error["code"], error["type"], error["param"]) == (status, kind, param), reply.text
    for content in (b"{", b""):
        reply = pair.client.post(pair.decode_url + CHAT, content=content, headers={"content-type": "application/json"})
        assert reply.status_code == 400
        assert reply.json()["error"].keys() == e.ERROR
    reply = pair.post(pair.decode_url, MESSAGES, {"model": "no-such", "max_tokens": 1, "messages": []})
    assert reply.status_code == 404
    assert reply.json().keys() == {"type", "error"}
    assert reply.json()["error"].keys() == {"type", "message"}


def check_unknown_routes(pair: EnginePair) -> None:
    """Not OpenAI-shaped: a router has to word these itself."""
    reply = pair.post(pair.decode_url, "/v1/no-such", {})
    assert (reply.status_code, reply.json()) == (404, {"detail": "Not Found"})
    reply = pair.client.get(pair.decode_url + CHAT)
    assert (reply.status_code, reply.json()) == (405, {"detail": "Method Not Allowed"})


def check_metric_names(pair: EnginePair) -> None:
    for url in (pair.prefill_url, pair.decode_url):
        names = pair.metrics(url).keys()
        assert names >= e.SERIES
        for histogram in e.HISTOGRAMS:
            assert {f"{histogram}_sum", f"{histogram}_count", f'{histogram}_bucket{{le="+Inf"}}'} <= names


def check_count_tokens(pair: EnginePair) -> None:
    body = chat(pair)
    counted = pair.ok(pair.decode_url, MESSAGES + "/count_tokens", {k: body[k] for k in ("model", "messages")})
    assert counted["input_tokens"] == pair.ok(pair.decode_url, CHAT, body)["usage"]["prompt_tokens"]
