"""Requests out of bytes, sans-IO, on httptools: limits enforced, every framing that could be read in two ways refused.

It neither reads nor writes a socket. After `broken` is set nothing on the connection can be trusted any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic, perf_counter
from typing import Any, NamedTuple

import httptools

from controlplane.fleet.wire import SnapshotKey
from frontend_api.formats.openai import Problem
from frontend_api.http.heads import Head, head_of

PIECE = 4 << 10
"""Bytes that are read at once, where they may be many requests: one read of a socket brings thousands of small ones."""
MOST_FIELDS = 256
"""Different headers of a request: small ones take many times the room that their bytes do."""


class Limits(NamedTuple):
    """Sizes in bytes, times in seconds."""

    head_bytes: int = 32 << 10
    body_bytes: int = 64 << 20
    head_seconds: float = 20.0
    """From a request's first byte to the end of its head."""
    body_seconds: float = 60.0
    """Between two pieces of a body."""
    body_rate: int = 1_000
    """Bytes a second that a body has to bring on average once `body_seconds` are over: drops do not keep it alive for ever."""
    idle_seconds: float = 75.0
    """A kept connection without a request."""
    write_seconds: float = 60.0
    """A client that takes no byte of its reply."""
    linger_seconds: float = 2.0
    """How long a refused client's further bytes are read away, so that it sees the refusal and not a reset."""
    pipelined: int = 16
    """Requests read ahead on one connection."""


class Request:
    """One request. Header names are lower case; of a repeated name the last value counts."""

    __slots__ = (
        "body", "cors", "digest", "headers", "http10", "keep_alive", "key", "method", "path", "query", "received_at", "refusal",
    )  # fmt: skip

    def __init__(self) -> None:
        self.method = b""
        self.path = b""
        self.query = b""
        self.headers: dict[bytes, bytes] = {}
        self.http10 = False
        self.keep_alive = True
        self.body = b""
        self.received_at = 0.0
        """`perf_counter` when its last byte came, or when its turn came on a connection with earlier requests."""
        self.cors = b""
        """Header lines of its answer, each ended, that tell a browser which web pages may read it."""
        self.refusal: Problem | None = None
        self.key: SnapshotKey | None = None
        """The API key it came with."""
        self.digest = ""
        """Of that key's text, once somebody has looked; one with the same head as another before brings it along."""

    def again(self) -> Request:
        """Another one with the same head. (Its body's length is in none of the headers that anybody asks for.)"""
        other = Request()
        other.method, other.path, other.query, other.headers = self.method, self.path, self.query, self.headers
        other.digest, other.cors = self.digest, self.cors
        return other


_ONCE = frozenset((b"authorization", b"x-api-key", b"host", b"expect", b"transfer-encoding"))
"""Headers that decide something and may come once only."""
_EVEN_EMPTY = frozenset((b"host", b"transfer-encoding", b"content-length"))
"""Headers that say something even without a value. Any other is absent then: gateways send fields that they have no value for."""


