"""The hand-over of KV: a prefill engine's side channel, and the pull that a decode engine makes from it.

Stands for NIXL. What travels are the contents that stand for KV blocks; the time that the true bytes would take is
modelled (bytes ÷ rate). As with real memory, blocks are read as they are *now*: after the lease they may hold another
prompt's KV, and nobody complains.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Sequence

import msgspec
from msgspec import Struct

CONNECT_TIMEOUT = 5.0
_REQUIRED = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


class Handshake(Struct, tag=True):
    engine_id: str


class Read(Struct, tag=True):
    block_ids: list[int]


class Done(Struct, tag=True):
    request_id: str


class Heartbeat(Struct, tag=True):
    request_ids: list[str]


class Greeting(Struct):
    engine_id: str
    block_size: int


class Contents(Struct):
    blocks: list[bytes]


_Message = Handshake | Read | Done | Heartbeat
_encode = msgspec.msgpack.Encoder().encode
_decode_message = msgspec.msgpack.Decoder(_Message).decode
_decode_greeting = msgspec.msgpack.Decoder(Greeting).decode
_decode_contents = msgspec.msgpack.Decoder(Contents).decode
_MOST = 64 << 20


class TransferFailed(Exception):
    """The other side could not be reached, is another process, or does not fit."""


class Remote(Struct, frozen=True):
    """The part of `kv_transfer_params` that says where the KV lies."""

    engine_id: str
    request_id: str
    host: str
    port: int
    block_ids: tuple[int, ...]
    cached_tokens: int | None = None


def remote_of(params: dict[str, object] | None) -> Remote | None:
    """Where a request's KV lies, or None: then this engine computes the prompt itself and says nothing."""
    if not params or not params.get("do_remote_prefill") or not params.get("remote_block_ids"):
        return None
    if any(params.get(name) is None for name in _REQUIRED):
        return None
    groups = params["remote_block_ids"]
    cached = params.get("remote_prefill_cached_tokens")
    try:
        return Remote(
            engine_id=str(params["remote_engine_id"]),
            request_id=str(params["remote_request_id"]),
            host=str(params["remote_host"]),
            port=int(str(params["remote_port"])),
            block_ids=msgspec.convert([id for group in _groups(groups) for id in group], tuple[int, ...]),
            cached_tokens=cached if isinstance(cached, int) else None,
        )
    except (TypeError, ValueError):
        return None


def _groups(value: object) -> list[list[object]]:
    return msgspec.convert(value, list[list[object]])


async def _receive(reader: asyncio.StreamReader) -> bytes:
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > _MOST:
        raise TransferFailed(f"a side channel message of {size} bytes")
    return await reader.readexactly(size)


def _send(writer: asyncio.StreamWriter, message: Struct) -> None:
    data = _encode(message)
    writer.write(len(data).to_bytes(4, "big") + data)


class SideChannel:
    """The prefill engine's end. `read`, `done` and `heartbeat` are the engine's."""

    def __init__(
        self,
        engine_id: str,
        block_size: int,
        *,
        read: Callable[[Iterable[int]], list[bytes]],
        done: Callable[[str], None],
        heartbeat: Callable[[Iterable[str]], None],
    ) -> None:
        self._greeting = Greeting(engine_id, block_size)
        self._read, self._done, self._heartbeat = read, done, heartbeat
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_server(self._serve, sock=listener)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                match _decode_message(await _receive(reader)):
                    case Handshake():
                        _send(writer, self._greeting)
                    case Read(block_ids):
                        _send(writer, Contents(self._read(block_ids)))
                    case Done(request_id):
                        self._done(request_id)
                    case Heartbeat(request_ids):
                        self._heartbeat(request_ids)
        except (OSError, asyncio.IncompleteReadError, msgspec.MsgspecError, TransferFailed):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.close()


async def _connect(remote: Remote, block_size: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT):
            reader, writer = await asyncio.open_connection(remote.host, remote.port)
            _send(writer, Handshake(remote.engine_id))
            greeting = _decode_greeting(await _receive(reader))
    except (OSError, asyncio.IncompleteReadError, msgspec.MsgspecError) as error:
        raise TransferFailed(f"no side channel at {remote.host}:{remote.port}: {error}") from error
    if greeting.engine_id != remote.engine_id:
        writer.close()
        raise TransferFailed(f"engine {greeting.engine_id} answers where {remote.engine_id} was expected")
    if greeting.block_size != block_size:
        writer.close()
        raise TransferFailed(f"KV blocks of {greeting.block_size} tokens there, {block_size} here")
    return reader, writer


async def pull(remote: Remote, count: int, block_size: int, seconds_per_block: float) -> tuple[list[bytes], float]:
    """The last `count` blocks of a remote request, and the seconds that the transfer took; frees them over there.

    Raises `TransferFailed`.
    """
    reader, writer = await _connect(remote, block_size)
    loop = asyncio.get_running_loop()
    started = loop.time()
    try:
        wanted = list(remote.block_ids[-count:]) if count else []
        _send(writer, Read(wanted))
        contents = _decode_contents(await _receive(reader))
        await asyncio.sleep(len(wanted) * seconds_per_block - (loop.time() - started))
        _send(writer, Done(remote.request_id))
        await writer.drain()
    except (OSError, asyncio.IncompleteReadError, msgspec.MsgspecError) as error:
        raise TransferFailed(f"transfer from {remote.host}:{remote.port} broke: {error}") from error
    finally:
        writer.close()
    return contents.blocks, loop.time() - started


async def tell(remote: Remote, block_size: int, messages: Sequence[Done | Heartbeat]) -> None:
    """Messages that need no answer: blocks that will not be read, or a lease to be kept.

    Raises `TransferFailed`.
    """
    _, writer = await _connect(remote, block_size)
    try:
        for message in messages:
            _send(writer, message)
        await writer.drain()
    except OSError as error:
        raise TransferFailed(str(error)) from error
    finally:
        writer.close()
