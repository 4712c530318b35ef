"""Engines that fail in every way, and what the client and the record are told. Cases: field reports B1, B3, B19, C1, C2, C5, R2, R7, S3, S4, S12."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from gzip import compress
from time import monotonic
from typing import Any

import pytest
import pytest_asyncio

from controlplane.fleet.model import Role
from controlplane.fleet.wire import OnPrefillFailure, Result, RoutingPolicy, SnapshotEngine, SnapshotKey
from frontend_api import flow
from frontend_api.http import upstream
from frontend_api.http.upstream import Failure
from frontend_api.processes.listeners import probe_once
from frontend_api.routing.view import HANG_PAUSE, Health
from tests.frontend_api.client import PROMPT, Client, ask, events
from tests.frontend_api.conftest import MakeSite, Site, until
from tests.frontend_api.scripted import (
    DONE,
    LAST,
    PARAMS,
    ROLE,
    STREAM_HEAD,
    USAGE,
    Answer,
    Heard,
    answer_well,
    chat_reply,
    chunk,
    event,
    framed,
    unary,
)

CHAT = "/v1/chat/completions"
STREAM = {**PROMPT, "stream": True}
FAIL = RoutingPolicy(on_prefill_failure=OnPrefillFailure.FAIL)


def says(data: bytes, *, then: str = "keep") -> Answer:
    """An engine that writes these bytes, and then keeps, ends or resets the connection, or hangs."""

    async def answer(heard: Heard, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        if then == "end":
            writer.close()
        elif then == "reset":
            await writer.drain()
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            writer.transport.abort()
        elif then == "hang":
            await asyncio.Event().wait()

    return answer


async def hang(heard: Heard, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def aggregated(make_site: MakeSite, *answers: Answer, **options: Any) -> Site:
    site = await make_site(**options)
    for index, answer in enumerate(answers):
        await site.engine(f"a{index}", Role.AGGREGATED, answer)
    site.publish()
    return site


# ---- connections


async def test_a_dead_engine_is_left_out_at_once_and_let_in_again_half_open(make_site: MakeSite) -> None:
    site = await aggregated(make_site, answer_well, answer_well)
    dead = site.engines["a0"]
    await dead.stop()
    for _ in range(4):
        assert (await ask(site.port, CHAT, PROMPT)).status == 200
    assert [r.decode for r in site.telemetry.records] == ["a1"] * 4
    down = next(e for e in site.view.engines() if e.id == "a0")
    assert down.health is Health.DOWN
    await probe_once(site.view)
    assert down.health is Health.DOWN
    await dead.start()
    await probe_once(site.view)
    assert down.health is Health.HALF_OPEN
    await ask(site.port, CHAT, PROMPT)
    assert down.health is Health.UP


async def test_the_only_engine_is_tried_although_it_failed(make_site: MakeSite) -> None:
    site = await aggregated(make_site, answer_well)
    engine = site.engines["a0"]
    await engine.stop()
    reply = await ask(site.port, CHAT, PROMPT)
    assert (reply.status, reply.error["code"]) == (503, "engine_unreachable")
    assert reply.headers["retry-after"] == "2"
    await engine.start()
    assert (await ask(site.port, CHAT, PROMPT)).status == 200


async def test_nothing_is_prefilled_while_the_only_decode_engine_is_away(make_site: MakeSite) -> None:
    site = await make_site()
    prefill = await site.engine("p", Role.PREFILL)
    decode = await site.engine("d", Role.DECODE)
    site.publish()
    await decode.stop()
    for _ in range(5):
        reply = await ask(site.port, CHAT, PROMPT)
        assert (reply.status, reply.error["code"]) == (503, "engine_unreachable")
    assert len(prefill.heard) == 1  # of the first request, as nobody knew
    assert [record.stranded for record in site.telemetry.records] == [1, 0, 0, 0, 0]
    await decode.start()
    assert (await ask(site.port, CHAT, PROMPT)).status == 200  # at once: it waits for no probe
    assert [engine.health for engine in site.view.engines()] == [Health.UP] * 2
    await site.settled()


@pytest_asyncio.fixture
async def hanging(make_site: MakeSite) -> AsyncIterator[Site]:
    """A site whose decode engine is out, and whose kernel answers nobody."""
    site = await make_site()
    await site.engine("p", Role.PREFILL)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        site.add(SnapshotEngine(id="d", name="d", attempt=1, role=Role.DECODE, url=url))
        site.publish()
        site.view.deployments["m"].decode[0].failed(0.0, hangs=False)
        _, writer = await asyncio.open_connection(*full.getsockname())  # its backlog
        yield site
        writer.transport.abort()
    assert site.engines["p"].heard == []


async def test_who_leaves_while_it_is_seen_whether_decode_is_back_leaves_nothing(hanging: Site) -> None:
    (decode,) = hanging.view.deployments["m"].decode
    async with Client(hanging.port) as client:
        client.post(CHAT, PROMPT)
        await until(lambda: bool(hanging.router.exchanges) and decode.in_flight == 1)
    await hanging.settled()
    assert hanging.record.status == 499


async def test_a_decode_engine_that_still_hangs_is_not_tried_again_at_once(
    hanging: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "CONNECT_SECONDS", 0.05)
    before = monotonic()
    reply = await ask(hanging.port, CHAT, PROMPT)
    assert (reply.status, reply.error["code"]) == (503, "engine_unreachable")
    (decode,) = hanging.view.deployments["m"].decode
    assert decode.retry_at >= before + HANG_PAUSE


async def test_a_kept_connection_that_the_engine_closed_costs_nothing(make_site: MakeSite) -> None:
    """The engine ends idle connections just as the router uses one again: same engine, new connection."""
    site = await aggregated(make_site, answer_well)
    engine = site.engines["a0"]
    await ask(site.port, CHAT, PROMPT)
    calls = 0

    async def close_first(heard: Heard, writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            writer.close()
        else:
            await answer_well(heard, writer)

    engine.answer = close_first
    assert (await ask(site.port, CHAT, PROMPT)).status == 200
    assert calls == 2
    assert next(site.view.engines()).health is Health.UP


async def test_no_engine_says_why(make_site: MakeSite) -> None:
    site = await make_site()
    site.publish()
    reply = await ask(site.port, CHAT, PROMPT)
    assert (reply.status, reply.error["code"]) == (503, "no_engine")
    assert "It is said why." in reply.error["message"]
    assert reply.headers["retry-after"] == "2"
    assert (await ask(site.port, "/ready")).status == 503
    assert (await ask(site.port, "/health")).status == 200
    await site.settled()
    assert (site.record.result, site.record.reason) == (Result.FAILED, "no-engine")


async def test_a_request_that_breaks_engines_breaks_two_at_most(make_site: MakeSite) -> None:
    site = await aggregated(make_site, *[says(b"", then="reset")] * 4)
    reply = await ask(site.port, CHAT, PROMPT)
    assert reply.status == 503
    assert sum(len(engine.heard) for engine in site.engines.values()) == flow.MAX_STRIKES


async def test_nor_does_it_over_kept_connections(make_site: MakeSite) -> None:
    """The end of one may be the engine's own end."""
    site = await aggregated(make_site, *[answer_well] * 4)
    for _ in range(4):
        await ask(site.port, CHAT, PROMPT)
    for engine in site.engines.values():
        assert len(engine.heard) == 1
        engine.answer = says(b"", then="reset")
    assert (await ask(site.port, CHAT, PROMPT)).status == 503
    assert sum(len(engine.heard) - 1 for engine in site.engines.values()) == flow.MAX_STRIKES


