"""A storm of clients that leave at any moment: nothing stays behind."""

from __future__ import annotations

import asyncio
import random

from controlplane.fleet.model import Role
from controlplane.fleet.wire import Result
from tests.frontend_api.client import PROMPT, Client, ask, request
from tests.frontend_api.conftest import MakeSite, until
from tests.frontend_api.scripted import DONE, LAST, ROLE, STREAM_HEAD, Heard, answer_well, chunk, framed

CHAT = "/v1/chat/completions"
ABORTS = 1_000
AT_ONCE = 40


async def test_random_aborts_leave_no_load_and_no_connection(make_site: MakeSite) -> None:
    dice = random.Random(7)

    async def unsteady(heard: Heard, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(dice.choice((0, 0, 0.002, 0.005)))
        if heard.body.get("stream") and not heard.body["kv_transfer_params"].get("do_remote_decode"):
            for part in (STREAM_HEAD + framed(ROLE), *(framed(chunk("t")) for _ in range(5)), framed(DONE) + LAST):
                writer.write(part)
                await asyncio.sleep(dice.choice((0, 0.001)))
        else:
            await answer_well(heard, writer)

    site = await make_site()
    for name in ("p0", "p1"):
        await site.engine(name, Role.PREFILL, unsteady)
    for name in ("d0", "d1"):
        await site.engine(name, Role.DECODE, unsteady)
    site.publish()
    gate = asyncio.Semaphore(AT_ONCE)

    async def leave(number: int) -> None:
        async with gate, Client(site.port) as client:
            data = request(CHAT, {**PROMPT, "stream": number % 2 == 0})
            client.send(
                data[: dice.choice((5, 60, len(data) - 1, len(data), len(data), len(data), len(data), len(data)))]
            )
            await asyncio.sleep(dice.choice((0, 0.001, 0.003, 0.006, 0.01)))

    await asyncio.gather(*(leave(number) for number in range(ABORTS)))
    await site.settled()
    await until(lambda: not site.server.connections)
    results = {record.result for record in site.telemetry.records}
    assert Result.ABORTED in results
    assert Result.FAILED not in results
    pools = [site.upstreams.pool(engine) for engine in site.view.engines()]
    await until(lambda: all(pool.opened == set(pool.idle) and not pool._connecting for pool in pools))
    assert {e.health.value for e in site.view.engines()} == {"up"}
    for stream in (False, True):
        assert (await ask(site.port, CHAT, {**PROMPT, "stream": stream})).status == 200
    site.upstreams.sweep(asyncio.get_running_loop().time() + 1e6)
    await until(lambda: not any(engine.open for engine in site.engines.values()))
