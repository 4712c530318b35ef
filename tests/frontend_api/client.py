"""A client that sees every byte."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple, cast

PROMPT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The OpenAI error object; fails if the body is no such thing."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


class Client:
    """One connection."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def __aenter__(self) -> Client:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 26)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.transport.abort()

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def post(self, path: str, body: Any = None, **headers: str) -> None:
        self.send(request(path, body, **headers))

    def pause(self) -> None:
        """Take nothing until `resume`."""
        cast(asyncio.Transport, self.writer.transport).pause_reading()

    def resume(self) -> None:
        cast(asyncio.Transport, self.writer.transport).resume_reading()

    async def head(self) -> Reply:
        """Status and headers; the body is still to come."""
        text = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 10)).decode("latin-1")
        first, *lines = text.rstrip("\r\n").split("\r\n")
        headers: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(": ")
            assert name not in headers, f"{name} comes twice"
            headers[name] = value
        return Reply(int(first.split()[1]), headers, b"")

    async def chunk(self) -> bytes:
        """One chunk; empty: the last."""
        size = int(await asyncio.wait_for(self.reader.readuntil(b"\r\n"), 10), 16)
        return (await asyncio.wait_for(self.reader.readexactly(size + 2), 10))[:-2]

    async def reply(self, *, bodiless: bool = False) -> Reply:
        head = await self.head()
        if head.headers.get("transfer-encoding") == "chunked":
            parts = []
            while part := await self.chunk():
                parts.append(part)
            body = b"".join(parts)
        elif bodiless:
            body = b""
        elif "content-length" in head.headers:
            body = await self.reader.readexactly(int(head.headers["content-length"]))
        else:
            body = await asyncio.wait_for(self.reader.read(), 10)
        return head._replace(body=body)

    async def closed_or_done(self) -> bytes:
        """What still comes until a stream's last chunk, or until it breaks."""
        parts = []
        try:
            while part := await self.chunk():
                parts.append(part)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        return b"".join(parts)

    async def closed(self) -> bytes:
        """What still comes until the router closes the connection."""
        try:
            return await asyncio.wait_for(self.reader.read(), 10)
        except ConnectionError:
            return b""


def request(path: str, body: Any = None, *, method: str = "", version: str = "1.1", **headers: str) -> bytes:
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = [f"{method or ('GET' if body is None else 'POST')} {path} HTTP/{version}", "Host: router"]
    if data:
        lines.append(f"Content-Length: {len(data)}")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


async def ask(port: int, path: str, body: Any = None, **headers: str) -> Reply:
    """One request on a connection of its own."""
    async with Client(port) as client:
        client.send(request(path, body, **headers))
        return await client.reply(bodiless=headers.get("method") == "HEAD")


def events(body: bytes) -> list[Any]:
    """The data of each event: parsed JSON, or the text where it is none."""
    assert body.endswith(b"\n\n")
    found = []
    for block in body[:-2].split(b"\n\n"):
        text = b"\n".join(line[6:] for line in block.split(b"\n") if line.startswith(b"data: ")).decode()
        found.append(text if text == "[DONE]" else json.loads(text))
    return found
