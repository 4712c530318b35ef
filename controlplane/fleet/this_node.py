"""Which node a machine is: its identity lies in the state folder, and outlives a change of host name."""

from __future__ import annotations

import platform
from pathlib import Path

from controlplane.fleet.errors import InvalidInput
from controlplane.fleet.wire import checked_node_name, node_name_of_host

NODE_FILE = "node.json"
"""In a folder of the node's name: what joining gave."""


def agents_folder(home: Path) -> Path:
    """Where the agents of a state folder keep what is theirs, each in a folder of its node's name."""
    return home / "agents"


def this_node(configured: str, home: Path, *, hostname: str | None = None) -> str:
    """The name that is set, else the one that the state folder has an identity for, else the host's.

    Raises `InvalidInput` naming the variable, also where several identities leave it open.
    """
    try:
        own = checked_node_name(configured or node_name_of_host(platform.node() if hostname is None else hostname))
    except InvalidInput as error:
        raise InvalidInput(f"TANDEM_NODE_NAME: {error.message.removeprefix('name: ')}", field="node_name") from None
    agents = agents_folder(home)
    stored = sorted(file.parent.name for file in agents.glob(f"*/{NODE_FILE}"))
    if configured or own in stored or not stored:
        return own
    if len(stored) > 1:
        raise InvalidInput(
            f"TANDEM_NODE_NAME: {agents} holds the identities of {', '.join(stored)}, and none of this host, {own}: set the "
            "name of the node that this is",
            field="node_name",
        )
    return stored[0]
