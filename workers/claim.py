"""One identity, one agent: a claim in Redis that the agent renews with its reports.

Two machines with one state folder (a copied disk, a restored backup) would else write over each other's reports and each end
what the other starts. The first keeps the claim. A claim whose agent ran here, with this very state folder, is taken over at
once: the folder's lock file shows that it is gone.
"""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

import msgspec
import redis
from msgspec import Struct

from controlplane.fleet.errors import Unavailable
from controlplane.fleet.wire import node_prefix
from workers.mailbox import unreachable
from workers.process import boot_id

CLAIM_SECONDS = 10
"""After which the claim of an agent that is gone has passed."""


class Claim(Struct, frozen=True):
    agent: str
    """Random id of the agent process."""
    place: str
    """Machine, boot and state folder."""
    host: str

    @property
    def is_here(self) -> bool:
        """Of an agent on this machine, or in another container of it."""
        return self.place.startswith(f"{boot_id()}:")


class Claimant:
    """One agent process that wants to be the node's only one."""

    def __init__(self, node: str, client: redis.Redis, *, lock: Path) -> None:
        self._key = f"{node_prefix(node)}agent"
        self._client = client
        stat = lock.stat()
        self._mine = Claim(secrets.token_hex(8), f"{boot_id()}:{stat.st_dev}:{stat.st_ino}", socket.gethostname())

    def renew(self) -> Claim | None:
        """None: this agent has the claim. Else another agent has it. Raises `Unavailable`."""
        data = msgspec.json.encode(self._mine)
        try:
            if self._client.set(self._key, data, nx=True, ex=CLAIM_SECONDS):
                return None
            other = self._read()
            if other is not None and other.place != self._mine.place:
                return other
            self._client.set(self._key, data, ex=CLAIM_SECONDS)
        except redis.RedisError as error:
            raise Unavailable(unreachable(error)) from error
        return None

    def release(self) -> None:
        """Lets the next agent in at once, if Redis answers."""
        try:
            if self._read() == self._mine:
                self._client.unlink(self._key)
        except redis.RedisError:
            return

    def _read(self) -> Claim | None:
        data = self._client.get(self._key)
        try:
            return None if data is None else msgspec.json.decode(data, type=Claim)
        except msgspec.DecodeError:
            return None


def already_running(node: str, other: Claim) -> str:
    """Two agents of one identity, as a sentence with the remedy."""
    return (
        f"Another agent is node {node} already, on {other.host or 'another machine'}: this state folder is a copy of that one's. "
        f"Stop that agent, or make this machine a node of its own: remove the folder agents/{node} from its TANDEM_HOME, set "
        "another TANDEM_NODE_NAME and join with a token."
    )
