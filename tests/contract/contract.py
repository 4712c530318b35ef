"""The contract: what Tandem relies on in an engine, as checks that run on stand-ins and on real vLLM alike.

Each check takes an `EnginePair` and asserts; `CHECKS` is all of them, for parametrising. They share one pair and run in
any order: each uses prompts of its own and compares counters before and after.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import httpx
import msgspec
import zmq

from tests.contract import expected as e
from tests.contract.pair import PREFILL_PARAMS, EnginePair, fresh_text

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)

BYTES_MOVED = "vllm:nixl_bytes_transferred_sum"
FAILED = "vllm:nixl_num_failed_transfers_total"


def chat(pair: EnginePair, text: str = "Name a colour.", **more: object) -> dict:
    messages = [{"role": "user", "content": text}]
    return {"model": pair.model, "messages": messages, "temperature": 0, "max_tokens": 6} | more


def completion(pair: EnginePair, text: str = "Red, green,", **more: object) -> dict:
    return {"model": pair.model, "prompt": text, "temperature": 0, "max_tokens": 6} | more


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
    usage = pair.ok(pair.decode_url, CHAT, chat(pair, max_tokens=1))["usage"]
    assert usage["prompt_tokens"] == reply["count"]


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


EXCHANGES: dict[str, tuple[str, str, Callable[[EnginePair, str], dict], Callable[[dict], str]]] = {
    "chat": (
        CHAT,
        "max_tokens",
        lambda pair, text: chat(pair, text),
        lambda reply: reply["choices"][0]["message"]["content"],
    ),
    "completion": (
        COMPLETIONS,
        "max_tokens",
        lambda pair, text: completion(pair, text),
        lambda reply: reply["choices"][0]["text"],
    ),
    "responses": (
        RESPONSES,
        "max_output_tokens",
        lambda pair, text: {"model": pair.model, "input": text, "temperature": 0, "max_output_tokens": 6},
        lambda reply: reply["output"][0]["content"][0]["text"],
    ),
    "messages": (
        MESSAGES,
        "max_tokens",
        lambda pair, text: chat(pair, text),
        lambda reply: reply["content"][0]["text"],
    ),
}
"""Per API: path, the field that limits the answer, a body, and the text of a reply."""


def prefill(pair: EnginePair, api: str, body: dict) -> dict:
    """The first leg; its params."""
    path, limit, _, _ = EXCHANGES[api]
    reply = pair.ok(pair.prefill_url, path, body | {limit: 1, "kv_transfer_params": PREFILL_PARAMS})
    return reply["kv_transfer_params"]


def check_exchange(pair: EnginePair) -> None:
    """Prefill → decode gives the text that decode alone gives, and the counters prove that the KV moved."""
    for api, (path, _, make, text_of) in EXCHANGES.items():
        body = make(pair, fresh_text(20))
        params = prefill(pair, api, body)
        assert params.keys() == e.TRANSFER_PARAMS
        assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
        assert (params["transfer_mode"], params["tp_size"]) == ("pull", 1)
        assert params["remote_prefill_cached_tokens"] == 0
        assert all(isinstance(group, list) for group in params["remote_block_ids"])
        tokens = params["remote_num_tokens"]
        before = pair.metrics(pair.decode_url)
        handed = pair.ok(pair.decode_url, path, body | {"kv_transfer_params": params})
        grown = pair.grown(pair.decode_url, before, BYTES_MOVED)
        assert handed.get("kv_transfer_params") is None
        assert grown["vllm:nixl_xfer_time_seconds_count"] == grown["vllm:nixl_bytes_transferred_count"] == 1
        assert grown["vllm:nixl_bytes_transferred_sum"] > 0
        assert grown['vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}'] == tokens
        assert grown['vllm:prompt_tokens_by_source_total{source="local_compute"}'] == 0
        assert grown["vllm:external_prefix_cache_hits_total"] == tokens
        alone = pair.ok(pair.decode_url, path, body | {"cache_salt": fresh_text(2)})
        assert text_of(handed) == text_of(alone)


def check_stream_after_exchange(pair: EnginePair) -> None:
    body = chat(pair, fresh_text(20))
    params = prefill(pair, "chat", body)
    frames = pair.stream(pair.decode_url, CHAT, body | {"kv_transfer_params": params})
    alone = pair.ok(pair.decode_url, CHAT, body | {"cache_salt": fresh_text(2)})
    text = "".join(frame["choices"][0]["delta"].get("content", "") for frame in frames[:-1])
    assert text == alone["choices"][0]["message"]["content"]
    assert all("kv_transfer_params" not in frame for frame in frames[:-1])


def check_silent_local_compute(pair: EnginePair) -> None:
    """Without params decode computes the prompt itself, answers 200 and says nothing: only a counter knows."""
    before = pair.metrics(pair.decode_url)
    usage = pair.ok(pair.decode_url, CHAT, chat(pair, fresh_text(20)))["usage"]
    grown = pair.grown(pair.decode_url, before)
    by_source = {
        source: grown[f'vllm:prompt_tokens_by_source_total{{source="{source}"}}']
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
    }
    assert by_source["external_kv_transfer"] == 0
    assert by_source["local_compute"] > 0
    assert sum(by_source.values()) == usage["prompt_tokens"]
    assert grown["vllm:nixl_bytes_transferred_count"] == 0


def check_unreachable_prefill(pair: EnginePair) -> None:
    """Params that lead nowhere end in 500, or in an error event once a stream has begun; a counter rises."""
    body = chat(pair, fresh_text(20))
    params = prefill(pair, "chat", body) | {"remote_port": 9, "remote_engine_id": "nobody"}
    before = pair.metrics(pair.decode_url)
    reply = pair.post(pair.decode_url, CHAT, body | {"kv_transfer_params": params})
    assert reply.status_code == 500
    error = reply.json()["error"]
    assert error.keys() == e.ERROR
    assert error["type"] == "InternalServerError"
    frames = pair.stream(pair.decode_url, CHAT, body | {"kv_transfer_params": params})
    assert frames == [{"error": error}, "[DONE]"]
    assert pair.grown(pair.decode_url, before, FAILED)[FAILED] >= 2


def check_decode_pulls_only_what_it_lacks(pair: EnginePair) -> None:
    """The same long prompt again moves fewer bytes: decode keeps whole blocks; prefill reports its cached tokens."""
    size = block_size(pair)
    body = completion(pair) | {"prompt": long_prompt(pair, 2 * size + 3)}
    moved = []
    for _ in range(2):
        params = prefill(pair, "completion", body)
        before = pair.metrics(pair.decode_url)
        reply = pair.ok(pair.decode_url, COMPLETIONS, body | {"kv_transfer_params": params})
        moved.append(pair.grown(pair.decode_url, before, BYTES_MOVED)[BYTES_MOVED])
    assert moved[1] * 3 == moved[0]
    assert params["remote_prefill_cached_tokens"] == 2 * size
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * size


def long_prompt(pair: EnginePair, tokens: int) -> list[int]:
    """A prompt of just so many tokens that nobody has sent before."""
    ids: list[int] = []
    while len(ids) < tokens:
        ids += pair.ok(pair.prefill_url, "/tokenize", {"prompt": fresh_text(tokens)})["tokens"]
    return ids[:tokens]


class Events:
    """A subscriber that has surely joined: it has heard of a prompt that it sent itself."""

    def __init__(self, pair: EnginePair, size: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVTIMEO, 20_000)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(pair.events)
        heard = False
        while not heard:
            prompt = long_prompt(pair, size + 1)
            pair.ok(pair.prefill_url, COMPLETIONS, completion(pair, max_tokens=1) | {"prompt": prompt})
            heard = bool(self._socket.poll(500))
        while self._socket.poll(200):
            self._socket.recv_multipart()

    def batch(self) -> list[bytes]:
        return self._socket.recv_multipart()

    def close(self) -> None:
        self._context.destroy(0)


def replayed(pair: EnginePair, first: int) -> list[list[bytes]]:
    """All batches from `first` on, as the replay socket gives them."""
    context = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        socket.connect(pair.replay)
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        batches = []
        while True:
            empty, topic, sequence, payload = socket.recv_multipart()
            assert empty == b""
            if int.from_bytes(sequence, "big", signed=True) == -1:
                assert payload == b""
                return batches
            batches.append([topic, sequence, payload])
    finally:
        context.destroy(0)


def block_size(pair: EnginePair) -> int:
    """Tokens per KV block, read from the engine's events."""
    for words in itertools.count(60, 60):
        for _, _, payload in reversed(replayed(pair, 0)):
            for event in msgspec.msgpack.decode(payload)[1]:
                if event["type"] == "BlockStored":
                    return event["block_size"]
        pair.ok(pair.prefill_url, COMPLETIONS, completion(pair, fresh_text(words), max_tokens=1))
    raise AssertionError


