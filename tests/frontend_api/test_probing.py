"""Stand-in engines that begin to fail, as processes of their own: the router takes out who is at fault, goes on another way,
says so, probes, and lets them back in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from time import monotonic
from typing import Any

import httpx
import pytest
import pytest_asyncio

from controlplane.fleet.model import Role
from controlplane.fleet.wire import Disaggregate, Result, RouterStatus, RoutingPolicy, SnapshotEngine, decode, encode
from frontend_api import exchange, probing
from frontend_api.probing import Prober
from frontend_api.routing import outcomes
from frontend_api.routing.failures import Failure
from frontend_api.routing.outcomes import ENOUGH
from frontend_api.routing.view import Engine
from tests.conftest import free_port
from tests.frontend_api import standins
from tests.frontend_api.client import PROMPT, ask
from tests.frontend_api.conftest import MakeSite, Site, until
from tests.frontend_api.scripted import PARAMS, Answer, Heard, answer_well, chat_reply, unary
from tests.frontend_api.test_faults import says

ALWAYS = RoutingPolicy(disaggregate=Disaggregate.ALWAYS)
NAMES = {"p0": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}
_numbers = count(1)
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """URLs of stand-ins, by name."""
    ports = {name: free_port() for name in NAMES}
    with standins.engines(
        {name: (role.value, ports[name]) for name, role in NAMES.items()}, tmp_path_factory.mktemp("e")
    ) as urls:
        yield urls


class Fleet:
    """Stand-ins behind a router that probes."""

    def __init__(self, site: Site, urls: dict[str, str]) -> None:
        self.site = site
        self.urls = urls
        for name, role in NAMES.items():
            site.add(SnapshotEngine(id=name, name=name, attempt=1, role=role, url=urls[name], block_size=16))

    def fault(self, name: str, *faults: str) -> None:
        httpx.post(self.urls[name] + "/sim/faults", json={"faults": faults}).raise_for_status()

    async def ask(self, result: Result = Result.OK) -> dict[str, Any]:
        """One request of a prompt that nobody has seen, every second one streamed; its record."""
        number = next(_numbers)
        body = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": f"{number} " * 60}]}
        reply = await ask(self.site.port, CHAT, {**body, "stream": result is not Result.OK or number % 2 == 0})
        assert reply.status == 200, reply.body
        await until(lambda: not self.site.router.exchanges)
        record = self.site.telemetry.records[-1]
        assert record.result is result
        return {
            "prefill": record.prefill,
            "decode": record.decode,
            "cause": record.fallback_cause,
            "tried": record.tried,
        }

    def left_out(self) -> set[str]:
        return {str(failure) for failure in self.site.router.outcomes.left_out}

    async def sweep_until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self.site.router.sweep(monotonic())
                await asyncio.sleep(0.02)


@pytest_asyncio.fixture
async def fleet(
    make_site: MakeSite, processes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Fleet]:
    monkeypatch.setattr(outcomes, "FIRST_PAUSE", 0.2)
    monkeypatch.setattr(outcomes, "LONGEST_PAUSE", 0.4)
    monkeypatch.setattr(outcomes, "DOUBT_SECONDS", 0.2)
    monkeypatch.setattr(exchange, "DOUBT_SECONDS", 0.2)
    monkeypatch.setattr(probing, "PROBE_SECONDS", 1.0)
    monkeypatch.setattr(probing, "LOOK_SECONDS", 0.02)
    site = await make_site()
    fleet = Fleet(site, processes)
    site.publish(policy=ALWAYS)
    probes = asyncio.create_task(Prober(site.upstreams, site.router.outcomes).run())
    yield fleet
    probes.cancel()
    for name in NAMES:
        fleet.fault(name)


async def test_a_pair_whose_transfers_begin_to_fail_is_out_and_comes_back(fleet: Fleet) -> None:
    await fleet.ask()
    fleet.fault("d0", "transfer-fails")
    seen = [await fleet.ask() for _ in range(8)]
    assert {one["cause"] for one in seen} == {""}, "the other decode engine takes its KV"
    assert 0 < sum(bool(one["tried"]) for one in seen) <= ENOUGH
    await until(lambda: fleet.left_out() == {"transfer-status-500 p0 d0"})
    assert {one["decode"] for one in [await fleet.ask() for _ in range(4)]} == {"d1"}
    prefilled = standins.metric(fleet.urls["p0"], "vllm:prompt_tokens_total")
    one = await fleet.ask()
    assert one["tried"] == ()
    assert standins.metric(fleet.urls["p0"], "vllm:prompt_tokens_total") - prefilled < 200, "a prompt is prefilled once"
    fleet.fault("d0")
    await until(lambda: not fleet.left_out())
    assert {one["decode"] for one in [await fleet.ask() for _ in range(4)]} == {"d0", "d1"}


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("transfer-fails", "transfer-status-500"),
        ("transfer-cut", "transfer-reset"),
        ("transfer-refused", "transfer-status-400"),
        ("computes-itself", "decode-computed"),
    ],
)
async def test_the_only_decode_engine_computes_prompts_that_it_cannot_fetch(
    fleet: Fleet, fault: str, cause: str
) -> None:
    fleet.site.publish(policy=ALWAYS, without=("d1",))
    fleet.fault("d0", fault)
    seen = [await fleet.ask() for _ in range(6)]
    causes = [one["cause"] for one in seen]
    assert causes[0] == cause
    assert set(causes) <= {cause, "pairs-broken"}
    await until(lambda: fleet.left_out() == {f"{cause} p0 d0"})
    assert (await fleet.ask())["cause"] == "pairs-broken"
    fleet.fault("d0")
    await until(lambda: not fleet.left_out())
    assert (await fleet.ask())["prefill"] == "p0"


async def test_a_transfer_that_hangs_is_given_up_and_tried_by_no_further_client(fleet: Fleet) -> None:
    fleet.site.publish(policy=ALWAYS, without=("d1",))
    fleet.fault("d0", "transfer-hangs")
    first = asyncio.ensure_future(fleet.ask())
    await fleet.sweep_until(first.done)
    assert first.result()["cause"] == "transfer-silent"
    assert fleet.left_out() == {"transfer-silent p0 d0"}
    assert (await fleet.ask())["cause"] == "pairs-broken"
    (fault,) = fleet.site.router.outcomes.faults(fleet.site.view.engines(), monotonic())
    port = fault.reason.rpartition(":")[2].rstrip(").")
    assert fault.reason == (
        f"Decode engine d0 did not answer in time; it was to fetch KV from prefill engine p0 (side channel 127.0.0.1:{port})."
    )


@pytest.mark.parametrize(("fault", "cause"), [("http-500", "status-500"), ("cut", "reset")])
@pytest.mark.parametrize("name", ["p0", "d0"])
async def test_an_engine_that_fails_though_it_calls_itself_healthy_is_out_until_it_works(
    fleet: Fleet, name: str, fault: str, cause: str
) -> None:
    fleet.fault(name, fault)
    stage = NAMES[name].value
    for _ in range(4):
        await fleet.ask()
    await until(lambda: fleet.left_out() >= {f"{stage}-{cause} {name}"})
    assert name not in {(await fleet.ask())[stage] for _ in range(3)}
    faults = fleet.site.router.outcomes.faults(fleet.site.view.engines(), monotonic())
    assert [(f.engine, f.prefill) for f in faults] == [(name, "")], "neither its partners nor its pairs"
    fleet.fault(name)
    await until(lambda: not fleet.left_out())
    assert name in {(await fleet.ask())[stage] for _ in range(4)}


async def test_an_engine_that_hangs_loses_its_requests_to_another(fleet: Fleet) -> None:
    fleet.fault("d0", "hang")
    asked = [asyncio.ensure_future(fleet.ask()) for _ in range(4)]
    await fleet.sweep_until(lambda: all(one.done() for one in asked))
    assert {record.decode for record in fleet.site.telemetry.records} == {"d1"}
    await fleet.sweep_until(lambda: fleet.left_out() >= {"decode-silent d0"})
    assert fleet.site.router.outcomes.faults(fleet.site.view.engines(), monotonic())[0].engine == "d0"
    fleet.fault("d0")
    await fleet.sweep_until(lambda: not fleet.left_out())


async def test_an_engine_that_breaks_its_streams_off_is_out_though_short_answers_work(fleet: Fleet) -> None:
    fleet.site.publish(policy=ALWAYS, without=("p0", "d1"), wants_prefill=False)
    fleet.fault("d0", "truncated-stream")
    for _ in range(ENOUGH):
        await fleet.ask(Result.TRUNCATED)
    assert fleet.left_out() == {"decode-broke-off d0"}
    fleet.fault("d0")
    await until(lambda: not fleet.left_out())


# ---- probes, byte by byte


async def probed(
    make_site: MakeSite, answer: Answer, failure: Callable[[Engine], Failure], role: Role = Role.DECODE
) -> Any:
    """What one probe of an engine tells, and what it was asked."""
    site = await make_site()
    engine = await site.engine("e", role, answer)
    site.publish()
    found = site.router.outcomes
    (subject,) = site.view.engines()
    for _ in range(ENOUGH):
        found.blame(failure(subject), site.view.deployments["m"], 0.0)
    Prober(site.upstreams, found).start_due(monotonic())
    (trouble,) = found.troubles.values()
    await until(lambda: not trouble.probing)
    return trouble, engine.heard


def of(what: str) -> Callable[[Engine], Failure]:
    return lambda engine: Failure(engine, what)


async def chat_only(heard: Heard, writer: asyncio.StreamWriter) -> None:
    if heard.target == CHAT:
        await answer_well(heard, writer)
    else:
        writer.write(unary({"error": {"message": "Not Found"}}, 404))


@pytest.mark.parametrize(
    ("answer", "what", "out", "paths"),
    [
        (answer_well, "status-500", False, ["/v1/completions"]),
        (chat_only, "status-500", False, ["/v1/completions", CHAT]),
        (says(unary(b"", 404)), "status-404", True, ["/v1/completions", CHAT]),
        (says(unary(b"", 401)), "status-500", True, ["/v1/completions"]),
        (says(unary(b"", 500)), "status-500", True, ["/v1/completions"]),
        (says(unary(chat_reply(choices=[]))), "status-500", True, ["/v1/completions"]),
        (says(unary(b"[]")), "status-500", True, ["/v1/completions"]),
        (says(unary(b"", 503)), "status-500", True, ["/v1/completions"]),  # too much to do: that tells nothing
        (says(b"", then="reset"), "status-500", True, ["/v1/completions"]),
    ],
)
async def test_a_probe_of_an_engine(
    make_site: MakeSite, answer: Answer, what: str, out: bool, paths: list[str]
) -> None:
    trouble, heard = await probed(make_site, answer, of(what))
    assert trouble.out is out
    assert [one.target for one in heard] == paths
    for one in heard:
        assert one.headers["authorization"] == "Bearer secret-e"
        assert (one.body["model"], one.body["max_tokens"], "stream" in one.body) == ("m", 1, False)
        assert all(isinstance(part, str) for part in (one.body.get("prompt", ""),)), "any tokenizer reads text"


async def test_an_engine_that_takes_no_such_probe_is_not_called_failing(make_site: MakeSite) -> None:
    """Of a model that makes embeddings, say."""
    site = await make_site()
    await site.engine("e", Role.AGGREGATED, says(unary({"error": {"message": "no completions"}}, 400)))
    site.publish()
    found = site.router.outcomes
    (engine,) = site.view.engines()
    trouble = found.doubt(Failure(engine, "status-500"), site.view.deployments["m"], 0.0)
    Prober(site.upstreams, found).start_due(monotonic())
    await until(lambda: bool(site.engines["e"].heard) and not trouble.probing)
    assert found.left_out == ()


async def test_a_prefill_engine_that_gave_no_params_is_probed_for_them(make_site: MakeSite) -> None:
    trouble, heard = await probed(make_site, answer_well, of("no-params"), Role.PREFILL)
    assert trouble.out is False
    assert heard[0].body["kv_transfer_params"]["do_remote_decode"] is True
    trouble, _ = await probed(make_site, says(unary(chat_reply())), of("no-params"), Role.PREFILL)
    assert trouble.out is True


async def test_a_probe_of_a_pair_is_shortened_to_what_its_engines_take(make_site: MakeSite) -> None:
    async def short(heard: Heard, writer: asyncio.StreamWriter) -> None:
        words = len(heard.body["prompt"].split())
        if words > 40:
            writer.write(unary({"error": {"message": "too long"}}, 400))
        else:
            await answer_well(heard, writer)

    site = await make_site()
    prefill = await site.engine("p", Role.PREFILL, short, block_size=64)
    decode = await site.engine("d", Role.DECODE, block_size=64)
    site.publish()
    found = site.router.outcomes
    p, d = site.view.deployments["m"].prefill[0], site.view.deployments["m"].decode[0]
    for _ in range(ENOUGH):
        found.blame(Failure(d, "silent", p), site.view.deployments["m"], 0.0)
    assert found.left_out
    Prober(site.upstreams, found).start_due(monotonic())
    await until(lambda: not found.left_out)
    assert [len(one.body["prompt"].split()) for one in prefill.heard] == [74, 37]
    alone, fetching = decode.heard
    assert "kv_transfer_params" not in alone.body
    assert fetching.body["prompt"] == prefill.heard[1].body["prompt"]
    assert fetching.body["kv_transfer_params"] == PARAMS


async def test_a_client_pays_nothing_for_probes(make_site: MakeSite) -> None:
    site = await make_site()
    await site.engine("a0", Role.AGGREGATED)
    site.publish()
    assert (await ask(site.port, CHAT, PROMPT)).status == 200
    Prober(site.upstreams, site.router.outcomes).start_due(monotonic())
    assert len(site.engines["a0"].heard) == 1, "where nothing is wrong nobody is probed"


@pytest.mark.parametrize("works", [False, True], ids=["hangs", "has much to do"])
async def test_an_engine_whose_counters_rise_is_not_called_silent(
    make_site: MakeSite, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    monkeypatch.setattr(probing, "PROBE_SECONDS", 0.3)
    written = count(1)

    async def busy(heard: Heard, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    site = await make_site()
    engine = await site.engine("e", Role.AGGREGATED, busy)
    engine.figures = lambda: f'vllm:generation_tokens_total{{engine="0"}} {next(written) if works else 7}\n'.encode()
    site.publish()
    found = site.router.outcomes
    (subject,) = site.view.engines()
    trouble = found.doubt(Failure(subject, "silent"), site.view.deployments["m"], 0.0)
    Prober(site.upstreams, found).start_due(monotonic())
    await until(lambda: bool(engine.heard) and not trouble.probing)
    assert trouble.out is not works


# ---- what people and the control plane hear


async def test_a_fault_is_in_the_status_the_figures_the_decisions_and_the_log(
    make_site: MakeSite, caplog: pytest.LogCaptureFixture
) -> None:
    site = await make_site()
    await site.engine("p", Role.PREFILL)
    await site.engine("d0", Role.DECODE, says(unary({"error": {"message": "no KV"}}, 500)))
    await site.engine("d1", Role.DECODE)
    site.publish(policy=ALWAYS)
    for _ in range(6):
        assert (await ask(site.port, CHAT, PROMPT)).status == 200
    await site.settled()
    site.router.sweep(monotonic())
    words = "Decode engine d0 answered with status 500; it was to fetch KV from prefill engine p (side channel 10.0.0.1:5600)."
    status = decode(encode(site.telemetry.status(site.view, site.evidence, site.router.outcomes)), RouterStatus)
    (fault,) = status.faults
    assert (fault.engine, fault.prefill, fault.cause, fault.reason) == ("d0", "p", "transfer-status-500", words)
    assert (fault.failures, fault.attempt, fault.prefill_attempt) == (ENOUGH, 1, 1)
    lines = (await ask(site.port, "/metrics")).body.decode().splitlines()
    for line in (
        'leg_failures_total{deployment="dep",engine="d0",cause="transfer-status-500"} 2',
        'pair_failing{prefill="p",decode="d0"} 1',
        'engine_failing{engine="d0"} 0',
    ):
        assert f"tandem_router_{line}" in lines
    decisions = (await ask(site.port, "/debug/decisions")).json["decisions"]
    assert [one["tried"] for one in decisions].count([words]) == ENOUGH
    assert (decisions[0]["tried"], decisions[0]["left_out"]) == ([], [words])
    assert f"dep: {words}" in caplog.text
    site.publish(policy=ALWAYS, without=("d0",))
    assert 'engine="d0"' not in (await ask(site.port, "/metrics")).body.decode(), "what is gone is told of no more"
