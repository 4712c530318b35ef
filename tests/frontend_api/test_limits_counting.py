"""The sliding window: the same rules in Python and in the script that Redis runs, and a router's lease there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import redis.asyncio as redis
from hypothesis import given
from hypothesis import strategies as st

from frontend_api.limits import counter
from frontend_api.limits.counter import Forgotten, Line, RedisCounter
from frontend_api.limits.windows import SPAN, Bound, Caps, Window
from tests.conftest import RedisServer


@pytest.mark.parametrize(
    ("caps", "held", "tokens", "bound"),
    [
        (Caps(3, 0, 0), 9, 9, Bound.NONE),
        (Caps(2, 0, 0), 0, 0, Bound.REQUESTS),
        (Caps(0, 100, 0), 0, 80, Bound.NONE),
        (Caps(0, 100, 0), 0, 81, Bound.TOKENS),
        (Caps(0, 0, 2), 1, 0, Bound.NONE),
        (Caps(0, 0, 2), 2, 0, Bound.CONCURRENCY),
        (Caps(2, 100, 1), 1, 81, Bound.REQUESTS),
        (Caps(0, 0, 0), 99, 10**9, Bound.NONE),
    ],
)
def test_what_is_in_the_window_counts(caps: Caps, held: int, tokens: int, bound: Bound) -> None:
    window = Window()
    window.add(1000, 2, 20)
    assert window.judge(caps, held, tokens, 1000.5).bound is bound


def test_room_comes_back_when_a_second_is_wholly_more_than_a_minute_old() -> None:
    window = Window()
    window.add(1000, 1, 30)
    window.add(1010, 1, 50)
    judged = window.judge(Caps(2, 0, 0), 0, 0, 1020.25)
    assert (judged.bound, judged.wait) == (Bound.REQUESTS, 1000 + SPAN + 1 - 1020.25)
    assert window.judge(Caps(2, 0, 0), 0, 0, 1020.25 + judged.wait - 0.01).bound is Bound.REQUESTS
    assert window.judge(Caps(2, 0, 0), 0, 0, 1020.25 + judged.wait).bound is Bound.NONE
    tokens = window.judge(Caps(0, 60, 0), 0, 60, 1061.5)
    assert (tokens.bound, tokens.wait) == (Bound.TOKENS, 1010 + SPAN + 1 - 1061.5)
    assert window.judge(Caps(0, 60, 0), 0, 61, 1061.5).wait == SPAN + 1  # larger than everything


def test_a_clock_that_was_set_back_does_not_lock_anybody_out() -> None:
    window = Window()
    window.add(5000, 2, 10)
    assert window.judge(Caps(2, 0, 0), 0, 0, 1000.0).bound is Bound.NONE
    assert not window


def test_no_second_gives_back_more_than_it_holds() -> None:
    window = Window()
    window.add(1000, 1, 10)
    window.add(1001, 1, 10)
    window.add(1000, -5, -50)
    assert (window.requests, window.tokens) == (1, 10)


@given(
    limit=st.integers(1, 8),
    steps=st.lists(st.tuples(st.floats(0, 20), st.integers(1, 5)), max_size=60),
)
def test_in_no_minute_more_than_the_limit_is_granted(limit: int, steps: list[tuple[float, int]]) -> None:
    window, now, granted = Window(), 1000.0, []
    for pause, burst in steps:
        now += pause
        for _ in range(burst):
            if window.judge(Caps(limit, 0, 0), 0, 0, now).bound is Bound.NONE:
                window.add(int(now), 1, 0)
                granted.append(now)
    for first in granted:
        assert sum(first <= at < first + 60 for at in granted) <= limit


@pytest.mark.parametrize(
    ("caps", "of", "share"),
    [
        (Caps(10, 1000, 4), 1, Caps(10, 1000, 4)),
        (Caps(10, 1000, 4), 4, Caps(2, 250, 1)),
        (Caps(3, 0, 1), 4, Caps(1, 0, 1)),
    ],
)
def test_shares(caps: Caps, of: int, share: Caps) -> None:
    assert caps.share(of) == share


# ---- the same in Redis


@pytest_asyncio.fixture
async def client(redis_server: RedisServer) -> AsyncIterator[redis.Redis]:
    client = redis.Redis.from_url(redis_server.url)
    await client.flushall()
    yield client
    await client.aclose()


class Twice:
    """One key, counted in Redis and by a `Window`, at seconds of the test's choosing: the script's clock is replaced."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.window = Window()
        script = counter.SCRIPT.replace("redis.call('TIME')", "{ARGV[2], ARGV[3]}")
        assert script != counter.SCRIPT
        self.script = client.register_script(script)

    async def ask(self, now: float, line: Line) -> list[float]:
        second = int(now)
        batch = counter._encode(("r", 10, "", [line], 0))
        answer = await self.script(args=[batch, second, round((now - second) * 1e6)], client=self.client)
        return counter._decode(answer).lines[0]

    def expected(self, now: float, line: Line) -> list[float]:
        window, found, held = self.window, [], line.held
        window.slide(now)
        for second, requests, tokens in line.owed:
            if second >= int(now) - SPAN:
                window.add(min(second, int(now)), requests, tokens)
        for tokens in line.asks:
            bound, wait = window.judge(line.caps, held, tokens, now)
            if bound is Bound.NONE:
                window.add(int(now), 1, tokens)
                held += 1
            found += [bound.value, wait, window.requests, window.tokens]
        return [window.last, window.requests, window.tokens, *found]


