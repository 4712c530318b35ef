"""Events that come in disorder, late, twice, by replay alone or not at all: what the router tells its clients then. Real ZMQ."""

from __future__ import annotations

import asyncio
import resource
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count, pairwise
from types import SimpleNamespace
from typing import cast

import msgspec
import psutil
import pytest
import pytest_asyncio

from controlplane.fleet.model import Role
from controlplane.fleet.wire import RoutingMode, RoutingPolicy
from frontend_api.formats.openai import Endpoint
from frontend_api.kv import budget, debt, listen, sequence
from frontend_api.kv.contents import Contents
from frontend_api.kv.evidence import Cache, Evidence, Source, TokenSource
from frontend_api.kv.index import Index, chain
from frontend_api.kv.knowledge import Knowledge
from frontend_api.kv.listen import Follower
from frontend_api.kv.sequence import Rank
from tests.conftest import free_port
from tests.frontend_api.client import ask
from tests.frontend_api.conftest import MakeSite, Site, until
from tests.frontend_api.publisher import Publisher
from tests.frontend_api.scripted import USAGE, Heard, chat_reply, unary

SIZE = 16
LINES = [[seed * 1_000 + n for n in range(4 * SIZE)] for seed in range(1, 9)]


class Ids:
    marks = ()

    def at_once(self, endpoint: Endpoint, body: bytes) -> array[int] | None:
        return array("I", msgspec.json.decode(body)["prompt"])


class Scene:
    """A router in front of one engine, whose events the test sends."""

    def __init__(self, site: Site, publisher: Publisher) -> None:
        self.site = site
        self.publisher = publisher
        tokens: TokenSource = Ids()
        self._follower = asyncio.create_task(Follower(site.evidence, lambda folder, key: tokens).run())

    async def close(self) -> None:
        self._follower.cancel()
        await asyncio.gather(self._follower, return_exceptions=True)
        await self.publisher.close()

    async def told(self, line: list[int]) -> tuple[str, str, str]:
        """State, reasons and overlap, as a client hears them."""
        body = {"model": "m", "prompt": line, "max_tokens": 1}
        reply = await ask(self.site.port, "/v1/completions", body, **{"x-tandem-explain": "1"})
        assert reply.status == 200
        headers = reply.headers
        return headers["x-tandem-state"], headers["x-tandem-state-because"], headers["x-tandem-overlap"]

    @property
    def cache(self) -> Cache:
        return self.site.cache

    @property
    def standing(self) -> tuple[str, dict[str, str]]:
        state, reasons = self.cache.standing()
        return state.value, dict(reasons)

    async def stands(self, state: str, why: str | None = None) -> None:
        await until(lambda: self.standing == (state, {"a": why} if why else {}))

    async def heard(self) -> None:
        """A first batch has come live."""
        await self.stands("exact")
        await self.heard_of(LINES[7])

    async def heard_of(self, line: list[int]) -> None:
        """A batch tells of it, and comes."""
        before = self.cache.counts()["batches"]
        while self.cache.counts()["batches"] == before:
            self.publisher.publish(self.publisher.stored(line))
            await asyncio.sleep(0.01)


async def _answer(heard: Heard, writer: asyncio.StreamWriter) -> None:
    """Counts the prompt's tokens as the router does."""
    writer.write(unary(chat_reply(usage={**USAGE, "prompt_tokens": len(heard.body["prompt"])})))


MakeScene = Callable[..., Awaitable[Scene]]


@pytest_asyncio.fixture
async def make_scene(make_site: MakeSite, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MakeScene]:
    monkeypatch.setattr(sequence, "CHECK_SECONDS", 0.2)
    monkeypatch.setattr(listen, "REPLAY_SECONDS", 0.2)
    scenes: list[Scene] = []

    async def make(*, replay: bool = True, through: int = 0) -> Scene:
        publisher = Publisher(size=SIZE)
        site = await make_site()
        scenes.append(Scene(site, publisher))
        address = publisher.replay if replay else ""
        events = f"tcp://127.0.0.1:{through}" if through else publisher.events
        await site.engine("a", Role.AGGREGATED, _answer, block_size=SIZE, events=events, replay=address)
        site.publish(policy=RoutingPolicy(mode=RoutingMode.KV))
        return scenes[-1]

    yield make
    for scene in scenes:
        await scene.close()


