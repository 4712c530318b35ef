"""Which TCP ports an engine gets: free on its address by a bind test, and promised to no other engine of this node.

A port may still be taken between the test and the engine's own bind; then the engine ends and is started with fresh ones.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Collection

from controlplane.fleet.errors import Unavailable
from controlplane.fleet.model import Ports, Role


def is_free(address: str, port: int) -> bool:
    """Whether this port can be bound on the address now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
        return True


def take(
    address: str,
    span: tuple[int, int],
    role: Role,
    *,
    promised: Collection[int],
    chance: random.Random,
    free: Callable[[str, int], bool] = is_free,
) -> Ports:
    """Disjoint ports for one engine, from `span` (both ends included), not among the `promised` ones.

    The search begins at a random place, so that two agents on one machine seldom choose alike. An aggregated engine
    hands no KV over and has no side channel.

    Raises `Unavailable` when the range holds too few free ones.
    """
    wanted = 3 if role is Role.AGGREGATED else 4
    low, high = span
    first = chance.randint(low, max(low, high))
    found: list[int] = []
    for port in (*range(first, high + 1), *range(low, first)):
        if port not in promised and free(address, port):
            found.append(port)
        if len(found) == wanted:
            http, events, replay, *side_channel = found
            return Ports(http=http, events=events, replay=replay, side_channel=side_channel[0] if side_channel else 0)
    raise Unavailable(
        f"TANDEM_ENGINE_PORTS {low}-{high}: fewer than {wanted} ports are free on {address}; set a wider range"
    )


def numbers(ports: Ports | None) -> tuple[int, ...]:
    """The ports an engine really has."""
    return () if ports is None else tuple(p for p in (ports.http, ports.side_channel, ports.events, ports.replay) if p)
