"""One ledger: however a request ends, its record, the metrics, its key's limits and the decisions count the same of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from controlplane.fleet.model import Role
from controlplane.fleet.wire import Result, RoutingMode, RoutingPolicy
from frontend_api import exchange
from frontend_api.http import upstream
from frontend_api.http.upstream import Pool
from frontend_api.legs import AnswerLeg
from frontend_api.observe.account import Used
from tests.frontend_api.client import PROMPT, Client, ask
from tests.frontend_api.conftest import MakeSite, Site, until
from tests.frontend_api.scripted import PARAMS, Answer, Heard, after, answer_well, chat_reply, unary
from tests.frontend_api.test_figures import of, samples
from tests.frontend_api.test_limits import CHAT, SECRET, countless, cut, fail, hang_up, limit, never, refuse, use

ANSWERS = {
    "well": answer_well,
    "cut": cut,
    "hang up": hang_up,
    "fail": fail,
    "refuse": refuse,
    "countless": countless,
    "never": never,
}


async def as_told(heard: Heard, writer: asyncio.StreamWriter) -> None:
    await ANSWERS[heard.body["user"]](heard, writer)


def totals(site: Site, text: bytes) -> dict[str, int]:
    """Tokens by kind, as `/metrics` tells them."""
    found = samples(text)
    return {
        kind: int(of(found, "tokens_total", deployment="dep", kind=kind) or 0)
        for kind in ("prompt", "output", "estimated")
    }


@pytest.mark.parametrize("roles", [(Role.AGGREGATED,), (Role.PREFILL, Role.DECODE)], ids=["alone", "pair"])
async def test_record_metrics_limits_and_decisions_say_the_same(make_site: MakeSite, roles: tuple[Role, ...]) -> None:
    site = await make_site(auth=True)
    for role in roles:
        await site.engine(role.value, role, as_told if role is not Role.PREFILL else answer_well)
    site.publish(policy=RoutingPolicy(mode=RoutingMode.ROUND_ROBIN))
    limit(site, tokens_per_minute=1_000_000)
    dice, answering = Random(5), roles[-1].value
    for number in range(60):
        name = dice.choice(list(ANSWERS))
        body = {**PROMPT, "user": name, "max_tokens": 50, "stream": dice.random() < 0.5 or name == "cut"}
        async with Client(site.port) as client:
            seen = len(site.engines[answering].heard)
            client.post(CHAT, body, Authorization=f"Bearer {SECRET}", x_request_id=f"r{number}")
            if name == "never" or dice.random() < 0.3:
                await until(lambda seen=seen: len(site.engines[answering].heard) > seen)
                continue  # the client leaves
            reply = await client.head()
            if reply.headers.get("transfer-encoding") == "chunked":
                await client.closed_or_done()
        await site.settled()
    await site.settled()
    records = site.telemetry.records
    assert len({record.result for record in records}) == 5
    spent = sum((record.prompt_tokens or 0) + (record.output_tokens or 0) for record in records)
    assert use(site)[1] == spent > 0
    told = totals(site, (await ask(site.port, "/metrics", None)).body)
    assert told["prompt"] + told["output"] == spent
    assert told["estimated"] == sum(record.estimated_tokens for record in records) > 0
    decisions: list[dict[str, Any]] = (await ask(site.port, "/debug/decisions?limit=200", None)).json["decisions"]
    used = Counter[str]()
    for decision in decisions:
        used.update(decision["used"])
    assert (used["prompt"] + used["output"], used["estimated"]) == (spent, told["estimated"])


async def test_a_stream_that_was_left_counts_what_was_seen_and_the_prefill_engines_count_of_the_prompt(
    make_site: MakeSite,
) -> None:
    site = await make_site()
    await site.engine("p", Role.PREFILL)
    await site.engine("d", Role.DECODE, cut)
    site.publish()
    async with Client(site.port) as client:
        client.post(CHAT, {**PROMPT, "stream": True})
        await client.head()
        await client.closed_or_done()
    await site.settled()
    record = site.record
    # the scripted prefill engine counts 7 prompt tokens, 2 of them cached
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens, record.estimated_tokens) == (7, 2, 2, 2)


# ---- a reply is answered when its client has it

LARGE = 32 << 20
"""Bytes: more than sockets hold."""


async def at_length(heard: Heard, writer: asyncio.StreamWriter) -> None:
    writer.write(unary(chat_reply("x" * LARGE)))


@pytest.mark.parametrize(
    ("end", "result", "status"),
    [
        ("takes it", Result.OK, 200),
        ("takes it, and the router ends the connection", Result.OK, 200),
        ("leaves", Result.ABORTED, 499),
        ("is cut at the end of a drain", Result.TRUNCATED, 200),
    ],
)
async def test_a_whole_reply_counts_as_answered_once_its_client_has_it(
    make_site: MakeSite, end: str, result: Result, status: int
) -> None:
    site = await make_site()
    await site.engine("a", Role.AGGREGATED, at_length)
    site.publish()
    async with Client(site.port) as client:
        client.post(CHAT, PROMPT)
        await client.head()
        client.pause()
        await until(lambda: bool(site.router.exchanges) and site.in_flight == {})
        assert site.telemetry.records == []
        if end.endswith("connection") or "drain" in end:
            site.server.stop_accepting()
        if "drain" in end:
            site.server.cut_all()
        elif end.startswith("takes"):
            client.resume()
            await client.reader.readexactly(LARGE)
    await site.settled()
    assert (site.record.result, site.record.status) == (result, status)
    assert (site.record.prompt_tokens, site.record.output_tokens) == (7, 3)


# ---- KV that nobody reads


async def refuse_kv(heard: Heard, writer: asyncio.StreamWriter) -> None:
    writer.write(unary({"error": {"message": "max_tokens must be at least 1"}}, 400))


async def leave_while(site: Site, heard: Callable[[], bool]) -> None:
    async with Client(site.port) as client:
        client.post(CHAT, PROMPT)
        await until(heard)


@pytest.mark.parametrize(("decode", "stranded"), [(refuse_kv, 0), (fail, 1), (hang_up, 1), (never, 1)])
async def test_kv_that_was_made_just_as_its_client_left_is_freed_or_counted_as_stranded(
    make_site: MakeSite, monkeypatch: pytest.MonkeyPatch, decode: Answer, stranded: int
) -> None:
    monkeypatch.setattr(exchange, "FREE_SECONDS", 0.2)
    go_on = asyncio.Event()
    site = await make_site()
    prefill = await site.engine("p", Role.PREFILL, after(go_on))
    refusing = await site.engine("d", Role.DECODE, decode)
    site.publish()
    await leave_while(site, lambda: bool(prefill.heard))
    await until(lambda: not site.server.connections)
    go_on.set()
    await site.settled()
    (heard,) = refusing.heard
    assert heard.target == "/v1/completions"
    assert (heard.body["max_tokens"], heard.body["kv_transfer_params"]) == (0, PARAMS)
    assert (site.record.result, site.record.stranded) == (Result.ABORTED, stranded)
    assert site.record.prefill_seconds is None, "its client was gone before"
    text = (await ask(site.port, "/metrics", None)).body
    assert (of(samples(text), "stranded_total", deployment="dep") or 0) == stranded


async def test_a_prefill_that_goes_on_for_long_is_cut_when_its_client_left(make_site: MakeSite) -> None:
    site = await make_site()
    prefill = await site.engine("p", Role.PREFILL, never)
    decode = await site.engine("d", Role.DECODE)
    site.publish()
    await leave_while(site, lambda: bool(prefill.heard))
    await until(lambda: prefill.aborted == 1, 3.0)
    await site.settled()
    assert (decode.heard, site.record.result, site.record.stranded) == ([], Result.ABORTED, 0)


@pytest.mark.skipif(not upstream.__file__.endswith(".py"), reason="a compiled class is as it is")
async def test_params_that_no_decode_engine_has_got_yet_are_given_back(
    make_site: MakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client leaves while the connection to decode is being made."""
    site = await make_site()
    await site.engine("p", Role.PREFILL)
    decode = await site.engine("d", Role.DECODE, refuse_kv)
    site.publish()
    connects = asyncio.Event()
    connect = Pool._connect

    async def slowly(pool: Pool, *leg: Any) -> None:
        if pool.port == decode.port:
            await connects.wait()
        await connect(pool, *leg)

    monkeypatch.setattr(Pool, "_connect", slowly)
    async with Client(site.port) as client:
        client.post(CHAT, PROMPT)
        await until(
            lambda: any(e.leg is not None and isinstance(e.leg.receiver, AnswerLeg) for e in site.router.exchanges)
        )
    await until(lambda: not site.server.connections)
    connects.set()
    await site.settled()
    assert [heard.body["max_tokens"] for heard in decode.heard] == [0]
    assert (site.record.result, site.record.stranded) == (Result.ABORTED, 0)


def test_no_more_of_a_prompt_was_cached_than_it_has_tokens() -> None:
    assert [Used(prompt, cached, 3).cached for prompt, cached in ((7, 10**6), (7, 2), (7, None), (None, 2))] == [
        7,
        2,
        None,
        2,
    ]
