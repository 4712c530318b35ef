"""The routing policy as requests meet it: sessions by header and user, local and remote prefill, what traffic teaches."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from controlplane.fleet.model import Role
from controlplane.fleet.wire import Affinity, Disaggregate, RoutingMode, RoutingPolicy
from frontend_api.formats.openai import Endpoint
from frontend_api.kv.evidence import Slow
from frontend_api.routing.view import Engine
from tests.frontend_api.client import PROMPT, Client, ask
from tests.frontend_api.conftest import MakeSite, Site, until
from tests.frontend_api.scripted import (
    DONE,
    LAST,
    ROLE,
    STREAM_HEAD,
    Heard,
    answer_well,
    chunk,
    event,
    framed,
)

CHAT = "/v1/chat/completions"
AGGREGATED = ("a0", "a1", "a2", "a3")


async def answered_by(
    site: Site, path: str = CHAT, body: dict[str, Any] | None = None, **headers: str
) -> tuple[str, str]:
    reply = await ask(site.port, path, {**PROMPT, "max_tokens": 9, **(body or {})}, x_tandem_explain="1", **headers)
    assert reply.status == 200
    return reply.headers["x-tandem-decode"], reply.headers["x-tandem-reason"]


MakeRouters = Callable[[RoutingPolicy], Awaitable[tuple[Site, Site]]]


@pytest.fixture
def two_routers(make_site: MakeSite) -> MakeRouters:
    """Two routers of the same engines that know nothing of each other."""

    async def make(policy: RoutingPolicy) -> tuple[Site, Site]:
        first, second = await make_site(), await make_site()
        for name in AGGREGATED:
            await first.engine(name, Role.AGGREGATED)
            second.add(first._specs[name])
        first.publish(policy=policy)
        second.publish(policy=policy)
        return first, second

    return make


async def test_a_session_goes_to_one_engine_in_every_router(two_routers: MakeRouters) -> None:
    first, second = await two_routers(RoutingPolicy())
    homes = set()
    for session in "abcdefgh":
        home, reason = await answered_by(first, x_session_id=session)
        assert reason == "affinity"
        homes.add(home)
        assert await answered_by(first, x_session_id=session) == (home, "affinity")
        assert await answered_by(second, x_session_id=session) == (home, "affinity")
    assert len(homes) > 1
    assert {(await answered_by(first))[0] for _ in range(8)} == set(AGGREGATED), "without a session they take turns"


async def test_policies_say_what_a_session_is(two_routers: MakeRouters) -> None:
    header, user, text = (
        {"x_session_id": "s"},
        {"user": "ann"},
        {"messages": [{"role": "user", "content": '"user": "bob"'}]},
    )
    site, _ = await two_routers(RoutingPolicy(affinity=Affinity.NONE))
    assert (await answered_by(site, body=user, **header))[1] == "aggregated"
    site, _ = await two_routers(RoutingPolicy(affinity=Affinity.HEADER))
    assert (await answered_by(site, body=user))[1] == "aggregated"
    assert (await answered_by(site, body=user, x_session_id=""))[1] == "aggregated"
    site, _ = await two_routers(RoutingPolicy(affinity=Affinity.USER))
    assert (await answered_by(site, body=text))[1] == "aggregated", "field case peer-R19"
    ann = await answered_by(site, body=user)
    assert ann[1] == "affinity"
    assert await answered_by(site, body={**user, **text}) == ann
    assert await answered_by(site, "/v1/messages", {"metadata": {"user_id": "ann"}}) == ann
    assert await answered_by(site, body={"user": "somebody else"}, x_session_id="ann") == ann, "the header goes first"


class Known:
    """Every prompt is the same 3,000 tokens."""

    marks: Sequence[str] = ()

    def at_once(self, endpoint: Endpoint, body: bytes) -> array[int] | Slow | None:
        return array("I", range(3_000))


async def known_pair(make_site: MakeSite, **policy: Any) -> tuple[Site, Engine, Engine]:
    site = await make_site()
    await site.engine("p", Role.PREFILL)
    await site.engine("d", Role.DECODE)
    site.publish(policy=RoutingPolicy(mode=RoutingMode.KV, **policy))
    deployment = site.view.deployments["m"]
    site.cache.tokens = Known()
    return site, deployment.prefill[0], deployment.decode[0]


async def test_local_where_that_is_cheaper_and_it_is_no_fallback(make_site: MakeSite) -> None:
    site, _, _ = await known_pair(make_site)
    go_on = asyncio.Event()

    async def slowly(heard: Heard, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + framed(ROLE + chunk("a")))
        await go_on.wait()
        writer.write(framed(DONE) + LAST)

    site.engines["d"].answer = slowly
    async with Client(site.port) as client:
        client.post(CHAT, {**PROMPT, "stream": True}, x_tandem_explain="1")
        told = (await client.head()).headers
        assert (told["x-tandem-prefill"], told["x-tandem-reason"], told["x-tandem-fallback"]) == (
            "-",
            "local-cheaper",
            "-",
        )
        site.engines["d"].answer = answer_well
        reply = await ask(site.port, CHAT, PROMPT, x_tandem_explain="1")  # that stream would stand still
        assert (reply.headers["x-tandem-prefill"], reply.headers["x-tandem-reason"]) == ("p", "no-overlap")
        for part in ("p prefill total=", "d decode total=", "d local total=", "stalls="):
            assert part in reply.headers["x-tandem-candidates"]
        go_on.set()
        await client.closed_or_done()
    await site.settled()
    assert [(r.prefill, r.decode, r.fallback) for r in site.telemetry.records] == [
        ("p", "d", False),
        (None, "d", False),
    ]
    text = (await ask(site.port, "/metrics")).body.decode()
    assert 'decisions_total{deployment="dep",reason="local-cheaper"} 1' in text


async def test_always_and_the_threshold(make_site: MakeSite) -> None:
    site, _, _ = await known_pair(make_site, disaggregate=Disaggregate.ALWAYS)
    assert (await answered_by(site))[1] == "no-overlap"
    site, _, _ = await known_pair(make_site, disaggregate=Disaggregate.ALWAYS, local_below_tokens=3_001)
    assert (await answered_by(site))[1] == "local-below-threshold"
    assert not site.engines["p"].heard


async def test_traffic_teaches_reading_fetching_and_writing(make_site: MakeSite) -> None:
    site, prefill, decode = await known_pair(make_site, disaggregate=Disaggregate.ALWAYS)

    async def at_length(heard: Heard, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + framed(ROLE + chunk("a")))
        for n in range(12):
            await asyncio.sleep(0)
            writer.write(framed(chunk(f"t{n}")))
        writer.write(framed(event({"choices": [], "usage": {"prompt_tokens": 3_000, "completion_tokens": 13}})))
        writer.write(framed(DONE) + LAST)

    site.engines["d"].answer = at_length
    await ask(site.port, CHAT, {**PROMPT, "stream": True})
    await site.settled()
    assert (prefill.read.measured, decode.pull.measured, decode.step.measured, decode.read.measured) == (1, 1, 1, 0)
    before = decode.step.pace
    site.router.sweep(0.0)
    assert decode.step.pace == decode.step.own < before


async def test_a_stream_that_is_announced_before_its_first_token_teaches_no_reading(make_site: MakeSite) -> None:
    site, _, decode = await known_pair(make_site)

    async def announced(heard: Heard, writer: asyncio.StreamWriter) -> None:
        created = b'event: response.created\ndata: {"type":"response.created","response":{"id":"r"}}\n\n'
        done = b'event: response.completed\ndata: {"type":"response.completed","response":{"usage":{}}}\n\n'
        delta = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"a"}\n\n'
        writer.write(STREAM_HEAD + framed(created))
        await asyncio.sleep(0.01)
        writer.write(framed(delta) + framed(done) + LAST)

    site.engines["d"].answer = announced
    await ask(site.port, "/v1/responses", {"model": "m", "input": "hi", "stream": True})
    await site.settled()
    assert site.record.reason == "local-cheaper"
    assert (decode.read.measured, decode.queued) == (0, 0)


async def test_a_slow_client_says_nothing_of_the_engine(make_site: MakeSite) -> None:
    site = await make_site()

    async def much(heard: Heard, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + framed(ROLE))
        for _ in range(600):
            writer.write(framed(chunk("x" * 20_000)))
        writer.write(framed(DONE) + LAST)

    await site.engine("a", Role.AGGREGATED, much)
    site.publish()
    (engine,) = site.view.deployments["m"].aggregated
    async with Client(site.port) as client:
        client.post(CHAT, {**PROMPT, "stream": True})
        await client.head()
        client.pause()
        await until(lambda: any(exchange.held_back for exchange in site.router.exchanges))
        client.resume()
        assert (await client.closed_or_done()).endswith(DONE)
    await site.settled()
    assert engine.step.measured == 0


async def test_kv_that_no_decode_engine_got_is_counted(pair: Site) -> None:
    await pair.engines["d"].stop()
    assert (await ask(pair.port, CHAT, PROMPT)).status == 503
    assert pair.record.stranded == 1
    assert 'tandem_router_stranded_total{deployment="dep"} 1' in (await ask(pair.port, "/metrics")).body.decode()
