"""A stub engine: answers are baked before the first request, so that it costs as little as Python can.

`python -m tests.bench.stub PORT`. It sees only whether a body asks for prefill or for a stream.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import cast

import uvloop

CHUNKS = 33
CHUNK_SECONDS = 0.002


def _unary(body: dict[str, object]) -> bytes:
    data = json.dumps(body, separators=(",", ":")).encode()
    head = (
        b"HTTP/1.1 200 OK\r\ndate: x\r\nserver: uvicorn\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    return head % len(data) + data


def _frame(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _chunk(delta: dict[str, object], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "token_ids": None}
    body = {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [choice],
    }
    return _frame(b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n")


_MESSAGE = {"role": "assistant", "content": "word " * 60, "refusal": None, "tool_calls": [], "reasoning": None}
_REPLY: dict[str, object] = {
    "id": "chatcmpl-0123456789abcdef",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": _MESSAGE, "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
    "usage": {"prompt_tokens": 200, "total_tokens": 260, "completion_tokens": 60, "prompt_tokens_details": None},
    "prompt_logprobs": None,
    "kv_transfer_params": None,
}
_PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "0123456789abcdef",
    "remote_request_id": "r",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_blocks_expiry_time": 1.0,
}
UNARY = _unary(_REPLY)
PREFILL = _unary({**_REPLY, "kv_transfer_params": _PARAMS})
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: x\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
STREAM = [
    STREAM_HEAD + _chunk({"role": "assistant", "content": ""}),
    *(_chunk({"content": " word"}) for _ in range(CHUNKS - 3)),
    _chunk({"content": ""}, "stop"),
    _frame(b"data: [DONE]\n\n") + b"0\r\n\r\n",
]


class Stub(asyncio.Protocol):
    def __init__(self) -> None:
        self._held = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        data = self._held + data
        end = data.find(b"\r\n\r\n")
        at = data.find(b"ontent-")
        while data[at : at + 8].lower() != b"ontent-l" and at >= 0:
            at = data.find(b"ontent-", at + 1)
        if end < 0 or len(data) < end + 4 + int(data[at + 14 : data.index(b"\r", at)]):
            self._held = data
            return
        self._held = b""
        if b'"do_remote_decode":true' in data:
            self._transport.write(PREFILL)
        elif b'"stream":true' in data:
            self._stream(0)
        else:
            self._transport.write(UNARY)

    def _stream(self, index: int) -> None:
        self._transport.write(STREAM[index])
        if index + 1 < len(STREAM):
            asyncio.get_running_loop().call_later(CHUNK_SECONDS, self._stream, index + 1)


async def main(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
