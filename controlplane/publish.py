"""The only way out of the control plane: plans to agents, the snapshot to routers, "this changed" to browsers.

Everything sent is a whole set with a generation, so that a lost message costs only the time to the next beat. When Redis
is away, every method raises `Unavailable`; the caller's next beat sends again. No database here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote, urlsplit, urlunsplit

import msgspec
import redis
from asgiref.sync import async_to_sync
from celery import Celery
from channels.layers import get_channel_layer
from kombu.connection import Connection

from controlplane.fleet import config, wire
from controlplane.fleet.addresses import broker_url
from controlplane.fleet.bounds import sentence
from controlplane.fleet.errors import Unavailable
from controlplane.fleet.wire import FleetSnapshot, NodePlan, NodeReport, RouterStatus

log = logging.getLogger(__name__)

LIVE_GROUP = "changed"
DEFAULT_REDIS = "redis://127.0.0.1:6379/0"
_VERSION_KEY = wire.SNAPSHOT_KEY + ":version"
_LOCAL = ("127.0.0.1", "localhost", "::1", "")


class LogLines(NamedTuple):
    lines: list[str]
    cursor: str
    """Id of the last entry read; `0-0` before the first."""
    times: list[float]
    """When each line came, in seconds since 1970 by Redis's clock."""


class Footprint(NamedTuple):
    """What one node has in Redis now."""

    keys: Mapping[str, int]
    """Bytes of each key, by its name behind `wire.node_prefix`."""
    connections: int = 0
    connection_bytes: int = 0


class Mail(NamedTuple):
    """What nodes have reported."""

    reports: dict[str, NodeReport]
    """The newest of each node that has one that can be read."""
    refused: dict[str, str]
    """Why the newest of a node cannot be read: names the field."""


class Publisher(Protocol):
    """Both forms. Every method raises `Unavailable` when the other side cannot be reached."""

    def read_reports(self, nodes: Iterable[str]) -> Mail:
        """The newest report of each node that has one."""

    def router_statuses(self) -> list[RouterStatus]:
        """What the living router processes said last."""

    def snapshot_version(self) -> int | None:
        """Version of the stored snapshot; None: there is none."""

    def read_snapshot(self) -> FleetSnapshot | None:
        """The stored snapshot; None: there is none that can be read."""

    def send_plan(self, plan: NodePlan) -> None:
        """Store the node's plan and wake its agent. The stored plan is the truth: a broken wake-up is only logged."""

    def publish_snapshot(self, snapshot: FleetSnapshot) -> None:
        """Store the snapshot and tell the routers its version."""

    def push_live(self, *topics: str) -> None:
        """Tell the browsers that these changed: `deployments`, `deployment:<name>`, `nodes`, `node:<name>`."""

    def ensure_node_user(self, node: str, digest: str) -> None:
        """Make the node's Redis user, limited to its own keys; `digest`: SHA-256 of its password as hex."""

    def ensure_node_users(self, digests: Mapping[str, str]) -> None:
        """Make again those users that Redis has lost: it forgets them when it restarts."""

    def node_url(self, node: str, password: str, host: str) -> str:
        """The URL with which an agent that reaches the control plane at `host` reaches Redis."""

    def forget_node(self, node: str) -> None:
        """Take the node's access away and delete its plan and report."""

    def shut_out(self, node: str) -> None:
        """Take the node's access away and delete everything that it stored."""

    def memory(self) -> tuple[int, int]:
        """Bytes that Redis uses, and may use (0: no limit)."""

    def footprints(self) -> dict[str, Footprint]:
        """What each node has in Redis."""

    def drop_keys(self, node: str, keys: Iterable[str]) -> None:
        """Delete keys of a node, by their names behind its prefix."""

    def tail_log(self, key: str, lines: int) -> LogLines:
        """The last lines of a log stream. A stream that is larger than an agent makes one is not read (`Unavailable`)."""

    def follow_log(self, key: str, cursor: str, wait_seconds: float) -> LogLines:
        """Lines after the cursor, as soon as there are any; none after `wait_seconds`."""