BATCHES = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.25, 1.5, 7.0, 30.0, 61.0, 200.0]),
        st.lists(st.tuples(st.integers(0, 65), st.integers(-3, 3), st.integers(-40, 40)), max_size=3),
        st.lists(st.integers(0, 40), max_size=4),
    ),
    max_size=12,
)


@pytest.mark.parametrize("caps", [Caps(5, 0, 0), Caps(0, 100, 0), Caps(6, 90, 3)])
@given(batches=BATCHES)
def test_redis_counts_as_the_window_does(
    caps: Caps, batches: list[tuple[float, list[tuple[int, int, int]], list[int]]], redis_server: RedisServer
) -> None:
    async def compare() -> None:
        client = redis.Redis.from_url(redis_server.url)
        try:
            await client.flushall()
            twice, now = Twice(client), 1_700_000_000.0
            for pause, owed, asks in batches:
                now += pause
                line = Line("k", *caps, 0, [(int(now) - ago, r, t) for ago, r, t in owed], asks)
                assert await twice.ask(now, line) == pytest.approx(twice.expected(now, line))
        finally:
            await client.aclose()

    asyncio.run(compare())


def line(key: str = "k", *, requests: int = 0, held_max: int = 0, held: int = 0, asks: int = 0) -> Line:
    return Line(key, requests, 0, held_max, held, [], [0] * asks)


async def bounds(router: RedisCounter, *lines: Line) -> list[list[Bound]]:
    reply = await router.ask(list(lines))
    return [[Bound(int(bound)) for bound in found[3::4]] for found in reply.lines]


async def test_requests_at_a_time_over_routers(client: redis.Redis) -> None:
    one, two = RedisCounter(client, "one"), RedisCounter(client, "two")
    assert await bounds(one, line(held_max=3, asks=2)) == [[Bound.NONE, Bound.NONE]]
    assert await bounds(two, line(held_max=3, asks=2)) == [[Bound.NONE, Bound.CONCURRENCY]]
    # The whole number is told: saying it twice changes nothing.
    for _ in range(3):
        assert await bounds(one, line(held_max=3, held=1)) == [[]]
    assert await bounds(two, line(held_max=3, held=1, asks=2)) == [[Bound.NONE, Bound.CONCURRENCY]]
    reply = await one.ask([line(held_max=3, held=0)])
    assert reply.routers == 2
    assert await bounds(two, line(held_max=3, held=2, asks=2)) == [[Bound.NONE, Bound.CONCURRENCY]]
    await one.drop()
    await two.drop()


async def test_a_limit_that_is_set_later_counts_what_runs_already(client: redis.Redis) -> None:
    one, two = RedisCounter(client, "one"), RedisCounter(client, "two")
    assert await bounds(one, line(requests=9, asks=2)) == [[Bound.NONE, Bound.NONE]]
    assert await bounds(two, line(held_max=3, asks=2)) == [[Bound.NONE, Bound.CONCURRENCY]]
    # And one that is set again counts nothing that has ended meanwhile.
    await bounds(one, line(requests=9, held=0))
    assert await bounds(two, line(held_max=3, held=1, asks=3)) == [[Bound.NONE, Bound.NONE, Bound.CONCURRENCY]]
    await one.drop()
    await two.drop()


