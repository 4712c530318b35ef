"""KV events of a stub engine, encoded beforehand: vLLM's frames, a replay socket, and nothing else."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

import msgspec
import zmq
import zmq.asyncio

BLOCK = 16
STEP_SECONDS = 0.01
"""What an engine stores during one step is one batch."""
CYCLE = 1_024
"""Blocks of answers that are held at a time; the oldest are removed."""
_pack = msgspec.msgpack.encode


def stored(hashes: list[int], parent: int | None, tokens: Sequence[int]) -> msgspec.Raw:
    return msgspec.Raw(
        _pack(
            {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": parent,
                "token_ids": list(tokens),
                "block_size": BLOCK,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [None] * len(hashes),
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        )
    )


def batch(events: Sequence[msgspec.Raw]) -> bytes:
    """As one step of an engine publishes them."""
    return _pack([time.time(), events, 0])


class Publisher:
    """Publishes on `tcp://127.0.0.1:<port>`, replays on `replay`."""

    def __init__(self, port: int, replay: int, holds: Sequence[Sequence[int]]) -> None:
        draw = random.Random(port)
        context = zmq.Context()
        self._pub = context.socket(zmq.PUB)
        self._pub.set_hwm(100_000)
        self._pub.bind(f"tcp://127.0.0.1:{port}")
        self._replay = zmq.asyncio.Context(context).socket(zmq.ROUTER)
        self._replay.bind(f"tcp://127.0.0.1:{replay}")
        self._batches: list[bytes] = []
        """From sequence 0 on, so that a replay is whole."""
        self._pending: list[msgspec.Raw] = []
        self._answers: list[tuple[msgspec.Raw, msgspec.Raw]] = []
        """Of a block: that it is stored, that it is removed."""
        for _ in range(2 * CYCLE):
            hashes = [draw.getrandbits(63)]
            tokens = [draw.randrange(150_000) for _ in range(BLOCK)]
            removed = _pack({"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0})
            self._answers.append((stored(hashes, None, tokens), msgspec.Raw(removed)))
        self._count = 0
        for tokens in holds:
            whole = len(tokens) // BLOCK * BLOCK
            hashes = [draw.getrandbits(63) for _ in range(whole // BLOCK)]
            self._pending.append(stored(hashes, None, tokens[:whole]))

    def wrote_block(self) -> None:
        """One block of an answer more is stored, and an old one removed."""
        count = self._count
        self._pending.append(self._answers[count % (2 * CYCLE)][0])
        if count >= CYCLE:
            self._pending.append(self._answers[(count - CYCLE) % (2 * CYCLE)][1])
        self._count = count + 1

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._server = loop.create_task(self._serve_replay())
        self._flush()

    def _flush(self) -> None:
        if self._pending:
            payload = batch(self._pending)
            self._pending = []
            self._pub.send_multipart((b"kv", len(self._batches).to_bytes(8, "big"), payload))
            self._batches.append(payload)
        self._loop.call_later(STEP_SECONDS, self._flush)

    async def _serve_replay(self) -> None:
        while True:
            client, _, start = await self._replay.recv_multipart()
            for sequence in range(int.from_bytes(start, "big"), len(self._batches)):
                await self._replay.send_multipart(
                    (client, b"", b"kv", sequence.to_bytes(8, "big"), self._batches[sequence])
                )
            await self._replay.send_multipart((client, b"", b"", b"\xff" * 8, b""))
