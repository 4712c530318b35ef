"""Engines in this process, stepped by their own loops: batching, capacity, hand-over, leases, aborts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from controlplane.fleet.model import Role
from tests.conftest import free_port
from workers.sim.__main__ import Listener
from workers.sim.engine import Engine
from workers.sim.faults import Faults
from workers.sim.generation import Generation, Job
from workers.sim.http import ApiError
from workers.sim.sequence import Sampling
from workers.sim.settings import Settings
from workers.sim.transfer import SideChannel

FAST = Settings(
    max_model_len=256,
    block_size=4,
    kv_blocks=64,
    prefill_tokens_per_second=1e9,
    itl_seconds=0,
    transfer_bytes_per_second=1e15,
)
REMOTE: dict[str, object] = {
    "do_remote_prefill": True,
    "remote_engine_id": "p",
    "remote_request_id": "its-id",
    "remote_host": "127.0.0.1",
    "remote_block_ids": [[1]],
}
"""Params that lead to an engine `p`; the port is still to be named."""
KEEP: dict[str, object] = {"do_remote_decode": True}


@asynccontextmanager
async def running(settings: Settings = FAST, *faults: str) -> AsyncIterator[Engine]:
    """An engine whose loop runs; with a side channel when it has one to serve."""
    engine = Engine(settings, Faults(faults), None)
    channel = None
    if leases := engine.leases:
        channel = SideChannel(
            engine.engine_id, settings.block_size, read=leases.read, done=leases.done, heartbeat=leases.extend
        )
        await channel.start(Listener(settings.host, settings.side_channel_port, "side channel").listen())
    loop = asyncio.create_task(engine.run())
    try:
        yield engine
        assert not loop.done()
    finally:
        loop.cancel()
        await engine.close()
        if channel:
            await channel.close()


def of(role: Role, **changes: object) -> Settings:
    return msgspec.structs.replace(FAST, role=role, side_channel_port=free_port(), **changes)


def job(prompt: list[int], params: dict[str, object] | None = None, tokens: int = 8, n: int = 1) -> Job:
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)
    return Job(prompts=(prompt,), sampling=sampling, n=n, kv_transfer_params=params)


async def answer(engine: Engine, prompt: list[int], params: dict[str, object] | None = None, tokens: int = 8) -> str:
    (choice,) = await Generation(engine, "r", job(prompt, params, tokens)).choices()
    return choice.text


async def prefilled(engine: Engine, prompt: list[int]) -> dict[str, object] | None:
    generation = Generation(engine, "r", job(prompt, KEEP, 1))
    await generation.choices()
    return generation.kv_transfer_params


async def until(condition: Callable[[], bool]) -> None:
    """Awaits what another task brings about, on either side of a socket."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def prompts(count: int, longest: int = 200) -> list[list[int]]:
    chance = random.Random(7)
    return [[chance.randrange(1000) for _ in range(chance.randint(1, longest))] for _ in range(count)]


async def test_the_same_prompt_gives_the_same_answer_cached_or_not() -> None:
    async with running() as engine:
        for prompt in prompts(20):
            assert await answer(engine, prompt) == await answer(engine, prompt)
        assert engine.metrics.prefix_hits.values[""] > 0
        assert engine.pool.usage == 0


async def test_a_crowd_that_does_not_fit_is_served_all_the_same() -> None:
    """More sequences than blocks: some wait, some are preempted, every answer is the one that it gets alone."""
    crowd = prompts(30, 100)
    async with running() as quiet:
        alone = [await answer(quiet, prompt, tokens=60) for prompt in crowd]
    async with running(msgspec.structs.replace(FAST, max_num_batched_tokens=32)) as engine:
        assert await asyncio.gather(*(answer(engine, prompt, tokens=60) for prompt in crowd)) == alone
        assert engine.metrics.preemptions.values[""] > 0
        assert engine.pool.usage == 0
        assert engine.metrics.prompt_tokens.values[""] == sum(map(len, crowd))


async def test_n_answers_to_one_prompt() -> None:
    async with running() as engine:
        choices = await Generation(engine, "r", job([1, 2, 3], n=3)).choices()
        assert len({choice.text for choice in choices}) == 3


