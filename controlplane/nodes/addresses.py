"""Where a node's engines may listen: on the one address that it joined with, and never on the control plane's own ports.

The address is settled when the node joins, by where it asks from or by an admin's word; its reports cannot change it. Otherwise a
node that was taken over could have prompts, and the secrets sent with them, delivered wherever it likes.
"""

from __future__ import annotations

import ipaddress
import socket
from functools import lru_cache
from urllib.parse import urlsplit

import psutil

from controlplane.fleet import config
from controlplane.fleet.errors import Forbidden, InvalidInput
from controlplane.fleet.model import NodeFacts, Observation
from controlplane.publish import DEFAULT_REDIS

_METADATA = frozenset(
    map(ipaddress.ip_address, ("169.254.169.254", "100.100.100.200", "168.63.129.16", "fd00:ec2::254"))
)
"""Where clouds hand out credentials to their machines."""
LOWEST_PORT = 1024


def checked(address: str) -> str:
    """An address on which a node's engines can be reached. Raises `InvalidInput`."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        raise InvalidInput(
            f"address: {address!r} is not an IP address; enter the node's private address", field="address"
        ) from None
    if ip.is_unspecified or ip.is_multicast or ip.is_link_local or ip.is_reserved or ip in _METADATA:
        raise InvalidInput(
            f"address: {ip} cannot be the address of a node; enter the node's private address", field="address"
        )
    return str(ip)


def settle(stated: str, *, seen: str, confirmed: str) -> str:
    """The address of a node that joins.

    `stated`: where its engines will listen, as it says; empty: where it asks from. `seen`: where it asks from, as the control
    plane sees it; empty: by a proxy that does not tell. `confirmed`: the address that an admin gave the token; empty: none.
    Raises `InvalidInput` or `Forbidden`, with the remedy.
    """
    address = checked(stated or confirmed or seen or "")
    if confirmed:
        if address != checked(confirmed):
            raise Forbidden(
                f"this join token is for the address {confirmed}; set TANDEM_NODE_ADDRESS={confirmed} on the node"
            )
        return address
    if address == seen or (is_own(seen) and is_own(address)):
        return address
    where = f"this request came from {seen}" if seen else "a proxy does not tell where this request came from"
    raise Forbidden(
        f"the node's engines will listen on {address}, and {where}: join by the control plane's private address, or make a "
        f"token for this one: tandem join-token --address {address}"
    )


def objection(seen: Observation, *, pinned: str, facts: NodeFacts | None) -> str:
    """Why an engine may not be used where it says that it listens: one sentence; empty: it may."""
    if seen.ports is None:
        return ""
    if seen.address != pinned:
        return (
            f"It says that it listens on {seen.address or 'no address'}, and its node joined with {pinned or 'none'}. "
            "If that changed, join the node again with a token made for it."
        )
    low, high = facts.engine_ports if facts is not None and facts.engine_ports else (LOWEST_PORT, 65_535)
    own = own_ports() if is_own(pinned) else frozenset[int]()
    for port in (seen.ports.http, seen.ports.side_channel, seen.ports.events, seen.ports.replay):
        if port in own:
            return f"It says that it listens on port {port}, which is the control plane's own."
        if port and not max(low, LOWEST_PORT) <= port <= high:
            return f"It says that it listens on port {port}, outside the node's range for engines ({low}-{high})."
    return ""


def is_own(address: str) -> bool:
    """Whether it is an address of the control plane's machine."""
    try:
        return ipaddress.ip_address(address).is_loopback or address in _own_addresses()
    except ValueError:
        return False


@lru_cache(maxsize=1)
def _own_addresses() -> frozenset[str]:
    families = (socket.AF_INET, socket.AF_INET6)
    return frozenset(a.address for many in psutil.net_if_addrs().values() for a in many if a.family in families)


@lru_cache(maxsize=1)
def own_ports() -> frozenset[int]:
    """Ports of the control plane's programs, of its Redis and its database."""
    settings = config.load()
    ports = {
        settings.web_port,
        settings.openai_port,
        settings.redis_port,
        urlsplit(settings.redis_url or DEFAULT_REDIS).port,
    }
    if settings.database_url:
        ports.add(urlsplit(settings.database_url).port or 5432)
    return frozenset(port for port in ports if port)