class RequestReader:
    """The requests of one connection, in their order."""

    def __init__(self, limits: Limits, judge: Callable[[Request], Problem | None]) -> None:
        self._limits = limits
        self._judge = judge
        self._parser: Any = httptools.HttpRequestParser(self)
        self.requests: deque[Request] = deque()
        """Whole requests that nobody has taken yet."""
        self.unread: bytes | memoryview = b""
        """Fed, and not read yet: enough was read ahead."""
        self.broken: Problem | None = None
        self.in_message = False
        self.in_head = False
        self.began = 0.0
        """Monotonic time of the present request's first byte."""
        self.wants_continue = False
        """The client waits for `100 Continue` before it sends the body."""
        self._request = Request()
        self._headers: dict[bytes, bytes] = {}
        self._target = b""
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._fed = 0
        """Bytes of the present head (later: of a chunked body) before the piece that is being read."""
        self._bare = 0
        """Bytes of a chunked body since the last piece that brought any of it."""
        self._piece = 0
        self._messages = 0
        """Whose bytes the piece may hold."""
        self._length = 0
        self._chunked = False
        self._upgrading = False
        self._replaying = False
        self._known: Head | None = None
        """Of the last whole request, if it may come again."""

    def feed(self, data: bytes) -> None:
        """Take further bytes. Whole requests are in `requests` afterwards; the next cannot be read once `broken` is set."""
        begins = not self.in_message
        if begins and self._known is not None:
            body = self._known.body_in(data)
            if body is not None and len(body) <= self._limits.body_bytes:
                self._request = request = self._request.again()
                request.refusal = self._judge(request)
                if request.refusal is None:
                    request.body = body
                request.received_at = perf_counter()
                self.requests.append(request)
                return
        if len(data) <= PIECE:
            self._parse(data)
        else:
            self.unread = memoryview(data)
            self.read_on()
        if begins and self._messages == 1 and not self.in_message and self.broken is None and not self.unread:
            self._known = head_of(data, self._length, b"POST ") if _is_usual(self._request) else None

    def read_on(self) -> None:
        """Read what is unread, until enough is read ahead."""
        while self.unread and self.broken is None and not self._ahead:
            data = self.unread
            body = self._length - self._body_bytes if self.in_message and not self.in_head else 0
            size = len(data) if len(data) <= body else PIECE
            self.unread = data[size:] or b""  # an empty view would hold what it is of
            self._parse(data[:size])

    def _parse(self, data: bytes | memoryview) -> None:
        self._piece = len(data)
        self._messages = int(self.in_message)
        carried = self._body_bytes if self.in_message and not self.in_head else -1
        while data:
            try:
                self._parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                if self.broken is not None:
                    return
                self._ignore_upgrade()
            except httptools.HttpParserCallbackError:
                raise
            except httptools.HttpParserError as error:
                self._break(400, "bad_request", f"This is not valid HTTP/1.1: {error}.")
                return
        if not self.in_message:
            return
        if self._messages == 1:  # else most of the piece was earlier requests'
            self._fed += self._piece
            self._bare = self._bare + self._piece if self._body_bytes == carried else 0
        if self.in_head:
            self._check_head(self._fed)
        elif self._chunked:
            limit = self._limits.head_bytes
            if self._fed > 8 * self._limits.body_bytes + limit:
                self._too_large()  # one-byte chunks and endless chunk extensions cost more than they carry
            if self._bare > limit:  # the parser keeps a trailer until it has ended, and copies it with each piece
                self._break(431, "header_too_large", f"The body's trailer is longer than {limit} bytes.")

    def late(self, now: float, last_read: float) -> bool:
        """Whether the present request comes too slowly. `last_read`: when its last piece came; both monotonic."""
        limits = self._limits
        age = now - self.began
        if self.in_head:
            return age > limits.head_seconds
        due = (age - limits.body_seconds) * limits.body_rate
        return now - last_read > limits.body_seconds or self._body_bytes < due

    @property
    def present(self) -> Request:
        """The request whose bytes come now, as far as they have come."""
        return self._request

    @property
    def waits(self) -> bool:
        """Something is to be done before the client sends more."""
        return bool(self.requests or self.unread) or self.broken is not None or self.wants_continue

    @property
    def full(self) -> bool:
        """Nothing more should be fed until a request was taken."""
        return bool(self.unread) or self._ahead

    @property
    def _ahead(self) -> bool:
        """Enough was read ahead."""
        limits, waiting = self._limits, self.requests
        if not waiting:
            return False
        return len(waiting) >= limits.pipelined or sum(len(request.body) for request in waiting) > limits.body_bytes

    def close(self) -> None:
        """Hold nothing any more. Parser and reader refer to each other: without this, bodies would stay in memory until
        the collector comes by, which it does for the number of objects and not for their size."""
        self._parser = None
        self.requests.clear()
        self.unread = b""
        self._body = []
        self._request = Request()
        self._known = None

    def _ignore_upgrade(self) -> None:
        """Offers of another protocol (h2c, by some clients with every first request) may be ignored: read on as HTTP/1.1."""
        self._parser = httptools.HttpRequestParser(self)
        framing = b"Transfer-Encoding: chunked" if self._chunked else b"Content-Length: %d" % self._length
        self._replaying = True
        self._upgrading = False
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n\r\n" % framing)

    def give_up(self, problem: Problem) -> None:
        """Read no further."""
        if self.broken is None:
            self.broken = problem

    def _break(self, status: int, code: str, message: str) -> None:
        self.give_up(Problem(status, code, message))

    def _too_large(self) -> None:
        size = self._limits.body_bytes
        self._break(
            413, "body_too_large", f"The body is larger than {size} bytes; the router's --max-body-mb sets this."
        )

    def _check_head(self, size: int) -> None:
        limit = self._limits.head_bytes
        if size > limit:
            self._break(431, "header_too_large", f"The request's head is longer than {limit} bytes.")
        elif len(self._headers) > MOST_FIELDS:
            self._break(431, "header_too_large", f"The request's head has more than {MOST_FIELDS} headers.")

    # ---- httptools

    def on_message_begin(self) -> None:
        if self._replaying:
            return
        self._request = request = Request()
        self._headers = request.headers
        self.in_message = self.in_head = True
        self._messages += 1
        self._known = None
        self.began = monotonic()
        self._target = b""
        self._fed = self._bare = self._body_bytes = self._length = 0
        self._chunked = False

    def on_url(self, url: bytes) -> None:
        if not self._replaying:
            self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.in_head:
            return  # trailers, and the head that is replayed, say nothing that is used
        name = name.lower()
        if name in _ONCE and name in self._headers:
            self._break(400, "bad_request", f"The header {name.decode()} is given twice.")
        self._headers[name] = value

    def on_headers_complete(self) -> None:
        if self._replaying:
            self._replaying = False
            return
        self.in_head = False
        request = self._request
        parser = self._parser
        headers = request.headers
        if (
            self._fed + self._piece > self._limits.head_bytes or len(headers) > MOST_FIELDS
        ):  # a part may be body: look closer
            self._check_head(len(self._target) + sum(len(name) + len(value) + 4 for name, value in headers.items()))
        if b"" in headers.values():
            headers = request.headers = {n: v for n, v in headers.items() if v or n in _EVEN_EMPTY}
        self._fed = 0
        request.method = parser.get_method()
        self._upgrading = parser.should_upgrade()
        version = parser.get_http_version()
        if version == "1.1":
            request.keep_alive = parser.should_keep_alive()
            if b"host" not in headers:
                self._break(400, "bad_request", "The header host is missing.")
        elif version == "1.0":
            request.http10 = True
            request.keep_alive = False
        else:
            self._break(505, "http_version", "Only HTTP/1.1 and HTTP/1.0 are spoken here.")
        if request.method == b"CONNECT":
            self._break(501, "not_implemented", "This is not a proxy.")
        self._read_framing(headers, request.http10)
        target = self._target if self._target.startswith(b"/") else _origin_form(self._target)
        request.path, _, request.query = target.partition(b"?")
        if self.broken is not None:
            return
        request.refusal = self._judge(request)
        if request.refusal is None and headers.get(b"content-encoding", b"identity").lower() != b"identity":
            request.refusal = Problem(415, "content_encoding", "Send the body without a content encoding.")
        if b"expect" in headers and not request.http10:
            self._read_expectation(headers[b"expect"])

    def _read_framing(self, headers: dict[bytes, bytes], http10: bool) -> None:
        coding = headers.get(b"transfer-encoding")
        if coding is not None:
            self._chunked = True
            if coding.lower() != b"chunked" or http10:
                self._break(501, "transfer_encoding", "The only transfer encoding understood is chunked.")
        elif length := headers.get(b"content-length"):
            self._length = int(length)
            if self._length > self._limits.body_bytes:
                self._too_large()

    def _read_expectation(self, expectation: bytes) -> None:
        if expectation.lower() != b"100-continue":
            self._break(417, "expectation_failed", "The only expectation understood is 100-continue.")
        elif self._request.refusal is not None:
            self.broken = self._request.refusal
        else:
            self.wants_continue = True

    def on_body(self, data: bytes) -> None:
        self._body_bytes += len(data)
        if self._body_bytes > self._limits.body_bytes:
            self._too_large()
        elif self._request.refusal is None and self.broken is None:
            self._body.append(data)

    def on_message_complete(self) -> None:
        if self._upgrading or self.broken is not None:
            return
        self.in_message = self.wants_continue = False
        request = self._request
        if self._body:
            body = self._body
            self._body = []
            request.body = body[0] if len(body) == 1 else b"".join(body)
        request.received_at = perf_counter()
        self.requests.append(request)


def _is_usual(request: Request) -> bool:
    """Nothing in its head asks for more than an answer."""
    headers = request.headers
    return request.keep_alive and request.refusal is None and b"expect" not in headers and b"upgrade" not in headers


def _origin_form(target: bytes) -> bytes:
    """`http://host/path?query` as `/path?query` (RFC 9112 §3.2.2); anything else stays and finds no route."""
    _, _, rest = target.partition(b"://")
    slash = rest.partition(b"?")[0].find(b"/")
    return rest[slash:] if slash >= 0 else target