async def test_batches_in_disorder_are_put_in_order(make_scene: MakeScene) -> None:
    scene = await make_scene()
    await scene.heard()
    publisher = scene.publisher
    one = publisher.batch(publisher.stored(LINES[0][:32]))
    two = publisher.batch(publisher.stored(LINES[0], 2))
    three = publisher.batch(publisher.removed(LINES[0], 3), publisher.stored(LINES[1]))
    publisher.send(three, one, two, one)
    cache = scene.cache
    await until(lambda: cache.index.entries == 4 + 3 + 4)
    assert await scene.told([*LINES[0], 7]) == ("exact", "-", "48/65")
    assert await scene.told([*LINES[1], 7]) == ("exact", "-", "64/65")


async def test_batches_that_are_late_are_replayed_and_not_taken_twice(make_scene: MakeScene) -> None:
    scene = await make_scene()
    await scene.heard()
    publisher = scene.publisher
    late = [publisher.batch(publisher.stored(LINES[n])) for n in range(4)]
    cache = scene.cache
    await until(lambda: cache.index.entries == 4 + 16)  # found by the check
    publisher.send(*late[-1:])
    publisher.publish(publisher.removed(LINES[0]))
    await until(lambda: cache.index.entries == 4 + 12)
    assert await scene.told([*LINES[3], 7]) == ("exact", "-", "64/65")
    assert await scene.told([*LINES[0], 7]) == ("exact", "-", "0/65")


async def test_a_gap_that_nobody_closes_costs_the_blocks_and_is_told(make_scene: MakeScene) -> None:
    scene = await make_scene()
    await scene.heard()
    publisher = scene.publisher
    publisher.publish(publisher.stored(LINES[0]))
    await until(lambda: scene.cache.index.entries == 8)
    publisher.batch(publisher.removed(LINES[0]))  # is never sent
    publisher.forget(1)
    publisher.buffer.clear()
    entry = publisher.batch(publisher.stored(LINES[1]))
    publisher.send(entry)
    await scene.stands("degraded", "kv_events_gap")
    assert await scene.told([*LINES[0], 7]) == ("degraded", "a=kv_events_gap", "0/65")
    assert await scene.told([*LINES[1], 7]) == ("degraded", "a=kv_events_gap", "64/65")


async def test_without_a_replay_address_a_gap_is_told_at_once(make_scene: MakeScene) -> None:
    scene = await make_scene(replay=False)
    publisher = scene.publisher
    await scene.stands("blind", "not-heard")
    cache = scene.cache
    while not cache.index.entries:
        publisher.publish(publisher.stored(LINES[0]))
        await asyncio.sleep(0.01)
    publisher.batch(publisher.removed(LINES[0]))
    publisher.publish(publisher.stored(LINES[1]))
    await scene.stands("degraded", "kv_events_gap")
    assert (await scene.told([*LINES[0], 7]))[2] == "0/65"


async def test_a_publisher_that_connects_instead_of_binding_is_told(make_scene: MakeScene) -> None:
    scene = await make_scene()
    await scene.stands("exact")
    publisher = scene.publisher
    cache = scene.cache
    for line in LINES[:2]:
        publisher.batch(publisher.stored(line))  # reaches nobody but the replay
        entries = cache.index.entries
        await until(lambda before=entries: cache.index.entries == before + 4)  # type: ignore[misc]
    await scene.stands("degraded", "kv_events_replay_only")
    assert await scene.told([*LINES[1], 7]) == ("degraded", "a=kv_events_replay_only", "64/65")
    publisher.publish(publisher.stored(LINES[2]))
    await scene.stands("exact")


