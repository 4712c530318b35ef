"""Where the agent reads its plan and leaves its report: two keys of its own in Redis, and the plain form for tests."""

from __future__ import annotations

import logging
from typing import Protocol

import msgspec
import redis
from msgspec.structs import replace

from controlplane.fleet import wire
from controlplane.fleet.errors import Unavailable
from controlplane.fleet.model import Observation, PairProof
from controlplane.fleet.wire import NodePlan, NodeReport

log = logging.getLogger(__name__)

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
        self._left_out = ""
        """What was said of this last."""

    def read_plan(self) -> NodePlan | None:
        try:
            data = self._client.get(wire.plan_key(self._node))
        except redis.RedisError as error:
            raise unavailable(error) from error
        if data is None:
            return None
        try:
            return wire.decode(data, NodePlan)
        except msgspec.DecodeError as error:
            raise Unavailable(f"the plan cannot be read ({error}); is the control plane of another version?") from error

    def write_report(self, report: NodeReport) -> None:
        try:
            self._client.set(wire.report_key(self._node), self._readable(report))
        except redis.RedisError as error:
            raise Unavailable(unreachable(error)) from error

    def _readable(self, report: NodeReport) -> bytes:
        """The report as the control plane will read it. It refuses one that is out of bounds as a whole, and an engine may say
        anything of itself: then what it said is left out, and not the node."""
        data = wire.encode(report)
        try:
            wire.decode(data, NodeReport)
        except msgspec.ValidationError as error:
            if str(error) != self._left_out:
                log.warning("What an engine says of itself cannot be reported: %s", error)
            self._left_out = str(error)
            return wire.encode(replace(report, engines=tuple(map(_sound, report.engines))))
        return data


def _sound(seen: Observation) -> Observation:
    try:
        return wire.decode(wire.encode(seen), Observation)
    except msgspec.ValidationError:
        return replace(
            seen,
            progress=None,
            block_size=None,
            kv_blocks=None,
            max_model_len=None,
            kv_ranks=1,
            load=None,
            pairs=tuple(filter(_is_sound, seen.pairs)),
        )


def _is_sound(proof: PairProof) -> bool:
    try:
        wire.decode(wire.encode(proof), PairProof)
    except msgspec.ValidationError:
        return False
    return True


class LoginRefused(Unavailable):
    """Redis is there and does not take this node's login: for a moment after a restart of it, or for good."""


def unavailable(error: redis.RedisError) -> Unavailable:
    """The error as the agent tells it."""
    refused = isinstance(error, (redis.AuthenticationError, redis.exceptions.NoPermissionError))
    return LoginRefused(unreachable(error)) if refused else Unavailable(unreachable(error))


def unreachable(error: redis.RedisError) -> str:
    """Why Redis cannot be used, as a sentence; never with its URL, which holds a password."""
    if isinstance(error, (redis.AuthenticationError, redis.exceptions.NoPermissionError)):
        return (
            "Redis refuses this node's login. If the node was removed, let it join again with a new token "
            "(TANDEM_JOIN_TOKEN); engines keep running meanwhile."
        )
    return f"Redis does not answer ({type(error).__name__}). Engines keep running, and this is tried again."
