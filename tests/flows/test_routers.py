"""Router programs that are ended, killed and started again, or stand on two hosts: what they say they know of the KV is there.

The engines are stand-ins; where batches must be lost or forgotten, their events are sent by the test.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest_asyncio
import redis

from controlplane.fleet.model import Role
from controlplane.fleet.wire import (
    SNAPSHOT_KEY,
    FleetSnapshot,
    RoutingMode,
    RoutingPolicy,
    SnapshotDeployment,
    SnapshotEngine,
    encode,
)
from tests.frontend_api.client import Client, Reply, ask
from tests.frontend_api.publisher import Publisher
from tests.frontend_api.test_kv_standins import BLOCK, Standin
from tests.frontend_api.test_process import Program
from tests.frontend_api.tiny_model import write_model

LINES = [[10 + (seed * 7 + n * n) % 300 for n in range(4 * BLOCK)] for seed in range(1, 9)]
"""Prompts, none the beginning of another."""


class Scene:
    """One engine that answers, publishers that speak for it, and the router programs in front."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = write_model(folder / "model")
        self.engine = Standin("a", Role.AGGREGATED, "--tokenizer", str(self.model))
        self.publishers: list[Publisher] = []
        self.programs: list[Program] = []

    def publisher(self, rank: int = 0, ports: tuple[int, int] | None = None) -> Publisher:
        self.publishers.append(Publisher(ports, rank=rank, size=BLOCK))
        return self.publishers[-1]

    async def router(self, **engines: tuple[Publisher, int]) -> Program:
        """In front of engines by these names: who publishes for each, and its ranks."""
        specs = tuple(
            self.engine.spec(id=name, name=name, events=publisher.events, replay=publisher.replay, ranks=ranks)
            for name, (publisher, ranks) in engines.items()
        )
        (self.folder / "fleet.json").write_bytes(snapshot(RoutingPolicy(mode=RoutingMode.KV), *specs, model=self.model))
        self.programs.append(Program(self.folder, "--no-auth", "--fleet", str(self.folder / "fleet.json")))
        return await self.programs[-1].up()

    async def told(self, line: list[int]) -> tuple[str, str, str]:
        """State, reasons and overlap, as a client hears them."""
        body = {"model": "m", "prompt": [*line, 7], "max_tokens": 1}
        reply = await ask(self.programs[-1].port, "/v1/completions", body, **{"x-tandem-explain": "1"})
        assert reply.status == 200, reply.body
        headers = reply.headers
        return headers["x-tandem-state"], headers["x-tandem-state-because"], headers["x-tandem-overlap"]

    async def tells(self, line: list[int], state: str, because: str, overlap: str) -> None:
        said = None
        try:
            async with asyncio.timeout(60):
                while (said := await self.told(line)) != (state, because, overlap):
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"still {said}") from None

    async def close(self) -> None:
        for program in self.programs:
            program.kill()
        for publisher in self.publishers:
            await publisher.close()
        await self.engine.stop()


def snapshot(policy: RoutingPolicy, *engines: SnapshotEngine, model: Path | str = "") -> bytes:
    deployment = SnapshotDeployment(
        name="d", served_name="m", routing=policy, engines=engines, tokenizer=str(model) if model else ""
    )
    return encode(FleetSnapshot(version=1, deployments=(deployment,)))


@pytest_asyncio.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    found = Scene(tmp_path)
    await found.engine.start()
    yield found
    await found.close()


async def test_a_saved_index_is_gone_on_with_as_far_as_the_replay_proves_it(scene: Scene) -> None:
    engine = scene.publisher()
    for line in LINES[:4]:
        engine.batch(engine.stored(line))
    router = await scene.router(a=(engine, 1))
    await scene.tells(LINES[3], "exact", "-", "64/65")
    router.process.terminate()
    assert await router.ended() == 0

    engine.batch(engine.removed(LINES[0], 2))  # while there is no router
    engine.batch(engine.stored(LINES[4]))
    engine.forget(3)  # its replay begins with the last batch that the file knows
    router = await scene.router(a=(engine, 1))
    await scene.tells(LINES[4], "exact", "-", "64/65")
    assert await scene.told(LINES[3]) == ("exact", "-", "64/65")
    assert await scene.told(LINES[0]) == ("exact", "-", "32/65")

    router.kill()  # without a word; the file is older now than the replay
    engine.batch(engine.removed(LINES[3]))
    engine.batch(engine.stored(LINES[5]))
    engine.forget(1)
    await scene.router(a=(engine, 1))
    await scene.tells(LINES[5], "approximate", "a=known-in-part", "64/65")
    assert (await scene.told(LINES[3]))[2] == "0/65"
    assert (await scene.told(LINES[4]))[2] == "0/65"  # is there, and not known


