"""Heads that come again: what is read by comparing is what the parser reads, and a judge is asked each time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend_api.formats.openai import Problem
from frontend_api.http.heads import MOST, head_of
from frontend_api.http.reading import Limits, RequestReader

HEADS = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\nAuthorization: Bearer k\r\n\r\n",
    b"POST /v1/completions?x=1 HTTP/1.1\r\nhost: a\r\ncontent-length:%d\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nx-session-id: s\r\ncontent-length: %d\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: %d\r\n\r\n",
    b"PUT /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d \r\n\r\n",
)
BODIES = st.sampled_from(
    [b"", b"{}", b"\r\n\r\n", b'{"a":"b"}' * 20, b"0\r\n\r\n", b"\r\ncontent-length: 3\r\n", b"x" * 5000]
)
SENT = st.lists(st.tuples(st.sampled_from(HEADS), BODIES), min_size=1, max_size=8)


def same(pieces: list[bytes]) -> bool:
    """Whether a reader that remembers heads tells after each piece what one that forgets them does."""
    remembers, forgets = (RequestReader(Limits(), lambda request: None) for _ in range(2))
    for piece in pieces:
        remembers.feed(piece)
        forgets._known = None
        forgets.feed(piece)
        if without_length(told(remembers)) != without_length(told(forgets)):
            return False
    return True


def told(reader: RequestReader) -> list[tuple[object, ...]]:
    found = [(r.method, r.path, r.query, r.headers, r.body, r.keep_alive, r.http10) for r in reader.requests]
    return [*found, (reader.broken, reader.in_message)]


def without_length(requests: list[tuple[object, ...]]) -> list[tuple[object, ...]]:
    """Nobody reads this header after the parser."""
    return [
        tuple({k: v for k, v in p.items() if k != b"content-length"} if isinstance(p, dict) else p for p in request)
        for request in requests
    ]


@given(SENT, st.lists(st.integers(0, 900), max_size=4), st.booleans())
def test_the_parser_would_have_read_the_same(sent: list[tuple[bytes, bytes]], cuts: list[int], joined: bool) -> None:
    pieces = [head % len(body) + body for head, body in sent]
    if joined:
        data = b"".join(pieces)
        ends = sorted({min(c, len(data)) for c in cuts} | {len(data)})
        pieces = [data[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    assert same(pieces)


@pytest.mark.parametrize(
    "data",
    [
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: +2\r\n\r\n{}",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: \r\n\r\n{}",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\n{}",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2 \r\n\r\n{}",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",
    ],
)
def test_another_way_of_saying_the_length_is_the_parsers(data: bytes) -> None:
    usual = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}"
    head = head_of(usual, 2, b"POST ")
    assert head is not None
    assert head.body_in(usual) == b"{}"
    assert head.body_in(data) is None
    assert same([usual, data])


def test_long_heads_are_not_kept() -> None:
    head = b"POST / HTTP/1.1\r\nx: " + b"y" * MOST + b"\r\ncontent-length: 2\r\n\r\n"
    assert head_of(head + b"{}", 2, b"POST ") is None


def test_the_judge_is_asked_each_time_and_limits_hold() -> None:
    answers: list[Problem | None] = [None, Problem(401, "expired", "It has expired."), None]
    reader = RequestReader(Limits(body_bytes=10), lambda request: answers.pop(0))
    head = HEADS[0]
    for _ in range(3):
        reader.feed(head % 2 + b"{}")
    assert [(r.refusal is None, r.body) for r in reader.requests] == [(True, b"{}"), (False, b""), (True, b"{}")]
    assert not answers
    answers.append(None)
    reader.feed(head % 11 + b"{}" * 5 + b" ")
    assert reader.broken is not None
    assert reader.broken.status == 413
