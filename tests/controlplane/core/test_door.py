"""The door of the web process against those who send too much, too slowly, or do not take their answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from controlplane import door, web
from controlplane.fleet.config import Config
from tests.conftest import free_port


class Site:
    """A real server of the web process's options on a port of its own, in front of an application that counts."""

    def __init__(self) -> None:
        self.port = free_port()
        self.bodies: list[int] = []
        self.answer = b"ok"
        options = web.options(Config(web_port=self.port, log_level="error")) | {"timeout_keep_alive": 1}
        self.server = uvicorn.Server(uvicorn.Config(door.Door(self._app), **options))
        self.listening = web.bind("127.0.0.1", self.port)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        assert not message["more_body"]
        self.bodies.append(len(message["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": self.answer})

    async def connect(self) -> Connection:
        return Connection(*await asyncio.open_connection("127.0.0.1", self.port))


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    def say(self, *parts: bytes) -> None:
        self.writer.write(b"".join(parts))

    async def status(self) -> int:
        head = await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), 20)
        return int(head.split()[1])

    async def ended(self) -> bytes:
        """What came until the server closed the connection."""
        try:
            return await asyncio.wait_for(self._reader.read(), 20)
        except ConnectionResetError:
            return b""


@asynccontextmanager
async def served() -> AsyncIterator[Site]:
    site = Site()
    running = asyncio.create_task(site.server.serve([site.listening]))
    while not site.server.started:
        await asyncio.sleep(0.01)
    yield site
    site.server.should_exit = True
    await running


HEAD = b"POST /x HTTP/1.1\r\nhost: h\r\n"


async def test_a_body_that_says_it_is_too_long_is_refused_unread() -> None:
    async with served() as site:
        for path, kind in ((b"/x", b"text/plain"), (b"/api/v1/x", b"application/json")):
            client = await site.connect()
            client.say(b"POST ", path, b" HTTP/1.1\r\nhost: h\r\ncontent-length: 209715200\r\n\r\n", bytes(1000))
            answer = await client.ended()
            assert answer.startswith(b"HTTP/1.1 413 ")
            assert kind in answer
        assert site.bodies == []


async def test_a_body_that_turns_out_too_long_is_refused_on_the_way() -> None:
    async with served() as site:
        client = await site.connect()
        client.say(HEAD, b"transfer-encoding: chunked\r\n\r\n")
        sent = 0
        try:
            while sent < 200 << 20:
                client.say(b"10000\r\n", bytes(0x10000), b"\r\n")
                await client.writer.drain()
                sent += 0x10000
        except ConnectionError:
            pass
        assert sent < 200 << 20, "it was cut off"
        assert site.bodies == []


async def test_the_largest_body_that_is_taken_arrives_whole() -> None:
    async with served() as site:
        for size in (0, 1, door.MOST_BYTES):
            client = await site.connect()
            client.say(HEAD, b"content-length: %d\r\n\r\n" % size, bytes(size))
            assert await client.status() == 200
        assert site.bodies == [0, 1, door.MOST_BYTES]


@pytest.mark.parametrize(
    "sent",
    [b"", b"P", b"POST /x HTTP/1.1\r\nhost: h", b"GET / HTTP/1.1\r\nhost: h\r\n\r\nGET /"],
    ids=["nothing", "a byte", "half a head", "half of a second head"],
)
async def test_a_head_that_does_not_come_ends_the_connection(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "HEAD_SECONDS", 0.3)
    async with served() as site:
        many = [await site.connect() for _ in range(21)]
        for client in many:
            client.say(sent)
        for client in many:
            await client.ended()
        assert not site.server.server_state.connections


async def test_a_head_that_drips_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "HEAD_SECONDS", 0.3)
    async with served() as site:
        client = await site.connect()
        ended = asyncio.create_task(client.ended())
        while not ended.done():
            client.say(b"x")
            await asyncio.sleep(0.05)


async def test_a_body_that_does_not_come_is_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "BODY_SECONDS", 0.3)
    async with served() as site:
        many = [await site.connect() for _ in range(21)]
        for client in many:
            client.say(HEAD, b"content-length: 1000\r\n\r\nabc")
        for client in many:
            assert (await client.ended()).startswith(b"HTTP/1.1 408 ")
        assert not site.server.server_state.connections
        assert site.bodies == []


async def test_an_endless_head_is_refused() -> None:
    async with served() as site:
        client = await site.connect()
        client.say(b"GET / HTTP/1.1\r\nx: ", b"a" * (door.MOST_HEAD_BYTES + 1))
        assert (await client.ended()).startswith(b"HTTP/1.1 400 ")


async def test_a_websocket_with_a_body_is_refused() -> None:
    async with served() as site:
        for body in (b"content-length: 1000000", b"transfer-encoding: chunked"):
            client = await site.connect()
            client.say(
                b"GET /live/ HTTP/1.1\r\nhost: h\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n",
                b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n" + body + b"\r\n\r\nxx",
            )
            assert (await client.ended()).startswith(b"HTTP/1.1 400 ")
        await until(lambda: not site.server.server_state.connections)


async def test_who_does_not_take_the_answer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "READ_SECONDS", 0.3)
    async with served() as site:
        site.answer = bytes(32 << 20)
        client = await site.connect()
        client.say(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
        await until(lambda: len(site.bodies) == 1)
        await until(lambda: not site.server.server_state.connections)


async def test_one_address_has_so_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "PER_ADDRESS", 3)
    monkeypatch.setattr(door, "_is_own", lambda address: False)
    async with served() as site:
        held = [await site.connect() for _ in range(3)]
        assert await (await site.connect()).ended() == b""
        held[0].writer.close()
        await until(lambda: len(site.server.server_state.connections) == 2)
        client = await site.connect()
        client.say(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
        assert await client.status() == 200
    assert not door.Protocol._per_address


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)
