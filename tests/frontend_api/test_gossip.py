"""Routers of several hosts that tell each other their loads through a real Redis."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis

from controlplane.fleet.wire import LOADS_CHANNEL, RouterLoads, encode
from frontend_api.processes import listeners
from frontend_api.routing import gossip
from frontend_api.routing.choice import choose
from frontend_api.routing.gossip import REPEAT_SECONDS, Gossip
from frontend_api.routing.loads import SILENCE_SECONDS, Table
from frontend_api.routing.view import carrying
from frontend_api.routing.waiting import Waiting
from tests.conftest import RedisServer
from tests.frontend_api.conftest import until
from tests.frontend_api.test_loads import Process

NAMES = ("a", "b")


class Host(Process):
    """One router process that gossips."""

    def __init__(self, url: str, name: str, table: Table | None = None, index: int = 0) -> None:
        super().__init__(table, index)
        self.take(*NAMES)
        self.client = listeners.connect(url)
        self.gossip = Gossip(name, self.loads, Waiting(self.view, self.loads), self.client)
        self.tasks: list[asyncio.Task[None]] = []

    def start(self) -> Host:
        self.tasks = [asyncio.create_task(self.gossip.run_hearing()), asyncio.create_task(self.gossip.run_telling())]
        return self

    async def stop(self) -> None:
        await listeners.end(self.tasks)
        await self.client.aclose()

    @property
    def hears(self) -> dict[str, tuple[int, int]]:
        return {e.id: (e.others, e.others_queued) for e in self.view.engines() if e.others}


@pytest.fixture
async def hosts(redis_url: str) -> AsyncIterator[list[Host]]:
    found = [Host(redis_url, f"r{number}").start() for number in range(3)]
    control = redis.Redis.from_url(redis_url)
    await until(lambda: control.pubsub_numsub(LOADS_CHANNEL)[0][1] == 3)
    yield found
    for host in found:
        await host.stop()


async def test_loads_are_heard_elsewhere_and_taken_back(hosts: list[Host]) -> None:
    one, two, three = hosts
    with carrying(one.engine("a"), 700), carrying(three.engine("a")), carrying(three.engine("b")):
        await until(lambda: two.hears == {"a": (2, 700), "b": (1, 0)})
        await until(lambda: one.hears == {"a": (1, 0), "b": (1, 0)})
    await until(lambda: not two.hears and not one.hears)


async def test_routers_of_three_hosts_do_not_herd(hosts: list[Host]) -> None:
    """Case dyn-A22: one has made an engine hot; the others' next bursts go elsewhere."""
    one, two, three = hosts
    busy = [carrying(one.engine("a")).__enter__() for _ in range(60)]
    await until(lambda: two.hears == three.hears == {"a": (60, 0)})
    taken: Counter[str] = Counter()
    for _ in range(30):
        for host in (two, three):
            engine = choose(host.deployment, now=0.0).decode
            assert engine is not None
            busy.append(carrying(engine).__enter__())
            taken[engine.id] += 1
    assert taken == {"b": 60}
    for load in busy:
        load.release()


async def test_it_says_no_more_than_is_news(redis_url: str) -> None:
    host = Host(redis_url, "r")
    assert not await host.gossip.tell(0.0)
    with carrying(host.engine("a")):
        assert await host.gossip.tell(1.0)
        assert not await host.gossip.tell(1.1)
        assert await host.gossip.tell(1.0 + REPEAT_SECONDS)
    assert await host.gossip.tell(2.1)
    assert not await host.gossip.tell(100.0)
    await host.stop()


async def test_siblings_are_not_heard_twice_and_nonsense_not_at_all(redis_url: str) -> None:
    table = Table(2)
    one, two = Host(redis_url, "r1", table, 0), Host(redis_url, "r2", table, 1)
    two.gossip.hear(encode(RouterLoads("r1", one.loads.host, {"a:1": (5, 0)})), 0.0)
    assert two.hears == {}
    for data in (b"", b"{}", b'{"router": "x", "host": "y", "loads": {"a:1": 7}}'):
        two.gossip.hear(data, 0.0)
    assert two.hears == {}
    two.gossip.hear(encode(RouterLoads("x", "y", {"a:1": (5, 0)})), 0.0)
    assert two.hears == {"a": (5, 0)}
    for host in (one, two):
        await host.stop()
    table.close()


async def test_redis_goes_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossip, "RETRY_SECONDS", 0.05)
    server = RedisServer(tmp_path)
    server.start()
    one, two = Host(server.url, "r1").start(), Host(server.url, "r2").start()
    try:
        with carrying(one.engine("a")):
            await until(lambda: two.hears == {"a": (1, 0)})
            await asyncio.to_thread(server.stop)
            two.loads.look(asyncio.get_running_loop().time() + SILENCE_SECONDS)
            assert two.hears == {}
            await asyncio.to_thread(server.start)
            await until(lambda: two.hears == {"a": (1, 0)})
    finally:
        for host in (one, two):
            await host.stop()
        await asyncio.to_thread(server.stop)
