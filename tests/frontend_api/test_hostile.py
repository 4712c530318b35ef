"""Hand-made bytes: requests whose framing lies, never ends, or comes in an unusual but legal form."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import tracemalloc
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest

from controlplane.fleet.model import Role
from controlplane.fleet.wire import Result
from frontend_api.http.reading import MOST_FIELDS, PIECE, Limits, RequestReader
from tests.frontend_api.client import PROMPT, Client, ask, request
from tests.frontend_api.conftest import MakeSite, Site, until
from tests.frontend_api.scripted import (
    LAST,
    ROLE,
    STREAM_HEAD,
    Heard,
    after,
    answer_well,
    chat_reply,
    chunk,
    framed,
    unary,
)

CHAT = "/v1/chat/completions"
BODY = json.dumps(PROMPT).encode()
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\n"
SIZED = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
IN_CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
SMUGGLED = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 3\r\n\r\n{}x"

REFUSED = {
    "length and chunked": HEAD + SIZED + CHUNKED + b"\r\n" + IN_CHUNKS,
    "chunked and length": HEAD + CHUNKED + SIZED + b"\r\n" + IN_CHUNKS,
    "two lengths": HEAD + SIZED + b"Content-Length: 5\r\n\r\n" + BODY,
    "two equal lengths": HEAD + SIZED + SIZED + b"\r\n" + BODY,
    "list of lengths": HEAD + b"Content-Length: %d, %d\r\n\r\n" % (len(BODY), len(BODY)) + BODY,
    "signed length": HEAD + b"Content-Length: +%d\r\n\r\n" % len(BODY) + BODY,
    "negative length": HEAD + b"Content-Length: -1\r\n\r\n" + BODY,
    "hexadecimal length": HEAD + b"Content-Length: 0x10\r\n\r\n" + BODY,
    "huge length": HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n" + BODY,
    "empty length": HEAD + b"Content-Length:\r\n\r\n" + BODY,
    "length with a space": HEAD + b"Content-Length: 1 3\r\n\r\n" + BODY,
    "length as a fraction": HEAD + b"Content-Length: 13.0\r\n\r\n" + BODY,
    "length after a vertical tab": HEAD + b"Content-Length:\x0b13\r\n\r\n" + BODY,
    "identity and length": HEAD + b"Transfer-Encoding: identity\r\n" + SIZED + b"\r\n" + BODY,
    "identity": HEAD + b"Transfer-Encoding: identity\r\n\r\n" + BODY,
    "empty coding and length": HEAD + b"Transfer-Encoding:\r\n" + SIZED + b"\r\n" + BODY,
    "coding in quotes": HEAD + b'Transfer-Encoding: "chunked"\r\n\r\n' + IN_CHUNKS,
    "coding with a parameter": HEAD + b"Transfer-Encoding: chunked;q=1\r\n\r\n" + IN_CHUNKS,
    "coding with a comma before": HEAD + b"Transfer-Encoding: ,chunked\r\n\r\n" + IN_CHUNKS,
    "coding with a comma behind": HEAD + b"Transfer-Encoding: chunked,\r\n\r\n" + IN_CHUNKS,
    "folded coding": HEAD + b"Transfer-Encoding:\r\n chunked\r\n\r\n" + IN_CHUNKS,
    "length and chunked in HTTP/1.0": HEAD.replace(b"1.1", b"1.0") + SIZED + CHUNKED + b"\r\n" + IN_CHUNKS,
    "length and chunked behind an offer": HEAD
    + b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    + CHUNKED
    + SIZED
    + b"\r\n"
    + IN_CHUNKS,
    "space before the colon": HEAD + b"Content-Length : 5\r\n\r\n" + BODY,
    "space before the first header": HEAD.replace(b"\r\nHost", b"\r\n Host") + SIZED + b"\r\n" + BODY,
    "space in a name": HEAD + b"X Y: a\r\n" + SIZED + b"\r\n" + BODY,
    "empty name": HEAD + b": a\r\n" + SIZED + b"\r\n" + BODY,
    "no colon": HEAD + b"nocolon\r\n" + SIZED + b"\r\n" + BODY,
    "bare return in a value": HEAD + b"X: a\rContent-Length: 5\r\n" + SIZED + b"\r\n" + BODY,
    "bare newline behind a value": HEAD + b"X: a\n" + SIZED + b"\r\n" + BODY,
    "bare newline for the empty line": HEAD + SIZED + b"\n" + BODY,
    "zero byte in a name": HEAD + b"X\x00Y: a\r\n" + SIZED + b"\r\n" + BODY,
    "control character": HEAD + b"X: a\x01b\r\n" + SIZED + b"\r\n" + BODY,
    "folded header": HEAD + b"X: a\r\n b\r\n" + SIZED + b"\r\n" + BODY,
    "tabbed coding": HEAD + b"Transfer-Encoding:\x0bchunked\r\n\r\n" + IN_CHUNKS,
    "unknown coding": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n" + IN_CHUNKS,
    "two codings": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + IN_CHUNKS,
    "chunked twice": HEAD + CHUNKED + CHUNKED + b"\r\n" + IN_CHUNKS,
    "no coding, then chunked": HEAD + b"Transfer-Encoding: identity\r\n" + CHUNKED + b"\r\n" + IN_CHUNKS,
    "chunked in HTTP/1.0": HEAD.replace(b"1.1", b"1.0") + CHUNKED + b"\r\n" + IN_CHUNKS,
    "bad chunk size": HEAD + CHUNKED + b"\r\nzz\r\n" + BODY,
    "chunk size with a space": HEAD + CHUNKED + b"\r\n3 \r\nabc\r\n0\r\n\r\n",
    "chunk size overflow": HEAD + CHUNKED + b"\r\nFFFFFFFFFFFFFFFFF\r\n",
    "chunk with bare newline": HEAD + CHUNKED + b"\r\n3\nabc\n0\n\n",
    "chunk size with 0x": HEAD + CHUNKED + b"\r\n0x3\r\nabc\r\n0\r\n\r\n",
    "chunk size with a sign": HEAD + CHUNKED + b"\r\n+3\r\nabc\r\n0\r\n\r\n",
    "negative chunk size": HEAD + CHUNKED + b"\r\n-3\r\nabc\r\n0\r\n\r\n",
    "no chunk size": HEAD + CHUNKED + b"\r\n\r\nabc\r\n0\r\n\r\n",
    "no end of a chunk": HEAD + CHUNKED + b"\r\n3\r\nabc0\r\n\r\n",
    "bare newline behind a chunk": HEAD + CHUNKED + b"\r\n3\r\nabc\n0\r\n\r\n",
    "bare newline in an extension": HEAD + CHUNKED + b"\r\n3;a\nabc\r\n0\r\n\r\n",
    "bare return in an extension": HEAD + CHUNKED + b"\r\n3;a\rb\r\nabc\r\n0\r\n\r\n",
    "end of line in a quoted extension": HEAD + CHUNKED + b'\r\n3;a="\r\n"\r\nabc\r\n0\r\n\r\n',
    "bare newline in the trailer": HEAD + CHUNKED + b"\r\n3\r\nabc\r\n0\r\nX: y\n\r\n",
    "bare newline behind the last chunk": HEAD + CHUNKED + b"\r\n3\r\nabc\r\n0\n\r\n",
    "length in the trailer": HEAD + CHUNKED + b"\r\n3\r\nabc\r\n0\r\nContent-Length: 5\r\n\r\n",
    "coding in the trailer": HEAD + CHUNKED + b"\r\n3\r\nabc\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n",
    "chunk longer than said": HEAD + CHUNKED + b"\r\n1\r\nabc\r\n0\r\n\r\n",
    "bare newlines": b"POST /v1/chat/completions HTTP/1.1\nHost: r\n\n",
    "no host": b"POST /v1/chat/completions HTTP/1.1\r\n" + SIZED + b"\r\n" + BODY,
    "two hosts": HEAD + b"Host: s\r\n" + SIZED + b"\r\n" + BODY,
    "two keys": HEAD + b"Authorization: Bearer a\r\nAuthorization: Bearer b\r\n" + SIZED + b"\r\n" + BODY,
    "zero byte": HEAD + b"X: a\x00b\r\n" + SIZED + b"\r\n" + BODY,
    "space in the target": b"GET /a b HTTP/1.1\r\nHost: r\r\n\r\n",
    "HTTP/1.9": b"GET /health HTTP/1.9\r\nHost: r\r\n\r\n",
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "HTTP/2.0": b"GET /health HTTP/2.0\r\nHost: r\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "tunnel": b"CONNECT engine:1 HTTP/1.1\r\nHost: r\r\n\r\n",
    "unknown method": b"BREW /health HTTP/1.1\r\nHost: r\r\n\r\n",
    "raw bytes in the path": b"GET /\xff HTTP/1.1\r\nHost: r\r\n\r\n",
    "unknown expectation": HEAD + b"Expect: 200-ok\r\n" + SIZED + b"\r\n" + BODY,
}


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
async def test_refused_and_closed(alone: Site, data: bytes) -> None:
    """One clear refusal, then the connection ends: what follows on it is never read as a request."""
    async with Client(alone.port) as client:
        client.send(data + SMUGGLED)
        reply = await client.reply()
        assert reply.status in (400, 413, 417, 501, 505)
        assert reply.error["message"]
        assert reply.headers["connection"] == "close"
        assert await client.closed() == b""
    assert alone.engines["a"].heard == []
    assert (await ask(alone.port, CHAT, PROMPT)).status == 200


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
async def test_refused_byte_by_byte(alone: Site, data: bytes) -> None:
    async with Client(alone.port) as client:
        for at in range(len(data)):
            client.send(data[at : at + 1])
            if at % 16 == 0:
                await client.writer.drain()
                await asyncio.sleep(0)
        if data in (REFUSED["TLS"], REFUSED["huge length"]):
            client.send(b"\r\n\r\n")
        assert (await client.head()).status >= 400
    assert alone.engines["a"].heard == []


UNUSUAL = {
    "chunked": HEAD + CHUNKED + b"\r\n" + IN_CHUNKS,
    "chunk by byte": HEAD + CHUNKED + b"\r\n" + b"".join(b"1\r\n%c\r\n" % c for c in BODY) + b"0\r\n\r\n",
    "chunk extension and trailer": HEAD
    + CHUNKED
    + b"\r\n%x;a=b\r\n%b\r\n0\r\nAuthorization: x\r\n\r\n" % (len(BODY), BODY),
    "upper-case coding": HEAD + b"TRANSFER-ENCODING: Chunked\r\n\r\n" + IN_CHUNKS,
    "leading blank lines": b"\r\n\r\n" + HEAD + SIZED + b"\r\n" + BODY,
    "absolute form": HEAD.replace(b"/v1", b"http://router:8080/v1") + SIZED + b"\r\n" + BODY,
    "absolute form with a slash in the query": HEAD.replace(b"/v1", b"http://router/v1").replace(
        b" HTTP", b"?a=/b HTTP"
    )
    + SIZED
    + b"\r\n"
    + BODY,
    "offer of HTTP/2": HEAD + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n" + SIZED + b"\r\n" + BODY,
    "offer of HTTP/2, chunked": HEAD + b"Connection: Upgrade\r\nUpgrade: h2c\r\n" + CHUNKED + b"\r\n" + IN_CHUNKS,
    "empty header value": HEAD + b"X-Empty:\r\n" + SIZED + b"\r\n" + BODY,
}


@pytest.mark.parametrize("data", UNUSUAL.values(), ids=UNUSUAL)
@pytest.mark.parametrize("step", [1, 7, 10_000])
async def test_unusual_and_served(alone: Site, data: bytes, step: int) -> None:
    async with Client(alone.port) as client:
        for _ in range(2):  # and the connection is good for another
            for at in range(0, len(data), step):
                client.send(data[at : at + step])
                await asyncio.sleep(0)
            assert (await client.reply()).status == 200
    assert [heard.raw for heard in alone.engines["a"].heard] == [BODY, BODY]


async def test_offers_of_another_protocol_may_come_by_the_thousand(alone: Site) -> None:
    offer = b"GET /health HTTP/1.1\r\nHost: r\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    async with Client(alone.port) as client:
        client.send(offer * 2000)
        for _ in range(2000):
            assert (await client.reply()).status == 200


async def test_a_pipelined_head_is_not_charged_for_the_body_before_it(alone: Site) -> None:
    body = json.dumps({**PROMPT, "user": "u" * 60_000}).encode()
    first = HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    async with Client(alone.port) as client:
        client.send(first + b"GET /hea")
        assert (await client.reply()).status == 200
        client.send(b"lth HTTP/1.1\r\nHost: r\r\n\r\n")
        assert (await client.reply()).status == 200


async def test_waiting_for_earlier_answers_is_no_overhead_of_the_router(alone: Site) -> None:
    engine = alone.engines["a"]
    free = asyncio.Event()

    async def answer_late(heard: Heard, writer: asyncio.StreamWriter) -> None:
        await free.wait()
        await answer_well(heard, writer)

    engine.answer = answer_late
    async with Client(alone.port) as client:
        client.send(request(CHAT, PROMPT, **{"X-Request-Id": "first"}) + request(CHAT, PROMPT))
        await until(lambda: bool(engine.heard))
        loop = asyncio.get_running_loop()
        began = loop.time()
        await until(lambda: loop.time() - began > 0.3)
        free.set()
        for _ in range(2):
            assert (await client.reply()).status == 200
    await alone.settled()
    first, second = alone.telemetry.records
    assert first.e2e > 0.3
    assert second.overhead_us < first.e2e * 1e6


async def test_what_waits_behind_a_slow_answer_is_bounded_in_bytes(make_site: MakeSite) -> None:
    site = await make_site(limits=Limits(body_bytes=100_000))
    free = asyncio.Event()

    async def answer_late(heard: Heard, writer: asyncio.StreamWriter) -> None:
        await free.wait()
        await answer_well(heard, writer)

    await site.engine("a", Role.AGGREGATED, answer_late)
    site.publish()
    large = request(CHAT, {"model": "no such", "user": "u" * 80_000})
    async with Client(site.port) as client:
        client.send(request(CHAT, PROMPT) + large * 12)
        await until(lambda: bool(site.engines["a"].heard))
        (connection,) = site.server.connections
        reader = connection._reader
        await until(lambda: reader.full)
        await until(lambda: connection._paused_reading)
        assert len(reader.requests) < 8  # the limit, and one piece of the socket's
        free.set()
        assert [(await client.reply()).status for _ in range(13)] == [200, *[404] * 12]


async def test_replies_that_nobody_takes_wait_as_requests(alone: Site) -> None:
    """Also those that need no engine: else a client without a key could fill the memory."""
    nowhere = request("/" + "x" * 20_000)
    async with Client(alone.port) as client:
        client.pause()
        client.send(nowhere * 2_000)
        await until(lambda: any(connection._paused_reading for connection in alone.server.connections))
        (connection,) = alone.server.connections
        assert connection._transport is not None
        assert connection._transport.get_write_buffer_size() < 16 << 20  # what was read in one turn
        client.resume()
        assert [(await client.reply()).status for _ in range(2_000)] == [404] * 2_000


async def test_short_requests_for_long_replies_fill_no_memory(alone: Site) -> None:
    length = len((await ask(alone.port, "/metrics")).body)
    async with Client(alone.port) as client:
        client.pause()
        client.send(request("/metrics") * 5_000)
        await until(lambda: any(connection._slow_since for connection in alone.server.connections))
        (connection,) = alone.server.connections
        assert connection._transport is not None
        assert connection._transport.get_write_buffer_size() < 100 * length


async def test_whoever_sends_thousands_of_requests_at_once_keeps_nobody_waiting(alone: Site) -> None:
    count = 9_000  # as many as one read of a socket brings
    async with Client(alone.port) as many, Client(alone.port) as one:
        many.send(b"GET /x HTTP/1.1\r\nHost: r\r\n\r\n" * count)
        one.send(request("/health"))
        assert (await one.reply()).status == 200
        assert any(connection._reader.waits for connection in alone.server.connections)
        for _ in range(count):
            assert (await many.reply()).status == 404


def test_what_one_read_brings_becomes_few_requests_at_a_time() -> None:
    """Each takes many times the room that its bytes do."""
    reader = RequestReader(Limits(), lambda request: None)
    reader.feed(b"".join(b"GET /%d HTTP/1.1\r\nHost: r\r\n\r\n" % n for n in range(7_000)))
    paths = []
    while reader.requests:
        assert reader.full
        assert len(reader.requests) < 200
        paths += [request.path for request in reader.requests]
        reader.requests.clear()
        reader.read_on()
    assert paths == [b"/%d" % n for n in range(7_000)]
    assert not reader.full


def test_of_what_was_read_in_pieces_nothing_is_kept() -> None:
    reader = RequestReader(Limits(), lambda request: None)
    data = request(CHAT, {"user": "u" * 3 * PIECE})
    held = sys.getrefcount(data)
    reader.feed(data)
    assert reader.requests
    assert sys.getrefcount(data) == held


async def test_a_client_that_ends_its_side_gets_the_replies_that_are_whole(alone: Site) -> None:
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(alone.port)) for _ in range(5)]
        await until(lambda: len(alone.server.connections) == 5)
        for client in clients:  # all of it waits for the next turn of the router's loop
            client.send(request("/health"))
            client.writer.write_eof()
        assert [(await client.reply()).status for client in clients] == [200] * 5


async def test_a_connection_that_is_gone_or_idle_holds_no_body(alone: Site) -> None:
    """The collector counts objects, not bytes: bodies that wait for it would fill the memory first."""
    large = request(CHAT, {"model": "no such", "user": "u" * (4 << 20)})
    part = large[: 3 << 20]
    both = large + part
    gc.disable()
    tracemalloc.start()
    try:
        async with Client(alone.port) as idle:
            idle.send(large)
            assert (await idle.reply()).status == 404
            for data in (large, part, both) * 2:
                async with Client(alone.port) as client:
                    client.send(data)
                    if data is not part:
                        assert (await client.reply()).status == 404
            await until(lambda: len(alone.server.connections) == 1)
            await until(lambda: tracemalloc.get_traced_memory()[0] < 3 << 20)  # what is sent is older
    finally:
        tracemalloc.stop()
        gc.enable()


BAD_TEXT = {
    "prompt": b'{"model": "m", "prompt": "\xff"}',
    "list of prompts": b'{"model": "m", "prompt": ["\xff", "b"]}',
    "unknown field's name": b'{"model": "m", "prompt": "a", "\xff": 1}',
    "number without a machine type": b'{"model": "m", "prompt": [1e999, 2]}',
    "integer without a machine type": b'{"model": "m", "prompt": [%b]}' % (b"9" * 5000),
}


@pytest.mark.parametrize("body", BAD_TEXT.values(), ids=BAD_TEXT)
async def test_json_that_no_engine_could_read_is_the_clients_fault(pair: Site, body: bytes) -> None:
    async with Client(pair.port) as client:
        client.send(HEAD.replace(b"chat/", b"") + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        reply = await client.reply()
    assert (reply.status, reply.error["code"]) == (400, "invalid_input")
    assert all(not engine.heard for engine in pair.engines.values())


async def test_http_1_0(alone: Site) -> None:
    """No chunks, and the end of the connection is the end of the answer."""
    async with Client(alone.port) as client:
        client.send(request(CHAT, {**PROMPT, "stream": True}, version="1.0"))
        reply = await client.reply()
        assert reply.headers["connection"] == "close"
        assert "transfer-encoding" not in reply.headers
        assert reply.body.startswith(b"data: ")
        assert reply.body.endswith(b"data: [DONE]\n\n")
    async with Client(alone.port) as client:
        client.send(b"GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert (await client.reply()).status == 200
        assert await client.closed() == b""


async def test_connection_close_is_kept(alone: Site) -> None:
    async with Client(alone.port) as client:
        client.post(CHAT, PROMPT, Connection="close")
        reply = await client.reply()
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert await client.closed() == b""


async def test_head(alone: Site) -> None:
    reply = await ask(alone.port, "/health", method="HEAD")
    assert (reply.status, reply.body) == (200, b"")


async def test_pipelined_requests_are_answered_in_order(make_site: MakeSite) -> None:
    site = await make_site()

    async def echo(heard: Heard, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.01 if heard.body["number"] % 2 else 0)
        writer.write(unary(chat_reply(str(heard.body["number"]))))

    await site.engine("a", Role.AGGREGATED, echo)
    site.publish()
    count = 60  # more than are read ahead
    async with Client(site.port) as client:
        client.send(b"".join(request(CHAT, {**PROMPT, "number": n}) for n in range(count)) + request("/health"))
        for number in range(count):
            assert (await client.reply()).json["choices"][0]["message"]["content"] == str(number)
        assert (await client.reply()).json == {"status": "ok"}
        assert len(site.engines["a"].open) == 1  # never two at once


async def test_what_came_before_nonsense_is_answered_first(alone: Site) -> None:
    async with Client(alone.port) as client:
        client.send(request(CHAT, PROMPT) + b"nonsense\r\n\r\n")
        assert (await client.reply()).status == 200
        assert (await client.reply()).status == 400
        assert await client.closed() == b""


async def test_expect_continue(alone: Site) -> None:
    async with Client(alone.port) as client:
        client.send(HEAD + b"Expect: 100-continue\r\n" + SIZED + b"\r\n")
        assert (await client.head()).status == 100
        client.send(BODY)
        assert (await client.reply()).status == 200


async def test_expect_continue_behind_another_request(alone: Site) -> None:
    async with Client(alone.port) as client:
        client.send(request(CHAT, PROMPT) + HEAD + SIZED + b"Expect: 100-continue\r\n\r\n")
        assert (await client.reply()).status == 200
        assert (await client.head()).status == 100
        client.send(BODY)
        assert (await client.reply()).status == 200


async def test_time_that_passes_before_continue_is_not_the_clients(make_site: MakeSite) -> None:
    async def late(heard: Heard, writer: asyncio.StreamWriter) -> None:
        await go_on.wait()
        writer.write(unary(chat_reply()))

    go_on = asyncio.Event()
    site = await make_site()
    await site.engine("a", Role.AGGREGATED, late)
    site.publish()
    async with Client(site.port) as client:
        client.send(request(CHAT, PROMPT) + HEAD + SIZED + b"Expect: 100-continue\r\n\r\n")
        await until(lambda: bool(site.engines["a"].heard))
        (connection,) = site.server.connections
        connection._last_read -= 1e6
        connection._reader.began -= 1e6
        go_on.set()
        assert (await client.reply()).status == 200
        assert (await client.head()).status == 100
        site.server.sweep(asyncio.get_running_loop().time())
        client.send(BODY)
        assert (await client.reply()).status == 200


async def test_http_1_0_knows_no_continue(alone: Site) -> None:
    async with Client(alone.port) as client:
        client.send(HEAD.replace(b"1.1", b"1.0") + SIZED + b"Expect: 100-continue\r\n\r\n")
        await until(lambda: any(connection._reader.in_message for connection in alone.server.connections))
        client.send(BODY)
        assert (await client.reply()).status == 200


async def test_expect_continue_refused_before_the_body(make_site: MakeSite) -> None:
    site = await make_site(auth=True)
    async with Client(site.port) as client:
        client.send(HEAD + b"Expect: 100-continue\r\n" + SIZED + b"\r\n")
        assert (await client.reply()).status == 401
        assert await client.closed() == b""


async def test_body_limit(make_site: MakeSite, caplog: pytest.LogCaptureFixture) -> None:
    site = await make_site(limits=Limits(body_bytes=1_000))
    await site.engine("a", Role.AGGREGATED)
    site.publish()
    fits = b'{"model":"m","x":"' + b"y" * 980 + b'"}'
    assert len(fits) == 1_000
    assert (await ask(site.port, CHAT, fits)).status == 200
    reply = await ask(site.port, CHAT, fits + b" ")
    assert (reply.status, reply.error["code"]) == (413, "body_too_large")
    for data in (b"%x\r\n%b\r\n1\r\nx\r\n" % (len(fits), fits), b"1;" + b"x" * 50_000):
        async with Client(site.port) as client:
            client.send(HEAD + CHUNKED + b"\r\n" + data)
            assert (await client.reply()).status == 413
    text = (await ask(site.port, "/metrics")).body
    assert b'tandem_router_refused_total{status="413"} 3' in text
    told = [record.getMessage() for record in caplog.records if record.name == "frontend_api.http.server"]
    assert len(told) == 3
    assert all("127.0.0.1" in line and "--max-body-mb" in line for line in told)


async def test_a_refused_upload_sees_the_refusal_and_no_reset(make_site: MakeSite) -> None:
    site = await make_site(limits=Limits(body_bytes=1_000))
    async with Client(site.port) as client:
        client.send(HEAD + b"Content-Length: 5000000\r\n\r\n" + b"x" * 5_000_000)
        await client.writer.drain()
        assert (await client.reply()).status == 413


async def test_head_limit(make_site: MakeSite) -> None:
    site = await make_site(limits=Limits(head_bytes=4_000))
    for data in (
        HEAD + b"X: " + b"a" * 5_000 + b"\r\n\r\n",
        HEAD + b"X: " + b"a" * 5_000,
        HEAD + b"".join(b"X-%d: a\r\n" % n for n in range(1_000)) + b"\r\n",
        b"GET /" + b"a" * 5_000 + b" HTTP/1.1\r\nHost: r\r\n\r\n",
    ):
        async with Client(site.port) as client:
            client.send(data)
            assert (await client.reply()).status == 431


@pytest.mark.parametrize("step", [100, 10_000])
async def test_head_limit_in_headers(alone: Site, step: int) -> None:
    for count, status in ((MOST_FIELDS - 1, 404), (MOST_FIELDS, 431)):
        data = b"GET /x HTTP/1.1\r\nHost: r\r\n" + b"".join(b"%x:\r\n" % n for n in range(count)) + b"\r\n"
        async with Client(alone.port) as client:
            for at in range(0, len(data), step):
                client.send(data[at : at + step])
                await asyncio.sleep(0)
            assert (await client.reply()).status == status


@pytest.mark.parametrize("trailer", [b"x" * 50_000, b"X: y\r\n" * 10_000], ids=["one", "many"])
async def test_trailer_limit(alone: Site, trailer: bytes) -> None:
    """The parser keeps each line of it until its end."""
    async with Client(alone.port) as client:
        client.send(HEAD + CHUNKED + b"\r\n" + IN_CHUNKS[:-2] + b"X: ")
        for _ in range(20):
            client.send(trailer)
            await asyncio.sleep(0)
        assert (await client.reply()).status == 431
        assert await client.closed() == b""
    assert alone.engines["a"].heard == []


async def test_slow_heads_and_bodies_time_out(make_site: MakeSite) -> None:
    site = await make_site()
    for data in (b"POST / HT", HEAD + SIZED + b"\r\n" + BODY[:-1]):
        async with Client(site.port) as client:
            client.send(data)
            await until(lambda: [c._reader.in_message for c in site.server.connections] == [True])
            site.server.sweep(asyncio.get_running_loop().time() + 1e6)
            assert (await client.reply()).status == 408
            assert await client.closed() == b""


async def test_drops_keep_neither_a_head_nor_a_body_alive(make_site: MakeSite) -> None:
    """A byte now and then: the head has one limit from its first byte on, and a body has to bring something."""
    site = await make_site(limits=Limits(body_bytes=10 << 20))
    long = HEAD + b"Content-Length: 5000000\r\n\r\n"
    for data, patience in ((b"POST /a", site.server.limits.head_seconds), (long, site.server.limits.body_seconds)):
        async with Client(site.port) as client:
            client.send(data)
            await until(lambda: [c._reader.in_message for c in site.server.connections] == [True])
            (connection,) = site.server.connections
            began = connection._reader.began
            for drop in range(9):
                last = connection._last_read
                client.send(b"x")
                await until(lambda: connection._last_read != last)  # noqa: B023 - awaited here
                connection._last_read = began + (drop + 1) * patience / 10  # it came just now, so to say
                site.server.sweep(connection._last_read)
                assert connection._reader.broken is None
            connection._last_read = began + patience + 1
            site.server.sweep(connection._last_read)
            assert (await client.reply()).status == 408
            assert await client.closed() == b""


async def test_a_long_upload_that_goes_on_is_waited_for(make_site: MakeSite) -> None:
    site = await make_site(limits=Limits(body_bytes=10 << 20))
    async with Client(site.port) as client:
        client.send(HEAD + b"Content-Length: 2000000\r\n\r\n" + b" " * 1_900_000)
        await until(lambda: [c._reader._body_bytes for c in site.server.connections] == [1_900_000])
        (connection,) = site.server.connections
        for later in (100.0, 500.0, 1_500.0):
            connection._last_read = connection._reader.began + later
            site.server.sweep(connection._last_read + 1.0)
        assert connection._reader.broken is None
        client.send(b" " * 100_000)
        assert (await client.reply()).status == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_takes_nothing_is_cut_off(make_site: MakeSite, stream: bool) -> None:
    async def firehose(heard: Heard, writer: asyncio.StreamWriter) -> None:
        if not stream:
            writer.write(unary(chat_reply("x" * 20_000_000)))
            return
        writer.write(STREAM_HEAD)
        for _ in range(1_000):
            writer.write(framed(chunk("x" * 60_000)))
            await writer.drain()

    site = await make_site()
    await site.engine("a", Role.AGGREGATED, firehose)
    site.publish()
    async with Client(site.port) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.post(CHAT, {**PROMPT, "stream": stream})
        await until(lambda: any(connection._slow_since for connection in site.server.connections))
        now = asyncio.get_running_loop().time()
        site.server.sweep(now + site.server.limits.write_seconds - 5.0)
        assert len(site.server.connections) == 1
        await until(passing_time(site, now))
    await site.settled()
    assert site.record.result is Result.ABORTED


def passing_time(site: Site, now: float) -> Callable[[], bool]:
    """Whether all connections are gone, with more and more time between two looks at them."""

    def gone() -> bool:
        nonlocal now
        now += site.server.limits.write_seconds + 5.0
        site.server.sweep(now)
        return not site.server.connections

    return gone


async def test_a_client_that_takes_its_reply_slowly_gets_all_of_it(make_site: MakeSite) -> None:
    size = 60_000_000

    async def large(heard: Heard, writer: asyncio.StreamWriter) -> None:
        writer.write(unary(chat_reply("x" * size)))

    site = await make_site()
    await site.engine("a", Role.AGGREGATED, large)
    site.publish()
    async with Client(site.port) as client:
        client.pause()
        client.post(CHAT, PROMPT)
        await until(lambda: any(connection._slow_since for connection in site.server.connections))
        (connection,) = site.server.connections
        transport = connection._transport
        assert transport is not None
        now, got = asyncio.get_running_loop().time(), 0
        for _ in range(5):
            now += site.server.limits.write_seconds - 5.0
            site.server.sweep(now)
            left = transport.get_write_buffer_size()
            client.resume()
            while transport.get_write_buffer_size() >= left:
                got += len(await client.reader.read(1 << 20))
            client.pause()
        assert connection in site.server.connections
        client.resume()
        while got < size:
            got += len(await client.reader.read(1 << 20))


@pytest.mark.parametrize("close", [True, False])
async def test_a_connection_that_is_to_close_waits_for_no_client_that_takes_nothing(
    make_site: MakeSite, close: bool
) -> None:
    """What is left is little enough to be no sign of a slow client."""

    async def large(heard: Heard, writer: asyncio.StreamWriter) -> None:
        writer.write(unary(chat_reply("x" * 1_000_000)))

    site = await make_site()
    await site.engine("a", Role.AGGREGATED, large)
    site.publish()
    async with Client(site.port) as client:
        client.pause()
        while not any(c._transport and c._transport.get_write_buffer_size() for c in site.server.connections):
            count = len(site.engines["a"].heard)
            client.post(CHAT, PROMPT)
            await until(lambda: len(site.engines["a"].heard) > count and site.in_flight == {})  # noqa: B023 - awaited here
        (connection,) = site.server.connections
        connection._slow_since = 0.0
        if close:
            connection._close()
        await until(passing_time(site, asyncio.get_running_loop().time() + 2 * site.server.limits.idle_seconds))


async def test_idle_connections_close_and_busy_ones_do_not(make_site: MakeSite) -> None:
    site = await make_site()
    go_on = asyncio.Event()
    await site.engine("a", Role.AGGREGATED, after(go_on))
    site.publish()
    async with Client(site.port) as busy, Client(site.port) as idle:
        busy.post(CHAT, PROMPT)
        await until(lambda: bool(site.router.exchanges))
        site.server.sweep(asyncio.get_running_loop().time() + 1e6)
        assert await idle.closed() == b""
        go_on.set()
        assert (await busy.reply()).status == 200


async def test_a_connection_is_not_idle_for_as_long_as_its_reply_took(make_site: MakeSite) -> None:
    site = await make_site()
    go_on = asyncio.Event()
    await site.engine("a", Role.AGGREGATED, after(go_on))
    site.publish()
    async with Client(site.port) as client:
        client.post(CHAT, PROMPT)
        await until(lambda: bool(site.router.exchanges))
        ended = asyncio.get_running_loop().time() + 10 * site.server.limits.idle_seconds
        site.server.sweep(ended)
        go_on.set()
        assert (await client.reply()).status == 200
        site.server.sweep(ended + site.server.limits.idle_seconds - 1.0)
        client.post(CHAT, PROMPT)
        assert (await client.reply()).status == 200
        site.server.sweep(ended + 10 * site.server.limits.idle_seconds)
        assert await client.closed() == b""


async def test_drain_finishes_streams_and_takes_no_new_ones(make_site: MakeSite) -> None:
    site = await make_site()
    go_on = asyncio.Event()
    await site.engine("a", Role.AGGREGATED, after(go_on))
    site.publish()
    async with Client(site.port) as busy, Client(site.port) as idle:
        busy.post(CHAT, {**PROMPT, "stream": True})
        await until(lambda: bool(site.router.exchanges))
        site.server.stop_accepting()
        assert await idle.closed() == b""
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", site.port)
        go_on.set()
        reply = await busy.reply()
        assert reply.body.endswith(b"data: [DONE]\n\n")
        assert reply.headers["connection"] == "close"
        assert await busy.closed() == b""
    await until(lambda: not site.server.connections)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_stream_that_is_cut_does_not_look_whole(make_site: MakeSite, version: str) -> None:
    """In HTTP/1.0 a stream ends with its connection: whoever stands between would take the usual end for the stream's."""

    async def stalls(heard: Heard, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + framed(ROLE) + framed(chunk("a")))
        await asyncio.Event().wait()

    site = await make_site()
    await site.engine("a", Role.AGGREGATED, stalls)
    site.publish()
    async with Client(site.port) as client:
        client.send(request(CHAT, {**PROMPT, "stream": True}, version=version))
        await client.head()
        site.server.stop_accepting()
        site.server.cut_all()
        if version == "1.0":
            with pytest.raises(ConnectionResetError):
                await client.reader.read()
        else:
            assert not (await client.closed()).endswith(LAST)
    await site.settled()
    assert site.record.result is Result.TRUNCATED
