"""Which proxy an HTTP call of ours goes through. Secrets go in these calls, so that a proxy gets them only inside TLS.

Nothing is asked of a proxy that concerns this machine or a private network: engines, the router, a control plane beside
them. `NO_PROXY` is understood with networks (`10.0.0.0/8`), which httpx does not.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
from collections.abc import Mapping
from urllib.parse import urlsplit
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]  # not in the stubs, and documented

from controlplane.fleet.errors import InvalidInput

_SHARED = ipaddress.ip_network("100.64.0.0/10")
"""Carrier-grade NAT, and private meshes such as Tailscale's."""
_LOCAL_NAMES = ("localhost", ".localhost", ".local", ".internal", ".lan", ".home.arpa")
NO_PROXY = "localhost,127.0.0.1,::1,127.0.0.0/8,10.0.0.0/8,172.16.0.0/12,192.168.0.0/16,169.254.0.0/16,100.64.0.0/10"
"""For programs that are not ours. IPv6 networks are left out: some clients end on them."""


def proxy_for(url: str, environ: Mapping[str, str] | None = None) -> str | None:
    """The proxy for calls to this URL by `HTTPS_PROXY` or `ALL_PROXY`; None: straight there.

    Only https URLs of public hosts have one. Raises `InvalidInput` naming the variable when it holds no proxy's URL, or when
    the certificates that it names, which such a call reads too, cannot be read.
    """
    environ = os.environ if environ is None else environ
    _check_certificates(environ)
    parts = urlsplit(url)
    host = parts.hostname or ""
    name, proxy = _configured(environ)
    if not proxy or parts.scheme != "https" or _excepted(host, environ) or is_local(host):
        return None
    return _checked(name, proxy)


def is_local(host: str) -> bool:
    """Whether a host is this machine or on a private network, by its address, its name, or what its name resolves to."""
    try:
        return _private(host)
    except ValueError:
        pass
    if "." not in host or host.lower().endswith(_LOCAL_NAMES):
        return True
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):  # behind some proxies no public name resolves
        return False
    return all(_private(address) for address in found)


def _private(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped:
        ip = ip.ipv4_mapped
    return ip.is_private or ip.is_loopback or ip.is_link_local or (ip.version == 4 and ip in _SHARED)


def with_no_proxy(environ: Mapping[str, str], *more: str) -> dict[str, str]:
    """`NO_PROXY` and `no_proxy` for a program of others: what the user excepts, private networks, and `more` hosts."""
    mine = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    value = ",".join(
        dict.fromkeys(filter(None, [*(part.strip() for part in mine.split(",")), *NO_PROXY.split(","), *more]))
    )
    return {"NO_PROXY": value, "no_proxy": value}


def _check_certificates(environ: Mapping[str, str]) -> None:
    try:
        if file := environ.get("SSL_CERT_FILE"):
            ssl.create_default_context(cafile=file)
    except OSError as error:  # SSLError too: the file holds no certificate
        raise InvalidInput(f"SSL_CERT_FILE: {file}: {error.strerror or error}", field="SSL_CERT_FILE") from None


def _configured(environ: Mapping[str, str]) -> tuple[str, str]:
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        if text := environ.get(name, "").strip():
            return name, text
    return "", ""


def _excepted(host: str, environ: Mapping[str, str]) -> bool:
    listed = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    if proxy_bypass_environment(host, {"no": listed}):
        return True
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    for part in listed.split(","):
        try:
            if ip in ipaddress.ip_network(part.strip().strip("[]"), strict=False):
                return True
        except ValueError:
            continue
    return False


def _checked(name: str, text: str) -> str:
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable or not url.isascii() or not url.isprintable() or " " in url:
        raise InvalidInput(
            f"{name}: write an HTTP proxy's URL, such as http://proxy.example.com:3128 (SOCKS is not supported), its password "
            "percent-encoded; or name this host in NO_PROXY",
            field=name,
        )
    return url
