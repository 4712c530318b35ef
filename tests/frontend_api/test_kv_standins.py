"""Cache-aware routing in front of real publishers: stand-in engines, their events over ZMQ, lost, restarted, killed, off."""

from __future__ import annotations

import asyncio
import os
import random
import re
import sys
import threading
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import pytest_asyncio

from controlplane.deployments import evidence_words
from controlplane.fleet.model import Role
from controlplane.fleet.wire import Disaggregate, RoutingMode, RoutingPolicy, SnapshotEngine
from frontend_api.formats.openai import Endpoint
from frontend_api.kv import sequence
from frontend_api.kv.evidence import Cache, State
from frontend_api.kv.knowledge import Knowledge, Trouble
from frontend_api.kv.listen import Follower, Unusable
from frontend_api.kv.room import RoomReader
from tests.conftest import free_port
from tests.frontend_api.client import Client, ask
from tests.frontend_api.conftest import MakeSite, Site, until
from tests.frontend_api.test_process import Program
from tests.frontend_api.tiny_model import write_model
from workers.sim.__main__ import PORT_TAKEN

ROOT = Path(__file__).parents[2]
BLOCK = 16
KV = RoutingPolicy(mode=RoutingMode.KV)


LONG = 1_000


class Later(NamedTuple):
    ids: Callable[[], array[int] | None]


class TokenIds:
    """Prompts that are token ids already; long ones take until they are let go."""

    marks = ()

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.let_go.set()

    def at_once(self, endpoint: Endpoint, body: bytes) -> array[int] | Later | None:
        prompt = msgspec.json.decode(body).get("prompt")
        if not isinstance(prompt, list):
            return None
        ids = array("I", prompt)
        return ids if len(ids) < LONG else Later(lambda: ids if self.let_go.wait(10) else None)


