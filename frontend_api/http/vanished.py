"""Peers whose machine or network has vanished: no packet says so, but the kernel can ask."""

from __future__ import annotations

import socket

CLIENT_SECONDS = 120
"""An engine would go on writing for nobody."""
ENGINE_SECONDS = 60
"""Others could serve its requests. An outage of half a minute costs none."""


def end_after(seconds: int, sock: socket.socket) -> None:
    """The kernel ends the connection once its peer has acknowledged nothing for so long; those that a listening socket accepts
    have it from that. See tcp(7): keepalive asks where nothing is sent, the user timeout ends waiting for what was."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds // 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, seconds // 8)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds * 1_000)
