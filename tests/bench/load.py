"""A load generator: N connections, each sends its next request when the last reply is whole. Bounded by count."""

from __future__ import annotations

import asyncio
import json
from time import perf_counter
from typing import NamedTuple, cast

import uvloop


class Load(NamedTuple):
    requests: int
    seconds: float
    errors: int
    p50_ms: float
    p99_ms: float

    @property
    def rate(self) -> float:
        return self.requests / self.seconds


def body(size: int, *, stream: bool) -> bytes:
    """A chat body of about `size` bytes."""
    message = {"role": "user", "content": ""}
    plain = json.dumps({"model": "m", "messages": [message], "max_tokens": 60, "stream": stream}, separators=(",", ":"))
    message["content"] = "x" * max(1, size - len(plain))
    whole = {"model": "m", "messages": [message], "max_tokens": 60, "stream": stream}
    return json.dumps(whole, separators=(",", ":")).encode()


def request(port: int, data: bytes, key: str) -> bytes:
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nAccept: */*\r\nUser-Agent: bench\r\n"
        b"Authorization: Bearer %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        % (port, key.encode(), len(data), data)
    )


class _Client(asyncio.Protocol):
    def __init__(self, run: _Run) -> None:
        self._run = run
        self._held = b""
        self._sent_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._next()

    def _next(self) -> None:
        if self._run.left <= 0:
            self._transport.close()
            return
        self._run.left -= 1
        self._sent_at = perf_counter()
        self._transport.write(self._run.request)

    def data_received(self, data: bytes) -> None:
        if self._run.stream:
            self._held = self._held[-8:] + data
            if not self._held.endswith(b"0\r\n\r\n"):
                return
        else:
            self._held += data
            end = self._held.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self._held[:end].lower()
            at = head.find(b"content-length: ")
            if at < 0 or len(self._held) < end + 4 + int(head[at + 16 :].split(b"\r", 1)[0]):
                return
            if not head.startswith(b"http/1.1 200"):
                self._run.errors += 1
        self._held = b""
        self._run.latencies.append(perf_counter() - self._sent_at)
        self._next()

    def connection_lost(self, error: Exception | None) -> None:
        self._run.closed(error is not None or self._run.left > 0)


class _Run:
    def __init__(self, request: bytes, count: int, connections: int, stream: bool) -> None:
        self.request = request
        self.left = count
        self.stream = stream
        self.errors = 0
        self.latencies: list[float] = []
        self._open = connections
        self.over = asyncio.Event()

    def closed(self, wrong: bool) -> None:
        self.errors += wrong
        self._open -= 1
        if self._open == 0:
            self.over.set()


async def _run(port: int, data: bytes, *, count: int, connections: int, stream: bool) -> Load:
    run = _Run(data, count, connections, stream)
    loop = asyncio.get_running_loop()
    began = perf_counter()
    for _ in range(connections):
        await loop.create_connection(lambda: _Client(run), "127.0.0.1", port)
    async with asyncio.timeout(120):
        await run.over.wait()
    took = perf_counter() - began
    times = sorted(run.latencies)
    return Load(len(times), took, run.errors, times[len(times) // 2] * 1e3, times[int(len(times) * 0.99)] * 1e3)


def run(port: int, *, count: int, connections: int, size: int, stream: bool, key: str) -> Load:
    """Send `count` requests over `connections` connections and wait for all replies."""
    data = request(port, body(size, stream=stream), key)
    return uvloop.run(_run(port, data, count=count, connections=connections, stream=stream))
