"""That the router's ids are the engine's is checked at the engine: what a check sees, and what is made of each outcome."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import AddedToken, normalizers
from tokenizers import Tokenizer as Raw

from controlplane.fleet.model import Role
from controlplane.fleet.wire import RoutingMode, RoutingPolicy
from frontend_api.formats.openai import ENDPOINTS, Endpoint
from frontend_api.kv.evidence import MISCOUNT_SECONDS, Cache, State, Tokenization
from frontend_api.kv.listen import Follower
from frontend_api.routing.view import Health
from frontend_api.tokens.check import EVERY_SECONDS, MISMATCH_SECONDS, UNVERIFIED_AFTER, TokenCheck, mismatches, probes
from frontend_api.tokens.tokenizer import Tokenizer
from tests.frontend_api.client import ask
from tests.frontend_api.conftest import MakeSite, Site, until
from tests.frontend_api.scripted import Heard, after, unary
from tests.frontend_api.test_kv_standins import Standin
from tests.frontend_api.tiny_model import CHATML, write_model
from workers.sim import messages, responses
from workers.sim.model_tokens import chat_text, ids
from workers.sim.requests import MessagesRequest, ResponsesRequest, parse
from workers.sim.settings import Settings

TOOLS_CHATML = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + CHATML


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", TOOLS_CHATML)


def answers_of(tokenizer: Tokenizer) -> dict[Any, array[int]]:
    found = {probe: tokenizer.token_ids(probe.endpoint, probe.body) for probe in probes("m", tokenizer.marks)}
    return {probe: ids for probe, ids in found.items() if ids is not None}


def test_a_tokenizer_agrees_with_itself_and_makes_ids_of_every_probe(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    answers = answers_of(tokenizer)
    assert len(answers) == len(probes("m", tokenizer.marks)) == 10
    assert mismatches(tokenizer, answers) == []


def edited(change: Callable[[Raw], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tokenizer = Raw.from_file(str(folder / "tokenizer.json"))
        change(tokenizer)
        tokenizer.save(str(folder / "tokenizer.json"))

    return edit


def template(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "chat_template.jinja").write_text(text) and None


DIFFERENCES: dict[str, Callable[[Path], None]] = {
    "no tools": template(CHATML),
    "other tool format": template(TOOLS_CHATML.replace("tools | tojson", "tools | tojson(indent=2)")),
    "trimmed content": template(TOOLS_CHATML.replace("m.content +", "(m.content | trim) +")),
    "a system prompt of its own": template("<|im_start|>system\nBe kind.<|im_end|>\n" + TOOLS_CHATML),
    "always a generation prompt": template(TOOLS_CHATML.replace("if add_generation_prompt", "if true")),
    "thinking off": template(TOOLS_CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>' }}{% endif")),
    "a normaliser": edited(lambda t: setattr(t, "normalizer", normalizers.NFC())),
    "no BOS": edited(lambda t: setattr(t, "post_processor", None)),
    "one more token": edited(lambda t: t.add_tokens([AddedToken(" in", normalized=False)])),
    "marks that take the spaces around them": edited(
        lambda t: t.add_special_tokens([AddedToken("<|im_end|>", lstrip=True, rstrip=True, special=True)])
    ),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_what_changes_the_ids_is_seen(folder: Path, difference: str) -> None:
    mine = Tokenizer(folder)
    DIFFERENCES[difference](folder)
    assert mismatches(mine, answers_of(Tokenizer(folder)))


def test_a_mismatch_is_told_with_its_counts(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    probe = probes("m")[0]
    ids = tokenizer.token_ids(probe.endpoint, probe.body)
    assert ids is not None
    assert mismatches(tokenizer, {probe: ids[:-2]}) == [
        f"{len(ids)} ids for a chat, where the engine has {len(ids) - 2} (the first {len(ids) - 2} are equal)"
    ]
    none = Tokenizer(write_model(folder.parent / "bare", None))
    assert mismatches(none, {probe: ids}) == [f"no ids for a chat, where the engine has {len(ids)}"]


class Bench:
    """A router with one scripted engine, whose `/tokenize` answers by `theirs` until a test says otherwise."""

    def __init__(self, site: Site, mine: Tokenizer) -> None:
        self.site = site
        self.theirs = mine
        self.counts: Counter[str] = Counter()
        self.check = TokenCheck(site.evidence, site.upstreams, self._count, random.Random(1))
        self.now = 1_000.0

    def _count(self, deployment: str, outcome: str) -> None:
        assert deployment == "dep"
        self.counts[outcome] += 1

    async def answer(self, heard: Heard, writer: asyncio.StreamWriter) -> None:
        assert heard.target == "/tokenize"
        assert heard.headers["authorization"] == "Bearer secret-a0"
        probe = next(p for p in probes("m", self.theirs.marks) if p.body == heard.raw)
        ids = self.theirs.token_ids(probe.endpoint, probe.body)
        if ids is None:
            writer.write(unary({"error": {"message": "this template knows no tools"}}, 400))
        else:
            writer.write(unary({"count": len(ids), "max_model_len": 9, "tokens": list(ids), "token_strs": None}))

    @property
    def cache(self) -> Cache:
        return self.site.cache

    @property
    def state(self) -> Tokenization | None:
        return next(iter(self.cache.tokenization.values()), None)

    async def turn(self, after: float) -> bool:
        self.now += after
        return await self.check.one_step(self.now)


MakeBench = Callable[..., Awaitable[Bench]]


@pytest_asyncio.fixture
async def make_bench(make_site: MakeSite, folder: Path) -> AsyncIterator[MakeBench]:
    async def make(mode: RoutingMode = RoutingMode.KV) -> Bench:
        site = await make_site()
        bench = Bench(site, Tokenizer(folder))
        await site.engine("a0", Role.AGGREGATED, bench.answer)
        site.publish(policy=RoutingPolicy(mode=mode))
        bench.cache.tokens = bench.theirs
        return bench

    yield make


async def test_an_engine_is_asked_when_it_appears_and_then_from_time_to_time(make_bench: MakeBench) -> None:
    bench = await make_bench()
    assert await bench.turn(0)
    assert bench.state is Tokenization.SAME
    assert len(bench.site.engines["a0"].heard) == 10
    assert not await bench.turn(EVERY_SECONDS / 2)
    assert await bench.turn(EVERY_SECONDS)
    assert bench.counts == {"same": 2}
    assert bench.site.in_flight == {}


async def test_a_new_attempt_is_asked_anew(make_bench: MakeBench) -> None:
    bench = await make_bench()
    assert await bench.turn(0)
    spec = bench.site._specs["a0"]
    bench.site.add(type(spec)(**{name: getattr(spec, name) for name in spec.__struct_fields__} | {"attempt": 2}))
    bench.site.publish(policy=RoutingPolicy(mode=RoutingMode.KV))
    bench.site.evidence.tick(0.0)
    assert bench.state is None
    assert await bench.turn(0)
    assert bench.state is Tokenization.SAME


async def test_other_ids_degrade_until_a_check_agrees(
    make_bench: MakeBench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = await make_bench(RoutingMode.KV_APPROXIMATE)
    mine, other = bench.theirs, Tokenizer(write_model(tmp_path / "other", "x" + TOOLS_CHATML))
    assert bench.cache.standing().state is State.APPROXIMATE
    bench.theirs = other
    with caplog.at_level(logging.INFO, "frontend_api.tokens.check"):
        assert await bench.turn(0)
        standing = bench.cache.standing()
        assert (standing.state, standing.reasons["a0"]) == (State.DEGRADED, "tokenization_mismatch")
        status = bench.site.telemetry.status(bench.site.view, bench.site.evidence, bench.site.router.outcomes)
        assert status.caches["dep"].state == "degraded"
        assert status.caches["dep"].reasons["a0"] == "tokenization_mismatch"
        assert await bench.turn(MISMATCH_SECONDS * 1.3)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "ids for a chat, where the engine has" in caplog.text
        bench.theirs = mine
        assert await bench.turn(MISMATCH_SECONDS * 1.3)
        assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert bench.cache.standing().state is State.APPROXIMATE
    assert "a0" not in bench.cache.standing().reasons
    assert bench.counts == {"mismatch": 2, "same": 1}


async def hang(heard: Heard, writer: asyncio.StreamWriter) -> None:
    pass


async def broken(heard: Heard, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


def fixed(body: bytes, status: int) -> Any:
    async def answer(heard: Heard, writer: asyncio.StreamWriter) -> None:
        writer.write(unary(body, status))

    return answer


SILENT = {
    "no such path": fixed(b'{"detail":"Not Found"}', 404),
    "a failure": fixed(b"Internal Server Error", 500),
    "no ids": fixed(b'{"count":3}', 200),
    "all refused": fixed(b'{"error":{}}', 400),
    "endless": fixed(b'{"tokens":[' + b"1," * (1 << 20), 200),
    "hangs": hang,
    "breaks": broken,
}


@pytest.mark.parametrize("how", SILENT)
async def test_no_answer_is_no_mismatch(make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr("frontend_api.tokens.check.ANSWER_SECONDS", 0.05 if how == "hangs" else 10.0)
    bench = await make_bench(RoutingMode.KV_APPROXIMATE)
    bench.site.engines["a0"].answer = SILENT[how]
    for attempt in range(1, UNVERIFIED_AFTER + 1):
        assert bench.state is None
        assert await bench.turn(EVERY_SECONDS * 1.3)
        assert bench.counts == {"unanswered": attempt}
    assert bench.state is Tokenization.UNVERIFIED
    standing = bench.cache.standing()
    assert (standing.state, standing.reasons["a0"]) == (State.APPROXIMATE, "tokenization_unverified")
    (engine,) = bench.cache.engines
    assert engine.health is Health.UP
    bench.site.engines["a0"].answer = bench.answer
    assert await bench.turn(EVERY_SECONDS * 1.3)
    assert bench.state is Tokenization.SAME
    bench.site.engines["a0"].answer = SILENT[how]
    for _ in range(UNVERIFIED_AFTER):
        assert await bench.turn(EVERY_SECONDS * 1.3)
    assert bench.state is Tokenization.SAME, "what was proved once stays so until something speaks against it"


async def test_an_engine_that_is_down_is_left_alone(make_bench: MakeBench) -> None:
    bench = await make_bench()
    (engine,) = bench.cache.engines
    engine.failed(0.0, hangs=False)
    assert not await bench.turn(0)
    engine.answered()
    assert await bench.turn(0)


async def test_a_defect_ends_no_router(make_bench: MakeBench, caplog: pytest.LogCaptureFixture) -> None:
    bench = await make_bench()
    broken = bench.cache.tokens = BrokenTokens()
    running = asyncio.create_task(bench.check.run())
    await until(lambda: "could not be checked" in caplog.text)
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert broken.asked == 1


async def test_one_engine_at_a_time_the_longest_waiting_first(make_bench: MakeBench) -> None:
    bench = await make_bench()
    answer = bench.site.engines["a0"].answer
    secrets = {"a1": "secret-a1", "a2": "secret-a2"}

    async def other(heard: Heard, writer: asyncio.StreamWriter) -> None:
        assert heard.headers["authorization"].removeprefix("Bearer ") in secrets.values()
        await answer(heard._replace(headers={**heard.headers, "authorization": "Bearer secret-a0"}), writer)

    for name in secrets:
        await bench.site.engine(name, Role.AGGREGATED, other)
    bench.site.publish(policy=RoutingPolicy(mode=RoutingMode.KV))
    for checked in range(1, 4):
        assert await bench.turn(0)
        assert len(bench.cache.tokenization) == checked
    assert not await bench.turn(0)


# ---- stand-ins that have a model's own ids


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), TOOLS_CHATML)


async def test_a_standin_with_a_models_tokenizer_has_its_ids_and_a_fault_is_seen(
    make_site: MakeSite, model: Path
) -> None:
    site = await make_site()
    engine = await Standin("a0", Role.AGGREGATED, "--tokenizer", str(model)).start()
    follower = asyncio.create_task(Follower(site.evidence, lambda folder, key: Tokenizer(Path(folder))).run())
    check = TokenCheck(site.evidence, site.upstreams, site.telemetry.count_token_check)
    now = 1_000.0
    try:
        site.add(engine.spec())
        site.publish(policy=RoutingPolicy(mode=RoutingMode.KV), tokenizer=str(model))
        cache = site.cache
        await until(lambda: cache.standing().state is State.EXACT)
        assert await check.one_step(now)
        assert cache.standing() == (State.EXACT, {})

        async def metrics() -> str:
            return (await ask(site.port, "/metrics", None)).body.decode()

        await engine.fault("wrong-tokens")
        assert await check.one_step(now := now + 2 * EVERY_SECONDS)
        assert cache.standing() == (State.DEGRADED, {"a0": "tokenization_mismatch"})
        text = await metrics()
        assert 'tandem_router_kv_state{deployment="dep",state="degraded"} 1' in text
        assert 'tandem_router_kv_trouble{deployment="dep",engine="a0",why="tokenization_mismatch"} 1' in text
        assert 'tandem_router_token_checks_total{deployment="dep",outcome="mismatch"} 1' in text
        await engine.fault("no-tokenize")
        assert await check.one_step(now := now + 2 * EVERY_SECONDS)
        assert cache.standing().state is State.DEGRADED, "silence takes nothing back"
        await engine.fault()
        assert await check.one_step(now + 2 * EVERY_SECONDS)
        assert cache.standing() == (State.EXACT, {})

        body = {
            "model": "m",
            "messages": [{"role": "user", "content": "The river rises in the hills. " * 20}],
            "max_tokens": 2,
        }
        first = await ask(site.port, "/v1/chat/completions", body)
        prompt_tokens = json.loads(first.body)["usage"]["prompt_tokens"]
        await until(lambda: len(cache.index) >= prompt_tokens // 16)
        again = await ask(site.port, "/v1/chat/completions", body, **{"x-tandem-explain": "1"})
        assert again.headers["x-tandem-overlap"] == f"{prompt_tokens // 16 * 16}/{prompt_tokens}"
    finally:
        follower.cancel()
        await asyncio.gather(follower, return_exceptions=True)
        await engine.stop()


CALLS_SHOWN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}[{{ m.tool_call_id }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.id + c.function.name + (c.function.arguments | tojson) }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER = {"role": "user", "content": "Weather?"}


def test_a_standin_shows_calls_of_tools_as_the_engine_does(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", CALLS_SHOWN)
    settings, tokenizer = Settings(tokenizer=str(folder)), Tokenizer(folder)
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": "Zürich"}'}
    output = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
    given = [USER, call, output, {**call, "arguments": "{broken"}, output]
    body = json.dumps({"model": "m", "input": given}).encode()
    text = chat_text(responses.chat_messages(parse(body, ResponsesRequest)), None, settings)
    mine = tokenizer.token_ids(ENDPOINTS["/v1/responses"], body)
    assert mine == array("I", ids(text, settings, special=True))

    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "Zürich"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "rain"}
    turns = [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    body = json.dumps({"model": "m", "max_tokens": 5, "messages": turns}).encode()
    text = chat_text(messages.chat_messages(parse(body, MessagesRequest)), None, settings)
    mine = tokenizer.token_ids(ENDPOINTS["/v1/messages"], body)
    assert mine == array("I", ids(text, settings, special=False))


class BrokenTokens:
    marks = ()
    asked = 0

    def at_once(self, endpoint: Endpoint, body: bytes) -> array[int]:
        self.asked += 1
        raise ZeroDivisionError


class FixedTokens:
    marks = ()
    count = 0

    def at_once(self, endpoint: Endpoint, body: bytes) -> array[int]:
        return array("I", [5] * self.count)


async def test_an_answer_that_counts_other_prompt_tokens_is_held_against_its_engine(
    make_site: MakeSite, caplog: pytest.LogCaptureFixture
) -> None:
    site = await make_site()
    await site.engine("a0", Role.AGGREGATED)  # it always counts 7
    site.publish(policy=RoutingPolicy(mode=RoutingMode.KV_APPROXIMATE))
    cache = site.cache
    tokens = cache.tokens = FixedTokens()

    async def chat(ids: int, stream: bool) -> None:
        tokens.count = ids
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": stream}
        assert (await ask(site.port, "/v1/chat/completions", body)).status == 200
        await site.settled()

    for stream in (False, True):
        await chat(7, stream)
        assert cache.standing().state is State.APPROXIMATE
    with caplog.at_level(logging.WARNING):
        for stream in (False, True):
            await chat(9, stream)
            assert cache.standing().state is State.DEGRADED
    assert cache.standing().reasons["a0"] == "prompt_tokens_mismatch"
    assert [r.getMessage() for r in caplog.records] == [
        "a0 of dep counted 7 prompt tokens in a request to /v1/chat/completions; the router had 9."
    ]
    text = (await ask(site.port, "/metrics", None)).body.decode()
    assert 'tandem_router_token_checks_total{deployment="dep",outcome="miscount"} 2' in text
    cache.tick(monotonic() + MISCOUNT_SECONDS / 2)
    assert cache.standing().state is State.DEGRADED
    cache.tick(monotonic() + MISCOUNT_SECONDS + 1)
    assert cache.standing().state is State.APPROXIMATE


async def test_no_answer_is_held_against_a_tokenizer_that_came_after_its_request(make_site: MakeSite) -> None:
    go_on = asyncio.Event()
    site = await make_site()
    await site.engine("a0", Role.AGGREGATED, after(go_on))  # it always counts 7
    kv = RoutingPolicy(mode=RoutingMode.KV_APPROXIMATE)
    site.publish(policy=kv, tokenizer="wrong")
    cache = site.cache
    tokens = cache.tokens = FixedTokens()
    tokens.count = 9
    asked = asyncio.create_task(ask(site.port, "/v1/chat/completions", {"model": "m", "messages": []}))
    await until(lambda: bool(site.in_flight))
    site.publish(policy=kv, tokenizer="right")
    assert site.evidence.of(site.view.deployments["m"]) is cache
    cache.tokens = FixedTokens()
    go_on.set()
    assert (await asked).status == 200
    await site.settled()
    assert cache.standing().reasons.keys() == {"*"}


@pytest.mark.parametrize("change", ["tokenizer", "mode"])
async def test_who_waited_is_weighed_only_by_the_tokens_of_now(make_site: MakeSite, change: str) -> None:
    go_on = asyncio.Event()
    site = await make_site()
    await site.engine("a0", Role.AGGREGATED, after(go_on))
    kv = RoutingPolicy(mode=RoutingMode.KV_APPROXIMATE, max_in_flight=1)
    site.publish(policy=kv)
    cache = site.cache
    tokens = cache.tokens = FixedTokens()
    tokens.count = 70
    body = {"model": "m", "messages": []}
    asked = [asyncio.create_task(ask(site.port, "/v1/chat/completions", body)) for _ in range(2)]
    await until(lambda: [many for _, many in site.router.waiting.counts()] == [1])
    if change == "tokenizer":
        site.publish(policy=kv, tokenizer="another")
    else:
        site.publish(policy=RoutingPolicy(max_in_flight=1))
    go_on.set()
    assert [(await one).status for one in asked] == [200, 200]
    await site.settled()
    reasons = [record.reason for record in site.telemetry.records]
    assert reasons == ["no-overlap", "no-tokens" if change == "tokenizer" else "aggregated"]
