"""What people write for an address, a URL or a key: brought into the one form that all programs take, or refused.

Every function raises `InvalidInput` with a sentence that the caller puts the variable's or option's name before. No sentence
shows a user, a password or a key.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from controlplane.fleet.errors import InvalidInput

_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_])?\.?", re.IGNORECASE)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]{0,30}://(?:\[[0-9a-f:.]+\]|[a-z0-9_.-]{1,253})(?::[0-9]{1,5})?")
_HALF_ENCODED = re.compile("%(?![0-9A-Fa-f]{2})")
PORTS_OF_ENGINE = 4
_NO_PORT = "its port is not from 1 to 65535"
_REDIS_OPTIONS = {"db", "ssl_cert_reqs", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname"}
_POSTGRES_OPTIONS = {
    "application_name", "channel_binding", "connect_timeout", "gssencmode", "host", "keepalives", "keepalives_count",
    "keepalives_idle", "keepalives_interval", "options", "passfile", "sslcert", "sslcrl", "sslkey", "sslmode", "sslrootcert",
    "target_session_attrs", "tcp_user_timeout",
}  # fmt: skip


def visible(text: str) -> str:
    """The text, if it has neither control characters nor bytes that are no UTF-8 (which Python shows as surrogates)."""
    if _UNSEEN.search(text):
        raise InvalidInput("it has control characters, or bytes that are not UTF-8; write it again")
    return text


def key(text: str) -> str:
    """A key or token, as it can stand in an HTTP header."""
    if not (text.isascii() and text.isprintable()) or " " in text:
        raise InvalidInput("a key or token has only ASCII characters and no spaces; copy it again")
    return text


def web_url(text: str) -> str:
    """An http or https URL of a whole host, without a final slash and without the scheme's usual port."""
    example = "https://tandem.example.com or http://10.0.0.5:8000"
    if "://" not in text:
        raise InvalidInput(f"write it with http:// or https:// in front, such as {example}")
    url = _split(text, ("http", "https"), example)
    if url.credentials or url.parts.query:
        raise InvalidInput(f"write scheme, host and port alone, such as {example}: no user, no password, no query")
    if url.parts.path.strip("/"):
        raise InvalidInput(
            f"it has the path {unquote(url.parts.path)!r}, and Tandem answers at the root of a host only: "
            f"give it a host name or a port of its own, such as {example}"
        )
    usual = {"http": 80, "https": 443}[url.parts.scheme]
    return f"{url.parts.scheme}://{url.host}{f':{url.port}' if url.port and url.port != usual else ''}"


def redis_url(text: str) -> str:
    """`redis://`, `rediss://` or `unix://`, user and password percent-encoded, with a database number."""
    example = "redis://:PASSWORD@HOST:6379/0 (rediss:// for TLS, unix:///PATH for a socket)"
    url = _split(text, ("redis", "rediss", "unix"), example)
    options = _options(url, _REDIS_OPTIONS)
    if url.parts.scheme == "unix":
        if url.host or url.port or not url.parts.path.strip("/"):
            raise InvalidInput(f"after unix:// write the absolute path of the socket; write a URL such as {example}")
        path, number = url.parts.path, options.pop("db", "0")
    else:
        if not url.host:
            raise InvalidInput(f"it names no host; write a URL such as {example}")
        path, number = "", options.pop("db", "") or url.parts.path.strip("/") or "0"
    if not (number.isascii() and number.isdigit() and len(number) < 6):
        raise _broken(example, "what follows the host is not a database number")
    if url.parts.scheme == "rediss":
        options.setdefault("ssl_cert_reqs", "required")  # Celery's client would else take any certificate
        if options["ssl_cert_reqs"] not in ("required", "optional", "none"):
            raise InvalidInput("ssl_cert_reqs is required, optional or none")
    elif options:
        raise InvalidInput(f"{', '.join(options)}: only rediss:// URLs have these")
    if url.parts.scheme == "unix":
        return f"unix://{url.credentials}{path}?db={int(number)}"
    where = f"{url.credentials}{url.host}{f':{url.port}' if url.port else ''}"
    return f"{url.parts.scheme}://{where}/{int(number)}{'?' + urlencode(options) if options else ''}"