def check_kv_events(pair: EnginePair) -> None:
    """A new prompt's full blocks are told, in order, with its tokens; replay gives the same bytes."""
    size = block_size(pair)
    prompt = long_prompt(pair, 2 * size + 3)
    subscriber = Events(pair, size)
    try:
        pair.ok(pair.prefill_url, COMPLETIONS, completion(pair, max_tokens=1) | {"prompt": prompt})
        batches, told, parents, hashes = [], [], [], []
        while len(hashes) < 2:
            topic, sequence, payload = subscriber.batch()
            batches.append([topic, sequence, payload])
            stamp, events, rank = msgspec.msgpack.decode(payload)
            assert isinstance(stamp, float)
            assert rank == 0
            for event in events:
                if event["type"] != "BlockStored":
                    assert event.keys() == {"type", "block_hashes", "medium", "group_idx"}
                    continue
                assert event.keys() == e.BLOCK_STORED
                assert len(event["token_ids"]) == len(event["block_hashes"]) * event["block_size"]
                assert (event["block_size"], event["medium"], event["group_idx"]) == (size, "GPU", 0)
                assert event["extra_keys"] == [None] * len(event["block_hashes"])
                assert event["kv_cache_spec_kind"] == "full_attention"
                assert all(isinstance(block, int) and 0 <= block < 1 << 64 for block in event["block_hashes"])
                told += event["token_ids"]
                parents.append(event["parent_block_hash"])
                hashes += event["block_hashes"]
        assert told == prompt[: 2 * size]
        assert parents == [None, hashes[0]][: len(parents)]
        numbers = [int.from_bytes(sequence, "big") for _, sequence, _ in batches]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert topic == b"kv"
        again = replayed(pair, numbers[0])
        assert again[: len(batches)] == batches
    finally:
        subscriber.close()


def check_salted_block_names_its_salt(pair: EnginePair) -> None:
    size = block_size(pair)
    before = len(replayed(pair, 0))
    body = completion(pair, max_tokens=1, cache_salt="a-salt") | {"prompt": long_prompt(pair, 2 * size + 3)}
    pair.ok(pair.prefill_url, COMPLETIONS, body)
    events = [event for batch in replayed(pair, before) for event in msgspec.msgpack.decode(batch[2])[1]]
    extra = [keys for event in events if event["type"] == "BlockStored" for keys in event["extra_keys"]]
    assert extra == [["a-salt"], None]


CHECKS = tuple(check for name, check in sorted(globals().items()) if name.startswith("check_"))