async def test_an_engine_that_answers_and_tells_nothing_makes_it_blind_and_it_stays_so(
    make_scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debt, "OWED_SECONDS", 0.5)
    scene = await make_scene()
    await scene.stands("exact")
    await scene.told([*LINES[0], 7])
    await scene.stands("blind", "kv_events_not_observed")
    for line in LINES * 2:
        assert await scene.told([*line, 7]) == ("blind", "a=kv_events_not_observed", "0/65")
    publisher = scene.publisher
    publisher.publish(publisher.stored(LINES[0]))
    await scene.stands("exact")
    assert (await scene.told([*LINES[0], 7]))[2] == "64/65"


async def test_two_sources_on_one_address_are_told(make_scene: MakeScene) -> None:
    scene = await make_scene()
    await scene.heard()
    scene.publisher.rank = 5
    scene.publisher.publish(scene.publisher.stored(LINES[0]))
    await scene.stands("degraded", "kv_events_ambiguous")


async def test_the_replay_of_another_engine_is_told_and_does_not_keep_the_router_busy(make_scene: MakeScene) -> None:
    """Events come from one engine, the replay answers for another: as if it started anew with every batch."""
    scene = await make_scene()
    other = scene.publisher
    for line in LINES * 60:
        other.batch(other.stored(line))
    await scene.stands("exact")
    own = Publisher((free_port(), other.ports[1] + 1), size=SIZE)
    try:
        scene.site.publish(policy=RoutingPolicy(mode=RoutingMode.ROUND_ROBIN))
        spec = msgspec.structs.replace(scene.site._specs["a"], events=own.events)
        scene.site.add(spec)
        scene.site.publish(policy=RoutingPolicy(mode=RoutingMode.KV))
        before, cache = len(other.asked), scene.cache

        def restarts() -> int:
            own.publish(own.stored(LINES[own.sequence % 8]))
            return cache.counts()["restarts"]

        while restarts() <= sequence.STEADY:
            await asyncio.sleep(0.02)
        known = len(other.asked)
        assert known - before <= 3 * sequence.STEADY + 3
        waits = next(iter(cache.ranks.values()))[0].ask_at
        while time.monotonic() < waits - 0.1:
            restarts()
            await asyncio.sleep(0.01)
            assert len(other.asked) <= known + 1, "it was asked before its time"
    finally:
        await own.close()


async def test_events_that_take_too_much_of_the_router_are_not_followed_for_a_while(
    make_scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "PAUSE_SECONDS", 0.3)
    monkeypatch.setattr(sequence, "CALM_SECONDS", 1.0)
    scene = await make_scene()
    await scene.heard()
    publisher, cache = scene.publisher, scene.cache
    takes = count()
    monkeypatch.setattr(listen, "thread_time", lambda: float(next(takes)))  # a second for each look

    def excessive() -> bool:
        publisher.publish(publisher.stored(LINES[0]))
        return "kv_events_excessive" in scene.standing[1].values()

    await until(excessive)
    monkeypatch.setattr(listen, "thread_time", time.thread_time)
    monkeypatch.setattr(budget, "SHARE", 1e6)  # what it has used comes back soon
    batches = cache.counts()["batches"]
    await until(lambda: cache.counts()["batches"] > batches)  # it is followed again, from the beginning
    await scene.heard_of(LINES[1])
    await until(lambda: scene.standing == ("exact", {}))
    assert (await scene.told([*LINES[1], 7]))[2] == "64/65"


async def test_an_engine_that_starts_again_starts_empty(make_scene: MakeScene) -> None:
    scene = await make_scene()
    await scene.heard()
    publisher = scene.publisher
    publisher.publish(publisher.stored(LINES[0]))
    await until(lambda: scene.cache.index.entries == 8)
    batches = publisher.sequence
    await publisher.close()
    scene.publisher = again = Publisher(publisher.ports, size=SIZE)
    for line in LINES[2:6]:
        again.publish(again.stored(line))
    cache = scene.cache
    assert cache.engines
    await until(lambda: cache.counts()["restarts"] == 1 and scene.standing == ("exact", {}))
    await until(lambda: len(again.buffer) == cache.ranks[cache.engines[0]][0].batches - batches)
    assert (await scene.told([*LINES[0], 7]))[2] == "0/65"
    assert (await scene.told([*LINES[5], 7]))[2] == "64/65"


