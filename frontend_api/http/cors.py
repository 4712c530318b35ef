"""Web pages of other origins (CORS): what a browser asks before it sends such a page's request, and what it has to be told with the
answer. Pure.

A page sends its key in a header of its own; no cookie is ever read. So it gets what its key allows and no more, wherever it comes
from, and every origin may be allowed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from controlplane.fleet import addresses

METHODS = b"GET, HEAD, POST, OPTIONS"
PREFLIGHT_SECONDS = 600
"""For which a browser need not ask again."""
_NAMES = re.compile(rb"[A-Za-z0-9_, -]{1,2048}")
"""Of headers."""


class Origins:
    """The origins whose pages may use the endpoint."""

    def __init__(self, text: str = "*") -> None:
        """`text`: `*`, `none`, or origins with commas between them. Raises `InvalidInput`."""
        text = addresses.origins(text)
        self._all = text == "*"
        self._listed = frozenset() if text in ("*", "none") else frozenset(text.encode().split(b","))

    def allow(self, origin: bytes) -> bool:
        return self._all or origin in self._listed

    def headers(self, request: Mapping[bytes, bytes]) -> bytes:
        """Header lines of every answer to this request, each ended. The page may read all of its headers: none tells more than
        the body."""
        origin = request.get(b"origin")
        vary = (
            b"vary: origin\r\n" if self._listed else b""
        )  # also where no page asks: caches would give its answer to one
        if origin is None or not self.allow(origin):
            return vary
        return b"access-control-allow-origin: %b\r\naccess-control-expose-headers: *\r\n%b" % (
            b"*" if self._all else origin,
            vary,
        )

    def preflight(self, request: Mapping[bytes, bytes]) -> bytes:
        """Further header lines of the answer to OPTIONS: any method and header may be sent, for what a request may do depends on
        its key."""
        names = request.get(b"access-control-request-headers", b"")
        allowed = b"access-control-allow-headers: %b\r\n" % names if _NAMES.fullmatch(names) else b""
        return b"access-control-allow-methods: %b\r\n%baccess-control-max-age: %d\r\n" % (
            METHODS, allowed, PREFLIGHT_SECONDS,
        )  # fmt: skip
