"""Web pages of other origins (CORS): what a browser asks before it sends such a page's request, and what it has to be told with the
answer. Pure.

A page sends its key in a header of its own; no cookie is ever read. So it gets what its key allows and no more, wherever it comes
from, and every origin may be allowed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from controlplane.fleet.errors import InvalidInput

METHODS = b"GET, HEAD, POST, OPTIONS"
PREFLIGHT_SECONDS = 600
"""For which a browser need not ask again."""
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::[0-9]{1,5})?")
_NAMES = re.compile(rb"[A-Za-z0-9_, -]{1,2048}")
"""Of headers."""


class Origins:
    """The origins whose pages may use the endpoint."""

    def __init__(self, text: str = "*", name: str = "origins") -> None:
        """`text`: `*`, `none`, or origins with commas between them; `name`: what it is called, for the error.

        Raises `InvalidInput`.
        """
        self._all = text.strip() == "*"
        given = [] if self._all or text.strip() == "none" else [one.strip() for one in text.split(",")]
        for one in given:
            if not _ORIGIN.fullmatch(one):
                raise InvalidInput(
                    f"{name}: {one!r} is no origin; write `*`, `none`, or origins as https://chat.example.com, with commas between "
                    "them and no path",
                    field=name,
                )
        self._listed = frozenset(one.encode() for one in given)

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
