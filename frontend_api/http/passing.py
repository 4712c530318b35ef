"""Which headers pass between clients and engines. All others end at the router: an engine sets no cookie, allows no web page,
redirects nobody and speaks for the router in none. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_UP = (b"traceparent", b"tracestate", b"anthropic-version", b"anthropic-beta")
_KIND = re.compile(
    rb"(?:application/json|text/event-stream|text/plain|application/octet-stream)(?: ?; ?[a-z]{1,20}=[a-z0-9-]{1,40})?",
    re.IGNORECASE,
)
"""What answers are made of. A browser would show and run others."""
_USUAL_KINDS = frozenset((b"application/json", b"text/event-stream", b"text/event-stream; charset=utf-8"))
_UNKNOWN_KIND = b"content-type: application/octet-stream\r\n"


def up(request: Mapping[bytes, bytes]) -> bytes:
    """Header lines of a client's request that its engine gets, each ended."""
    lines = b""
    for name in _UP:
        if name in request:
            lines += b"%b: %b\r\n" % (name, request[name])
    return lines


def down(reply: list[tuple[bytes, bytes]]) -> bytes:
    """Header lines of an engine's reply that its client gets, each ended: the kind of its body, and of binary embeddings what
    describes them. `reply`: names in lower case."""
    kind = description = b""
    for name, value in reply:
        if name == b"content-type":
            known = value in _USUAL_KINDS or _KIND.fullmatch(value) is not None
            kind = b"content-type: %b\r\n" % value if known else _UNKNOWN_KIND
        elif name == b"metadata":
            description = b"metadata: %b\r\n" % value
    return kind + description
