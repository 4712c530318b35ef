"""Chance against an oracle: several routers count in one real Redis while clocks differ, answers are lost, routers die, and Redis
goes, comes back, forgets, and comes back with older data. The clock is the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextvars import ContextVar, copy_context
from random import Random

import pytest
import pytest_asyncio
import redis.asyncio as redis
from redis.exceptions import ConnectionError as RedisConnectionError

from controlplane.fleet.wire import SnapshotKey
from frontend_api.limits import counter, reserve
from frontend_api.limits.answers import Refusal
from frontend_api.limits.charges import Estimate
from frontend_api.limits.counter import Line, RedisCounter, Reply
from frontend_api.limits.reserve import KeyLimits
from frontend_api.limits.use import Hold
from tests.conftest import RedisServer

KEYS = [
    SnapshotKey(id="requests", digest="1", requests_per_minute=7),
    SnapshotKey(id="tokens", digest="2", tokens_per_minute=200),
    SnapshotKey(id="busy", digest="3", concurrency=4),
    SnapshotKey(id="all", digest="4", requests_per_minute=9, tokens_per_minute=300, concurrency=3),
]
OFF: ContextVar[float] = ContextVar("OFF", default=0.0)
"""Seconds by which a router's host has another time."""


class World:
    """Time, and a Redis that may be out of reach."""

    def __init__(self, client: redis.Redis, chance: Random) -> None:
        self.client = client
        self.chance = chance
        self.now = 1_700_000_000.0
        self.away = self.forgot = False
        self.leaving = 0.1
        self.saved: dict[bytes, bytes] = {}
        self.routers = [Router(self) for _ in range(chance.randint(1, 3))]
        self.asked: list[Asked] = []
        self.wrong: list[tuple[str, int, int, int]] = []
        """Granted although by all that is known it might not be: key, requests, tokens, and requests at a time."""

    async def wait(self, seconds: float) -> None:
        while seconds > 0:  # every router lets its heart beat
            self.now += min(seconds, reserve.BEAT_SECONDS)
            seconds -= reserve.BEAT_SECONDS
            micros = round(self.now % 1 * 1e6)
            await self.client.hset("clock", mapping={"s": int(self.now), "u": micros})  # type: ignore[misc]
            for router in self.chance.sample(self.routers, len(self.routers)):
                router.context.run(router.limits.beat)
                await router.tell()

    async def forget(self) -> None:
        await self.client.flushall()
        self.forgot = True
        await self.wait(0.001)
        self.forgot = False

    async def save(self) -> None:
        names = [name async for name in self.client.scan_iter("tandem:*")]
        self.saved = {name: await self.client.dump(name) for name in names}

    async def restore(self) -> None:
        names = [name async for name in self.client.scan_iter("tandem:*")]
        if names:
            await self.client.delete(*names)
        for name, data in self.saved.items():
            await self.client.restore(name, 0, data)
        self.forgot = True
        for _ in range(2):  # a router that has not called since the data was saved learns of it from the others
            await self.wait(0.001)
        self.forgot = False

    def check(self, key: SnapshotKey) -> None:
        """One more request was granted. Nobody knows what the dead had granted, without Redis each router has its share, and one that has
        forgotten has to be told by all."""
        if self.forgot or any(router.limits.away for router in self.routers):
            return
        granted = [a for a in self.asked if a.key is key and a.granted_at and a.router in self.routers]
        minute = [a for a in granted if a.granted_at > self.now - 60]
        found = sum(a.counts for a in minute), sum(a.tokens for a in minute), sum(a.runs for a in granted)
        caps = key.requests_per_minute, key.tokens_per_minute, key.concurrency
        if any(cap is not None and have > cap for have, cap in zip(found, caps, strict=True)):
            self.wrong.append((key.id, *found))


class Router:
    def __init__(self, world: World) -> None:
        self.world = world
        self.context = copy_context()
        self.context.run(OFF.set, world.chance.uniform(-5, 5))
        self.counter = RedisCounter(world.client, f"{id(self)}-{world.now}")
        self.limits = KeyLimits(self)
        self.loses = False

    async def ask(self, lines: list[Line], *, last: bool = False) -> Reply:
        if self.world.away:
            raise RedisConnectionError("away")
        reply = await self.counter.ask(lines, last=last)
        for asked in self.world.asked:  # clients leave meanwhile
            waits = asked.router is self and not asked.over and not asked.granted_at
            if waits and self.world.chance.random() < self.world.leaving:
                asyncio.get_running_loop().call_soon(asked.end)
        await asyncio.sleep(0)
        if self.loses:
            self.loses = False
            raise RedisConnectionError("in the middle of the answer")
        return reply

    async def drop(self) -> None:
        await self.counter.drop()

    async def tell(self) -> None:
        for _ in range(2):  # once more where Redis had forgotten
            await asyncio.create_task(self.limits.tell(), context=self.context)