class RedisPublisher:
    """The form of the product. Connections are made when first used, and again after a loss."""

    def __init__(self, url: str) -> None:
        self._url = url
        # RESP2 is understood by every server, and its replies have one shape. (The stubs mix all shapes: hence Any.)
        self._redis: Any = redis.Redis.from_url(url, protocol=2, socket_connect_timeout=3, socket_timeout=5)
        self._patient: Any = redis.Redis.from_url(url, protocol=2, socket_connect_timeout=3, socket_timeout=None)
        self._ensured: dict[str, str] = {}

    def read_reports(self, nodes: Iterable[str]) -> Mail:
        names = list(nodes)
        mail = Mail({}, {})
        if not names:
            return mail
        with _unavailable():
            pipeline = self._redis.pipeline(transaction=False)
            for name in names:  # a node may have stored anything there: no more than a report may have is fetched
                pipeline.getrange(wire.report_key(name), 0, wire.REPORT_BYTES)
            found = pipeline.execute(raise_on_error=False)
            for answer in found:
                if isinstance(answer, Exception) and not isinstance(answer, redis.ResponseError):
                    raise answer
        for name, data in zip(names, found, strict=True):
            if isinstance(data, redis.ResponseError):
                mail.refused[name] = "its key holds something else than text"
            elif data:
                _sort(mail, name, data)
        return mail

    def router_statuses(self) -> list[RouterStatus]:
        with _unavailable():
            keys = list(self._redis.scan_iter(match=wire.router_key("*"), count=1000))
            found = self._redis.mget(keys) if keys else []
        statuses = (_decoded(data, RouterStatus, "router status") for data in found if data is not None)
        return [status for status in statuses if status is not None]

    def snapshot_version(self) -> int | None:
        with _unavailable():
            version = self._redis.get(_VERSION_KEY)
        return None if version is None else int(version)

    def read_snapshot(self) -> FleetSnapshot | None:
        with _unavailable():
            data = self._redis.get(wire.SNAPSHOT_KEY)
        snapshot: FleetSnapshot | None = None if data is None else _decoded(data, FleetSnapshot, "snapshot")
        return snapshot

    def send_plan(self, plan: NodePlan) -> None:
        with _unavailable():
            self._redis.set(wire.plan_key(plan.node), wire.encode(plan))
        prefix, queue = wire.node_prefix(plan.node), wire.queue_name(plan.node)
        try:
            with Connection(  # type: ignore[no-untyped-call]
                broker_url(self._url),
                connect_timeout=3,
                transport_options={"global_keyprefix": prefix, "max_retries": 0, "socket_connect_timeout": 3},
            ) as connection:
                self._celery.send_task(
                    wire.APPLY_PLAN_TASK,
                    queue=queue,
                    connection=connection,
                    expires=wire.PLAN_TASK_EXPIRES,
                    retry=False,
                    ignore_result=True,
                )
            # A dead node's queue goes by itself: nobody else takes expired messages out of it.
            self._redis.expire(prefix + queue, wire.PLAN_TASK_EXPIRES)
        except Exception as error:  # the keys of its queue are the node's own, which may have made anything of them
            log.warning("node %s was not woken for plan %d: %s", plan.node, plan.generation, error)

    def publish_snapshot(self, snapshot: FleetSnapshot) -> None:
        with _unavailable():
            pipeline = self._redis.pipeline(transaction=True)
            pipeline.set(wire.SNAPSHOT_KEY, wire.encode(snapshot))
            pipeline.set(_VERSION_KEY, snapshot.version)
            pipeline.publish(wire.SNAPSHOT_KEY, snapshot.version)
            pipeline.execute()

    def push_live(self, *topics: str) -> None:
        layer = get_channel_layer()
        if layer is None or not topics:
            return

        async def send() -> None:
            for topic in topics:
                await layer.group_send(LIVE_GROUP, {"type": "changed", "topic": topic})

        with _unavailable():
            async_to_sync(send)()

    def ensure_node_user(self, node: str, digest: str) -> None:
        with _unavailable():
            self._redis.execute_command(
                "ACL", "SETUSER", wire.acl_user(node), "reset", "on", f"#{digest}", *wire.acl_rules(node)
            )
        self._ensured[node] = digest

    def ensure_node_users(self, digests: Mapping[str, str]) -> None:
        with _unavailable():
            present = {name.decode() for name in self._redis.execute_command("ACL", "USERS")}
            strangers = {name for name in present if name.startswith(wire.acl_user(""))} - set(
                map(wire.acl_user, digests)
            )
            if strangers:  # their node is gone, or its access was taken away while a step was under way
                self._redis.execute_command("ACL", "DELUSER", *strangers)
        for node, digest in digests.items():
            if wire.acl_user(node) not in present or self._ensured.get(node) != digest:
                self.ensure_node_user(node, digest)

    def node_url(self, node: str, password: str, host: str) -> str:
        parts = urlsplit(self._url)
        who = f"{quote(wire.acl_user(node))}:{quote(password)}@"
        if parts.scheme == "unix":
            if host not in _LOCAL:
                raise Unavailable("Redis listens on a unix socket only: set REDIS_URL to one that other nodes reach")
            return urlunsplit((parts.scheme, who, parts.path, parts.query, ""))
        reached = host if parts.hostname in _LOCAL else str(parts.hostname)
        shown = f"[{reached}]" if ":" in reached else reached
        return urlunsplit((parts.scheme, f"{who}{shown}:{parts.port or 6379}", parts.path, parts.query, ""))

    def forget_node(self, node: str) -> None:
        with _unavailable():
            self._redis.execute_command("ACL", "DELUSER", wire.acl_user(node))
            queue = wire.node_prefix(node) + wire.queue_name(node)
            self._redis.delete(wire.plan_key(node), wire.report_key(node), queue)
        self._ensured.pop(node, None)

    def shut_out(self, node: str) -> None:
        self.forget_node(node)
        with _unavailable():
            for keys in _batches(self._redis.scan_iter(match=wire.node_prefix(node) + "*", count=1000)):
                self._redis.unlink(*keys)

    def memory(self) -> tuple[int, int]:
        with _unavailable():
            told = self._redis.info("memory")
        return int(told["used_memory"]), int(told.get("maxmemory", 0))

    def footprints(self) -> dict[str, Footprint]:
        sizes: dict[str, dict[str, int]] = {}
        clients: dict[str, list[int]] = {}
        prefix = wire.node_prefix("").removesuffix(":")
        with _unavailable():
            for keys in _batches(self._redis.scan_iter(match=prefix + "*", count=1000)):
                pipeline = self._redis.pipeline(transaction=False)
                for key in keys:  # all of it: of a part of a key, a node could choose which
                    pipeline.memory_usage(key, samples=0)
                for key, size in zip(keys, pipeline.execute(), strict=True):
                    node, _, rest = key.decode("utf-8", "replace").removeprefix(prefix).partition(":")
                    sizes.setdefault(node, {})[rest] = int(size or 0)
            for client in self._redis.client_list():
                if (user := client.get("user", "")).startswith(wire.acl_user("")):
                    found = clients.setdefault(user.removeprefix(wire.acl_user("")), [])
                    found.append(int(client.get("tot-mem") or client.get("qbuf", 0)))
        return {
            node: Footprint(sizes.get(node, {}), len(clients.get(node, ())), sum(clients.get(node, ())))
            for node in sizes.keys() | clients.keys()
        }

    def drop_keys(self, node: str, keys: Iterable[str]) -> None:
        with _unavailable():
            self._redis.unlink(*(wire.node_prefix(node) + key for key in keys))

    def tail_log(self, key: str, lines: int) -> LogLines:
        with _unavailable():
            self._check_log(key)
            entries = self._redis.xrevrange(key, count=lines)
        return _log_lines(list(reversed(entries)), "0-0")

    def follow_log(self, key: str, cursor: str, wait_seconds: float) -> LogLines:
        with _unavailable():
            self._check_log(key)
            found = self._patient.xread({key: cursor}, count=wire.LOG_MAXLEN, block=max(1, int(wait_seconds * 1000)))
        return _log_lines(found[0][1] if found else [], cursor)

    def _check_log(self, key: str) -> None:
        if int(self._redis.memory_usage(key, samples=0) or 0) > wire.LOG_BYTES:
            raise Unavailable(
                f"this log takes more than {wire.LOG_BYTES >> 20} MiB in Redis: its node does not keep to its limits"
            )

    @cached_property
    def _celery(self) -> Celery:
        app = Celery("tandem-wake", set_as_current=False)
        app.conf.update(task_serializer="json", task_ignore_result=True)
        return app


