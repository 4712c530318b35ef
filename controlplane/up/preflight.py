"""What must be true before anything starts. Each objection is one sentence that says what to do.

Looks and decides; changes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil

from controlplane.fleet.addresses import reachable
from controlplane.fleet.config import Config
from controlplane.fleet.errors import InvalidInput
from controlplane.fleet.outbound import proxy_for

GIB = 1 << 30
HOME_BYTES = GIB // 2
RUNTIME_BYTES = {"auto": 8 * GIB, "cpu": 8 * GIB, "gpu": 16 * GIB}
"""An engine runtime with what pip needs while it installs one, and the demo model."""
MEMORY_BYTES = 7 * GIB
"""Two CPU engines of the demo model take about 3.9 GB each."""


def machine(config: Config) -> list[str]:
    """Objections to this machine and these settings, whatever runs on it."""
    objections = []
    named = {
        "TANDEM_WEB_PORT": config.web_port,
        "TANDEM_OPENAI_PORT": config.openai_port,
        "TANDEM_REDIS_PORT": config.redis_port,
    }
    for (one, port), (other, same) in itertools.combinations(named.items(), 2):
        if port == same:
            objections.append(f"{one} and {other} are both {port}; choose different ports.")
    low, high = config.engine_port_range()
    for name, port in named.items():
        if low <= port <= high:
            objections.append(
                f"TANDEM_ENGINE_PORTS: {low}-{high} holds {port}, which is {name}'s; choose a range without it."
            )
    if config.node_address and refusal(config.node_address, 0) == errno.EADDRNOTAVAIL:
        objections.append(
            f"TANDEM_NODE_ADDRESS: {config.node_address} is not an address of this machine; `ip addr` lists those it has."
        )
    try:
        proxy_for(f"http://{reachable(config.bind)}:{config.web_port}")  # as this machine's agent will ask
    except InvalidInput as error:
        objections.append(error.message)
    objections += disk(config.home_path(), "TANDEM_HOME", HOME_BYTES)
    objections += cache(config)
    if config.runtime != "sim":
        objections += memory(memory_limit())
    return objections


def cache(config: Config) -> list[str]:
    """Objections to where engine runtimes and models go. Whoever finds a runtime there need not write one."""
    try:
        folder = config.cache_path()
    except InvalidInput as error:
        return [error.message]
    if config.runtime == "sim":
        return []
    existing = _existing(folder)
    if existing == folder and any((folder / "runtimes").glob("*")):
        return disk(folder, "TANDEM_CACHE", GIB)
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        return [
            f"This user may not write in {existing}, and engine runtimes and models go to {folder}; "
            "set TANDEM_CACHE to another folder."
        ]
    return disk(folder, "TANDEM_CACHE", RUNTIME_BYTES[config.runtime])


def disk(folder: Path, variable: str, needed: int) -> list[str]:
    """An objection when the disk of `folder` has less than `needed` bytes free."""
    free = shutil.disk_usage(_existing(folder)).free
    if free >= needed:
        return []
    return [
        f"The disk of {folder} has {free / GIB:.1f} GiB free and {needed / GIB:.1f} GiB are needed; "
        f"make room, or set {variable} to a folder on another disk."
    ]


def _existing(folder: Path) -> Path:
    """The nearest folder above it, or itself, that this user can see."""
    return next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))


def memory(total: int) -> list[str]:
    """An objection when two engines of the demo cannot fit."""
    if total >= MEMORY_BYTES:
        return []
    return [
        f"This machine has {total / GIB:.1f} GiB of memory and two engines need about 8 GiB; "
        "`make up RUNTIME=sim` shows everything with stand-in engines."
    ]


def memory_limit() -> int:
    """The machine's memory in bytes, or the container's limit where that is lower."""
    total = int(psutil.virtual_memory().total)
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def own_redis(memory: Mapping[str, Any]) -> list[str]:
    """Warnings about a Redis that is not the embedded one; `memory`: what it says of its memory."""
    warnings = []
    if not int(memory.get("maxmemory", 0)):
        warnings.append(
            "REDIS_URL: that server has no limit of memory, so one node can fill its machine; set maxmemory 1gb or more."
        )
    policy = str(memory.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        warnings.append(
            f"REDIS_URL: that server's maxmemory-policy is {policy}, which throws away what is needed; set it to noeviction."
        )
    return warnings


def ports(config: Config, redis_addresses: Iterable[str] = ()) -> list[str]:
    """Objections to the ports that are wanted by name: each tells who has it and which variable chooses another."""
    wanted = [
        ("TANDEM_WEB_PORT", config.bind, config.web_port),
        ("TANDEM_OPENAI_PORT", config.bind, config.openai_port),
    ]
    if config.redis_port:
        wanted += [("TANDEM_REDIS_PORT", address, config.redis_port) for address in redis_addresses]
    objections = []
    for variable, address, port in wanted:
        reason = refusal(address, port)
        if reason == errno.EADDRINUSE:
            free = next(p for p in range(port + 1, 65536) if refusal(address, p) is None)
            objections.append(
                f"Port {port} is taken by {holder(address, port)}. Stop that first, or choose another port: "
                f"make up {variable}={free}"
            )
        elif reason == errno.EACCES:
            objections.append(f"Port {port} is for root alone; choose one above 1023: make up {variable}={port + 8000}")
        elif reason == errno.EADDRNOTAVAIL:
            return [f"TANDEM_BIND: {address} is not an address of this machine; `ip addr` lists those it has."]
        elif reason is not None:
            objections.append(f"Port {port} of {address} cannot be used: {errno.errorcode.get(reason, reason)}.")
    return objections


def refusal(address: str, port: int) -> int | None:
    """The error number with which the system refuses to listen there; None: it is free."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen(1)
        except OSError as error:
            return error.errno
    return None


def holder(address: str, port: int) -> str:
    """Who listens on a port, as well as this user may know: another Tandem, a process, or something unseen."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if (
                connection.status == psutil.CONN_LISTEN
                and connection.laddr
                and connection.laddr[1] == port
                and connection.pid
            ):
                process = psutil.Process(connection.pid)
                argv = process.cmdline()
                if "controlplane.web" in argv or "frontend_api" in argv:
                    home = process.environ().get("TANDEM_HOME", "")
                    return f"another Tandem{f', the one of the state folder {home},' if home else ''} (process {process.pid})"
                return f"{process.name()} (process {process.pid})"
    if answers_as_tandem(address, port):
        return "another Tandem (of another user, or in a container)"
    return "a process that this user cannot see"


def answers_as_tandem(address: str, port: int) -> bool:
    """Whether the health answer there is that of a Tandem router or dashboard."""
    for path in ("/health", "/api/schema/"):
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.get(f"http://{reachable(address)}:{port}{path}", timeout=1.0, trust_env=False)
            if "tandem" in answer.text[:2000].lower():
                return True
    return False