class Standin:
    """One stand-in engine in a process of its own."""

    def __init__(self, name: str, role: Role, *arguments: str) -> None:
        self.name = name
        self.role = role
        self.port = self.events = self.replay = 0
        self._arguments = arguments
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> Standin:
        """On ports of its own; others may be quicker to take one."""
        for _ in range(5):
            self.port, self.events, self.replay = (free_port() for _ in range(3))
            if await self.serve():
                return self
        raise AssertionError("no ports could be had")

    async def serve(self) -> bool:
        """Start on the ports it has. False: one of them was taken."""
        side = () if self.role is Role.AGGREGATED else ("--side-channel-port", str(free_port()))
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "workers.sim", "--host", "127.0.0.1", "--port", str(self.port), "--role", self.role,
            "--served-model-name", "m", "--block-size", str(BLOCK), "--prefill-tokens-per-second", "100000",
            "--itl-ms", "1", "--events-port", str(self.events), "--replay-port", str(self.replay), *side,
            *self._arguments, cwd=ROOT, env={**os.environ, "VLLM_API_KEY": ""},
        )  # fmt: skip
        async with asyncio.timeout(20):
            while not await self._is_up():
                if self.process.returncode == PORT_TAKEN:
                    return False
                await asyncio.sleep(0.02)
        return True

    async def _is_up(self) -> bool:
        try:
            return (await ask(self.port, "/health", None)).status == 200
        except OSError:
            return False

    async def stop(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    async def fault(self, *names: str) -> None:
        assert (await ask(self.port, "/sim/faults", {"faults": names})).status == 200

    def spec(self, **more: Any) -> SnapshotEngine:
        spec: dict[str, Any] = {
            "id": self.name, "name": self.name, "attempt": 1, "role": self.role, "block_size": BLOCK,
            "url": f"http://127.0.0.1:{self.port}", "events": f"tcp://127.0.0.1:{self.events}",
            "replay": f"tcp://127.0.0.1:{self.replay}",
        }  # fmt: skip
        return SnapshotEngine(**{**spec, **more})


class Fleet:
    """Stand-ins behind a router that follows their events."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.engines: dict[str, Standin] = {}
        self._follower = asyncio.create_task(Follower(site.evidence, self._load).run())

    def _load(self, folder: str, key: str) -> TokenIds:
        if folder != "a-folder":
            raise Unusable("it is empty") if folder == "b" else RuntimeError("a defect")
        return TokenIds()

    async def add(self, name: str, *arguments: str, **spec: Any) -> Standin:
        role = {"a": Role.AGGREGATED, "p": Role.PREFILL, "d": Role.DECODE}[name[0]]
        engine = self.engines[name] = await Standin(name, role, *arguments).start()
        self.site.add(engine.spec(**spec))
        return engine

    async def close(self) -> None:
        self._follower.cancel()
        await asyncio.gather(self._follower, return_exceptions=True)
        for engine in self.engines.values():
            await engine.stop()

    @property
    def cache(self) -> Cache:
        return self.site.cache

    def rank(self, name: str) -> Any:
        return next(rank for engine, (rank,) in self.cache.ranks.items() if engine.id == name)

    def holds(self, name: str) -> int:
        return len(self.rank(name).contents.holder.blocks)

    async def loaded(self) -> None:
        await until(lambda: self.cache.tokens is not None)

    async def exact(self) -> None:
        await until(lambda: self.cache.standing().state is State.EXACT)

    async def ask(self, prompt: list[int]) -> dict[str, str]:
        """The explanation of one answer."""
        body = {"model": "m", "prompt": prompt, "max_tokens": 2}
        reply = await ask(self.site.port, "/v1/completions", body, **{"x-tandem-explain": "1"})
        assert reply.status == 200, reply.body
        return {k[9:]: v for k, v in reply.headers.items() if k.startswith("x-tandem-")}


MakeFleet = Callable[..., Awaitable[Fleet]]


@pytest_asyncio.fixture
async def make_fleet(make_site: MakeSite) -> AsyncIterator[MakeFleet]:
    fleets: list[Fleet] = []

    async def make(*names: str, policy: RoutingPolicy = KV, arguments: tuple[str, ...] = ()) -> Fleet:
        fleet = Fleet(await make_site())
        fleets.append(fleet)
        await asyncio.gather(*(fleet.add(name, *arguments) for name in names))
        fleet.site.publish(policy=policy)
        return fleet

    yield make
    for fleet in fleets:
        await fleet.close()


def prompt(seed: int, blocks: int = 8) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(300, 4_000) for _ in range(blocks * BLOCK + 5)]


async def test_a_prompt_goes_where_it_need_not_wait_for_kv(make_fleet: MakeFleet) -> None:
    """One engine has the prompt's KV and fewer requests, but a client of its own has nearly all the rest of its KV in use."""
    fleet = await make_fleet("a0", "a1", arguments=("--kv-blocks", "400", "--itl-ms", "20"))
    site = fleet.site
    await fleet.exact()
    wanted = prompt(1, blocks=60)
    full = fleet.engines["a0"]
    json = {"content-type": "application/json"}
    await ask(full.port, "/v1/completions", {"model": "m", "prompt": wanted[: 9 * BLOCK], "max_tokens": 1}, **json)
    await until(lambda: fleet.holds("a0") >= 8)
    reader = RoomReader(site.view, site.router.loads, site.upstreams)
    async with Client(full.port) as client:
        body = {"model": "m", "prompt": prompt(2, blocks=360), "max_tokens": 400, "ignore_eos": True, "stream": True}
        client.post("/v1/completions", body, **json)
        await client.head()
        assert b"data" in await client.chunk()
        for mode in (RoutingMode.KV, RoutingMode.LEAST_LOAD):
            site.publish(policy=RoutingPolicy(mode=mode))
            await reader.one_round()
            told = await fleet.ask(wanted)
            assert (told["reason"], told["decode"]) == ("room-wins", "a1")
            assert "a0 alone" in told["candidates"]
            waits = dict(re.findall(r"(a\d) alone .*? wait=([0-9.]+)", told["candidates"]))
            assert float(waits["a0"]) > 0 == float(waits["a1"])
        text = (await ask(site.port, "/metrics", None)).body.decode()
        assert re.search(r'engine_kv_room\{engine="a0"\} \d{1,3}\n', text)
        assert re.search(r'engine_kv_room\{engine="a1"\} 6\d{3}\n', text)


async def test_prompts_that_no_block_holds_are_told_as_such(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet("a0", "a1")
    await fleet.exact()
    ids = prompt(1)
    for _ in range(2):
        for length, because in ((BLOCK - 1, True), (BLOCK, True), (BLOCK + 1, False)):
            told = await fleet.ask(ids[:length])
            assert (told["reason"] == "below-one-block") is because
            assert ("overlap-because" in told) is because
    assert told["overlap"] == f"{BLOCK}/{BLOCK + 1}"
    decisions = (await ask(fleet.site.port, "/debug/decisions?limit=2", None)).json["decisions"]
    assert [d["overlap_because"] for d in decisions] == [
        "",
        f"no longer than one KV block ({BLOCK} tokens): cannot be cached",
    ]
    status = fleet.site.telemetry.status(fleet.site.view, fleet.site.evidence, fleet.site.router.outcomes)
    assert evidence_words.sentence(status.caches["dep"]) == (
        f"Cache-aware routing is exact. Of the last 6 prompts 4 are no longer than one KV block ({BLOCK} tokens): "
        "they cannot be cached."
    )


async def test_the_second_turn_goes_to_the_engine_of_the_first(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet("a0", "a1")
    await fleet.exact()
    firsts = []
    for seed in range(6):
        told = await fleet.ask(prompt(seed))
        assert (told["reason"], told["overlap"]) == ("no-overlap", "0/133")
        firsts.append(told["decode"])
        await until(lambda seen=seed + 1: len(fleet.cache.index) >= 8 * seen)
    assert firsts == ["a0", "a1"] * 3
    for seed in (3, 0, 5, 2, 4, 1):
        told = await fleet.ask(prompt(seed) + prompt(99, 1))
        assert (told["decode"], told["reason"], told["overlap"]) == (firsts[seed], "overlap", "128/154")
        assert (told["state"], told["state-because"]) == ("exact", "-")
        assert told["candidates"].count("total=") == 2
    assert [r.overlap_tokens for r in fleet.site.telemetry.records] == [0] * 6 + [128] * 6
    text = (await ask(fleet.site.port, "/metrics", None)).body.decode()
    assert 'tandem_router_kv_state{deployment="dep",state="exact"} 1' in text
    assert 'tandem_router_tokens_total{deployment="dep",kind="overlap"} 768' in text
    assert 'tandem_router_decisions_total{deployment="dep",reason="overlap"} 6' in text


async def test_disaggregated_both_pools_follow_their_events(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(
        "p0", "p1", "d0", "d1", policy=RoutingPolicy(mode=RoutingMode.KV, disaggregate=Disaggregate.ALWAYS)
    )
    await fleet.exact()
    first = await fleet.ask(prompt(1))
    await until(lambda: fleet.holds(first["prefill"]) >= 8 and fleet.holds(first["decode"]) >= 8)
    await fleet.ask(prompt(2))  # would move turns on to the others
    again = await fleet.ask(prompt(1) + prompt(3, 2))
    assert (again["prefill"], again["decode"]) == (first["prefill"], first["decode"])
    assert (again["reason"], again["overlap"]) == ("overlap", "128/170")
    assert again["candidates"].count("total=") == 4


async def test_events_that_are_lost_on_the_way_are_replayed(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet("a0")
    await fleet.exact()
    await fleet.engines["a0"].fault("events-gap")
    for seed in range(5):
        await fleet.ask(prompt(seed))
    await until(lambda: fleet.holds("a0") >= 40)
    assert fleet.rank("a0").gaps == 0
    assert fleet.cache.standing().state is State.EXACT
    assert (await fleet.ask(prompt(4)))["overlap"] == "128/133"


async def test_a_publisher_that_was_killed_and_comes_back_starts_empty(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence, "CHECK_SECONDS", 0.3)
    fleet = await make_fleet("a0", "a1")
    await fleet.exact()
    first = await fleet.ask(prompt(1))
    await until(lambda: fleet.holds(first["decode"]) >= 8)
    await fleet.engines[first["decode"]].stop()
    assert await fleet.engines[first["decode"]].serve()
    await until(lambda: fleet.rank(first["decode"]).restarts == 1, 20)
    await fleet.exact()
    assert fleet.holds(first["decode"]) == 0
    assert (await fleet.ask(prompt(1)))["overlap"] == "0/133"


async def test_an_engine_that_leaves_takes_its_blocks_with_it(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet("a0", "a1")
    await fleet.exact()
    first = await fleet.ask(prompt(1))
    await until(lambda: len(fleet.cache.index) >= 8)
    fleet.site.publish(policy=KV, without=(first["decode"],))
    await until(lambda: len(fleet.cache.index) == 0)
    assert (await fleet.ask(prompt(1)))["reason"] == "no-overlap"


async def test_a_router_that_starts_late_knows_what_was_stored_before(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet("a0")
    body = {"model": "m", "prompt": prompt(1), "max_tokens": 1}
    assert (await ask(fleet.engines["a0"].port, "/v1/completions", body, content_type="application/json")).status == 200
    late = await make_fleet()
    late.site.add(fleet.engines["a0"].spec())
    late.site.publish(policy=KV)
    await late.exact()
    assert (await late.ask(prompt(1)))["overlap"] == "128/133"


async def test_an_engine_that_publishes_nothing_makes_the_router_blind_and_it_says_so(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet("a0")
    await fleet.exact()
    await fleet.engines["a0"].fault("no-events")
    await fleet.ask(prompt(1))
    rank = fleet.rank("a0")
    rank.contents._debt._since -= 60.0  # a minute ago
    await until(lambda: fleet.cache.standing().state is State.BLIND)
    told = await fleet.ask(prompt(1))
    assert (told["state"], told["reason"]) == ("blind", "no-overlap")
    assert told["state-because"] == "a0=kv_events_not_observed"
    await fleet.engines["a0"].fault()
    await fleet.ask(prompt(2))
    await until(lambda: fleet.holds("a0") == 8)
    told = await fleet.ask(prompt(1))  # which it has, and nobody knows
    assert (told["state"], told["state-because"]) == ("degraded", "a0=kv_events_not_observed")


async def test_events_off_and_odd_engines_are_named(make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "CHECK_SECONDS", 0.3)
    fleet = await make_fleet()
    await fleet.add("a0", events="", replay="")
    fleet.site.publish(policy=KV)
    await fleet.loaded()
    told = await fleet.ask(prompt(1))
    assert (told["state"], told["state-because"]) == ("blind", "a0=kv_events_disabled")
    await fleet.add("a1", "--fault", "wrong-block-size")
    await fleet.add("a2", "--fault", "events-connect")
    fleet.site.publish(policy=KV)
    await until(lambda: fleet.rank("a1").knowledge is Knowledge.COMPLETE is fleet.rank("a2").knowledge)
    assert fleet.cache.standing() == (State.DEGRADED, {"a0": "kv_events_disabled"})
    for name in ("a1", "a2"):
        body = {"model": "m", "prompt": prompt(1), "max_tokens": 1}
        assert (
            await ask(fleet.engines[name].port, "/v1/completions", body, content_type="application/json")
        ).status == 200
    await until(lambda: Trouble.MISMATCH in fleet.rank("a1").trouble)
    await until(lambda: fleet.holds("a2") >= 8, 20)  # by the replay alone
    assert fleet.holds("a1") == 0


async def test_two_engines_that_claim_one_address(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet()
    engine = await fleet.add("a0")
    await fleet.add("a1", events=engine.spec().events, replay=engine.spec().replay)
    fleet.site.publish(policy=KV)
    await fleet.loaded()
    told = await fleet.ask(prompt(1))
    assert "a0=kv_events_ambiguous" in told["state-because"]
    assert "a1=kv_events_ambiguous" in told["state-because"]


async def test_without_events_it_remembers_what_it_sent(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet("a0", "a1", policy=RoutingPolicy(mode=RoutingMode.KV_APPROXIMATE))
    await fleet.loaded()
    firsts = [(await fleet.ask(prompt(seed)))["decode"] for seed in range(4)]
    assert firsts == ["a0", "a1"] * 2
    for seed in (2, 3, 1, 0):
        told = await fleet.ask(prompt(seed))
        assert (told["decode"], told["overlap"], told["state"]) == (firsts[seed], "128/133", "approximate")
    assert fleet.cache.ranks == {}


async def test_where_tokens_are_not_known_load_decides_and_it_is_said(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet("a0", "a1")
    await fleet.exact()
    body = {"model": "m", "prompt": "some words", "max_tokens": 1}
    taken = []
    for _ in range(4):
        reply = await ask(fleet.site.port, "/v1/completions", body, **{"x-tandem-explain": "1"})
        assert (reply.headers["x-tandem-reason"], reply.headers["x-tandem-overlap"]) == ("no-tokens", "unknown")
        taken.append(reply.headers["x-tandem-decode"])
    assert taken == ["a0", "a1"] * 2


async def test_a_long_prompt_is_tokenised_beside_the_others(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet("a0")
    await fleet.exact()
    long = prompt(1, 100)
    assert (await fleet.ask(long))["overlap"] == "0/1605"
    await until(lambda: fleet.holds("a0") >= 100)
    assert (await fleet.ask(long))["overlap"] == "1600/1605"
    tokens = fleet.cache.tokens
    assert isinstance(tokens, TokenIds)
    tokens.let_go.clear()
    async with Client(fleet.site.port) as client:
        client.post("/v1/completions", {"model": "m", "prompt": long, "max_tokens": 1})
        await until(lambda: bool(fleet.site.router.exchanges))
        assert (await fleet.ask(prompt(2)))["overlap"] == "0/133"
    await fleet.site.settled()  # it is gone while its prompt is tokenised
    tokens.let_go.set()
    assert (await fleet.ask(long))["overlap"] == "1600/1605"
    assert [r.status for r in fleet.site.telemetry.records] == [200, 200, 200, 499, 200]
    assert [e.queued for e in fleet.site.view.engines()] == [0]


async def test_no_tokenizer_is_no_evidence(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet("a0")
    for folder, why in (
        ("", "the router has no tokenizer for this model"),
        ("b", "the tokenizer cannot be used"),
        ("", "the router has no tokenizer for this model"),
        ("c", "the tokenizer cannot be used"),
    ):
        fleet.site.publish(policy=KV, tokenizer=folder)
        await until(lambda why=why: fleet.cache.standing().reasons == {"*": why})
        told = await fleet.ask(prompt(1))
        assert (told["state"], told["reason"], told["overlap"]) == ("blind", "no-tokens", "unknown")
    fleet.site.publish(policy=KV)
    await fleet.exact()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_other_modes_know_no_cache(make_fleet: MakeFleet, path: str) -> None:
    fleet = await make_fleet("a0", policy=RoutingPolicy())
    reply = await ask(
        fleet.site.port, path, {"model": "m", "prompt": prompt(1), "max_tokens": 1}, **{"x-tandem-explain": "1"}
    )
    assert "x-tandem-reason" in reply.headers
    assert "x-tandem-state" not in reply.headers
    assert fleet.site.evidence.caches == {}


async def test_the_program_alone_with_a_tokenizer_and_two_engines(make_fleet: MakeFleet, tmp_path: Path) -> None:
    fleet = await make_fleet("a0", "a1")
    model = tmp_path / "model"
    write_model(model)
    program = Program(
        tmp_path, "--no-auth", "--model", "m", "--mode", "kv", "--tokenizer", str(model),
        "--aggregated", *(e.spec().url for e in fleet.engines.values()),
        "--kv-events", *(f"{s.url}={s.events},replay={s.replay}" for s in (e.spec() for e in fleet.engines.values())),
    )  # fmt: skip
    try:
        await program.up()
        body = {"model": "m", "prompt": prompt(1), "max_tokens": 1}

        async def told() -> dict[str, str]:
            reply = await ask(program.port, "/v1/completions", body, **{"x-tandem-explain": "1"})
            assert reply.status == 200
            return reply.headers

        async with asyncio.timeout(20):
            while (first := await told())["x-tandem-state"] != "exact":
                await asyncio.sleep(0.02)
            while (again := await told())["x-tandem-overlap"] != "128/133":
                await asyncio.sleep(0.02)
        assert again["x-tandem-reason"] == "overlap"
        assert first["x-tandem-candidates"].count("total=") in (0, 2)
    finally:
        program.kill()


async def test_the_program_saves_its_index_when_it_ends_and_goes_on_with_it(
    make_fleet: MakeFleet, tmp_path: Path
) -> None:
    fleet = await make_fleet("a0")
    spec = fleet.engines["a0"].spec()
    write_model(tmp_path / "model")
    programs = []

    async def program() -> Program:
        programs.append(
            Program(
                tmp_path, "--no-auth", "--model", "m", "--mode", "kv", "--tokenizer", str(tmp_path / "model"),
                "--processes", "2", "--aggregated", spec.url, "--kv-events", f"{spec.url}={spec.events},replay={spec.replay}",
            )
        )  # fmt: skip
        return await programs[-1].up()

    async def told(port: int) -> tuple[str, str]:
        body = {"model": "m", "prompt": prompt(1), "max_tokens": 1}
        reply = await ask(port, "/v1/completions", body, **{"x-tandem-explain": "1"})
        assert reply.status == 200
        return reply.headers["x-tandem-state"], reply.headers["x-tandem-overlap"]

    try:
        first = await program()
        async with asyncio.timeout(20):
            while await told(first.port) != ("exact", "128/133"):
                await asyncio.sleep(0.02)
        first.process.terminate()
        assert await first.ended() == 0
        (file,) = (tmp_path / "router" / "kv").iterdir()
        assert file.stat().st_mode & 0o777 == 0o600
        second = await program()
        async with asyncio.timeout(20):
            while second.log.read_text().count("aggregated-0 rank 0: 8 blocks are known from disk.") < 2:
                await asyncio.sleep(0.02)
            while await told(second.port) != ("exact", "128/133"):
                await asyncio.sleep(0.02)
    finally:
        for each in programs:
            each.kill()