class InMemoryPublisher:
    """The form of tests: what was sent can be read back, and what would come from outside is put in."""

    def __init__(self) -> None:
        self.reports: dict[str, NodeReport] = {}
        self.raw: dict[str, bytes] = {}
        """Reports as bytes, of nodes that write what they like."""
        self.routers: list[RouterStatus] = []
        self.plans: dict[str, NodePlan] = {}
        self.sent: list[NodePlan] = []
        self.snapshots: list[FleetSnapshot] = []
        self.topics: list[str] = []
        self.users: dict[str, str] = {}
        self.logs: dict[str, list[str]] = {}
        self.stored: dict[str, Footprint] = {}
        """What nodes have in Redis."""
        self.dropped: dict[str, list[str]] = {}
        self.away = False
        """Redis cannot be reached."""

    def read_reports(self, nodes: Iterable[str]) -> Mail:
        self._reach()
        mail = Mail({}, {})
        for name in nodes:
            if name in self.raw:
                _sort(mail, name, self.raw[name])
            elif name in self.reports:
                mail.reports[name] = self.reports[name]
        return mail

    def router_statuses(self) -> list[RouterStatus]:
        self._reach()
        return list(self.routers)

    def snapshot_version(self) -> int | None:
        self._reach()
        return self.snapshots[-1].version if self.snapshots else None

    def read_snapshot(self) -> FleetSnapshot | None:
        self._reach()
        return self.snapshots[-1] if self.snapshots else None

    def send_plan(self, plan: NodePlan) -> None:
        self._reach()
        self.plans[plan.node] = plan
        self.sent.append(plan)

    def publish_snapshot(self, snapshot: FleetSnapshot) -> None:
        self._reach()
        self.snapshots.append(snapshot)

    def push_live(self, *topics: str) -> None:
        self._reach()
        self.topics.extend(topics)

    def ensure_node_user(self, node: str, digest: str) -> None:
        self._reach()
        self.users[node] = digest

    def ensure_node_users(self, digests: Mapping[str, str]) -> None:
        self._reach()
        self.users.update(digests)

    def node_url(self, node: str, password: str, host: str) -> str:
        return f"redis://{wire.acl_user(node)}:{password}@{host}:6379/0"

    def forget_node(self, node: str) -> None:
        self._reach()
        for known in (self.users, self.plans, self.reports):
            known.pop(node, None)

    def shut_out(self, node: str) -> None:
        self.forget_node(node)
        self.stored.pop(node, None)

    def memory(self) -> tuple[int, int]:
        self._reach()
        return sum(sum(footprint.keys.values()) for footprint in self.stored.values()), 0

    def footprints(self) -> dict[str, Footprint]:
        self._reach()
        return dict(self.stored)

    def drop_keys(self, node: str, keys: Iterable[str]) -> None:
        self._reach()
        self.dropped.setdefault(node, []).extend(keys)

    def tail_log(self, key: str, lines: int) -> LogLines:
        self._reach()
        stored = self.logs.get(key, [])
        return LogLines(stored[-lines:], f"{len(stored)}-0", [float(i) for i in range(len(stored))][-lines:])

    def follow_log(self, key: str, cursor: str, wait_seconds: float) -> LogLines:
        self._reach()
        stored, start = self.logs.get(key, []), int(cursor.split("-")[0])
        new = list(islice(stored, start, None))
        return LogLines(new, f"{len(stored)}-0", [float(start + i) for i in range(len(new))])

    def _reach(self) -> None:
        if self.away:
            raise Unavailable("Redis cannot be reached")


