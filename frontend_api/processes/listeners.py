"""What goes on beside requests: snapshots in, from Redis or disk; records and status out; probes of engines that failed.

The snapshot is read whole whenever the channel speaks, and every few seconds in any case. Without Redis the last snapshot
(first from disk, then the one in memory) stays in force for as long as it takes.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import cast

import msgspec
import redis as plain
import redis.asyncio as redis
from redis.exceptions import RedisError, ResponseError

from controlplane.fleet.tokenizer_files import MAX_PACKED_BYTES
from controlplane.fleet.wire import (
    REQUESTS_MAXLEN,
    REQUESTS_STREAM,
    ROUTER_STATUS_TTL,
    SNAPSHOT_KEY,
    encode,
    encode_lines,
    router_key,
)
from frontend_api.http.upstream import Upstreams, probe
from frontend_api.kv.evidence import Evidence
from frontend_api.observe.telemetry import Telemetry
from frontend_api.routing import intake
from frontend_api.routing.outcomes import Outcomes
from frontend_api.routing.view import Health, View

log = logging.getLogger(__name__)

REREAD_SECONDS = 5.0
RETRY_SECONDS = 1.0
FLUSH_SECONDS = 0.25
PROBE_SECONDS = 1.0

_APPEND = """
for record in string.gmatch(ARGV[2], '[^\\n]+') do
  redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', 'r', record)
end
"""
"""One command and one argument for a whole batch, a record a line: a fraction of a pipeline's cost in this process."""


def connect(url: str) -> redis.Redis:
    """A client whose every call ends within seconds."""
    return redis.Redis.from_url(url, socket_timeout=5.0, socket_connect_timeout=3.0)


def fetcher(url: str) -> Callable[[str], bytes | None]:
    """Reads one key's value, of a tokenizer at most, for a thread: opens a connection each time. Raises `OSError` when Redis is away."""

    def fetch(key: str) -> bytes | None:
        try:
            with plain.Redis.from_url(url, socket_timeout=30.0, socket_connect_timeout=3.0) as client:
                # Its node may have stored anything there: no more of it is fetched than will be read.
                return cast(bytes, client.getrange(key, 0, MAX_PACKED_BYTES)) or None
        except RedisError as error:
            raise OSError(f"Redis does not answer ({type(error).__name__})") from None

    return fetch


class SnapshotListener:
    """Keeps the view at the newest snapshot, and a copy of it on disk for a start without Redis."""

    def __init__(self, view: View, upstreams: Upstreams, client: redis.Redis, copy: Path) -> None:
        self._view = view
        self._upstreams = upstreams
        self._client = client
        self._copy = copy
        self._raw = b""
        self._away = False
        self._said: set[str] = set()
        """What of the last snapshot could not be used."""

    def load_copy(self) -> bool:
        """Take the snapshot from disk. False: there is none that can be read."""
        try:
            data = self._copy.read_bytes()
            self._take(data)
        except FileNotFoundError:
            return False
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("The snapshot copy %s cannot be used: %s", self._copy, error)
            return False
        return True

    async def read_once(self) -> bool:
        """Take the snapshot from Redis if it is another one. Raises `RedisError` or `OSError` when Redis is away."""
        data = cast(bytes | None, await self._client.get(SNAPSHOT_KEY))
        if data is None or data == self._raw:
            return False
        try:
            self._take(data)
        except msgspec.MsgspecError as error:
            log.error("The snapshot in Redis cannot be read, the last one stays in force: %s", error)
            return False
        try:
            await asyncio.to_thread(write_private, self._copy, data)
        except OSError as error:
            log.warning("The snapshot copy %s cannot be written: %s", self._copy, error)
        return True

    async def read_first(self, seconds: float) -> None:
        """At the start, without a copy: who asks now shall not hear that there is no such key or model. Waits no longer."""
        with suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(seconds):
                await self.read_once()

    async def run(self) -> None:
        """For ever: read, then wait for the channel or for the next reading."""
        while True:
            try:
                async with self._client.pubsub() as channel:
                    await channel.subscribe(SNAPSHOT_KEY)
                    while True:
                        await self.read_once()
                        if self._away:
                            log.info("Redis is back.")
                            self._away = False
                        await channel.get_message(ignore_subscribe_messages=True, timeout=REREAD_SECONDS)
            except (RedisError, OSError) as error:
                if not self._away:
                    log.warning("Redis is away, the last snapshot stays in force: %s", error)
                    self._away = True
                await asyncio.sleep(RETRY_SECONDS)

    def _take(self, data: bytes) -> None:
        snapshot, unread = intake.read(data)
        for engine in self._view.take(snapshot):
            self._upstreams.forget(engine)
        self._raw = data
        trouble = [*unread, *self._view.trouble]
        for why in trouble:
            if why not in self._said:
                log.warning("%s", why)
        self._said = set(trouble)
        log.info("Snapshot %d is in force: %d deployments.", snapshot.version, len(snapshot.deployments))


def write_private(path: Path, data: bytes) -> None:
    """Replace a file whole; only its owner may read it. Raises `OSError`."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)  # on a full disk a part of it would only be in the way
        raise


class Reporter:
    """Writes records and status to Redis. While Redis takes none, records wait as long as there is room for them."""

    def __init__(
        self, telemetry: Telemetry, view: View, evidence: Evidence, outcomes: Outcomes, client: redis.Redis
    ) -> None:
        self._telemetry = telemetry
        self._view = view
        self._evidence = evidence
        self._outcomes = outcomes
        self._client = client

    async def flush(self) -> None:
        """Write all waiting records, a batch at a time. One that is lost on the way is dropped and counted: Redis may have it."""
        try:
            if self._telemetry.waiting:
                # so that a connection that has ended, or a Redis that loads its data, costs no record
                await self._client.ping()
            while records := self._telemetry.batch():
                written = False
                try:
                    await cast(
                        Awaitable[int],
                        self._client.eval(_APPEND, 1, REQUESTS_STREAM, REQUESTS_MAXLEN, encode_lines(records)),
                    )
                    written = True
                except ResponseError:  # out of memory, or a replica: it has none of them
                    self._telemetry.put_back(records)
                    records = []
                    raise
                finally:  # also of a flush that is cancelled
                    self._telemetry.settle(len(records), written=written)
        except (RedisError, OSError):
            return

    async def end(self) -> None:
        """Write the last records; what Redis does not take now is lost."""
        await self.flush()
        while records := self._telemetry.batch():
            self._telemetry.settle(len(records), written=False)

    async def report(self) -> None:
        """Write the status once."""
        try:
            status = self._telemetry.status(self._view, self._evidence, self._outcomes)
            await self._client.set(router_key(status.router), encode(status), ex=ROUTER_STATUS_TTL)
        except (RedisError, OSError) as error:
            log.debug("The status was not written: %s", error)

    async def run_flush(self) -> None:
        while True:
            await self.flush()
            await asyncio.sleep(FLUSH_SECONDS)

    async def run_report(self) -> None:
        while True:
            await self.report()
            await asyncio.sleep(1.0)


async def end(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel background loops until they have ended: redis-py's pub/sub sometimes swallows a cancellation."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=0.2)


async def probe_once(view: View) -> None:
    """Let engines that failed back in, half-open, once they accept a connection."""
    down = [engine for engine in view.engines() if engine.health is Health.DOWN]
    for engine, broken in zip(down, await asyncio.gather(*map(probe, down)), strict=True):
        if broken is None:
            engine.accepts()


async def run_probes(view: View) -> None:
    while True:
        await probe_once(view)
        await asyncio.sleep(PROBE_SECONDS)
