"""Heads that come again: on one connection most requests have the same, but for the length of the body, and most replies.

Pure. What was read once, byte for byte, need not be read again; everything else is the parser's.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MOST = 4 << 10
"""Bytes of a head that is remembered."""
_LENGTH = re.compile(rb"\r\ncontent-length: ?([0-9]{1,10})(?=\r\n)", re.IGNORECASE)


class Head(NamedTuple):
    """A head of which only the body's length may differ."""

    before: bytes
    """Up to that length …"""
    after: bytes
    """… and from its end on."""

    def body_in(self, data: bytes) -> bytes | None:
        """The body, where the data is this head and a whole body and nothing else."""
        before, after = self
        if not data.startswith(before):
            return None
        at = len(before)
        end = data.find(b"\r\n", at, at + 12)
        if end < 0 or not data.startswith(after, end):
            return None
        length = data[at:end]
        body = data[end + len(after) :]
        return body if length.isdigit() and len(body) == int(length) else None


def head_of(data: bytes, length: int, begins: bytes) -> Head | None:
    """Of data that was one message with a body of this length. None: it does not begin so, or there is anything unusual
    about it."""
    head = data[: len(data) - length]
    lengths = list(_LENGTH.finditer(head)) if len(head) <= MOST and head.startswith(begins) else []
    if len(lengths) != 1 or int(lengths[0][1]) != length or head.find(b"\r\n\r\n") != len(head) - 4:
        return None
    return Head(head[: lengths[0].start(1)], head[lengths[0].end(1) :])