@lru_cache(maxsize=1)
def _of_this_process() -> RedisPublisher:
    return RedisPublisher(config.load().redis_url or DEFAULT_REDIS)


_instead: list[Publisher] = []


def current() -> Publisher:
    """The publisher of this process: Redis as configured, unless `using` says otherwise."""
    return _instead[-1] if _instead else _of_this_process()


@contextmanager
def using(publisher: Publisher) -> Iterator[Publisher]:
    """Inside, `current()` is this one."""
    _instead.append(publisher)
    try:
        yield publisher
    finally:
        _instead.remove(publisher)


@contextmanager
def _unavailable() -> Iterator[None]:
    try:
        yield
    except redis.ResponseError as error:
        raise Unavailable(f"Redis refused a command: {error}") from error
    except (redis.RedisError, OSError) as error:
        raise Unavailable(f"Redis cannot be reached: {error}") from error


def _decoded(data: bytes, kind: type[Any], what: str) -> Any:
    try:
        return wire.decode(data, kind)
    except msgspec.MsgspecError as error:  # from an agent of another version: never a reason to stop the loop
        log.warning("%s cannot be read: %s", what, error)
        return None


def _sort(mail: Mail, name: str, data: bytes) -> None:
    """Into one of both: a node's report, or why it cannot be read."""
    try:
        if len(data) > wire.REPORT_BYTES:
            raise msgspec.ValidationError(f"it is longer than {wire.REPORT_BYTES >> 20} MiB")
        report = wire.decode(data, NodeReport)
        if report.node != name:
            raise msgspec.ValidationError("it is another node's - at `$.node`")
    except msgspec.MsgspecError as error:  # also of an agent of another version: its own node's trouble alone
        why, _, field = str(error).partition(" - at `$.")
        for pattern, plain in _PLAINLY:
            why = re.sub(pattern, plain, why)
        mail.refused[name] = sentence(
            f"{field.rstrip('`')}: {why}" if field else why, 200
        )  # msgspec quotes what it refuses
    else:
        mail.reports[name] = report


