"""A KV event publisher on real ZMQ sockets, as one rank of an engine has it, that can lose, delay, reorder and forget."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from tests.conftest import free_port


class Publisher:
    """`ports`: of events and replay, two free ones if not given. `rank`: added to both, as vLLM does."""

    def __init__(self, ports: tuple[int, int] | None = None, *, rank: int = 0, size: int = 4) -> None:
        self.ports = ports or (free_port(), free_port())
        self.rank = rank
        self.size = size
        self.sequence = 0
        self.buffer: list[tuple[int, bytes]] = []
        self.asked: list[int] = []
        self.says: tuple[bytes, ...] | None = None
        """What a replay is answered instead, again and again."""
        self.answers = True
        """Whether replays are answered."""
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.XPUB)  # a PUB that shows who listens
        self._replay = self._context.socket(zmq.ROUTER)
        for socket, port in ((self._pub, self.ports[0]), (self._replay, self.ports[1])):
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(f"tcp://127.0.0.1:{port + rank}")
        self._tasks = {asyncio.create_task(self._serve())}

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.end()

    async def followed(self) -> None:
        """Until somebody listens to what is published from now on."""
        await self._pub.recv()

    def end(self) -> None:
        """End all connections."""
        self._context.destroy(linger=0)

    @property
    def events(self) -> str:
        """Address of the engine's events, without the rank."""
        return f"tcp://127.0.0.1:{self.ports[0]}"

    @property
    def replay(self) -> str:
        return f"tcp://127.0.0.1:{self.ports[1]}"

    def batch(self, *events: dict[str, Any]) -> tuple[int, bytes]:
        """The next batch, kept for replay and not sent yet."""
        entry = self.sequence, msgspec.msgpack.encode([float(id(self)), list(events), self.rank])
        self.sequence += 1
        self.buffer.append(entry)
        return entry

    def send(self, *batches: tuple[int, bytes]) -> None:
        for sequence, payload in batches:
            self._pub.send_multipart((b"kv", sequence.to_bytes(8, "big"), payload))

    def publish(self, *events: dict[str, Any]) -> None:
        self.send(self.batch(*events))

    def forget(self, keep: int) -> None:
        """The replay no longer reaches further back than the last `keep` batches."""
        del self.buffer[:-keep]

    def stored(self, tokens: list[int], start: int = 0) -> dict[str, Any]:
        """The blocks of a prompt from block number `start` on."""
        blocks = len(tokens) // self.size
        names = [hash((id(self), *tokens[: (n + 1) * self.size])) & (1 << 64) - 1 for n in range(blocks)]
        return {
            "type": "BlockStored",
            "block_hashes": names[start:],
            "parent_block_hash": names[start - 1] if start else None,
            "token_ids": tokens[start * self.size : blocks * self.size],
            "block_size": self.size,
            "medium": "GPU",
        }

    def removed(self, tokens: list[int], start: int = 0) -> dict[str, Any]:
        return {"type": "BlockRemoved", "block_hashes": self.stored(tokens, start)["block_hashes"], "medium": "GPU"}

    async def _say(self, client: bytes, frames: tuple[bytes, ...]) -> None:
        while True:
            await self._replay.send_multipart((client, *frames))
            await asyncio.sleep(0.02)

    async def _serve(self) -> None:
        while True:
            client, _, start = await self._replay.recv_multipart()
            if not self.answers:
                continue
            first = int.from_bytes(start, "big")
            self.asked.append(first)
            if self.says is not None:
                self._tasks.add(asyncio.create_task(self._say(client, self.says)))
                continue
            for sequence, payload in list(self.buffer):
                if sequence >= first:
                    await self._replay.send_multipart((client, b"", b"kv", sequence.to_bytes(8, "big"), payload))
            await self._replay.send_multipart((client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""))