async def test_hand_over_gives_the_answer_of_one_engine_and_counts_what_moved() -> None:
    async with running() as single, running(of(Role.PREFILL)) as prefill, running(of(Role.DECODE)) as decode:
        for number, prompt in enumerate(prompts(10), 1):
            params = await prefilled(prefill, prompt)
            assert prefill.pool.usage > 0
            assert await answer(decode, prompt, params) == await answer(single, prompt)
            await until(lambda: prefill.pool.usage == 0)
            assert decode.metrics.nixl
            assert decode.metrics.nixl.bytes.count == number
        by_source = decode.metrics.prompt_tokens_by_source.values
        assert by_source['source="local_compute"'] == 0
        assert by_source['source="external_kv_transfer"'] > 0
        assert decode.pool.usage == 0
        assert prefill.metrics.nixl
        assert prefill.metrics.nixl.expired.values[""] == 0


async def test_kv_of_another_prompt_gives_another_answer() -> None:
    right, other = list(range(40)), list(range(100, 140))
    async with running() as single, running(of(Role.PREFILL)) as prefill, running(of(Role.DECODE)) as decode:
        params = await prefilled(prefill, other)
        assert await answer(decode, right, params) != await answer(single, right)


async def test_one_lease_serves_one_sequence() -> None:
    """Several sequences with one set of params: status 200, wrong text for the second prompt, late notifications."""
    first, second = list(range(40)), list(range(100, 140))
    async with running() as single, running(of(Role.PREFILL)) as prefill, running(of(Role.DECODE)) as decode:
        params = await prefilled(prefill, first)
        both = msgspec.structs.replace(job(first, params), prompts=(first, second))
        choices = await Generation(decode, "r", both).choices()
        assert choices[0].text == await answer(single, first)
        assert choices[1].text != await answer(single, second)
        assert prefill.metrics.nixl
        await until(lambda: prefill.metrics.nixl.notified_after_expiry.values[""] == 1)


async def test_an_expired_lease_frees_its_blocks_and_is_counted() -> None:
    async with running(of(Role.PREFILL, lease_seconds=0.01)) as prefill, running(of(Role.DECODE)) as decode:
        params = await prefilled(prefill, list(range(40)))
        await until(lambda: prefill.pool.usage == 0)
        assert prefill.metrics.nixl
        assert prefill.metrics.nixl.expired.values[""] == 1
        assert await answer(decode, list(range(40)), params)
        await until(lambda: prefill.metrics.nixl.notified_after_expiry.values[""] == 1)


async def test_after_expiry_the_blocks_may_hold_another_prompt() -> None:
    prompt = list(range(40))
    small = of(Role.PREFILL, kv_blocks=12, max_model_len=48, lease_seconds=0.01)
    async with running() as single, running(small) as prefill, running(of(Role.DECODE)) as decode:
        params = await prefilled(prefill, prompt)
        await until(lambda: prefill.pool.usage == 0)
        await answer(prefill, list(range(100, 140)))
        assert await answer(decode, prompt, params) != await answer(single, prompt)


@pytest.mark.parametrize(
    "change",
    [{"remote_engine_id": "another"}, {"remote_port": 9}],
    ids=["another engine answers", "nobody answers"],
)
async def test_a_failed_transfer_is_an_error_and_is_counted(change: dict[str, object]) -> None:
    async with running(of(Role.PREFILL)) as prefill, running(of(Role.DECODE)) as decode:
        params = await prefilled(prefill, list(range(40)))
        assert params
        with pytest.raises(ApiError) as error:
            await answer(decode, list(range(40)), params | change)
        assert error.value.status == 500
        assert decode.metrics.nixl
        assert decode.metrics.nixl.failed_transfers.values[""] == 1
        assert decode.pool.usage == 0


async def test_unequal_block_sizes_do_not_fit() -> None:
    async with running(of(Role.PREFILL)) as prefill, running(of(Role.DECODE, block_size=8)) as decode:
        params = await prefilled(prefill, list(range(40)))
        with pytest.raises(ApiError):
            await answer(decode, list(range(40)), params)


@pytest.mark.parametrize("lost", ["remote_port", "remote_engine_id", "remote_block_ids", "do_remote_prefill"])
async def test_incomplete_params_are_ignored_in_silence(lost: str) -> None:
    prompt = list(range(40))
    async with running() as single, running(of(Role.PREFILL)) as prefill, running(of(Role.DECODE)) as decode:
        params = await prefilled(prefill, prompt)
        assert params
        del params[lost]
        assert await answer(decode, prompt, params) == await answer(single, prompt)
        assert decode.metrics.prompt_tokens_by_source.values['source="local_compute"'] == 40