async def test_ranks_groups_and_tiers_each_have_their_say(scene: Scene) -> None:
    ranks = [scene.publisher()]
    ranks.append(scene.publisher(1, ranks[0].ports))
    hybrid, tiered = scene.publisher(), scene.publisher()
    engines = {"ranks": (ranks[0], 2), "hybrid": (hybrid, 1), "tiered": (tiered, 1)}
    ranks[0].batch(ranks[0].stored(LINES[0][:32]))
    ranks[1].batch(ranks[1].stored(LINES[0]), ranks[1].stored(LINES[1]))
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    hybrid.batch(hybrid.stored(LINES[2]), {**hybrid.stored(LINES[3]), **window})
    tiered.batch(tiered.stored(LINES[4]), {**tiered.stored(LINES[5]), "medium": "CPU"})
    because = "ranks=kv_rank_unknown; hybrid=kv_other_cache_groups; tiered=kv_in_lower_tier"
    router = await scene.router(**engines)
    await scene.tells(LINES[5], "approximate", because, "0/65")  # of a tier that is not counted
    for line, overlap in ((0, "64/65"), (1, "64/65"), (2, "64/65"), (3, "0/65"), (4, "64/65")):
        assert await scene.told(LINES[line]) == ("approximate", because, overlap)
    router.process.terminate()
    assert await router.ended() == 0

    await ranks[1].close()  # this rank begins anew while there is no router, the other one goes on
    ranks[1] = scene.publisher(1, ranks[0].ports)
    ranks[1].batch(ranks[1].stored(LINES[6]))
    for publisher in (ranks[0], hybrid, tiered):
        publisher.forget(1)
    await scene.router(**engines)
    await scene.tells(LINES[6], "approximate", because, "64/65")
    for line, overlap in ((0, "32/65"), (1, "0/65"), (2, "64/65"), (4, "64/65")):
        assert await scene.told(LINES[line]) == ("approximate", because, overlap)


Hold = Callable[[int, int], Awaitable[Counter[str]]]


@pytest_asyncio.fixture
async def hold() -> AsyncIterator[Hold]:
    """Streams through a router that last as long as the test: how many came to each engine."""
    async with AsyncExitStack() as stack:

        async def one(port: int) -> str:
            client = await stack.enter_async_context(Client(port))
            body = {"model": "m", "prompt": "go on", "max_tokens": 5_000, "ignore_eos": True, "stream": True}
            client.post("/v1/completions", body, x_tandem_explain="1")
            return (await client.head()).headers["x-tandem-decode"]

        async def many(port: int, number: int) -> Counter[str]:
            return Counter(await asyncio.gather(*(one(port) for _ in range(number))))

        yield many


async def test_routers_of_two_hosts_share_their_loads_and_do_not_herd(
    tmp_path: Path, redis_url: str, hold: Hold
) -> None:
    engines = [Standin(name, Role.AGGREGATED, "--itl-ms", "50") for name in ("a", "b")]
    programs: list[Program] = []
    try:
        await asyncio.gather(*(engine.start() for engine in engines))
        specs = [engine.spec(events="", replay="") for engine in engines]
        for name, there in (("one", specs[:1]), ("two", specs)):
            redis.Redis.from_url(redis_url).set(SNAPSHOT_KEY, snapshot(RoutingPolicy(), *there))
            (tmp_path / name).mkdir()
            programs.append(await Program(tmp_path / name, "--no-auth", REDIS_URL=redis_url).up())
            if name == "one":
                assert await hold(programs[0].port, 8) == {"a": 8}
        port = programs[1].port
        async with asyncio.timeout(60):  # by turns, until what the first one has is heard of
            while {await short(port) for _ in range(3)} != {"b"}:
                await asyncio.sleep(0.1)
        assert await hold(port, 8) == {"b": 8}
        children = programs[0].children
        programs[0].kill()
        for pid in children:  # which would finish their streams first
            os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            while {await short(port) for _ in range(3)} != {"a"}:
                await asyncio.sleep(0.1)
        assert await hold(port, 8) == {"a": 8}
    finally:
        for program in programs:
            program.kill()
        for engine in engines:
            await engine.stop()


async def short(port: int) -> str:
    """The engine of a request that is over at once."""
    body = {"model": "m", "prompt": "now", "max_tokens": 1}
    reply: Reply = await ask(port, "/v1/completions", body, **{"x-tandem-explain": "1"})
    assert reply.status == 200, reply.body
    return reply.headers["x-tandem-decode"]