class Asked:
    """A request."""

    def __init__(self, router: Router, key: SnapshotKey, tokens: int) -> None:
        self.router, self.key, self.tokens = router, key, tokens
        self.granted_at = 0.0
        self.refused = self.over = False
        self.counts = True
        router.world.asked.append(self)
        self.hold = Hold(key, Estimate(tokens, 0, tokens), self.answered)
        router.context.run(router.limits.reserve, self.hold)

    def answered(self, refusal: Refusal | None) -> None:
        if refusal is not None:
            self.refused = self.over = True
        else:
            self.granted_at = self.router.world.now
            self.router.world.check(self.key)

    @property
    def runs(self) -> bool:
        return bool(self.granted_at) and not self.over

    def end(self) -> None:
        """Well, badly or before it began."""
        chance = self.router.world.chance
        self.over = True
        self.counts = bool(self.granted_at) and chance.random() < 0.8
        spent = chance.choice([0, self.tokens, self.tokens + 7]) if self.counts else 0
        self.router.context.run(self.router.limits.settle, self.hold, spent, counts=self.counts)
        self.tokens = min(self.tokens, spent)  # who needs more than it reserved has it


@pytest_asyncio.fixture
async def client(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[redis.Redis]:
    script = counter.SCRIPT.replace("redis.call('TIME')", "redis.call('HMGET', 'clock', 's', 'u')")
    assert script != counter.SCRIPT
    monkeypatch.setattr(counter, "SCRIPT", script)
    client = redis.Redis.from_url(redis_server.url)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.mark.parametrize("seed", range(10))
async def test_no_key_gets_more_than_it_may_and_none_is_locked_out(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance = Random(seed)
    world = World(client, chance)
    monkeypatch.setattr(reserve, "monotonic", lambda: world.now + OFF.get())
    await world.wait(0.1)
    for _ in range(200):
        router = chance.choice(world.routers)
        running = [asked for asked in world.asked if asked.router is router and not asked.over]
        match chance.choices(
            ["ask", "end", "tell", "wait", "away", "lose", "die", "forget", "save", "restore"],
            [40, 25, 20, 15, 2, 2, 1, 2, 2, 2],
        )[0]:
            case "ask":
                for _ in range(chance.choice([1, 1, 5])):
                    Asked(chance.choice(world.routers), chance.choice(KEYS), chance.choice([0, 5, 40]))
            case "end" if running:
                chance.choice(running).end()
            case "tell":
                await router.tell()
            case "wait":
                await world.wait(chance.choice([0.01, 0.3, 1.0, 5.0, 5.0, 59.0, 61.0]))
            case "away":
                world.away = not world.away
            case "lose":
                router.loses = True
            case "die" if not world.away:
                await router.drop()
                world.routers[world.routers.index(router)] = another = Router(world)
                await another.tell()  # until then it knows no time but its host's
            case "forget":
                await world.forget()
            case "save":
                await world.save()
            case "restore":
                await world.restore()

    assert not world.wrong
    world.away, world.leaving = False, 0.0
    for router in world.routers:
        router.loses = False
    for asked in world.asked:
        if asked.router in world.routers and not asked.over:
            asked.end()
    await world.wait(61.5)
    last = [Asked(chance.choice(world.routers), key, 0) for key in KEYS for _ in range(3)]
    await world.wait(0.1)
    assert all(asked.runs for asked in last), "all of it is there again"
    for asked in last:
        asked.end()
    await world.wait(0.1)
    (born,) = await client.hmget("tandem:limits:calls", "born")  # type: ignore[misc]
    held = [key async for key in client.scan_iter(b"tandem:limits:held:*:" + born)]
    alive = {name async for name, _ in client.zscan_iter("tandem:limits:routers")}
    assert not [name for key in held for name in await client.hkeys(key) if name in alive]  # type: ignore[misc]
    for router in world.routers:
        await router.drop()
