"""Which node this machine is: its identity lies in the state folder and outlives a change of host name. And whose engines an
earlier identity left running here: no engine runs on with nobody to look after it.
"""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Callable
from pathlib import Path

from controlplane.fleet.errors import Conflict, InvalidInput
from controlplane.fleet.wire import checked_node_name, node_name_of_host
from workers.join import NODE_FILE
from workers.process import EngineProcess
from workers.record import Records

log = logging.getLogger(__name__)

LOCK = "agent.lock"
PATIENCE_SECONDS = 15.0
"""For which another node's agent on this machine may take to start and adopt its engines."""


def choose_name(configured: str, hostname: str, agents: Path) -> str:
    """The name that is set, else that of the identity in the folder `agents`, else the host's.

    Raises `InvalidInput` naming the variable, also where several identities leave it open.
    """
    try:
        own = checked_node_name(configured or node_name_of_host(hostname))
    except InvalidInput as error:
        raise InvalidInput(f"TANDEM_NODE_NAME: {error.message.removeprefix('name: ')}", field="node_name") from None
    stored = sorted(file.parent.name for file in agents.glob(f"*/{NODE_FILE}"))
    if configured or own in stored or not stored:
        return own
    if len(stored) > 1:
        raise InvalidInput(
            f"TANDEM_NODE_NAME: {agents} holds the identities of {', '.join(stored)}, and none of this host, {own}: set the "
            "name of the node that this is",
            field="node_name",
        )
    log.warning(
        "This host is called %s now and goes on as node %s, as its state folder says. To make it a new node, end its engines "
        "(stop its agent without KEEP_ENGINES), then set TANDEM_NODE_NAME=%s and join with a token.",
        own,
        stored[0],
        own,
    )
    return stored[0]


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