@pytest.mark.parametrize(
    "frames",
    [
        (b"", b"kv", bytes(8), b"the first batch, and again"),
        (b"", b"kv", b"a number that no machine counts to", b""),
        (b"x",),
    ],
)
async def test_a_replay_that_is_none_keeps_nobody_waiting(make_scene: MakeScene, frames: tuple[bytes, ...]) -> None:
    scene = await make_scene()
    await scene.heard()
    publisher = scene.publisher
    publisher.publish(publisher.stored(LINES[1]))
    publisher.says = frames
    await scene.stands("degraded", "kv_events_silent")
    before = scene.cache.index.entries
    publisher.publish(publisher.stored(LINES[0]))
    await until(lambda: scene.cache.index.entries == before + 4)
    publisher.says = None
    await scene.stands("exact")
    assert await scene.told([*LINES[0], 7]) == ("exact", "-", "64/65")


async def test_another_process_that_goes_on_with_the_next_number_starts_empty(
    make_scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = await make_scene()
    await scene.heard()
    monkeypatch.setattr(sequence, "CHECK_SECONDS", 60.0)
    cache, publisher = scene.cache, scene.publisher
    publisher.publish(publisher.stored(LINES[0]))
    await until(lambda: cache.index.entries == 8)
    reached, ports = publisher.sequence, publisher.ports
    await publisher.close()
    scene.publisher = again = Publisher(ports, size=SIZE)
    again.buffer = [(n, again.batch(again.stored(LINES[1]))[1]) for n in range(reached)]  # before anybody is connected
    again.sequence = reached
    await again.followed()
    again.publish(again.stored(LINES[2]))
    there = chain(array("I", LINES[2]), SIZE)
    await until(lambda: list(cache.index.match(there).values()) == [4])
    assert (scene.standing, cache.counts()["restarts"]) == (("exact", {}), 1)
    assert (await scene.told([*LINES[0], 7]))[2] == "0/65"
    assert (await scene.told([*LINES[2], 7]))[2] == "64/65"


async def test_without_a_replay_address_nothing_outlives_the_connection(make_scene: MakeScene) -> None:
    scene = await make_scene(replay=False)
    await scene.stands("blind", "not-heard")
    await scene.heard_of(LINES[0])
    await scene.publisher.close()  # whoever comes in its place may publish nothing
    await scene.stands("blind", "not-heard")
    assert (await scene.told([*LINES[0], 7]))[2] == "0/65"


async def test_without_a_replay_address_nothing_is_taken_that_came_before_the_connection_ended(
    make_scene: MakeScene,
) -> None:
    scene = await make_scene(replay=False)
    await scene.stands("blind", "not-heard")
    publisher = scene.publisher
    await scene.heard_of(LINES[0])
    publisher.publish(publisher.stored(LINES[1]))
    time.sleep(0.1)  # noqa: ASYNC251 - nobody looks until the end has come, too
    publisher.end()
    time.sleep(0.1)  # noqa: ASYNC251
    await publisher.close()
    await scene.stands("blind", "not-heard")
    assert (await scene.told([*LINES[1], 7]))[2] == "0/65"
    scene.publisher = Publisher(publisher.ports, size=SIZE)
    await scene.heard_of(LINES[2])
    assert (await scene.told([*LINES[2], 7]))[2] == "64/65"


async def test_a_large_fleet_is_followed_and_nothing_stays_open() -> None:
    """A context of ZMQ has room for 1,023 sockets, unless it is told otherwise."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # as the router does
    before = psutil.Process().num_fds()
    publisher, index = Publisher(size=SIZE), Index()
    sources = {
        Source("m", f"a{n}", 1, "", 0, publisher.events, publisher.replay): Rank(
            Contents(index, block_size=SIZE), replays=True, now=0.0
        )
        for n in range(400)
    }
    evidence = SimpleNamespace(sources=lambda: sources, caches={}, tick=lambda now: None)
    follower = asyncio.create_task(Follower(cast(Evidence, evidence), lambda folder, key: Ids()).run())
    try:
        await until(lambda: all(rank.knowledge is Knowledge.COMPLETE for rank in sources.values()))
    finally:
        follower.cancel()
        await asyncio.gather(follower, return_exceptions=True)
        await publisher.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    await until(lambda: psutil.Process().num_fds() <= before)


async def test_a_connection_that_nobody_serves_any_more_is_made_anew(
    make_scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "HEARTBEAT_SECONDS", 0.2)
    connections = vanished = 0

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        while data := await reader.read(65_536):
            if number > vanished:
                writer.write(data)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        back, there = await asyncio.open_connection("127.0.0.1", scene.publisher.ports[0])
        await asyncio.gather(pass_on(reader, there, connections), pass_on(back, writer, connections))

    port = free_port()
    server = await asyncio.start_server(serve, "127.0.0.1", port)
    scene = await make_scene(through=port)
    await scene.heard()
    vanished = connections
    cache, publisher = scene.cache, scene.publisher
    while connections == vanished:
        await asyncio.sleep(0.05)
    publisher.answers = False  # from now on only live batches come
    before = cache.counts()["batches"]
    while cache.counts()["batches"] == before:
        publisher.publish(publisher.stored(LINES[0]))
        await asyncio.sleep(0.05)
    server.close()


async def test_a_batch_larger_than_any_real_one_is_not_taken_and_that_is_told(
    make_scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "MOST_BYTES", 10_000)
    scene = await make_scene()
    await scene.heard()
    publisher = scene.publisher
    taken = scene.cache.counts()["stored"]
    publisher.publish(publisher.stored([7] * 50_000))
    await scene.stands("degraded", "kv_events_silent")  # its replay brings no more either
    assert scene.cache.counts()["stored"] < taken + 3_000
    del publisher.buffer[-1]
    publisher.publish(publisher.stored(LINES[0]))
    await scene.stands("degraded", "kv_events_gap")
    assert await scene.told([*LINES[0], 7]) == ("degraded", "a=kv_events_gap", "64/65")


async def test_other_tasks_get_their_turn_while_batches_come(
    make_scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "TURN_SECONDS", 0.0)
    scene = await make_scene()
    await scene.heard()
    publisher = scene.publisher
    turns: list[int] = []

    async def look() -> None:
        while True:
            turns.append(scene.cache.counts()["batches"])
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    before = scene.cache.counts()["batches"]
    publisher.send(*[publisher.batch(publisher.stored(LINES[n % 7])) for n in range(60)])
    await until(lambda: scene.cache.counts()["batches"] >= before + 60)
    looking.cancel()
    steps = [after - earlier for earlier, after in pairwise(turns)]
    assert max(steps) == 1


async def test_batches_that_flow_are_looked_for_together_and_a_lone_one_at_once(
    make_scene: MakeScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[bool] = []
    tell = listen._Heard.tell

    async def told(heard: listen._Heard) -> bool:
        looks.append(await tell(heard))
        return looks[-1]

    monkeypatch.setattr(listen._Heard, "tell", told)
    monkeypatch.setattr(listen, "LOOK_SECONDS", 0.3)  # a machine that is busy sends them more slowly
    scene = await make_scene()
    await scene.heard()
    publisher, cache = scene.publisher, scene.cache
    for _ in range(2):  # it flows, is quiet, and flows again
        before = cache.counts()["batches"]
        looks.clear()
        for n in range(200):
            publisher.publish(publisher.stored(LINES[n % 7]))
            await asyncio.sleep(0.002)
        await until(lambda before=before: cache.counts()["batches"] == before + 200)
        assert len(looks) < 100
        await until(lambda: looks[-1] is False)
        looks.clear()
    monkeypatch.setattr(listen, "LOOK_SECONDS", 1_000.0)  # who sleeps now hears nothing more in this test
    before = cache.counts()["batches"]
    publisher.publish(publisher.stored(LINES[0]))
    await until(lambda: cache.counts()["batches"] == before + 1)