async def test_decode_pulls_only_the_blocks_it_lacks() -> None:
    async with running(of(Role.PREFILL)) as prefill, running(of(Role.DECODE)) as decode:
        moved = []
        for _ in range(2):
            before = decode.metrics.nixl.bytes.sum if decode.metrics.nixl else 0
            await answer(decode, list(range(42)), await prefilled(prefill, list(range(42))))
            assert decode.metrics.nixl
            moved.append(decode.metrics.nixl.bytes.sum - before)
        block = FAST.block_size * FAST.kv_bytes_per_token
        assert moved == [11 * block, block]


async def test_an_abort_before_during_and_after_leaves_nothing_behind() -> None:
    async with running() as engine:
        generation = Generation(engine, "r", job(list(range(50)), tokens=200))
        generation.abort()
        task = asyncio.create_task(generation.choices())
        await until(lambda: engine.load() == (1, 0))
        generation.abort()
        generation.abort()
        await task
        assert engine.load() == (0, 0)
        assert engine.pool.usage == 0
        assert engine.metrics.request_success.values['finished_reason="abort"'] == 1


async def test_an_abort_during_a_pull_frees_the_blocks_when_the_pull_is_over() -> None:
    silent = Listener("127.0.0.1", port := free_port(), "side channel").listen()
    async with running(of(Role.DECODE)) as decode:
        generation = Generation(decode, "r", job([1, 2, 3], REMOTE | {"remote_port": port}))
        task = asyncio.create_task(generation.choices())
        await until(lambda: decode.load() == (0, 1))
        generation.abort()
        await task
        assert decode.pool.usage > 0
        silent.close()
        await until(lambda: decode.pool.usage == 0)
        assert decode.load() == (0, 0)


async def test_kv_use_returns_to_nothing_after_a_storm_of_aborts() -> None:
    chance = random.Random(11)
    async with running(of(Role.PREFILL, lease_seconds=0.05)) as prefill, running(of(Role.DECODE)) as decode:

        async def client(prompt: list[int]) -> None:
            engine, params = prefill, KEEP
            for leg in range(2):
                generation = Generation(engine, "r", job(prompt, params, 1 if leg == 0 else 30))
                task = asyncio.create_task(generation.choices())
                for _ in range(chance.randrange(60)):
                    await asyncio.sleep(0)
                generation.abort()
                await task
                engine, params = decode, generation.kv_transfer_params or {}

        await asyncio.gather(*(client(prompt) for prompt in prompts(150, 60)))
        await until(lambda: prefill.pool.usage == decode.pool.usage == 0)
        assert prefill.load() == decode.load() == (0, 0)
        endings = decode.metrics.request_success.values
        assert endings['finished_reason="abort"'] > 0
        assert endings['finished_reason="error"'] == 0


async def test_a_waiting_request_keeps_its_lease_alive_until_it_leaves() -> None:
    beats: asyncio.Queue[list[str]] = asyncio.Queue()
    done: asyncio.Queue[str] = asyncio.Queue()
    port = free_port()
    prefill = SideChannel("p", 4, read=lambda ids: [], done=done.put_nowait, heartbeat=beats.put_nowait)
    await prefill.start(Listener("127.0.0.1", port, "side channel").listen())
    async with running(of(Role.DECODE, lease_seconds=0.06)) as decode:
        decode.pool.take((), decode.pool.free)
        generation = Generation(decode, "r", job([1, 2, 3], REMOTE | {"remote_port": port}))
        task = asyncio.create_task(generation.choices())
        assert await beats.get() == await beats.get() == ["its-id"]
        generation.abort()
        assert await done.get() == "its-id"
        task.cancel()
    await prefill.close()


async def test_an_extended_lease_outlives_its_first_term() -> None:
    async with running(of(Role.PREFILL, lease_seconds=0.2)) as prefill:
        params = await prefilled(prefill, list(range(40)))
        assert params
        assert prefill.leases
        loop = asyncio.get_running_loop()
        granted = loop.time()
        while loop.time() < granted + 0.3:
            prefill.leases.extend([str(params["remote_request_id"]), "unknown"])
            assert prefill.pool.usage > 0
            await asyncio.sleep(0)
        await until(lambda: prefill.pool.usage == 0)


async def test_missing_params_fault() -> None:
    async with running(of(Role.PREFILL), "missing-params") as prefill:
        assert await prefilled(prefill, list(range(40))) is None


async def test_wrong_kv_fault() -> None:
    prompt = list(range(40))
    async with (
        running() as single,
        running(of(Role.PREFILL), "wrong-kv") as prefill,
        running(of(Role.DECODE)) as decode,
    ):
        assert await answer(decode, prompt, await prefilled(prefill, prompt)) != await answer(single, prompt)
