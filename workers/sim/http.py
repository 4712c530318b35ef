"""The few HTTP pieces a bare ASGI application needs: body in, JSON or an event stream out, vLLM's error shapes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

import msgspec

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MOST_BODY = 64 << 20
encode = msgspec.json.Encoder().encode


class ApiError(Exception):
    """An answer other than 200, in vLLM's shape."""

    late = False
    """Refused by the engine and not by the request's own grammar: only then does vLLM let go of KV that waits elsewhere."""

    def __init__(self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None):
        super().__init__(message)
        self.status = status
        self.body: object = {"error": {"message": message, "type": kind, "param": param, "code": status}}
        self.kind = kind
        self.message = message


def invalid(message: str, parameter: str | None = None, value: object = None) -> ApiError:
    """A request that breaks one of vLLM's own rules; the text ends as `VLLMValidationError` ends it."""
    named = [f"parameter={parameter}"] if parameter is not None else []
    extras = named if value is None else [*named, f"value={value}"]
    return ApiError(f"{message} ({', '.join(extras)})" if extras else message, param=parameter)


def late(error: ApiError) -> ApiError:
    """The same error, as the engine's own."""
    error.late = True
    return error


def no_route(status: HTTPStatus = HTTPStatus.NOT_FOUND) -> ApiError:
    """An unknown path or method: the web framework under vLLM answers these, in a shape of its own."""
    error = ApiError(status.phrase, status=status.value)
    error.body = {"detail": status.phrase}
    return error


def internal() -> ApiError:
    return ApiError("Internal server error", status=500, kind="InternalServerError")


class ClientGone(Exception):
    """The client closed the connection."""


class Exchange:
    """One request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self._headers: list[tuple[bytes, bytes]] = scope["headers"]
        self._receive, self._send = receive, send
        self.started = False

    def header(self, name: bytes) -> str:
        """A header's value, empty when it is not there. Names are lower case."""
        return next((value.decode("latin-1") for key, value in self._headers if key == name), "")

    async def body(self) -> bytes:
        parts, size, more = [], 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > MOST_BODY:
                raise ApiError("Request body is too large", status=413, kind="Request Entity Too Large")
            more = message.get("more_body", False)
        return b"".join(parts)

    async def gone(self) -> None:
        """Returns when the client has left. Only after `body`."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def json(self, value: object, status: int = 200) -> None:
        await self.answer(encode(value), b"application/json", status)

    async def answer(self, body: bytes, content_type: bytes = b"", status: int = 200) -> None:
        headers = [(b"content-length", str(len(body)).encode())]
        if content_type:
            headers.append((b"content-type", content_type))
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def stream(self, chunks: AsyncIterator[bytes]) -> None:
        """Server-sent events. The headers leave before the first chunk is there, as in vLLM."""
        self.started = True
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        async for chunk in chunks:
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})


def event(data: object) -> bytes:
    """One `data:` frame."""
    return b"data: " + encode(data) + b"\n\n"


def named_event(data: dict[str, object]) -> bytes:
    """A frame whose `event:` line repeats the `type` of its data."""
    return b"event: " + str(data["type"]).encode() + b"\ndata: " + encode(data) + b"\n\n"


DONE = b"data: [DONE]\n\n"


async def unless_gone(exchange: Exchange, work: Awaitable[None]) -> None:
    """Awaits `work`, cancelling it when the client leaves first.

    Raises `ClientGone`.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(exchange.gone())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise ClientGone
        task.result()
    finally:
        task.cancel()
        gone.cancel()