def broker_url(url: str) -> str:
    """A `redis_url` in the words of Celery's client: there a unix socket is `redis+socket://`, and its database a host."""
    if not url.startswith("unix://"):
        return url
    return "redis+socket://" + url.removeprefix("unix://").replace("?db=", "?virtual_host=")


def database_url(text: str) -> str:
    """`postgres://` or `sqlite:///`. A socket's folder in place of the host becomes the option `host`; a file's path absolute."""
    example = "postgres://USER:PASSWORD@HOST:5432/NAME (sqlite:///PATH for a file)"
    if text.startswith("sqlite:"):
        return _sqlite_url(text)
    url = _split(text, ("postgres", "postgresql"), example)
    name = unquote(url.parts.path.removeprefix("/"))
    if not name or "/" in name or len(name.encode()) > 63:
        raise _broken(example, "after the host stands the name of one database, of at most 63 bytes")
    options = _options(url, _POSTGRES_OPTIONS)
    host = url.host
    if url.socket_folder:
        host, options["host"] = "", url.socket_folder
    where = f"{url.credentials}{host}{f':{url.port}' if url.port else ''}"
    more = f"?{urlencode(options, quote_via=quote)}" if options else ""
    return f"postgres://{where}/{quote(name, safe='')}{more}"


def _sqlite_url(text: str) -> str:
    path = text.removeprefix("sqlite:///")
    if path == text or not path.strip("/") or set("?#") & set(path) or _HALF_ENCODED.search(path):
        raise InvalidInput("write a file of SQLite as sqlite:///PATH, its ? # and % percent-encoded (%3F %23 %25)")
    return f"sqlite:///{quote(str(Path(unquote(path)).absolute()))}"


def ip_address(text: str) -> str:
    """An IPv4 or IPv6 address that one machine may listen on (`0.0.0.0` and `::` included); localhost is 127.0.0.1."""
    if text.lower() == "localhost":
        return "127.0.0.1"
    try:
        address = ipaddress.ip_address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        raise InvalidInput("write an IP address of this machine, such as 127.0.0.1 or 10.0.0.5") from None
    link_local = address.version == 6 and address.is_link_local  # means nothing without its interface
    if address.is_multicast or link_local or "%" in text or address == ipaddress.IPv4Address("255.255.255.255"):
        raise InvalidInput(
            "nothing can listen on that address; write one of this machine, such as 127.0.0.1 or 10.0.0.5"
        )
    return str(address)


def reachable(bind: str) -> str:
    """An address of this machine at which a server bound to `bind` answers, ready for a URL."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(bind, bracketed(bind))


def is_loopback(host: str) -> bool:
    """Whether only programs of the same machine reach what listens there, by its address or its name."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost" or host.lower().endswith(".localhost")


def bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def node_address(text: str) -> str:
    """The one IPv4 address of this machine on which its engines listen."""
    try:
        address = ipaddress.IPv4Address(text)
    except ValueError:
        raise InvalidInput("write this node's private IPv4 address") from None
    if address.is_unspecified or address.is_multicast or str(address) == "255.255.255.255":
        raise InvalidInput(
            f"{text} would open engine sockets without authentication to every network; write one private address of this node"
        )
    return text


def host_names(text: str) -> str:
    """Host names, comma separated, as Django's ALLOWED_HOSTS wants them: IPv6 in brackets, `.example.com`, `*`."""
    names = []
    for one in filter(None, (part.strip() for part in text.split(","))):
        name = one if one == "*" else _host(one.removeprefix("."))
        if not name:
            raise InvalidInput(
                f"{one!r} is not a host name; write names like tandem.example.com, without scheme and port"
            )
        names.append("." + name if one.startswith(".") else name)
    return ",".join(names)


