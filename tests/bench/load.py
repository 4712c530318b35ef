"""A load generator: N connections, each sends its next request when the last reply is whole. Bounded by time and count."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import NamedTuple, cast

import uvloop

from tests.bench.model import Body

SECONDS_FOR_ALL = 15
PATH = b"/v1/chat/completions"


class Load(NamedTuple):
    requests: int
    seconds: float
    errors: int
    p50_ms: float
    """To the first byte of a stream, else to the end of the reply."""
    p99_ms: float

    @property
    def rate(self) -> float:
        return self.requests / self.seconds


def request(port: int, data: bytes, key: str, more: bytes = b"") -> bytes:
    """`more`: header lines, each ended."""
    return (
        b"POST %b HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nAccept: */*\r\nUser-Agent: bench\r\n"
        b"Authorization: Bearer %b\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n%b"
        % (PATH, port, key.encode(), more, len(data), data)
    )


class _Client(asyncio.Protocol):
    def __init__(self, run: _Run) -> None:
        self._run = run
        self._held = b""
        self._wanted = 0
        self._sent_at = 0.0
        self._first = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._next()

    def _next(self) -> None:
        run = self._run
        if run.left <= 0 or (run.done and perf_counter() > run.until):
            self._transport.close()
            return
        run.left -= 1
        self._first = True
        data = run.next_request()
        self._sent_at = perf_counter()
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        run = self._run
        if self._first:
            self._first = False
            if not data.startswith(b"HTTP/1.1 200"):
                run.errors += 1
                run.said = run.said or data[:600]
            if run.stream:
                run.latencies.append(perf_counter() - self._sent_at)
        if run.stream:
            self._held = self._held[-8:] + data if len(data) < 8 else data
            if not self._held.endswith(b"0\r\n\r\n"):
                return
        else:
            self._held = self._held + data if self._held else data
            if not self._wanted:
                end = self._held.find(b"\r\n\r\n")
                if end < 0:
                    return
                head = self._held[:end].lower()
                at = head.find(b"content-length:")
                self._wanted = end + 4 + int(head[at + 15 :].split(b"\r", 1)[0]) if at >= 0 else -1
            if self._wanted < 0:  # chunked
                if not self._held.endswith(b"0\r\n\r\n"):
                    return
            elif len(self._held) < self._wanted:
                return
            run.latencies.append(perf_counter() - self._sent_at)
        self._wanted = 0
        self._held = b""
        run.done += 1
        self._next()

    def connection_lost(self, error: Exception | None) -> None:
        self._run.closed(error is not None or not self._transport.is_closing())


class _Run:
    def __init__(
        self, ports: Sequence[int], body: Body, number: Iterator[int], key: str, connections: int, stream: bool
    ) -> None:
        self._body = body
        self._number = number
        probe = request(ports[0], body.whole(next(number)), key)
        self._head = probe[: probe.index(b"\r\n\r\n") + 4]
        self.left = 0
        self.until = 0.0
        self.stream = stream
        self.errors = self.done = 0
        self.said = b""
        self.latencies: list[float] = []
        self._open = connections
        self.over = asyncio.Event()

    def next_request(self) -> bytes:
        return self._head + self._body.whole(next(self._number))

    def closed(self, wrong: bool) -> None:
        self.errors += wrong
        self._open -= 1
        if self._open == 0:
            self.over.set()


async def _run(run: _Run, ports: Sequence[int], connections: int) -> Load:
    loop = asyncio.get_running_loop()
    began = perf_counter()
    for number in range(connections):
        await loop.create_connection(lambda: _Client(run), "127.0.0.1", ports[number % len(ports)])
    async with asyncio.timeout(SECONDS_FOR_ALL):
        await run.over.wait()
    took = perf_counter() - began
    times = sorted(run.latencies) or [0.0]
    if run.errors:
        print(f"{run.errors} errors at port {ports[0]}: {run.said.decode(errors='replace')}")
    return Load(run.done, took, run.errors, times[len(times) // 2] * 1e3, times[int(len(times) * 0.99)] * 1e3)


def run(
    ports: Sequence[int],
    body: Body,
    number: Iterator[int],
    *,
    seconds: float,
    most: int,
    connections: int,
    stream: bool,
    key: str,
) -> Load:
    """Send requests for `seconds`, one at least and `most` at most, and wait for all replies. `number`: makes each body new.
    Connections go to the ports by turns. Raises `OSError`, `TimeoutError` among them, when nobody answers."""
    made = _Run(ports, body, number, key, connections, stream)
    made.left, made.until = most, perf_counter() + seconds
    return uvloop.run(_run(made, ports, connections))