_PLAINLY = (
    (r"Expected `(?:int|float)` <= (\S+)", r"it is above \1"),
    (r"Expected `(?:int|float)` >= (\S+)", r"it is below \1"),
    (r"Expected `str` of length <= (\d+)", r"it is longer than \1 characters"),
    (r"Expected `array` of length <= (\d+)", r"it has more than \1 entries"),
    (r"Expected `str` matching regex.*", "it holds characters that cannot be there"),
)
"""What msgspec says of a message, in people's words."""


def _log_lines(entries: list[Any], cursor: str) -> LogLines:
    lines = [_line(fields.get(b"line", b"")) for _, fields in entries]
    times = [int(entry.partition(b"-")[0]) / 1000 for entry, _ in entries]  # an id begins with milliseconds
    return LogLines(lines, entries[-1][0].decode() if entries else cursor, times)


_LINE_MARGIN = 16
"""Bytes by which an agent's own remark lengthens a line that it has cut."""


def _line(data: bytes) -> str:
    """A log line as its agent should have sent it: short, and without what would command a terminal."""
    text = data[: wire.LOG_LINE_BYTES + _LINE_MARGIN].decode("utf-8", "replace")
    return text if text.isprintable() else _CONTROLS.sub("\ufffd", text)


_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")


def _batches(keys: Iterable[bytes]) -> Iterator[list[bytes]]:
    """A thousand at a time."""
    keys = iter(keys)
    while batch := list(islice(keys, 1000)):
        yield batch