async def test_a_router_that_died_holds_nothing_when_its_lease_is_over(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, alive = RedisCounter(client, "dead"), RedisCounter(client, "alive")
    monkeypatch.setattr(counter, "LEASE", 1)
    assert await bounds(dead, line(held_max=1, asks=1)) == [[Bound.NONE]]
    monkeypatch.setattr(counter, "LEASE", 60)
    found: list[Any] = []
    async with asyncio.timeout(10):
        while found != [[Bound.NONE]]:
            found = await bounds(alive, line(held_max=1, asks=1))
            assert found in ([[Bound.CONCURRENCY]], [[Bound.NONE]])
            await asyncio.sleep(0.05)
    (held,) = await client.keys("tandem:limits:held:k:*")
    assert await client.hkeys(held) == [b"alive"]  # type: ignore[misc]
    await dead.drop()
    await alive.drop()


async def test_a_router_that_ends_is_gone_at_once(client: redis.Redis) -> None:
    one, two = RedisCounter(client, "one"), RedisCounter(client, "two")
    await bounds(one, line(held_max=1, asks=1))
    await one.ask([], last=True)
    assert await bounds(two, line(held_max=1, asks=1)) == [[Bound.NONE]]
    assert (await two.ask([])).routers == 1
    await one.drop()
    await two.drop()


async def test_a_redis_that_lost_everything_goes_on(client: redis.Redis) -> None:
    router = RedisCounter(client, "one")
    assert await bounds(router, line(requests=1, asks=2)) == [[Bound.NONE, Bound.REQUESTS]]
    await client.flushall()
    await client.script_flush()
    with pytest.raises(Forgotten):
        await bounds(router, line(requests=1, asks=2))
    assert await client.keys("tandem:limits:window:*") == []
    assert await bounds(router, line(requests=1, asks=2)) == [[Bound.NONE, Bound.REQUESTS]]
    await router.drop()


async def test_a_redis_with_older_data_is_told_again(client: redis.Redis) -> None:
    one, two = RedisCounter(client, "one"), RedisCounter(client, "two")
    await bounds(one, line(requests=3, held_max=9, asks=1))
    older = {name: await client.dump(name) for name in await client.keys("tandem:limits:*")}
    await bounds(two, line(requests=3, held_max=9, asks=1))
    await client.flushall()
    for name, data in older.items():
        await client.restore(name, 0, data)
    with pytest.raises(Forgotten):
        await bounds(two, line(requests=3, asks=1))
    with pytest.raises(Forgotten):
        await bounds(one, line(requests=3, asks=1))
    assert await bounds(one, line(requests=3, held_max=1, asks=4)) == [[Bound.NONE] + [Bound.CONCURRENCY] * 3], (
        "nothing older counts"
    )
    await one.drop()
    await two.drop()


async def test_many_that_run_into_a_limit_at_once_cost_redis_no_more_than_one(client: redis.Redis) -> None:
    router = RedisCounter(client, "one")
    reply = await router.ask([Line("k", 0, 100, 0, 0, [], [100])])

    async def reads() -> int:
        return int((await client.info("commandstats"))["cmdstat_hmget"]["calls"])

    before = await reads()
    refused = await router.ask([Line("k", 0, 100, 0, 0, [(int(reply.now) - 50, 0, 1)], [50] * 1000)])
    assert refused.lines[0][3::4] == [Bound.TOKENS] * 1000
    assert await reads() - before < 10
    await router.drop()


async def test_what_is_counted_does_not_stay_in_redis(client: redis.Redis) -> None:
    router = RedisCounter(client, "one")
    await bounds(router, line(requests=9, held_max=9, asks=2), line("other", requests=1, asks=1))
    keys = [key async for key in client.scan_iter("tandem:limits:*")]
    assert len(keys) == 6
    for key in keys:
        assert 0 < await client.ttl(key) <= 3600
    await router.drop()