def origins(text: str) -> str:
    """`*`, `none`, or origins of web pages as browsers send them, comma separated."""
    given = [one.strip().lower() for one in text.split(",")]
    if given in (["*"], ["none"]):
        return given[0]
    for one in given:
        if not _ORIGIN.fullmatch(one):
            raise InvalidInput(
                f"{one!r} is not an origin; write *, none, or origins such as https://chat.example.com, with commas between them and no "
                "path"
            )
    return ",".join(given)


def port_range(text: str) -> str:
    """`LOW-HIGH`, both from 1 to 65535, with room for one engine."""
    low, dash, high = text.partition("-")
    if not (dash and all(part.isascii() and part.isdigit() and len(part) < 6 for part in (low, high))):
        raise InvalidInput("write two ports, LOW-HIGH, such as 21000-24999")
    if not 1 <= int(low) <= int(high) <= 65535:
        raise InvalidInput("write the lower port first, both from 1 to 65535, such as 21000-24999")
    if int(high) - int(low) + 1 < PORTS_OF_ENGINE:
        raise InvalidInput(f"one engine takes up to {PORTS_OF_ENGINE} ports; write a wider range, such as 21000-24999")
    return f"{int(low)}-{int(high)}"


class _Url(NamedTuple):
    parts: SplitResult
    credentials: str
    """`user:password@`, percent-encoded; empty where there are none."""
    host: str
    """IPv6 in brackets; empty where there is none."""
    port: int | None
    socket_folder: str


def _split(text: str, schemes: tuple[str, ...], example: str) -> _Url:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:  # of brackets that are no IPv6 address, or of a port that is none
        raise _broken(example, _NO_PORT if "out of range" in str(error) else "it cannot be read") from None
    if parts.scheme not in schemes or not text.lower().startswith(f"{parts.scheme}://"):
        raise InvalidInput(f"write a URL such as {example}")
    rest = parts.path + parts.query
    if " " in text or "#" in text or "@" in rest or parts.netloc.count("@") > 1 or _HALF_ENCODED.search(text):
        raise _broken(example)
    if port == 0:
        raise _broken(example, _NO_PORT)
    before, _, where = parts.netloc.rpartition("@")
    user, colon, password = before.partition(":")
    credentials = f"{_encoded(user)}{colon}{_encoded(password)}@" if before.strip(":") else ""
    written = where if where.startswith("[") or ":" not in where else where.rpartition(":")[0]
    if "%" in written and "postgres" in schemes and unquote(written).startswith("/"):
        return _Url(parts, credentials, "", port, unquote(written))
    host = _host(parts.hostname or "")
    if parts.hostname and not host:
        raise _broken(example, "its host is neither a host name nor an address")
    if not host and "http" in schemes:
        raise InvalidInput(f"it names no host; write a URL such as {example}")
    return _Url(parts, credentials, host, port, "")


def _host(text: str) -> str:
    """A host as it stands in a URL, in lower case; empty if it is none."""
    try:
        address = ipaddress.ip_address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        return text.lower() if _NAME.fullmatch(text) and ".." not in text else ""
    if "%" in text:
        return ""
    return f"[{address}]" if address.version == 6 else str(address)


def _options(url: _Url, known: set[str]) -> dict[str, str]:
    options = dict(parse_qsl(url.parts.query, keep_blank_values=True))
    if strange := sorted(set(options) - known):
        raise InvalidInput(
            f"{len(strange)} of its options after ? are unknown here; known are {', '.join(sorted(known))}"
        )
    return options


def _encoded(text: str) -> str:
    return quote(unquote(text), safe="")


def _broken(example: str, why: str = "it cannot be read") -> InvalidInput:
    return InvalidInput(
        f"{why}; write a URL such as {example}, with the special characters of user and password percent-encoded: "
        "/ as %2F, @ as %40, # as %23, ? as %3F, % as %25, : as %3A, [ as %5B"
    )