async def test_kept_connections_that_all_end_at_once_cost_no_request(make_site: MakeSite) -> None:
    async def once(heard: Heard, writer: asyncio.StreamWriter) -> None:
        await (says(b"", then="reset") if writer in used else answer_well)(heard, writer)
        used.add(writer)

    used: set[asyncio.StreamWriter] = set()
    site = await aggregated(make_site, *[once] * 3)
    for _ in range(3):
        await ask(site.port, CHAT, PROMPT)
    assert len(used) == 3
    assert (await ask(site.port, CHAT, PROMPT)).status == 200


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nsecret",
        b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * 200_000,
        b"HTTP/1.1 200 OK\r\ncontent-length: 300\r\n\r\n{",
    ],
    ids=range(9),
)
async def test_hostile_framing_of_a_reply_never_reaches_the_client(make_site: MakeSite, reply: bytes) -> None:
    site = await aggregated(make_site, says(reply, then="end"), answer_well)
    got = await ask(site.port, CHAT, PROMPT)
    assert (got.status, b"secret" in got.body) == (200, False)
    assert (await ask(site.port, CHAT, PROMPT)).json["usage"] == USAGE
    assert len(site.engines["a0"].heard) == 1


async def test_a_reply_that_ends_with_its_connection(make_site: MakeSite) -> None:
    site = await aggregated(make_site, says(b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n{}", then="end"))
    for _ in range(2):
        assert (await ask(site.port, "/tokenize", PROMPT)).json == {}


async def test_an_engine_that_answers_before_it_took_the_request_gets_no_other_behind_it(make_site: MakeSite) -> None:
    async def hasty(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(
            unary({"error": {"message": "too long"}}, 400) if b"content-length: 30" in head else unary(chat_reply())
        )
        await closed.wait()
        writer.transport.abort()

    closed = asyncio.Event()
    server = await asyncio.start_server(hasty, "127.0.0.1", 0)
    site = await make_site()
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    site.add(SnapshotEngine(id="a", name="a", attempt=1, role=Role.AGGREGATED, url=url))
    site.publish()
    try:
        assert (await ask(site.port, CHAT, {**PROMPT, "user": "u" * 30_000_000})).status == 400
        assert (await ask(site.port, CHAT, PROMPT)).status == 200
    finally:
        closed.set()
        server.close()


async def test_nothing_is_kept_of_an_engine_that_left_while_a_request_was_on_its_way_there(make_site: MakeSite) -> None:
    async def late(heard: Heard, writer: asyncio.StreamWriter) -> None:
        await gone.wait()
        await answer_well(heard, writer)

    gone = asyncio.Event()
    site = await make_site()
    await site.engine("p", Role.PREFILL, late)
    await site.engine("d", Role.DECODE)
    site.publish()
    asking = asyncio.ensure_future(ask(site.port, CHAT, PROMPT))
    await until(lambda: bool(site.engines["p"].heard))
    site.publish(without=("d",))
    gone.set()
    assert (await asking).status == 200
    assert len(site.engines["d"].heard) == 1
    site.upstreams.sweep(asyncio.get_running_loop().time() + 1e6)
    await until(lambda: site.upstreams.open_connections() == 0)
    site.upstreams.sweep(asyncio.get_running_loop().time())
    assert "d" not in {engine.id for engine in site.upstreams._pools}


# ---- the engine's own errors


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_an_error_caused_by_the_request_is_passed_on_and_trips_nothing(make_site: MakeSite, status: int) -> None:
    error = {"error": {"message": "too long", "type": "BadRequestError", "param": None, "code": status}}
    site = await aggregated(make_site, says(unary(error, status)), answer_well)
    reply = await ask(site.port, CHAT, PROMPT)
    assert (reply.status, reply.json) == (status, error)
    assert [e.health for e in site.view.engines()] == [Health.UP, Health.UP]
    await site.settled()
    assert site.record.result is Result.REFUSED
    assert site.engines["a1"].heard == []


async def test_foreign_error_shapes_are_put_right(make_site: MakeSite) -> None:
    site = await aggregated(make_site, says(unary({"detail": "Not Found"}, 404)))
    reply = await ask(site.port, "/v1/embeddings", PROMPT)
    assert reply.error["message"] == "Not Found"
    site.engines["a0"].answer = says(unary(b"<html>", 400))
    assert (await ask(site.port, CHAT, PROMPT)).error["code"] == "engine_error"
    error = {"message": "bad", "type": "x", "param": None, "code": 400}
    site.engines["a0"].answer = says(unary({"error": error}, 400))
    assert (await ask(site.port, "/v1/messages", PROMPT)).json == {"type": "error", "error": error}


async def test_a_5xx_is_tried_elsewhere_once_and_trips_nothing(make_site: MakeSite) -> None:
    error = unary({"error": {"message": "boom", "type": "x", "param": None, "code": 500}}, 500)
    site = await aggregated(make_site, says(error), answer_well)
    assert (await ask(site.port, CHAT, PROMPT)).status == 200
    site.engines["a1"].answer = says(error)
    reply = await ask(site.port, CHAT, PROMPT)
    assert (reply.status, reply.json["error"]["message"]) == (500, "boom")
    assert [e.health for e in site.view.engines()] == [Health.UP, Health.UP]


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(("asks", "pause"), [("", 1.0), ("retry-after: 7\r\n", 7.0), ("retry-after: 9999\r\n", 30.0)])
async def test_an_overloaded_engine_is_left_alone_for_a_while(
    make_site: MakeSite, status: int, asks: str, pause: float
) -> None:
    error = unary({"error": {"message": "too many", "type": "x", "param": None, "code": status}}, status, asks)
    site = await aggregated(make_site, says(error), says(error), answer_well)
    for _ in range(5):
        assert (await ask(site.port, CHAT, PROMPT)).status == 200
    assert [len(site.engines[name].heard) for name in ("a0", "a1", "a2")] == [
        1,
        1,
        5,
    ]  # more than two may be overloaded
    first = next(e for e in site.view.engines() if e.id == "a0")
    assert first.health is Health.OVERLOADED
    assert b'tandem_router_engine_overloaded{engine="a0"} 1' in (await ask(site.port, "/metrics")).body
    now = asyncio.get_running_loop().time()
    assert pause - 1 < first.retry_at - now <= pause
    site.router.sweep(first.retry_at - 0.001)
    assert first.health is Health.OVERLOADED
    site.router.sweep(first.retry_at)
    assert first.health is Health.UP
    await site.settled()
    assert {r.result for r in site.telemetry.records} == {Result.OK}


async def test_overloaded_engines_are_used_when_no_other_can_and_say_when_to_come_again(make_site: MakeSite) -> None:
    error = {"error": {"message": "too many", "type": "x", "param": None, "code": 429}}
    site = await aggregated(make_site, says(unary(error, 429, "retry-after: 4\r\n")))
    for _ in range(2):
        reply = await ask(site.port, CHAT, PROMPT)
        assert (reply.status, reply.json, reply.headers["retry-after"]) == (429, error, "4")
    site.engines["a0"].answer = answer_well
    assert (await ask(site.port, CHAT, PROMPT)).status == 200


async def test_an_overloaded_prefill_engine_gives_way_to_another(make_site: MakeSite) -> None:
    site = await make_site()
    await site.engine("p0", Role.PREFILL, says(unary({"error": {"message": "x"}}, 503)))
    await site.engine("p1", Role.PREFILL)
    await site.engine("d", Role.DECODE)
    site.publish()
    for _ in range(3):
        assert (await ask(site.port, CHAT, PROMPT)).status == 200
    await site.settled()
    assert [(r.prefill, r.fallback) for r in site.telemetry.records] == [("p1", False)] * 3
    assert len(site.engines["p0"].heard) == 1


async def test_a_prompt_too_long_for_an_engine_trips_nothing_wherever_it_goes(make_site: MakeSite) -> None:
    """Case peer-S12: a 500 that the prompt has caused, on prefill and on decode, again and again."""
    error = unary({"error": {"message": "prompt too long", "type": "x", "param": None, "code": 500}}, 500)

    async def judge(heard: Heard, writer: asyncio.StreamWriter) -> None:
        if "long" in heard.raw.decode():
            writer.write(error)
        else:
            await answer_well(heard, writer)

    site = await make_site()
    for name, role in (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE)):
        await site.engine(name, role, judge)
    site.publish()
    for _ in range(20):
        assert (await ask(site.port, CHAT, {**PROMPT, "user": "long"})).status == 500
        assert {e.health for e in site.view.engines()} == {Health.UP}
    assert (await ask(site.port, CHAT, PROMPT)).status == 200
    await site.settled()
    assert (site.telemetry.records[-1].fallback, site.telemetry.records[-1].result) == (False, Result.OK)


async def test_a_prefill_engine_that_died_is_used_again(make_site: MakeSite) -> None:
    """Case peer-R7: half-open reaches prefill, the only one and one of two."""
    for names in (("p0",), ("p0", "p1")):
        site = await make_site()
        for name in names:
            await site.engine(name, Role.PREFILL)
        await site.engine("d", Role.DECODE)
        site.publish()
        await site.engines["p0"].stop()
        for _ in range(2):
            assert (await ask(site.port, CHAT, PROMPT)).status == 200
        await site.settled()
        assert {r.prefill for r in site.telemetry.records} == ({None} if len(names) == 1 else {"p1"})
        dead = next(e for e in site.view.engines() if e.id == "p0")
        assert dead.health is Health.DOWN
        await site.engines["p0"].start()
        await probe_once(site.view)
        assert dead.health is Health.HALF_OPEN
        for _ in range(len(names)):
            assert (await ask(site.port, CHAT, PROMPT)).status == 200
        assert dead.health is Health.UP
        assert len(site.engines["p0"].heard) == 1


async def test_an_engine_that_refuses_the_routers_key_is_our_fault(make_site: MakeSite) -> None:
    site = await aggregated(make_site, says(unary({"error": "Unauthorized"}, 401)))
    reply = await ask(site.port, CHAT, PROMPT)
    assert (reply.status, reply.error["code"]) == (502, "engine_refused")


@pytest.mark.parametrize("status", [302, 304, 999])
async def test_statuses_that_no_request_asks_for_are_not_passed_on(make_site: MakeSite, status: int) -> None:
    """A client would read the body of a 304 as its next reply."""
    site = await aggregated(make_site, says(unary({"error": "?"}, status)))
    reply = await ask(site.port, CHAT, PROMPT)
    assert reply.status in (502, 503)  # what comes behind a 304 is no reply to anything
    assert reply.error["code"] in ("engine_error", "engine_unreachable")


async def test_an_answer_without_tokens_is_a_failure(make_site: MakeSite) -> None:
    usage = {**USAGE, "completion_tokens": 0}
    site = await aggregated(make_site, says(unary(chat_reply("", usage=usage))))
    assert (await ask(site.port, CHAT, PROMPT)).status == 200
    await site.settled()
    assert site.record.result is Result.FAILED


# ---- prefill


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (says(unary(chat_reply())), "no-params"),
        (says(unary(chat_reply(kv_transfer_params={}))), "no-params"),
        (says(unary(b"not json")), "no-params"),
        (says(unary({"error": {"message": "boom"}}, 500)), "prefill-status-500"),
        (says(b"", then="reset"), "prefill-reset"),
        (says(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n{", then="end"), "prefill-reset"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_prefill_fails(make_site: MakeSite, answer: Answer, cause: str, stream: bool) -> None:
    site = await make_site()
    await site.engine("p", Role.PREFILL, answer)
    await site.engine("d", Role.DECODE)
    site.publish()
    assert (await ask(site.port, CHAT, {**PROMPT, "stream": stream})).status == 200
    assert "kv_transfer_params" not in site.engines["d"].heard[0].body
    await site.settled()
    record = site.record
    assert (record.fallback, record.fallback_cause, record.prefill, record.result) == (True, cause, None, Result.OK)

    site.publish(policy=FAIL)
    site.telemetry.records.clear()
    reply = await ask(site.port, CHAT, {**PROMPT, "stream": stream})
    assert reply.status in (500, 502, 503)
    assert reply.json["error"]["message"]
    assert len(site.engines["d"].heard) == 1
    await site.settled()
    assert (site.record.result, site.record.fallback) == (Result.FAILED, False)


async def test_prefill_gone_entirely(make_site: MakeSite) -> None:
    site = await make_site()
    await site.engine("d", Role.DECODE)
    site.publish(policy=FAIL)
    assert (await ask(site.port, CHAT, PROMPT)).error["code"] == "no_prefill"
    site.publish()
    assert (await ask(site.port, CHAT, PROMPT)).status == 200
    site.publish(wants_prefill=False)
    assert (await ask(site.port, CHAT, PROMPT)).status == 200
    await site.settled()
    assert [(r.reason, r.fallback) for r in site.telemetry.records] == [
        ("prefill-unavailable", False),
        ("prefill-unavailable", True),
        ("no-prefill-pool", False),
    ]


async def test_another_prefill_engine_is_tried_first(make_site: MakeSite) -> None:
    site = await make_site()
    await site.engine("p0", Role.PREFILL, says(b"", then="reset"))
    await site.engine("p1", Role.PREFILL)
    await site.engine("d", Role.DECODE)
    site.publish()
    assert (await ask(site.port, CHAT, PROMPT)).status == 200
    await site.settled()
    assert (site.record.prefill, site.record.fallback, site.record.fallback_cause) == ("p1", False, "")


async def test_a_prompt_that_both_refuse_is_the_clients_mistake_and_nobody_elses(make_site: MakeSite) -> None:
    site = await make_site()
    error = {"error": {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}}
    await site.engine("p", Role.PREFILL, says(unary(error, 400)))
    await site.engine("d", Role.DECODE, says(unary(error, 400)))
    site.publish()
    reply = await ask(site.port, CHAT, STREAM)
    assert (reply.status, reply.json) == (400, error)
    await site.settled()
    record = site.record
    assert (record.result, record.fallback, record.tried, record.reason) == (Result.REFUSED, False, (), "least-load")
    asked = site.engines["d"].heard[0].body
    assert {**asked, **STREAM} == asked, "decode judges the client's own body"
    assert "kv_transfer_params" not in asked
    assert not site.router.outcomes.left_out


async def test_broken_pairs_are_avoided(make_site: MakeSite) -> None:
    site = await make_site()
    for name in ("p0", "p1"):
        await site.engine(name, Role.PREFILL)
    for name in ("d0", "d1"):
        await site.engine(name, Role.DECODE)
    site.publish(broken_pairs=(("p0", "d0"), ("p1", "d1"), ("p0", "d1")))
    for _ in range(4):
        await ask(site.port, CHAT, PROMPT)
    await site.settled()
    assert {(r.prefill, r.decode) for r in site.telemetry.records} == {("p1", "d0")}


# ---- decode


async def test_params_are_spent_by_a_decode_that_may_have_used_them(make_site: MakeSite) -> None:
    site = await make_site()
    await site.engine("p", Role.PREFILL)
    await site.engine("d0", Role.DECODE, says(b"", then="reset"))
    await site.engine("d1", Role.DECODE)
    site.publish()
    assert (await ask(site.port, CHAT, PROMPT)).status == 200
    assert len(site.engines["p"].heard) == 2
    assert site.engines["d1"].heard[0].body["kv_transfer_params"] == PARAMS


async def test_params_are_not_spent_by_a_decode_that_was_never_reached(make_site: MakeSite) -> None:
    site = await make_site()
    await site.engine("p", Role.PREFILL)
    await site.engine("d0", Role.DECODE)
    await site.engine("d1", Role.DECODE)
    site.publish()
    await site.engines["d0"].stop()
    assert (await ask(site.port, CHAT, PROMPT)).status == 200
    assert len(site.engines["p"].heard) == 1


# ---- streams


async def test_an_error_before_the_first_token_is_a_plain_error(make_site: MakeSite) -> None:
    """Case peer-S4."""
    error = {"error": {"message": "no room", "type": "x", "param": None, "code": 503}}
    site = await aggregated(make_site, says(STREAM_HEAD + framed(event(error)) + framed(DONE) + LAST))
    reply = await ask(site.port, CHAT, STREAM)
    assert (reply.status, reply.headers["content-type"], reply.json) == (503, "application/json", error)


async def test_an_error_inside_a_stream_is_passed_on_and_recorded(make_site: MakeSite) -> None:
    """Case peer-S3."""
    error = {"error": {"message": "died", "type": "x", "param": None, "code": 500}}
    for tail in (framed(DONE), b""):
        site = await aggregated(
            make_site, says(STREAM_HEAD + framed(ROLE + chunk("a")) + framed(event(error)) + tail + LAST)
        )
        reply = await ask(site.port, CHAT, STREAM)
        assert reply.status == 200
        assert events(reply.body)[2] == error
        assert len([e for e in events(reply.body) if "error" in e]) == 1
        await site.settled()
        assert site.record.result is Result.FAILED


@pytest.mark.parametrize("then", ["end", "reset"])
@pytest.mark.parametrize("cut", [b"", LAST, b"40\r\ndata: {half an ev"], ids=["mid-chunk", "no-done", "mid-event"])
async def test_a_stream_that_breaks_ends_in_one_error_event(make_site: MakeSite, then: str, cut: bytes) -> None:
    """Case dyn-C5."""
    raw = STREAM_HEAD + framed(ROLE) + framed(chunk("a")) + cut
    site = await aggregated(make_site, says(raw, then=then), answer_well)
    async with Client(site.port) as client:
        client.post(CHAT, STREAM)
        reply = await client.reply()
        told = events(reply.body)
        assert told[2]["error"]["code"] == "stream_truncated"
        assert told[3:] == ["[DONE]"]  # or clients wait for more
        client.post(CHAT, PROMPT)  # the connection is still good
        assert (await client.reply()).status == 200
    await site.settled()
    assert [r.result for r in site.telemetry.records] == [Result.TRUNCATED, Result.OK]
    assert site.telemetry.records[0].ttft is not None


@pytest.mark.parametrize(("path", "kind"), [("/v1/messages", "api_error"), ("/v1/responses", "server_error")])
async def test_error_events_of_the_other_formats(make_site: MakeSite, path: str, kind: str) -> None:
    text = event({"type": "content_block_delta"}) + event({"type": "response.output_text.delta", "delta": "x"})
    site = await aggregated(make_site, says(STREAM_HEAD + framed(text), then="end"))
    reply = await ask(site.port, path, STREAM)
    last = reply.body.rstrip().split(b"\n\n")[-1]  # in these formats the error itself is the end
    assert last.startswith(b'event: error\ndata: {"type":"error","error":{"message"')
    assert f'"type":"{kind}"'.encode() in last


async def test_a_stream_that_breaks_before_its_first_event_is_tried_elsewhere(make_site: MakeSite) -> None:
    site = await aggregated(make_site, says(STREAM_HEAD + b"5\r\ndata:", then="end"), answer_well)
    reply = await ask(site.port, CHAT, STREAM)
    assert events(reply.body)[-1] == "[DONE]"
    await site.settled()
    assert site.record.decode == "a1"


async def test_an_empty_stream_is_no_answer(make_site: MakeSite) -> None:
    site = await aggregated(make_site, says(STREAM_HEAD + LAST))
    assert (await ask(site.port, CHAT, STREAM)).status == 503


@pytest.mark.parametrize("framing", [lambda data: framed(data), lambda data: b"".join(framed(b"%c" % c) for c in data)])
async def test_a_stream_of_nothing_but_its_end_is_no_answer(make_site: MakeSite, framing: Any) -> None:
    """The client would take it for an empty success. Another engine is tried; without one, it is told."""
    site = await aggregated(make_site, says(STREAM_HEAD + framing(DONE) + LAST))
    reply = await ask(site.port, CHAT, STREAM)
    assert (reply.status, reply.error["code"]) == (502, "empty_answer")
    await site.settled()
    assert (site.record.result, site.record.status, site.record.reason) == (Result.FAILED, 502, "aggregated")


NO_ANSWERS = {
    "nothing": unary(b""),
    "a page": b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 6\r\n\r\n<html>",
    "null": unary(b"null"),
    "a list": unary(b"[]"),
    "half an object": unary(b'{"choices":[{"index":0'),
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
    "compressed": unary(compress(json.dumps(chat_reply()).encode()), headers="content-encoding: gzip\r\n"),
    "no choice": unary({"id": "c-1", "choices": []}),
    "an error": unary({"error": {"message": "boom", "code": 500}}),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", NO_ANSWERS)
async def test_status_200_alone_makes_no_answer(make_site: MakeSite, name: str, stream: bool) -> None:
    """Another engine is tried; without one, the client is told."""
    body = STREAM if stream else PROMPT
    site = await aggregated(make_site, says(NO_ANSWERS[name]), answer_well)
    assert (await ask(site.port, CHAT, body)).status == 200
    await site.settled()
    failed = "aggregated-status-500 a0" if name == "an error" else "aggregated-status-502 a0"
    assert (site.record.decode, site.record.tried, site.record.result) == ("a1", (failed,), Result.OK)

    alone = await aggregated(make_site, says(NO_ANSWERS[name]))
    reply = await ask(alone.port, CHAT, body)
    assert reply.status == int(failed[-6:-3])
    await alone.settled()
    assert (alone.record.result, alone.record.prompt_tokens) == (Result.FAILED, None)


async def test_a_stored_response_may_tell_of_an_error_of_its_own(make_site: MakeSite) -> None:
    body = {"object": "response", "status": "failed", "output": [], "error": {"code": "server_error", "message": "x"}}
    site = await aggregated(make_site, says(unary(body)))
    reply = await ask(site.port, "/v1/responses", {"model": "m", "input": "hi"})
    assert (reply.status, reply.json["status"]) == (200, "failed")


TEXT_MARK = event({"type": "content_block_delta"}) + event({"type": "response.output_text.delta", "delta": "x"})
DIED = {"error": {"message": "died", "type": "x", "param": None, "code": 500}}
ENDS: dict[str, tuple[str, bytes, bytes]] = {
    "done": (CHAT, ROLE + chunk("a") + DONE, b""),
    "chat error": (CHAT, ROLE + chunk("a") + event(DIED), DONE),
    "text error": ("/v1/completions", event({"choices": [{"text": "a"}]}) + event(DIED), DONE),
    "message_stop": ("/v1/messages", TEXT_MARK + event({"type": "message_stop"}), b""),
    "message error": ("/v1/messages", TEXT_MARK + event({"type": "error", **DIED}), b""),
    "response.completed": ("/v1/responses", TEXT_MARK + event({"type": "response.completed", "response": {}}), b""),
    "response.failed": ("/v1/responses", TEXT_MARK + event({"type": "response.failed", "response": {}}), b""),
    "response.incomplete": ("/v1/responses", TEXT_MARK + event({"type": "response.incomplete", "response": {}}), b""),
    "response error": ("/v1/responses", TEXT_MARK + event({"type": "error", "message": "x"}), b""),
}


@pytest.mark.parametrize("more", [b"", framed(chunk("more") + event(DIED))], ids=["silent", "talkative"])
@pytest.mark.parametrize("end", ENDS)
async def test_the_last_event_ends_stream_and_leg_though_the_engine_goes_on(
    make_site: MakeSite, end: str, more: bytes
) -> None:
    path, text, added = ENDS[end]
    site = await aggregated(make_site, says(STREAM_HEAD + framed(text) + more, then="hang"))
    reply = await ask(site.port, path, {**STREAM, "prompt": "a", "input": "a"})
    assert reply.body == text + added
    await site.settled()
    assert site.record.result is (Result.FAILED if "error" in end or "failed" in end else Result.OK)
    site.upstreams.sweep(monotonic() + upstream.ENDING_SECONDS + 0.1)
    await until(lambda: site.upstreams.open_connections() == 0)


async def test_a_reply_that_ends_soon_behind_its_last_event_keeps_its_connection(make_site: MakeSite) -> None:
    go_on = asyncio.Event()

    async def ends_late(heard: Heard, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + framed(ROLE + chunk("a") + DONE))
        await go_on.wait()
        writer.write(LAST)

    site = await aggregated(make_site, ends_late)
    assert events((await ask(site.port, CHAT, STREAM)).body)[-1] == "[DONE]"
    go_on.set()
    (pool,) = site.upstreams._pools.values()
    await until(lambda: len(pool.idle) == 1)
    site.upstreams.sweep(monotonic() + upstream.ENDING_SECONDS + 0.1)
    assert (await ask(site.port, CHAT, STREAM)).status == 200
    assert len(site.engines["a0"].open) == 1


async def test_an_endless_reply_of_an_engine_that_left_is_cut(make_site: MakeSite) -> None:
    site = await aggregated(make_site, says(STREAM_HEAD + framed(ROLE + chunk("a") + DONE), then="hang"))
    await ask(site.port, CHAT, STREAM)
    site.publish(without=("a0",))
    await until(lambda: not site.engines["a0"].open)


async def test_only_an_exact_line_ends_a_stream(make_site: MakeSite) -> None:
    """Case peer-S16."""
    text = ROLE + chunk("data: [DONE]") + event("[DONE] not")
    site = await aggregated(make_site, says(STREAM_HEAD + framed(text) + LAST))
    reply = await ask(site.port, CHAT, STREAM)
    assert reply.body.startswith(text)
    assert b"stream_truncated" in reply.body


@pytest.mark.parametrize("body", [PROMPT, STREAM])
async def test_silence_is_waited_for_as_long_as_the_deployment_says(make_site: MakeSite, body: dict[str, Any]) -> None:
    site = await aggregated(make_site, hang)
    site.publish(policy=RoutingPolicy(silence_seconds=7_000.0, gap_seconds=5.0))
    now = asyncio.get_running_loop().time
    async with Client(site.port) as client:
        client.post(CHAT, body)
        await until(lambda: bool(site.engines["a0"].heard))
        site.router.sweep(now() + 6_900)
        assert site.in_flight == {"a0": 1}
        site.router.sweep(now() + 7_001)
        reply = await client.reply()
        assert (reply.status, reply.error["code"]) == (504, "engine_timeout")
    await until(lambda: site.engines["a0"].aborted == 1)
    await site.settled()


async def test_a_key_may_have_another_patience_than_the_deployment(make_site: MakeSite) -> None:
    site = await aggregated(make_site, hang, auth=True)
    site.publish(policy=RoutingPolicy(silence_seconds=7_000.0))
    (digest,) = (digest for digest, key in site.view.keys.items() if key.id == "k-all")
    now = asyncio.get_running_loop().time
    for patience in (20.0, 9_000.0):
        site.view.keys[digest] = SnapshotKey("k-all", digest, silence_seconds=patience)
        async with Client(site.port) as client:
            heard = len(site.engines["a0"].heard)
            client.post(CHAT, PROMPT, Authorization="Bearer tdm-inference")
            await until(lambda heard=heard: len(site.engines["a0"].heard) > heard)
            site.router.sweep(now() + patience - 10)
            assert site.in_flight == {"a0": 1}
            site.router.sweep(now() + patience + 10)
            assert (await client.reply()).status == 504
        await site.settled()


async def test_a_gap_in_a_stream_may_last_as_long_as_the_deployment_says(make_site: MakeSite) -> None:
    site = await aggregated(make_site, says(STREAM_HEAD + framed(ROLE + chunk("a")), then="hang"))
    site.publish(policy=RoutingPolicy(silence_seconds=1.0, gap_seconds=7_000.0))
    now = asyncio.get_running_loop().time
    async with Client(site.port) as client:
        client.post(CHAT, STREAM)
        await client.head()
        site.router.sweep(now() + 6_900)
        assert site.in_flight == {"a0": 1}
        site.router.sweep(now() + 7_001)
        await until(lambda: site.engines["a0"].aborted == 1)
    await site.settled()
    assert site.record.result is Result.TRUNCATED


# ---- the client leaves


@pytest.mark.parametrize("body", [PROMPT, STREAM])
@pytest.mark.parametrize("where", ["prefill", "decode", "mid-stream"])
async def test_client_gone(make_site: MakeSite, where: str, body: dict[str, Any]) -> None:
    """Cases dyn-C1, dyn-C2, peer-S1."""
    half = says(STREAM_HEAD + framed(ROLE + chunk("a")), then="hang")
    site = await make_site()
    await site.engine("p", Role.PREFILL, hang if where == "prefill" else answer_well)
    await site.engine("d", Role.DECODE, half if where == "mid-stream" else hang)
    site.publish()
    busy = site.engines["p" if where == "prefill" else "d"]
    async with Client(site.port) as client:
        client.post(CHAT, body)
        await until(lambda: bool(busy.heard))
        if where == "mid-stream":
            await client.head()
    async with asyncio.timeout(1.0):
        await until(lambda: busy.aborted == 1)
    await site.settled()
    assert site.record.result is Result.ABORTED
    for engine in site.engines.values():
        engine.answer = answer_well
    assert (await ask(site.port, CHAT, PROMPT)).status == 200  # the next request is well (C4)


async def test_client_gone_while_connecting(alone: Site) -> None:
    """The connection that nobody waits for any more goes to the pool."""

    class Nobody:
        def sending(self) -> None: ...
        def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None: ...
        def body(self, data: bytes, last: bool, framed: bytes = b"") -> None: ...
        def ended(self) -> None: ...
        def crashed(self) -> None: ...
        def failed(self, failure: Failure) -> None:
            raise AssertionError(failure)

    pool = alone.upstreams.pool(next(alone.view.engines()))
    pool.start(Nobody(), b"/", b"", b"{}").cancel()
    await until(lambda: len(pool.idle) == 1)
    assert alone.engines["a"].heard == []


@pytest.mark.parametrize("pipelined", [False, True], ids=["one", "behind a reply that is still on its way"])
async def test_slow_client_pauses_the_engine(make_site: MakeSite, pipelined: bool) -> None:
    """Memory stays bounded: what the client does not take is not read from the engine."""
    written = 0
    big = b'{"choices":[{"text":"%b"}]}' % (b"x" * 30_000_000)

    async def firehose(heard: Heard, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        if not heard.body.get("stream"):
            writer.write(unary(big))
            return
        writer.write(STREAM_HEAD)
        for _ in range(1_000):
            writer.write(framed(chunk("x" * 60_000)))
            await writer.drain()
            written += 60_000
        writer.write(framed(DONE) + LAST)

    site = await aggregated(make_site, firehose)
    async with Client(site.port) as client:
        client.writer.transport.pause_reading()
        if pipelined:
            client.post(CHAT, PROMPT)
        client.post(CHAT, STREAM)
        before = -1
        while before != written or not (written or pipelined):  # what is behind is not even asked for
            before = written
            await asyncio.sleep(0.3)
        assert written < 40_000_000  # what four socket buffers hold
        client.writer.transport.resume_reading()
        if pipelined:
            assert (await client.reply()).body == big
        reply = await client.reply()
        assert reply.body.endswith(DONE)
        assert len(reply.body) > 60_000_000
    await site.settled()
