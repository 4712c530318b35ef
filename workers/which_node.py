"""Which node this machine is, and whose engines an earlier identity left running here: no engine runs on with nobody to look
after it.
"""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Callable
from pathlib import Path

from controlplane.fleet.errors import Conflict
from controlplane.fleet.this_node import this_node
from controlplane.fleet.wire import node_name_of_host
from workers.process import EngineProcess
from workers.record import Records

log = logging.getLogger(__name__)

LOCK = "agent.lock"
PATIENCE_SECONDS = 15.0
"""For which another node's agent on this machine may take to start and adopt its engines."""


def choose_name(configured: str, home: Path, *, hostname: str) -> str:
    """See `this_node`; says so where it is another than the host's. Raises `InvalidInput`."""
    name, own = this_node(configured, home, hostname=hostname), node_name_of_host(hostname)
    if not configured and name != own:
        log.warning(
            "This host is called %s now and goes on as node %s, as its state folder says. To make it a new node, end its engines "
            "(stop its agent without KEEP_ENGINES), then set TANDEM_NODE_NAME=%s and join with a token.",
            own,
            name,
            own,
        )
    return name


def refuse_forsaken_engines(agents: Path, name: str, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Raises `Conflict` where engines of another identity run on this machine and no agent looks after them."""
    waited = 0.0
    while forsaken := _forsaken(agents, name):
        if waited >= PATIENCE_SECONDS:
            other, count = next(iter(forsaken.items()))
            raise Conflict(
                f"Engines of node {other} still run here ({count}), and no agent looks after them: start the agent with "
                f"TANDEM_NODE_NAME={other}, which adopts them; stopped without KEEP_ENGINES it ends them, and this machine "
                f"can be node {name}."
            )
        waited += 1.0
        sleep(1.0)


def _forsaken(agents: Path, name: str) -> dict[str, int]:
    """Running engines by the name of their node."""
    found = {}
    for folder in sorted(agents.glob("*/engines")):
        other = folder.parent
        if other.name != name and (count := _running(Records(folder))) and not _is_locked(other / LOCK):
            found[other.name] = count
    return found


def _running(records: Records) -> int:
    known = (records.load(engine, attempt) for engine, attempt in records.attempts())
    return sum(
        record is not None
        and not record.ended
        and record.pid is not None
        and EngineProcess.adopt(
            record.pid,
            record.start_ticks,
            record.boot,
            records.folder(record.assignment.engine, record.assignment.attempt),
        )
        is not None
        for record in known
    )


def _is_locked(file: Path) -> bool:
    try:
        with file.open("a+") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
