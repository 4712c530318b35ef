"""KV events as vLLM 0.32 publishes them: ZMQ PUB with a sequence, and a ROUTER that replays the last 10,000 batches.

Frames: topic, 8-byte big-endian sequence from 0, msgpack `[ts, [events], dp_rank]`; an event is a map with a type tag and
leaves out fields that have their default (`distributed/kv_events.py`, `EventBatch` and `KVCacheEvent`). The publisher
binds the engine's one address, never a wildcard.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import zmq
import zmq.asyncio
from msgspec import Struct

from workers.sim.faults import Faults

TOPIC = "kv"
BUFFER = 10_000
HIGH_WATER_MARK = 100_000
END = (-1).to_bytes(8, "big", signed=True)


class Event(Struct, tag=True, omit_defaults=True):
    """Base of the three events; the class name is the tag."""


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    pass


class EventBatch(Struct, array_like=True):
    ts: float
    events: list[Event]
    data_parallel_rank: int = 0


def address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class EventPublisher:
    """Gathers the events of one engine step and publishes them as one batch.

    Raises `zmq.ZMQError` when an address cannot be had.
    """

    def __init__(self, host: str, events_port: int, replay_port: int, block_size: int, faults: Faults) -> None:
        self.endpoint = address(host, events_port)
        self.replay_endpoint = address(host, replay_port) if replay_port else None
        self._block_size = block_size
        self._faults = faults
        self._pending: list[Event] = []
        self._sequence = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=BUFFER)
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(HIGH_WATER_MARK)
        self._pub.setsockopt(zmq.IPV6, ":" in host)
        self._pub.setsockopt(zmq.LINGER, 0)
        if "events-connect" in faults:
            self._pub.connect(self.endpoint)
        else:
            self._pub.bind(self.endpoint)
        self._replay: zmq.asyncio.Socket | None = None
        self._server: asyncio.Task[None] | None = None
        if self.replay_endpoint:
            self._replay = zmq.asyncio.Context(self._context).socket(zmq.ROUTER)
            self._replay.setsockopt(zmq.IPV6, ":" in host)
            self._replay.setsockopt(zmq.LINGER, 0)
            self._replay.bind(self.replay_endpoint)
            self._server = asyncio.create_task(self._serve_replay(self._replay))

    def source(self) -> dict[str, object]:
        """What `/kv_event_sources` says of this rank."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "buffer_steps": BUFFER,
            "hwm": HIGH_WATER_MARK,
            "max_queue_size": HIGH_WATER_MARK,
            "topic": TOPIC,
        }

    def stored(self, hashes: list[int], parent: int | None, tokens: Sequence[int], salt: str | None) -> None:
        extra: list[list[str] | None] = [None] * len(hashes)
        if salt:
            extra[0] = [salt]
        size = self._block_size * (2 if "wrong-block-size" in self._faults else 1)
        self._pending.append(
            BlockStored(hashes, parent, tokens, size, None, "GPU", None, extra, 0, "full_attention"),
        )

    def removed(self, block_hash: int) -> None:
        self._pending.append(BlockRemoved([block_hash], "GPU", 0))

    def cleared(self) -> None:
        self._pending.append(AllBlocksCleared())

    def flush(self) -> None:
        """Publishes what has gathered, if anything. Never blocks: a slow subscriber loses batches."""
        if not self._pending:
            return
        payload = self._encoder.encode(EventBatch(time.time(), self._pending))
        self._pending = []
        if "no-events" in self._faults:
            return
        sequence, self._sequence = self._sequence, self._sequence + 1
        self._buffer.append((sequence, payload))
        if "events-gap" in self._faults and sequence % 2:
            return
        self._pub.send_multipart((TOPIC.encode(), sequence.to_bytes(8, "big"), payload), flags=zmq.NOBLOCK)

    async def _serve_replay(self, replay: zmq.asyncio.Socket) -> None:
        while True:
            frames = await replay.recv_multipart()
            if len(frames) != 3:
                continue
            client, _, start = frames
            first = int.from_bytes(start, "big")
            for sequence, payload in list(self._buffer):
                if sequence >= first:
                    head = (client, b"", TOPIC.encode(), sequence.to_bytes(8, "big"), payload)
                    await replay.send_multipart(head)
            await replay.send_multipart((client, b"", b"", END, b""))

    async def close(self) -> None:
        if self._server is not None:
            self._server.cancel()
            with suppress(asyncio.CancelledError):
                await self._server
        if self._replay is not None:
            self._replay.close(0)
        self._pub.close(0)
        self._context.term()
