"""Policy `fallback` keeps its word: however the prefill leg or the hand-over fails before the first byte, the client has its
answer and the record says what went wrong. And `fail` says who failed. Every endpoint, streamed or not, one engine or many."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any, NamedTuple

import msgspec
import pytest

from controlplane.fleet.model import Role
from controlplane.fleet.wire import OnPrefillFailure, Result, RoutingPolicy
from frontend_api.gate import Router
from frontend_api.legs import AnswerLeg
from tests.frontend_api.client import PROMPT, Client, Reply
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
    ScriptedEngine,
    chat_reply,
    chunk,
    event,
    framed,
    unary,
)
from tests.frontend_api.test_faults import says

COUNTS = {"input_tokens": 7, "output_tokens": 3}


def named(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\n".encode() + event({"type": kind, **fields})


CREATED = named("response.created", response={"id": "r"})
STREAMS = {
    "/v1/chat/completions": [ROLE, chunk("Paris."), event({"choices": [], "usage": USAGE}), DONE],
    "/v1/completions": [event({"choices": [{"index": 0, "text": "Paris."}]}), event({"choices": [], "usage": USAGE}), DONE],
    "/v1/responses": [
        CREATED, named("response.output_text.delta", delta="Paris."), named("response.completed", response={"usage": COUNTS})],
    "/v1/messages": [
        named("message_start", message={"usage": COUNTS}), named("content_block_start"), named("content_block_delta", delta={"text": "Paris."}),
        named("message_stop")],
}  # fmt: skip
BODIES = {
    "/v1/chat/completions": PROMPT,
    "/v1/completions": {"model": "m", "prompt": "hi"},
    "/v1/responses": {"model": "m", "input": "hi"},
    "/v1/messages": {**PROMPT, "max_tokens": 9},
}


async def well(heard: Heard, writer: asyncio.StreamWriter) -> None:
    """As an engine does, in the words of any endpoint."""
    body = heard.body
    if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
        writer.write(unary(chat_reply("P", kv_transfer_params=PARAMS)))
    elif body.get("stream"):
        writer.write(STREAM_HEAD + b"".join(map(framed, STREAMS[heard.target])) + LAST)
    else:
        writer.write(unary(chat_reply()))


ERROR = {"error": {"message": "boom", "type": "x", "param": None, "code": 500}}


BEGINS = {
    "/v1/chat/completions": ROLE,
    "/v1/completions": b"",
    "/v1/responses": CREATED,
    "/v1/messages": named("message_start", message={"usage": COUNTS}) + named("content_block_start"),
}
"""What vLLM writes before it looks whether the KV has come."""


def announces(*, fails: bool, at_once: bool) -> Answer:
    """Begins a stream, and has no token: an error inside it, or its end."""

    async def answer(heard: Heard, writer: asyncio.StreamWriter) -> None:
        if not heard.body.get("stream"):
            writer.write(unary(ERROR, 500))
            return
        begins = BEGINS[heard.target]
        writer.write(STREAM_HEAD + (framed(begins) if begins else b""))
        if not at_once:
            await writer.drain()
            await asyncio.sleep(0.01)
        if fails:
            writer.write(framed(event(ERROR)) + LAST)
        writer.close()

    return answer


class Hangs:
    """Takes requests and never answers. The router's patience ends at once where a test looks on."""

    def __init__(self) -> None:
        self.taken = 0

    async def __call__(self, heard: Heard, writer: asyncio.StreamWriter) -> None:
        self.taken += 1
        await asyncio.Event().wait()


class Case(NamedTuple):
    answer: Answer
    cause: str
    of_client: bool = False
    """Where decode refuses it too, it is the client's mistake."""


