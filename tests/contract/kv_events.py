"""Checks of KV events: frames, order, tokens, replay."""

from __future__ import annotations

import itertools

import msgspec
import zmq

from tests.contract import expected as e
from tests.contract.bodies import COMPLETIONS, completion, long_prompt
from tests.contract.pair import EnginePair, fresh_text


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


def check_block_size_is_told_alike(pair: EnginePair) -> None:
    """Events and metrics name the same block size."""
    size = block_size(pair)
    info = [name for name in pair.metrics(pair.prefill_url) if name.startswith("vllm:cache_config_info{")]
    assert len(info) == 1
    assert f'block_size="{size}"' in info[0]
