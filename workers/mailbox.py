"""Where the agent reads its plan and leaves its report: two keys of its own in Redis, and the plain form for tests."""

from __future__ import annotations

from typing import Protocol

import msgspec
import redis

from controlplane.fleet import wire
from controlplane.fleet.errors import Unavailable
from controlplane.fleet.wire import NodePlan, NodeReport

REPLY_SECONDS = 3.0


class Mailbox(Protocol):
    def read_plan(self) -> NodePlan | None:
        """The newest plan; None: there is none. Raises `Unavailable`."""

    def write_report(self, report: NodeReport) -> None:
        """Raises `Unavailable`."""


def connect(redis_url: str) -> redis.Redis:
    """A client of the node's Redis user, that gives up instead of hanging."""
    return redis.Redis.from_url(
        redis_url, socket_timeout=REPLY_SECONDS, socket_connect_timeout=REPLY_SECONDS, health_check_interval=15
    )


class RedisMailbox:
    def __init__(self, node: str, client: redis.Redis) -> None:
        self._node = node
        self._client = client

    def read_plan(self) -> NodePlan | None:
        try:
            data = self._client.get(wire.plan_key(self._node))
        except redis.RedisError as error:
            raise Unavailable(unreachable(error)) from error
        if data is None:
            return None
        try:
            return wire.decode(data, NodePlan)
        except msgspec.DecodeError as error:
            raise Unavailable(f"the plan cannot be read ({error}); is the control plane of another version?") from error

    def write_report(self, report: NodeReport) -> None:
        try:
            self._client.set(wire.report_key(self._node), wire.encode(report))
        except redis.RedisError as error:
            raise Unavailable(unreachable(error)) from error


def unreachable(error: redis.RedisError) -> str:
    """Why Redis cannot be used, as a sentence; never with its URL, which holds a password."""
    if isinstance(error, (redis.AuthenticationError, redis.exceptions.NoPermissionError)):
        return (
            "Redis refuses this node's login. If the node was removed, let it join again with a new token "
            "(TANDEM_JOIN_TOKEN); engines keep running meanwhile."
        )
    return f"Redis does not answer ({type(error).__name__}). Engines keep running, and this is tried again."
