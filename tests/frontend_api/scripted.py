"""An engine whose every byte is scripted, and a client whose every byte is seen. Raw asyncio: no HTTP library between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "e-1",
    "remote_request_id": "r-1",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_blocks_expiry_time": 12.5,
}
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 2}}


class Heard(NamedTuple):
    """One request as an engine got it."""

    target: str
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> dict[str, Any]:
        return json.loads(self.raw)


Answer = Callable[[Heard, asyncio.StreamWriter], Awaitable[None]]


def unary(body: dict[str, Any] | bytes, status: int = 200, headers: str = "") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
    head = f"HTTP/1.1 {status} X\r\nserver: uvicorn\r\ncontent-type: application/json\r\n{headers}content-length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data


def chat_reply(text: str = "Paris.", **more: Any) -> dict[str, Any]:
    choices = [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]
    return {
        "id": "c-1",
        "object": "chat.completion",
        "choices": choices,
        "usage": USAGE,
        "kv_transfer_params": None,
        **more,
    }


def event(data: dict[str, Any] | str) -> bytes:
    return b"data: " + (data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))).encode() + b"\n\n"


def chunk(text: str) -> bytes:
    return event(
        {"id": "c-1", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": text}}]}
    )


ROLE = event({"id": "c-1", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
DONE = event("[DONE]")
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST = b"0\r\n\r\n"


async def answer_well(heard: Heard, writer: asyncio.StreamWriter) -> None:
    """As vLLM does: prefill gives params, decode gives text, streamed when asked."""
    body = heard.body
    if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
        writer.write(unary(chat_reply("P", kv_transfer_params=PARAMS)))
    elif body.get("stream"):
        parts = [ROLE, *(chunk(f"t{i}") for i in range(3)), event({"choices": [], "usage": USAGE}), DONE]
        writer.write(STREAM_HEAD + b"".join(framed(part) for part in parts) + LAST)
    else:
        writer.write(unary(chat_reply()))


def after(go_on: asyncio.Event) -> Answer:
    """The same, once that is set."""

    async def answer(heard: Heard, writer: asyncio.StreamWriter) -> None:
        await go_on.wait()
        await answer_well(heard, writer)

    return answer


def dribble(raw: bytes) -> Answer:
    """These bytes, so many at a time as the request's `step` says."""

    async def answer(heard: Heard, writer: asyncio.StreamWriter) -> None:
        step = int(heard.body["step"])
        for at in range(0, len(raw), step):
            writer.write(raw[at : at + step])
            await writer.drain()
            await asyncio.sleep(0)

    return answer


class ScriptedEngine:
    """Listens on a port of the system's choice and answers every request by `answer`."""

    def __init__(self, answer: Answer = answer_well) -> None:
        self.answer = answer
        self.figures: Callable[[], bytes] | None = None
        """Its `/metrics`, if it has some."""
        self.heard: list[Heard] = []
        self.open: set[asyncio.StreamWriter] = set()
        self.aborted = 0
        """Requests whose connection the router closed before they were answered."""
        self.port = 0
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> ScriptedEngine:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self.open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:] if line)}
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                heard = Heard(head[0].split()[1], headers, raw)
                if heard.target == "/metrics":  # routers ask by themselves, beside the requests
                    writer.write(unary({}, 404) if self.figures is None else unary(self.figures()))
                    continue
                self.heard.append(heard)
                answering = asyncio.ensure_future(self.answer(heard, writer))
                leaving = asyncio.ensure_future(_until_eof(reader))
                await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
                leaving.cancel()
                if not answering.done():
                    self.aborted += 1
                    answering.cancel()
                    return
                await answering
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.open.discard(writer)
            writer.transport.abort()


async def _until_eof(reader: asyncio.StreamReader) -> None:
    while not reader.at_eof() and reader.exception() is None:  # a reset is no end of file
        await asyncio.sleep(0.005)
