"""A stub engine: answers are baked before the first request, so that it costs as little as Python can.

`python -m tests.bench.stub PORT [--events PORT --replay PORT --holds FILE --model FOLDER]`. It sees only whether a body asks
for prefill or for a stream. With `--events` it publishes KV events as vLLM does: what FILE says it holds (from the start on,
and to whoever asks for a replay), and a block for every 16 tokens of its answers, gathered as an engine's step gathers them.
Routers that let the engine tokenise each prompt (`…/render`) get the ids of that prompt in FILE which is as long as theirs;
`/tokenize`, which routers ask now and then, answers truly.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import uvloop

from tests.bench.events import BLOCK, Publisher

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


_MESSAGE = {"role": "assistant", "content": "word " * 16, "refusal": None, "tool_calls": [], "reasoning": None}
# It counts no prompt: it has not read it, and routers hold an engine to its word.
_REPLY: dict[str, object] = {
    "id": "chatcmpl-0123456789abcdef",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": _MESSAGE, "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
    "usage": {"completion_tokens": 16, "prompt_tokens_details": None},
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
MODELS = _unary(
    {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "vllm", "max_model_len": 65536}]}
)
"""Also the answer to every other GET: routers ask for health in several ways, and look at the status."""
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
_COUNTS = {**_REPLY, "object": "chat.completion.chunk", "choices": [], "system_fingerprint": "vllm-0.32.0-0123abcd"}
COUNTED = [*STREAM[:-1], _frame(b"data: " + json.dumps(_COUNTS, separators=(",", ":")).encode() + b"\n\n") + STREAM[-1]]
"""For those who ask for the stream's counts."""


BYTES_PER_TOKEN = 5


class Renders:
    """Answers to those who ask the engine for a prompt's token ids."""

    def __init__(self, prompts: Sequence[Sequence[int]], model: Path | None) -> None:
        self._model = model
        self._answers = [
            (len(ids) * BYTES_PER_TOKEN, _unary({"request_id": "r", "token_ids": ids, "sampling_params": {}}))
            for ids in prompts or [[1]]
        ]

    def nearest(self, size: int) -> bytes:
        return min(self._answers, key=lambda answer: abs(answer[0] - size))[1]

    def exact(self, body: bytes) -> bytes:
        from frontend_api.formats.openai import ENDPOINTS
        from frontend_api.tokens.tokenizer import Tokenizer

        assert self._model is not None
        path = "/v1/chat/completions" if b'"messages"' in body else "/v1/completions"
        ids = list(Tokenizer(self._model).token_ids(ENDPOINTS[path], body) or ())
        return _unary({"count": len(ids), "max_model_len": 65_536, "tokens": ids})


class Stub(asyncio.Protocol):
    def __init__(self, renders: Renders, publisher: Publisher | None) -> None:
        self._renders = renders
        self._publisher = publisher
        self._held = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._held:
            data = self._held + data
            self._held = b""
        end = data.find(b"\r\n\r\n")
        if end < 0:
            self._held = data
            return
        if data.startswith(b"GET"):
            self._transport.write(MODELS)
            return
        head = data[:end].lower()
        at = head.index(b"\r\ncontent-length:")
        if len(data) < end + 4 + int(head[at + 17 :].split(b"\r", 1)[0]):
            self._held = data
            return
        if b"/render HTTP" in data[:80]:
            self._transport.write(self._renders.nearest(len(data) - end))
            return
        if data.startswith(b"POST /tokenize"):
            self._transport.write(self._renders.exact(data[end + 4 :]))
            return
        tail = data[max(end, len(data) - 1_024) :]
        if b'"stream":' not in tail:
            tail = data
        if b'"do_remote_decode":true' in tail:
            self._transport.write(PREFILL)
        elif b'"stream":true' in tail:
            self._stream(COUNTED if b'"include_usage":true' in tail else STREAM, 0)
        else:
            self._transport.write(UNARY)
            self._wrote_block()

    def _stream(self, pieces: list[bytes], index: int) -> None:
        self._transport.write(pieces[index])
        if index % BLOCK == BLOCK - 1:
            self._wrote_block()
        if index + 1 < len(pieces):
            asyncio.get_running_loop().call_later(CHUNK_SECONDS, self._stream, pieces, index + 1)

    def _wrote_block(self) -> None:
        """The answer has filled one more block of KV."""
        if self._publisher is not None:
            self._publisher.wrote_block()


async def main(port: int, renders: Renders, publisher: Publisher | None) -> None:
    loop = asyncio.get_running_loop()
    if publisher is not None:
        publisher.start(loop)
    server = await loop.create_server(lambda: Stub(renders, publisher), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--events", type=int, help="port of the KV event publisher")
    parser.add_argument("--replay", type=int, help="port of its replays")
    parser.add_argument("--holds", type=Path, help="JSON: the token ids of each prompt whose KV it has")
    parser.add_argument("--model", type=Path, help="the model's folder, for /tokenize")
    given = parser.parse_args()
    holds: list[list[int]] = json.loads(given.holds.read_text()) if given.holds else []
    events = Publisher(given.events, given.replay, holds) if given.events else None
    uvloop.run(main(given.port, Renders(holds, given.model), events))
