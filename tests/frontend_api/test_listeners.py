"""Snapshots in, records out, with a real Redis that comes and goes."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from time import monotonic
from typing import cast

import pytest
import redis
import redis.asyncio

from controlplane.fleet.model import Role
from controlplane.fleet.wire import (
    REQUESTS_STREAM,
    SNAPSHOT_KEY,
    CacheState,
    FleetSnapshot,
    RequestRecord,
    Result,
    RouterStatus,
    RoutingMode,
    RoutingPolicy,
    SnapshotDeployment,
    SnapshotEngine,
    decode,
    encode,
    router_key,
)
from frontend_api.http.upstream import Upstreams
from frontend_api.kv.evidence import Evidence
from frontend_api.observe import telemetry
from frontend_api.observe.telemetry import Telemetry
from frontend_api.processes import listeners
from frontend_api.processes.listeners import Reporter, SnapshotListener
from frontend_api.routing.outcomes import Outcomes
from frontend_api.routing.view import View, carrying
from tests.conftest import RedisServer
from tests.frontend_api.conftest import until


def snapshot(version: int, *engines: str) -> bytes:
    members = tuple(
        SnapshotEngine(id=e, name=e, attempt=1, role=Role.AGGREGATED, url=f"http://127.0.0.1:{9 + i}")
        for i, e in enumerate(engines)
    )
    deployment = SnapshotDeployment(name="d", served_name="m", routing=RoutingPolicy(), engines=members)
    return encode(FleetSnapshot(version=version, deployments=(deployment,)))


def record(number: int) -> RequestRecord:
    return RequestRecord(id=str(number), at=1.0, deployment="d", endpoint="/v1/x", status=200, result=Result.OK)


class Listening:
    def __init__(self, url: str, folder: Path) -> None:
        self.view = View()
        self.copy = folder / "router" / "snapshot.json"
        self.client = listeners.connect(url)
        self.listener = SnapshotListener(self.view, Upstreams(), self.client, self.copy)
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.task = asyncio.create_task(self.listener.run())

    async def stop(self) -> None:
        if self.task is not None:
            await listeners.end([self.task])
        await self.client.aclose()

    @property
    def engines(self) -> set[str]:
        return {engine.id for engine in self.view.engines()}


@pytest.fixture
async def listening(redis_url: str, tmp_path: Path) -> AsyncIterator[Listening]:
    found = Listening(redis_url, tmp_path)
    yield found
    await found.stop()


async def test_a_snapshot_is_taken_when_the_channel_speaks(listening: Listening, redis_url: str) -> None:
    control = redis.Redis.from_url(redis_url)
    listening.start()
    await until(lambda: control.pubsub_numsub(SNAPSHOT_KEY)[0][1] == 1)
    control.set(SNAPSHOT_KEY, snapshot(3, "e1"))
    control.publish(SNAPSHOT_KEY, 3)
    await until(lambda: listening.view.version == 3, 3.0)  # the next reading would be later
    assert listening.engines == {"e1"}


async def test_a_lost_message_is_made_up_for(
    listening: Listening, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "REREAD_SECONDS", 0.05)
    listening.start()
    redis.Redis.from_url(redis_url).set(SNAPSHOT_KEY, snapshot(4, "e1"))
    await until(lambda: listening.view.version == 4)


async def test_an_engine_that_cannot_be_used_is_said_once_and_heals(
    listening: Listening, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    control = redis.Redis.from_url(redis_url)
    for version in (1, 2):
        odd = snapshot(version, "e1", "e2").replace(b'"url":"http://127.0.0.1:10"', b'"url":"http://169.254.169.254"')
        control.set(SNAPSHOT_KEY, odd.replace(b'"keys":[]', b'"keys":[{"id":7}]'))
        assert await listening.listener.read_once()
        assert listening.engines == {"e1"}
    assert [record.levelname for record in caplog.records].count("WARNING") == 2  # the engine, and the key
    control.set(SNAPSHOT_KEY, snapshot(3, "e1", "e2"))
    assert await listening.listener.read_once()
    assert listening.engines == {"e1", "e2"}


async def test_what_cannot_be_read_changes_nothing(listening: Listening, redis_url: str) -> None:
    control = redis.Redis.from_url(redis_url)
    control.set(SNAPSHOT_KEY, snapshot(1, "e1"))
    assert await listening.listener.read_once()
    for data in (b"nonsense", b"{}", b'{"version":"x"}'):
        control.set(SNAPSHOT_KEY, data)
        assert not await listening.listener.read_once()
    control.delete(SNAPSHOT_KEY)
    assert not await listening.listener.read_once()
    assert listening.engines == {"e1"}


async def test_engines_that_stay_keep_load_and_health(listening: Listening, redis_url: str) -> None:
    control = redis.Redis.from_url(redis_url)
    control.set(SNAPSHOT_KEY, snapshot(1, "e1", "e2"))
    await listening.listener.read_once()
    engine = next(iter(listening.view.engines()))
    with carrying(engine):
        control.set(SNAPSHOT_KEY, snapshot(2, "e1"))
        await listening.listener.read_once()
        assert [e.in_flight for e in listening.view.engines()] == [1]
    assert next(iter(listening.view.engines())) is engine


async def test_a_copy_for_a_start_without_redis(listening: Listening, redis_url: str, tmp_path: Path) -> None:
    redis.Redis.from_url(redis_url).set(SNAPSHOT_KEY, snapshot(7, "e1"))
    await listening.listener.read_once()
    assert stat.S_IMODE(listening.copy.stat().st_mode) == 0o600
    assert stat.S_IMODE(listening.copy.parent.stat().st_mode) == 0o700
    assert os.listdir(listening.copy.parent) == ["snapshot.json"]
    again = Listening("redis://127.0.0.1:1/0", tmp_path)
    assert again.listener.load_copy()
    assert (again.view.version, again.engines) == (7, {"e1"})
    again.copy.write_bytes(b"nonsense")
    assert not Listening("redis://127.0.0.1:1/0", tmp_path).listener.load_copy()
    again.copy.unlink()
    assert not Listening("redis://127.0.0.1:1/0", tmp_path).listener.load_copy()


async def test_redis_goes_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "RETRY_SECONDS", 0.05)
    server = RedisServer(tmp_path)
    server.start()
    listening = Listening(server.url, tmp_path)
    try:
        redis.Redis.from_url(server.url).set(SNAPSHOT_KEY, snapshot(1, "e1"))
        listening.start()
        await until(lambda: listening.view.version == 1)
        await asyncio.to_thread(server.stop)
        await until(lambda: listening.listener._away)
        assert listening.engines == {"e1"}
        await asyncio.to_thread(server.start)
        redis.Redis.from_url(server.url).set(SNAPSHOT_KEY, snapshot(2, "e2"))
        await until(lambda: listening.engines == {"e2"})
    finally:
        await listening.stop()
        await asyncio.to_thread(server.stop)


async def test_records_reach_the_stream(redis_url: str) -> None:
    client = listeners.connect(redis_url)
    told = Telemetry("r1", 5.0)
    reporter = Reporter(told, View(), Evidence(View()), Outcomes(), client)
    for number in range(2_500):  # three batches
        told.record(record(number))
    await reporter.flush()
    entries = redis.Redis.from_url(redis_url).xrange(REQUESTS_STREAM)
    assert [decode(fields[b"r"], RequestRecord).id for _, fields in entries] == [str(n) for n in range(2_500)]
    assert (told.written, told.dropped) == (2_500, 0)
    await client.aclose()


async def test_records_wait_while_redis_is_away_or_refuses_and_are_dropped_and_counted_where_there_is_no_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(telemetry, "QUEUE", 10)
    server = RedisServer(tmp_path)
    server.start()
    client = listeners.connect(server.url)
    told = Telemetry("r1", 5.0)
    reporter = Reporter(told, View(), Evidence(View()), Outcomes(), client)
    try:
        told.record(record(0))
        await reporter.flush()
        await asyncio.to_thread(server.stop)
        for number in range(1, 13):
            told.record(record(number))
        await reporter.flush()
        assert (told.written, told.dropped) == (1, 2)
        await asyncio.to_thread(server.start)
        control = redis.Redis.from_url(server.url)
        control.config_set("maxmemory", "1")
        await until_flushed(reporter, lambda: False, 0.5)
        assert (told.written, told.dropped) == (1, 2)
        control.config_set("maxmemory", "0")
        await until_flushed(reporter, lambda: told.written == 11)
        found = [decode(fields[b"r"], RequestRecord).id for _, fields in control.xrange(REQUESTS_STREAM)]
        assert found[-10:] == [str(number) for number in range(1, 11)]
        assert told.dropped == 2
        told.record(record(13))
        await asyncio.to_thread(server.stop)
        await reporter.end()
        assert told.dropped == 3, "nothing is lost unsaid"
        await reporter.report()  # nor does this raise
    finally:
        await client.aclose()
        await asyncio.to_thread(server.stop)


async def until_flushed(reporter: Reporter, done: Callable[[], bool], seconds: float = 10.0) -> None:
    """Flush again and again, until it is done or the time has passed."""
    end = monotonic() + seconds
    while not done() and monotonic() < end:
        await reporter.flush()
        await asyncio.sleep(0.05)


async def test_records_that_are_lost_on_their_way_are_counted(redis_url: str) -> None:
    client = listeners.connect(redis_url)
    control = redis.Redis.from_url(redis_url)
    told = Telemetry("r1", 5.0)
    told.record(record(0))
    control.client_pause(60_000, all=False)  # it answers, and writes nothing
    try:
        flushing = asyncio.create_task(Reporter(told, View(), Evidence(View()), Outcomes(), client).flush())
        await until(lambda: not told.waiting)
        flushing.cancel()
        await asyncio.wait([flushing])
        assert (told.written, told.dropped) == (0, 1)
    finally:
        control.client_unpause()
        await client.aclose()


async def test_status(redis_url: str) -> None:
    client = listeners.connect(redis_url)
    told, view = Telemetry("r1", 5.0), View()
    view.take(decode(snapshot(9, "e1", "e2"), FleetSnapshot))
    told.record(record(1))
    evidence = Evidence(view)
    with carrying(next(view.engines())):
        await Reporter(told, view, evidence, Outcomes(), client).report()
    control = redis.Redis.from_url(redis_url)
    raw = control.get(router_key("r1"))
    assert isinstance(raw, bytes)
    status = decode(raw, RouterStatus)
    assert status == RouterStatus("r1", 9, {"e1": 1}, {"ok": 1}, 5.0)
    assert 0 < control.ttl(router_key("r1")) <= 5
    aware = RoutingPolicy(RoutingMode.KV)
    view.take(FleetSnapshot(10, deployments=(SnapshotDeployment("name", "served", aware),)))
    evidence.tick(0.0)
    await Reporter(told, view, evidence, Outcomes(), client).report()
    status = decode(cast(bytes, control.get(router_key("r1"))), RouterStatus)
    assert status.caches == {"name": CacheState("blind", {"*": "the router has no tokenizer for this model"})}
    await client.aclose()


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "a" / "full").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        listeners.write_private(tmp_path / "a", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
