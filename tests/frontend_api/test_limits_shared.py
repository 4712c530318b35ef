"""Several real router processes, as on several hosts, and one real Redis: a limit is one limit."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter as Tally
from hashlib import sha256
from pathlib import Path
from typing import Any

import openai
import pytest
import redis

from controlplane.fleet.wire import SNAPSHOT_KEY, SnapshotKey
from tests.conftest import RedisServer
from tests.frontend_api.client import PROMPT, Client, ask
from tests.frontend_api.conftest import until
from tests.frontend_api.scripted import USAGE, Heard, ScriptedEngine, answer_well
from tests.frontend_api.test_process import CHAT, Program, Run, engine, fleet, run

__all__ = ["engine", "run"]  # fixtures

PATIENT = ("--limit-wait-ms", "10000")
"""So that a busy machine is not taken for a Redis that is away."""


def key(name: str, **limits: Any) -> SnapshotKey:
    return SnapshotKey(id=name, digest=sha256(name.encode()).hexdigest(), **limits)


async def statuses(ports: list[int], count: int, name: str, body: Any = PROMPT) -> Tally[int]:
    """Of `count` requests at once, taken in turns by the ports."""
    replies = await asyncio.gather(
        *(ask(ports[i % len(ports)], CHAT, body, Authorization=f"Bearer {name}") for i in range(count))
    )
    return Tally(reply.status for reply in replies)


@pytest.fixture
async def two(run: Run, engine: ScriptedEngine, redis_url: str, tmp_path: Path) -> list[int]:
    """Ports of two programs, one of them of two processes."""
    keys = (
        key("rpm", requests_per_minute=20),
        key("tpm", tokens_per_minute=100),
        key("busy", concurrency=5),
        key("free"),
    )
    redis.Redis.from_url(redis_url).set(SNAPSHOT_KEY, fleet(engine.url, keys))
    programs = [await run(*PATIENT, "--processes", n, REDIS_URL=redis_url) for n in ("2", "1")]
    return [program.port for program in programs]


async def test_requests_of_all_routers_together_never_pass_the_limit(two: list[int], engine: ScriptedEngine) -> None:
    assert await statuses(two, 60, "rpm") == {200: 20, 429: 40}
    assert len(engine.heard) == 20
    assert await statuses(two, 6, "rpm") == {429: 6}
    assert await statuses(two, 6, "free") == {200: 6}


async def test_tokens_of_all_routers_together_never_pass_the_limit(two: list[int], engine: ScriptedEngine) -> None:
    assert USAGE["total_tokens"] == 10
    served = 0
    async with asyncio.timeout(30):
        while True:  # what was reserved too much comes back, so that ten of these fit in the end
            found = await statuses(two, 6, "tpm", {**PROMPT, "max_tokens": 5})
            served += found[200]
            if not found[200]:
                break
    assert 7 <= served <= 10
    assert len(engine.heard) == served


async def test_requests_at_a_time_count_over_all_routers(two: list[int], engine: ScriptedEngine) -> None:
    release = asyncio.Event()

    async def later(heard: Heard, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        await answer_well(heard, writer)

    engine.answer = later
    tasks = [asyncio.create_task(statuses([port], 1, "busy")) for port in two * 10]
    await until(lambda: sum(task.done() for task in tasks) == 15, 30)
    assert len(engine.heard) == 5
    release.set()
    assert sum([await task for task in tasks], Tally[int]()) == {200: 5, 429: 15}
    async with asyncio.timeout(10):  # what ended is told at once
        while await statuses(two, 1, "busy") != {200: 1}:
            await asyncio.sleep(0.01)


async def test_a_client_that_left_frees_its_place_in_all_routers(two: list[int], engine: ScriptedEngine) -> None:
    async def never(heard: Heard, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    engine.answer = never
    clients = [Client(two[i % 2]) for i in range(5)]
    for client in clients:
        await client.__aenter__()
        client.post(CHAT, PROMPT, Authorization="Bearer busy")
    await until(lambda: len(engine.heard) == 5)
    assert await statuses(two, 4, "busy") == {429: 4}
    for client in clients:
        await client.__aexit__()
    engine.answer = answer_well
    async with asyncio.timeout(10):
        while await statuses(two, 1, "busy") != {200: 1}:
            await asyncio.sleep(0.01)


async def test_without_redis_the_gate_is_neither_shut_nor_open(
    run: Run, engine: ScriptedEngine, tmp_path: Path
) -> None:
    server = RedisServer(tmp_path)
    server.start()
    try:
        client = redis.Redis.from_url(server.url)
        client.set(
            SNAPSHOT_KEY, fleet(engine.url, (key("rpm", requests_per_minute=8), key("more", requests_per_minute=8)))
        )
        one = await run("--processes", "2", *PATIENT, REDIS_URL=server.url)
        assert await statuses([one.port], 2, "rpm") == {200: 2}
        await asyncio.to_thread(server.stop)
        found = await statuses([one.port], 40, "more")
        assert 4 <= found[200] <= 8, "each process its half, and which one is asked is chance"
        assert found[200] + found[429] == 40
        assert one.log.read_text().count("does not count limits") <= 2
        text = (await ask(one.port, "/metrics")).body.decode()
        assert "tandem_router_limit_fallbacks_total" in text
        server.start()
        client.set(
            SNAPSHOT_KEY, fleet(engine.url, (key("rpm", requests_per_minute=8), key("more", requests_per_minute=8)))
        )
        await until(lambda: one.log.read_text().count("limits are counted there again") >= 1, 20)
        async with asyncio.timeout(20):  # what was granted meanwhile is told: no fresh minute begins
            while sum(int(client.hget(w, "requests")) for w in client.keys("tandem:limits:window:more:*")) < found[200]:  # type: ignore[arg-type,union-attr]
                await asyncio.sleep(0.05)
    finally:
        server.stop()


async def test_a_process_that_is_killed_holds_its_places_only_for_its_lease(
    run: Run, engine: ScriptedEngine, redis_url: str
) -> None:
    async def never(heard: Heard, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    client = redis.Redis.from_url(redis_url)
    client.set(SNAPSHOT_KEY, fleet(engine.url, (key("busy", concurrency=1),)))
    programs: list[Program] = [await run(*PATIENT, REDIS_URL=redis_url) for _ in range(2)]
    engine.answer = never
    async with Client(programs[0].port) as held:
        held.post(CHAT, PROMPT, Authorization="Bearer busy")
        await until(lambda: bool(engine.heard))
        assert await statuses([programs[1].port], 1, "busy") == {429: 1}
        (child,) = programs[0].children
        programs[0].kill()
        os.kill(child, signal.SIGKILL)
    engine.answer = answer_well
    (held,) = client.keys("tandem:limits:held:busy:*")  # type: ignore[misc]
    (router,) = client.hkeys(held)  # type: ignore[misc]
    client.zadd("tandem:limits:routers", {router: 1.0})  # its lease is over: the test does not wait for it
    assert await statuses([programs[1].port], 1, "busy") == {200: 1}


async def test_the_official_client_knows_the_refusal(two: list[int]) -> None:
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{two[0]}/v1", api_key="tpm", max_retries=0)
    async with client:
        raw = await client.chat.completions.with_raw_response.create(
            model="m", messages=PROMPT["messages"], max_tokens=5
        )  # type: ignore[call-overload]
        assert raw.headers["x-ratelimit-limit-tokens"] == "100"
        with pytest.raises(openai.RateLimitError) as refused:
            await client.chat.completions.create(model="m", messages=PROMPT["messages"], max_tokens=500)  # type: ignore[call-overload]
    assert (refused.value.code, refused.value.type) == ("rate_limit_exceeded", "tokens")
    assert int(refused.value.response.headers["retry-after"]) > 0


async def test_a_redis_that_hangs_stops_nobody(run: Run, engine: ScriptedEngine, tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    process = server._process
    assert process is not None
    try:
        snapshot = fleet(engine.url, (key("rpm", requests_per_minute=8), key("free")))
        redis.Redis.from_url(server.url).set(SNAPSHOT_KEY, snapshot)
        one = await run(REDIS_URL=server.url)
        assert await statuses([one.port], 5, "rpm") == {200: 5}
        process.send_signal(signal.SIGSTOP)
        assert await statuses([one.port], 9, "rpm") == {200: 3, 429: 6}, "one process: all that was left is its own"
        assert await statuses([one.port], 3, "free") == {200: 3}
        process.send_signal(signal.SIGCONT)
        await until(lambda: "limits are counted there again" in one.log.read_text(), 20)
        assert await statuses([one.port], 3, "rpm") == {429: 3}
    finally:
        process.send_signal(signal.SIGCONT)
        server.stop()
