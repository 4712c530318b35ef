"""Replies of engines: whichever way they are cut and written, the same bytes come out, and bad framing is seen."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.fleet.model import Role
from controlplane.fleet.wire import SnapshotEngine
from frontend_api.http.outbox import Outbox
from frontend_api.http.upstream import Broken, Connection, Failure, Leg, Pool, _head_of_chunk
from frontend_api.routing.view import Engine

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Socket:
    """A transport that goes nowhere."""

    closing = False

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        self.closing = True


class Seen:
    """What a receiver is told."""

    def __init__(self) -> None:
        self.headed: tuple[int, list[tuple[bytes, bytes]]] | None = None
        self.whole = b""
        self.framed: list[tuple[bytes, bytes]] = []
        self.over = False
        self.failure: Failure | None = None

    def sending(self) -> None: ...
    def crashed(self) -> None: ...

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.headed = status, headers

    def body(self, data: bytes, last: bool, framed: bytes = b"") -> None:
        self.whole += data
        if framed:
            self.framed.append((data, framed))

    def ended(self) -> None:
        self.over = True

    def failed(self, failure: Failure) -> None:
        self.failure = failure


def connected() -> Connection:
    spec = SnapshotEngine(id="e", name="e", attempt=1, role=Role.AGGREGATED, url="http://e:1")
    connection = Connection(Pool(Engine(spec), Outbox()))
    connection.connection_made(cast(asyncio.Transport, Socket()))
    return connection


def receive(pieces: list[bytes], connection: Connection | None = None) -> Seen:
    """One reply. `connection`: that has had others before."""
    connection = connection or connected()
    seen = Seen()
    connection.leg = leg = Leg(seen)
    leg.connection = connection
    for piece in pieces:
        if piece and connection.leg is leg:
            connection.data_received(piece)
    return seen


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({min(c, len(data)) for c in cuts} | {len(data)})
    return [data[a:b] for a, b in zip([0, *ends], ends, strict=False)]


PAYLOADS = st.lists(
    st.one_of(st.binary(min_size=1, max_size=40), st.sampled_from([b"x" * 255, b"\r\n", b"0\r\n\r\n", b"a\r\n"])),
    max_size=6,
)
WAYS = st.sampled_from([b"%x\r\n", b"%X\r\n", b"00%x\r\n", b"%x;name=value\r\n"])


@given(PAYLOADS, st.data())
def test_any_cut_and_any_way_of_writing_gives_the_same(payloads: list[bytes], data: st.DataObject) -> None:
    chunks = [data.draw(WAYS) % len(payload) + payload + b"\r\n" for payload in payloads]
    body = b"".join(chunks) + b"0\r\n\r\n"
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=8))
    for pieces in ([HEAD, *chunks, b"0\r\n\r\n"], [HEAD, *cut(body, cuts)], cut(HEAD + body, cuts)):
        seen = receive(pieces)
        assert (seen.whole, seen.over, seen.failure) == (b"".join(payloads), True, None)
        assert all(framed == b"%x\r\n%b\r\n" % (len(part), part) for part, framed in seen.framed)


def test_a_chunk_that_comes_alone_is_passed_on_as_it_came() -> None:
    seen = receive([HEAD, b"3\r\nabc\r\n", b"10\r\n0123456789abcdef\r\n"])
    assert seen.framed == [(b"abc", b"3\r\nabc\r\n"), (b"0123456789abcdef", b"10\r\n0123456789abcdef\r\n")]


@pytest.mark.parametrize(
    "pieces",
    [
        [b"0x3\r\nabc\r\n"],
        [b"+3\r\nabc\r\n"],
        [b" 3\r\nabc\r\n"],
        [b"3\r\nabcd\r\n"],
        [b"3\r\nabc\r\n", b"4\r\nabc\r\n\r\n\r\n"],
        [b"3\r\nabc\r\n", b"\r\n3\r\nabc\r\n"],
        [b"1", b"3\r\nabc\r\n"],
        [b"3\r\nabc\r\n", b"0\r\n\r\n3\r\nabc\r\n"],
    ],
)
def test_what_is_no_chunk_is_never_taken_for_one(pieces: list[bytes]) -> None:
    seen = receive([HEAD, *pieces, b"0\r\n\r\n"])
    assert seen.failure == Failure(Broken.PROTOCOL, True) or not seen.over


def test_of_each_size_there_is_one_chunk_at_most() -> None:
    chunks = {len(head) + size + 2: head for size in range(1, 5_000) for head in [b"%x\r\n" % size]}
    assert all(_head_of_chunk(size) == chunks.get(size, b"") for size in range(5_000))


REPLIES = st.lists(
    st.tuples(
        st.sampled_from([b"HTTP/1.1 200 OK", b"HTTP/1.1 404 Not Found", b"HTTP/1.1 200 OK\r\ndate: x"]),
        st.sampled_from([b"", b"{}", b"\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"]),
        st.lists(st.integers(0, 80), max_size=2),
    ),
    max_size=6,
)


@given(REPLIES)
def test_a_reply_whose_head_came_before_is_read_alike(replies: list[tuple[bytes, bytes, list[int]]]) -> None:
    connection = connected()
    for line, body, cuts in replies:
        reply = b"%b\r\nserver: e\r\ncontent-length: %d\r\n\r\n%b" % (line, len(body), body)
        again, fresh = receive(cut(reply, cuts), connection), receive([reply])
        assert (again.headed, again.whole, again.over) == (fresh.headed, fresh.whole, True)


def test_bytes_behind_a_reply_whose_head_came_before_are_seen() -> None:
    connection, reply = connected(), b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
    assert receive([reply], connection).over
    assert receive([reply], connection).over
    assert receive([reply + reply], connection).failure == Failure(Broken.PROTOCOL, True)


@pytest.mark.parametrize("framing", [b"content-length: 2", b"transfer-encoding: chunked"])
def test_a_provisional_reply_has_no_body(framing: bytes) -> None:
    """The parser takes one for it, which would stand before the reply's own."""
    seen = receive([b"HTTP/1.1 199 X\r\n%b\r\n\r\n" % framing, b"{}HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]"])
    assert (seen.whole, seen.failure) == (b"", Failure(Broken.PROTOCOL, True))
    for provisional in (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"):
        seen = receive([provisional * 2 + b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]"])
        assert (seen.headed, seen.whole, seen.over) == ((200, []), b"[]", True)


def test_chunked_twice_is_no_framing() -> None:
    seen = receive([HEAD.replace(b"\r\n\r\n", b"\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n")])
    assert seen.failure == Failure(Broken.PROTOCOL, True)


def test_what_is_for_the_engines_connection_only_goes_no_further() -> None:
    hops = b"x-a: 1\r\nconnection: Keep-Alive, X-A\r\nx-b: 2\r\nconnection: x-c\r\nX-C: 3\r\nkeep-alive: timeout=5\r\n"
    reply = b"HTTP/1.1 200 OK\r\n%bcontent-length: 2\r\n\r\n{}" % hops
    connection = connected()
    assert [receive([reply], connection).headed for _ in range(2)] == [(200, [(b"x-b", b"2")])] * 2
    assert receive([b"HTTP/1.1 200 OK\r\nx-a: 1\r\ncontent-length: 2\r\n\r\n{}"], connection).headed == (
        200,
        [(b"x-a", b"1")],
    )
