"""At which URL a new node reaches this control plane, and what has to be set where it cannot."""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil
from django.http import HttpRequest
from rest_framework.request import Request

from controlplane.fleet import config
from controlplane.fleet.addresses import bracketed, is_loopback
from controlplane.fleet.config import Config
from controlplane.publish import DEFAULT_REDIS


class JoinAddress(NamedTuple):
    url: str
    """For `python -m workers --join`."""
    note: str
    """Why other machines do not reach it, and the remedy; empty: they do."""


def join_address(asked_at: str = "") -> JoinAddress:
    """`asked_at`: the host at which this control plane was just asked, without a port; empty: it was not."""
    return of(config.load(), asked_at, private_addresses())


def host_of(request: HttpRequest | Request) -> str:
    """The host at which a client asks, without its port."""
    return urlsplit(f"//{request.get_host()}").hostname or ""


def of(settings: Config, asked_at: str, own: list[str]) -> JoinAddress:
    """The same from what is known. Pure. `own`: this machine's private addresses."""
    if not is_loopback(settings.bind):
        host = settings.bind
        if host in ("0.0.0.0", "::"):
            near = not asked_at or is_loopback(asked_at) or asked_at == urlsplit(settings.public_url).hostname
            host = (own[0] if own else "127.0.0.1") if near else asked_at
        if not is_loopback(host):
            return JoinAddress(f"http://{bracketed(host)}:{settings.web_port}", "")
    remedy = (
        "For other machines, start Tandem with TANDEM_BIND set to the private address of this machine, for example "
        f"TANDEM_BIND={own[0] if own else '10.0.0.5'}."
    )
    if settings.public_url:
        redis_is_near = is_loopback(urlsplit(settings.redis_url or DEFAULT_REDIS).hostname or "127.0.0.1")
        return JoinAddress(settings.public_url, f"Only this machine reaches Redis. {remedy}" if redis_is_near else "")
    local = bracketed(settings.bind) if is_loopback(settings.bind) else "127.0.0.1"
    return JoinAddress(f"http://{local}:{settings.web_port}", f"Only this machine reaches that address. {remedy}")


def private_addresses() -> list[str]:
    """This machine's, that of its default route first."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
            first = str(probe.getsockname()[0])
        except OSError:
            first = ""
    found = [a.address for many in psutil.net_if_addrs().values() for a in many if a.family is socket.AF_INET]
    usable = [a for a in found if _is_private(a)]
    return sorted(usable, key=lambda address: address != first)


def _is_private(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    return ip.is_private and not ip.is_loopback and not ip.is_link_local
