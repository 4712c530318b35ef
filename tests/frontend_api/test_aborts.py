"""A storm of clients that leave at any moment: nothing stays behind. Cases: field reports R2, B7."""

from __future__ import annotations

import asyncio
import gc
import os
import random
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from controlplane.fleet.model import Role
from controlplane.fleet.wire import Disaggregate, RequestRecord, Result, RoutingMode, RoutingPolicy
from frontend_api.kv.index import chain
from tests.frontend_api.client import PROMPT, Client, ask, request
from tests.frontend_api.conftest import MakeSite, Site, until
from tests.frontend_api.scripted import DONE, LAST, ROLE, STREAM_HEAD, Heard, answer_well, chunk, framed

CHAT = "/v1/chat/completions"
WARM_UP = 2_000
ABORTS = 10_000
AT_ONCE = 60
BLOCK = 16
TOKENS = array("i", range(4 * BLOCK))


class SameTokens:
    """Every prompt is the same one."""

    def at_once(self, endpoint: object, body: bytes) -> array[int]:
        return TOKENS


def policy(limit: int) -> RoutingPolicy:
    return RoutingPolicy(mode=RoutingMode.KV, disaggregate=Disaggregate.ALWAYS, max_in_flight=limit)


def stored() -> bytes:
    """The event of an engine that has computed the prompt's first three blocks."""
    event = {
        "type": "BlockStored", "block_hashes": [1, 2, 3], "parent_block_hash": None,
        "token_ids": list(TOKENS[: 3 * BLOCK]), "block_size": BLOCK,
    }  # fmt: skip
    return msgspec.msgpack.encode([0.0, [event], 0])


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def stage(record: RequestRecord) -> str:
    """How far a request came."""
    if record.result is not Result.ABORTED:
        return record.result
    if record.decode is None:
        return "waiting"
    return "streaming" if record.stream else "prefill" if record.prefill_seconds is None else "decode"


def forget(site: Site, stages: Counter[str]) -> None:
    """What a test keeps and a router does not."""
    stages.update(map(stage, site.telemetry.records))
    site.telemetry.records.clear()
    while records := site.telemetry.batch():
        site.telemetry.settle(len(records), written=True)
    for engine in site.engines.values():
        engine.heard.clear()


async def test_random_aborts_leave_nothing_behind(make_site: MakeSite) -> None:
    dice = random.Random(7)
    decoding: set[str] = set()

    async def unsteady(heard: Heard, writer: asyncio.StreamWriter) -> None:
        reads = heard.body["kv_transfer_params"].get("do_remote_decode")
        if not reads:
            decoding.add(heard.headers["x-request-id"])
        await asyncio.sleep(dice.choice((0, 0, 0.002, 0.005) if reads else (0, 0.01, 0.03)))
        if heard.body.get("stream") and not reads:
            for part in (STREAM_HEAD + framed(ROLE), *(framed(chunk("t")) for _ in range(5)), framed(DONE) + LAST):
                if writer.is_closing():
                    return
                writer.write(part)
                await asyncio.sleep(dice.choice((0, 0.001)))
        elif not writer.is_closing():
            await answer_well(heard, writer)

    site = await make_site()
    for name, role in (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE)):
        await site.engine(name, role, unsteady, events=f"tcp://{name}:1", block_size=BLOCK)
    site.publish(policy=policy(1))
    cache = site.cache
    cache.tokens = SameTokens()
    for ranks in cache.ranks.values():
        ranks[0].live(0, stored(), 0.0)
    gate = asyncio.Semaphore(AT_ONCE)
    stages: Counter[str] = Counter()

    async def leave(number: int) -> None:
        async with gate, Client(site.port) as client:
            name = f"r{number}"
            data = request(CHAT, {**PROMPT, "stream": number % 2 == 0}, **{"X-Request-Id": name})
            how = dice.random()
            client.send(data[: dice.choice((5, 60, len(data) - 1))] if how < 0.1 else data)
            if how > 0.5 and number % 2 == 0:
                await client.head()  # its stream has begun
            elif how > 0.9:
                await until(lambda: name in decoding, 60.0)  # its prompt has been read
            elif how > 0.3:
                await asyncio.sleep(dice.choice((0.001, 0.01, 0.03, 0.05)))
            else:
                for _ in range(dice.randrange(40)):
                    await asyncio.sleep(0)

    async def storm(aborts: int) -> tuple[int, int]:
        """Returns how many objects there are afterwards, and bytes."""
        for batch in range(aborts // 1_000):
            site.publish(policy=policy(2 if batch % 2 else 100))  # nearly all wait, or nobody does
            await asyncio.gather(*(leave(number) for number in range(1_000)))
            forget(site, stages)
            decoding.clear()
        await site.settled()
        await until(lambda: not site.server.connections)
        pools = [site.upstreams.pool(engine) for engine in site.view.engines()]
        await until(lambda: all(pool.opened == set(pool.idle) and not pool._connecting for pool in pools))
        site.upstreams.sweep(asyncio.get_running_loop().time() + 1e6)
        await until(lambda: not any(engine.open for engine in site.engines.values()))
        forget(site, stages)
        gc.collect()
        return len(gc.get_objects()), resident()

    def index() -> Any:
        return len(cache.index), cache.index.entries, cache.index.match(chain(TOKENS, BLOCK, salt=None))

    known = index()
    assert known[1] == 3 * 4
    objects, memory = await storm(WARM_UP)
    more_objects, more_memory = await storm(ABORTS)
    assert more_objects - objects < 1_000
    assert more_memory - memory < 16 << 20
    assert index() == known
    assert min(stages[name] for name in ("waiting", "prefill", "decode", "streaming")) > 100, stages
    assert not {Result.FAILED, Result.TRUNCATED, Result.REFUSED} & {*stages}
    assert {e.health.value for e in site.view.engines()} == {"up"}

    assert not list(site.router.waiting.counts())
    for stream in (False, True):
        assert (await ask(site.port, CHAT, {**PROMPT, "stream": stream})).status == 200
    site.upstreams.sweep(asyncio.get_running_loop().time() + 1e6)
    await until(lambda: not any(engine.open for engine in site.engines.values()))
