"""The least that a router in Python can do: bytes to an engine and back, on uvloop; nothing is read but where a reply ends.

`python -m tests.bench.relay PORT ENGINE_PORT …`. What ours costs more is its own; what this costs is the kernel's and uvloop's.
Good for the bench alone: its connections to engines are as many as it ever has, and it breaks when a client vanishes.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop

CONNECTIONS = 64


class Engine(asyncio.Protocol):
    """A connection to one; `idle`: those that serve nobody."""

    def __init__(self, idle: list[Engine]) -> None:
        self._idle = idle
        self.client: Client | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._idle.append(self)

    def data_received(self, data: bytes) -> None:
        client = self.client
        assert client is not None
        if data.endswith(b"0\r\n\r\n") or b"\r\ncontent-length:" in data[:256]:
            self.client = client.engine = None
            self._idle.append(self)
        client.transport.write(data)


class Client(asyncio.Protocol):
    def __init__(self, idle: list[Engine]) -> None:
        self._idle = idle
        self.engine: Engine | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        engine = self.engine
        if engine is None:
            engine = self.engine = self._idle.pop()
            engine.client = self
        engine.transport.write(data)


async def main(port: int, engines: list[int]) -> None:
    loop, idle = asyncio.get_running_loop(), list[Engine]()
    for number in range(CONNECTIONS):
        await loop.create_connection(lambda: Engine(idle), "127.0.0.1", engines[number % len(engines)])
    server = await loop.create_server(lambda: Client(idle), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), [int(port) for port in sys.argv[2:]]))