def cases(stage: str) -> dict[str, Case]:
    common = {
        "500": Case(says(unary(ERROR, 500)), f"{stage}-status-500"),
        "501": Case(says(unary(b"", 501)), f"{stage}-status-501"),
        "503": Case(says(unary(ERROR, 503)), f"{stage}-status-503"),
        "429": Case(says(unary(ERROR, 429)), f"{stage}-status-429"),
        "404": Case(says(unary(ERROR, 404)), f"{stage}-status-404", of_client=True),
        "400": Case(says(unary(ERROR, 400)), f"{stage}-status-400", of_client=True),
        "401": Case(says(unary(ERROR, 401)), f"{stage}-status-401"),
        "302": Case(says(unary(b"", 302)), f"{stage}-status-302"),
        "reset": Case(says(b"", then="reset"), f"{stage}-reset"),
        "cut in the head": Case(says(b"HTTP/1.1 200 OK\r\ncontent-", then="end"), f"{stage}-reset"),
        "cut in the body": Case(says(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{", then="end"), f"{stage}-reset"),
        "no HTTP": Case(says(b"220 smtp.example.com\r\n\r\n", then="end"), f"{stage}-protocol"),
        "hang": Case(Hangs(), f"{stage}-silent"),
    }
    if stage == "transfer":
        return common | {
            "error in the stream": Case(announces(fails=True, at_once=True), f"{stage}-status-500"),
            "error later in the stream": Case(announces(fails=True, at_once=False), f"{stage}-status-500"),
            "stream cut before a token": Case(announces(fails=False, at_once=False), f"{stage}-reset"),
            "no JSON": Case(says(unary(b"<html>")), f"{stage}-status-502"),
            "error with status 200": Case(says(unary(ERROR)), f"{stage}-status-500"),
            "empty stream": Case(says(STREAM_HEAD + framed(DONE) + LAST), ""),
        }
    return common | {
        "no params": Case(says(unary(chat_reply("P"))), "no-params"),
        "not JSON": Case(says(unary(b"<html>")), "no-params"),
        "stopped": Case(well, f"{stage}-connect"),
    }


def only_with_kv(answer: Answer) -> Answer:
    async def either(heard: Heard, writer: asyncio.StreamWriter) -> None:
        await (answer if "kv_transfer_params" in heard.body else well)(heard, writer)

    return either


async def build(make_site: MakeSite, stage: str, case: Case, many: bool, **policy: Any) -> Site:
    site = await make_site()
    for number in range(1 + many):
        prefill = await site.engine(f"p{number}", Role.PREFILL, case.answer if stage == "prefill" else well)
        await site.engine(f"d{number}", Role.DECODE, only_with_kv(case.answer) if stage == "transfer" else well)
        if case.cause == "prefill-connect":
            await prefill.stop()
    site.publish(policy=RoutingPolicy(**policy))
    return site


def renew(site: Site) -> None:
    """As if the engines had been started again: nothing is known of them."""
    for name, spec in site._specs.items():
        site._specs[name] = msgspec.structs.replace(spec, attempt=spec.attempt + 1)
    site.publish(policy=site.view.deployments["m"].routing)


async def ask(site: Site, hangs: Hangs | None, path: str, stream: bool) -> Reply:
    async with Client(site.port) as client:
        client.post(path, {**BODIES[path], "stream": stream}, x_tandem_explain="1")
        reply = asyncio.ensure_future(client.reply())
        given_up = hangs.taken if hangs is not None else 0
        while not reply.done():
            if hangs is not None and hangs.taken > given_up:
                given_up = hangs.taken
                hurry(site.router)
            await asyncio.wait((reply,), timeout=0.005)
        return reply.result()


def hurry(router: Router) -> None:
    for exchange in list(router.exchanges):
        exchange.check(monotonic() + 1e6)


ALL = [(stage, name) for stage in ("prefill", "transfer") for name in cases(stage)]


@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
@pytest.mark.parametrize(("stage", "name"), ALL, ids=[f"{stage}: {name}" for stage, name in ALL])
async def test_decode_answers_whatever_fails_before_it(make_site: MakeSite, stage: str, name: str, many: bool) -> None:
    case = cases(stage)[name]
    hangs = case.answer if isinstance(case.answer, Hangs) else None
    site = await build(make_site, stage, case, many)
    for path in BODIES:
        for stream in (False, True):
            if name == "empty stream" and (not stream or path in ("/v1/responses", "/v1/messages")):
                continue  # that is how no other stream ends
            renew(site)
            reply = await ask(site, hangs, path, stream)
            where = f"{path}, stream: {stream}: {reply.body!r}"
            assert reply.status == 200, where
            assert b"Paris." in reply.body, where
            assert b"boom" not in reply.body, where
            begins = BEGINS[path]
            assert reply.body.count(begins or b"none") == (stream and bool(begins)), where
            await site.settled()
            record = site.telemetry.records.pop()
            assert (record.result, record.fallback) == (Result.OK, True), where
            cause = "transfer-status-500" if name == "stream cut before a token" and not stream else case.cause
            assert record.fallback_cause == (cause or "transfer-status-502"), where
            assert record.tried[0].startswith(record.fallback_cause + " "), where
            assert reply.headers["x-tandem-fallback"] == record.fallback_cause, where
            assert (record.prefill, (record.decode or "")[0]) == (None, "d"), where


async def pings(heard: Heard, writer: asyncio.StreamWriter) -> None:
    """Begins its stream, and then tells only that it is still there."""
    writer.write(STREAM_HEAD + framed(ROLE))
    while True:
        writer.write(framed(b": ping\n\n"))
        await writer.drain()
        await asyncio.sleep(0.001)


async def test_signs_of_life_without_a_token_do_not_end_silence(make_site: MakeSite) -> None:
    """A decode engine that waits for KV which never comes may ping for ever; its client hears none of that."""
    site = await build(make_site, "transfer", Case(pings, "transfer-silent"), False)
    async with Client(site.port) as client:
        client.post("/v1/chat/completions", {**PROMPT, "stream": True}, x_tandem_explain="1")
        await until(lambda: any(leg._size for leg in legs(site)))
        began = monotonic()
        await until(lambda: any(leg._size > 1_000 for leg in legs(site)))
        for exchange in list(site.router.exchanges):
            exchange.check(began + site.view.deployments["m"].routing.silence_seconds + 0.01)
        reply = await asyncio.wait_for(client.reply(), 5)
    assert (reply.status, reply.headers["x-tandem-fallback"]) == (200, "transfer-silent")
    assert b"Paris." in reply.body


def legs(site: Site) -> list[AnswerLeg]:
    """Those in motion that answer."""
    now = [exchange.leg.receiver for exchange in site.router.exchanges if exchange.leg is not None]
    return [leg for leg in now if isinstance(leg, AnswerLeg)]


def decode_heard(site: Site) -> list[Heard]:
    engines: list[ScriptedEngine] = [engine for name, engine in site.engines.items() if name[0] == "d"]
    return [heard for engine in engines for heard in engine.heard]


@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
@pytest.mark.parametrize(("stage", "name"), ALL, ids=[f"{stage}: {name}" for stage, name in ALL])
async def test_policy_fail_names_who_failed_and_lets_decode_compute_nothing(
    make_site: MakeSite, stage: str, name: str, many: bool
) -> None:
    case = cases(stage)[name]
    hangs = case.answer if isinstance(case.answer, Hangs) else None
    site = await build(make_site, stage, case, many, on_prefill_failure=OnPrefillFailure.FAIL)
    for path in BODIES:
        renew(site)
        reply = await ask(site, hangs, path, True)
        where = f"{path}: {reply.body!r}"
        await site.settled()
        if name == "empty stream" and path in ("/v1/responses", "/v1/messages"):
            continue
        if stage == "transfer" and case.of_client:
            assert reply.status == int(name), "decode has the last word on the client's request"
            continue
        overloaded = name in ("503", "429")
        assert reply.status in ((int(name), 503) if overloaded else (502, 503, 504)), where
        if not overloaded and name != "401":
            assert (
                f"{stage[0] if stage == 'prefill' else 'd'}{site.telemetry.records[-1].tried[-1][-1]}"
                in reply.json["error"]["message"]
            )
            if stage == "transfer":
                assert "prefill engine p" in reply.json["error"]["message"], where
        for heard in decode_heard(site):
            body = heard.body
            checked = body.get("max_tokens", body.get("max_output_tokens")) == 1 and not body["stream"]
            assert "kv_transfer_params" in body or checked, where


async def test_a_side_channel_is_told_to_those_who_run_it_and_to_no_client(make_site: MakeSite) -> None:
    site = await build(make_site, "transfer", cases("transfer")["500"], False, on_prefill_failure=OnPrefillFailure.FAIL)
    reply = await ask(site, None, "/v1/chat/completions", False)
    assert reply.status == 503
    assert reply.error["message"] == (
        "Decode engine d0 answered with status 500; it was to fetch KV from prefill engine p0."
    )
    assert reply.headers["x-tandem-tried"] == "transfer-status-500 p0 d0 via=10.0.0.1:5600"
    await site.settled()
    (told,) = site.router.outcomes.news()
    assert "(side channel 10.0.0.1:5600)" in told


TOLD = {
    "/v1/chat/completions": {
        "prompt_tokens": 700,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    },
    "/v1/completions": {"prompt_tokens": 700, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}},
    "/v1/responses": {"input_tokens": 700, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 0}},
    "/v1/messages": {"input_tokens": 700, "output_tokens": 3, "cache_read_input_tokens": 0},
}
ENDS = {
    "/v1/chat/completions": lambda usage: [event({"choices": [], "usage": usage}), DONE],
    "/v1/completions": lambda usage: [event({"choices": [], "usage": usage}), DONE],
    "/v1/responses": lambda usage: [named("response.completed", response={"usage": usage})],
    "/v1/messages": lambda usage: [named("message_delta", usage=usage), named("message_stop")],
}


async def computes_itself(heard: Heard, writer: asyncio.StreamWriter) -> None:
    """Answers well whatever KV it was to fetch, and says that nothing of the prompt was cached."""
    usage = TOLD[heard.target]
    if heard.body.get("stream"):
        parts = [*STREAMS[heard.target][:2], *ENDS[heard.target](usage)]
        writer.write(STREAM_HEAD + b"".join(map(framed, parts)) + LAST)
    else:
        writer.write(unary(chat_reply(usage=usage)))


@pytest.mark.parametrize("path", TOLD)
async def test_a_prompt_that_decode_computed_by_its_own_account_is_a_fallback(make_site: MakeSite, path: str) -> None:
    site = await make_site()
    await site.engine("p0", Role.PREFILL, well)
    await site.engine("d0", Role.DECODE, computes_itself)
    site.publish()
    for stream in (False, True):
        renew(site)
        async with Client(site.port) as client:
            client.post(path, {**BODIES[path], "stream": stream}, x_tandem_explain="1")
            reply = await client.reply()
        await site.settled()
        record = site.telemetry.records.pop()
        assert (reply.status, record.fallback, record.fallback_cause) == (200, True, "decode-computed"), path
        assert (record.prefill, record.decode, record.tried) == ("p0", "d0", ())
        if not stream:
            assert reply.headers["x-tandem-fallback"] == "decode-computed"
        (trouble,) = site.router.outcomes.troubles.values()
        assert str(trouble.failure) == "decode-computed p0 d0"
