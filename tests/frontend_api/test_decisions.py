"""`/debug/decisions`: who may see it, what it tells, and that every process behind the port is heard."""

from __future__ import annotations

import asyncio
import gc
import json
from array import array
from typing import Any

import msgspec
import pytest

from controlplane.fleet.model import Role
from controlplane.fleet.wire import Disaggregate, RoutingMode, RoutingPolicy, SnapshotEngine
from frontend_api.formats.openai import Endpoint
from frontend_api.kv.evidence import Cache, Prompt
from frontend_api.observe import decisions
from frontend_api.observe.decisions import Board, Decisions, Kept
from frontend_api.trace import Trace
from tests.frontend_api.client import PROMPT, Client, Reply, ask
from tests.frontend_api.conftest import KEY, MakeSite, Site, until
from tests.frontend_api.scripted import ScriptedEngine
from tests.frontend_api.test_figures import record, snapshot
from tests.frontend_api.test_process import Run, engine, run  # noqa: F401 - fixtures

CHAT = "/v1/chat/completions"
PATH = "/debug/decisions"
SECRET = "zebras whisper about quixotic lanterns"


async def told(site: Site, query: str = "", **headers: str) -> list[dict[str, Any]]:
    reply = await ask(site.port, PATH + query, None, **headers)
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"] == "application/json"
    assert (reply.json["processes"], reply.json["silent_processes"]) == (1, [])
    return reply.json["decisions"]


async def asked(site: Site, **more: Any) -> Reply:
    body = {"model": "m", "messages": [{"role": "user", "content": SECRET}], **more}
    reply = await ask(site.port, CHAT, body, authorization=f"Bearer {KEY}")
    await site.settled()
    return reply


async def test_each_request_is_told_newest_first(pair: Site) -> None:
    assert await told(pair) == []
    first, second = [(await asked(pair, stream=stream)).headers["x-request-id"] for stream in (True, False)]
    newest, oldest = await told(pair)
    assert (newest["id"], oldest["id"]) == (second, first)
    assert newest["at"] >= oldest["at"]
    for decision in (newest, oldest):
        assert (decision["deployment"], decision["model"], decision["endpoint"]) == ("dep", "m", CHAT)
        assert (decision["prefill"], decision["decode"]) == ("p", "d")
        assert (decision["mode"], decision["reason"], decision["state"]) == ("least-load", "least-load", None)
        assert (decision["fallback"], decision["result"], decision["status"]) == (False, "ok", 200)
        assert (decision["cached_tokens"], decision["overlap_tokens"], decision["prompt_tokens"]) == (2, None, None)
        assert list(decision["stages_us"]) == ["read", "tokenise", "choose", "send"]
        assert sum(decision["stages_us"].values()) == pytest.approx(decision["overhead_us"])
        assert 0 < decision["prefill_seconds"] < decision["e2e"]
        assert decision["queue_seconds"] is None
    assert 0 < oldest["ttft"] <= oldest["e2e"]
    assert newest["ttft"] is None


async def test_neither_words_nor_keys_are_told(make_site: MakeSite) -> None:
    site = await make_site(auth=True)
    await site.engine("a", Role.AGGREGATED)
    site.publish()
    assert (await asked(site)).status == 200
    (decision,) = await told(site)
    assert decision["decode"] == "a"
    text = json.dumps(decision)
    for word in (*SECRET.split(), KEY, "k-all", "secret-a", "Paris"):
        assert word not in text


async def test_it_is_for_this_machine_or_a_manage_key(make_site: MakeSite) -> None:
    site = await make_site(auth=True)
    site.publish()
    assert await told(site) == []
    for headers, status in (
        ({"x-forwarded-for": "10.0.0.9"}, 401),
        ({"forwarded": "for=10.0.0.9"}, 401),
        ({"x-forwarded-for": "10.0.0.9", "authorization": f"Bearer {KEY}"}, 403),
        ({"x-forwarded-for": "10.0.0.9", "authorization": "Bearer tdm-manage"}, 200),
    ):
        assert (await ask(site.port, PATH, None, **headers)).status == status
    assert (await ask(site.port, PATH, PROMPT)).status == 405
    assert (await ask(site.port, PATH, None, method="HEAD")).status == 200


async def test_limit_and_model(pair: Site) -> None:
    ids = [(await asked(pair)).headers["x-request-id"] for _ in range(3)]
    assert [d["id"] for d in await told(pair, "?limit=2")] == [ids[2], ids[1]]
    for query, count in (("?model=m", 3), ("?model=dep&limit=9", 3), ("?model=other", 0), ("?model=", 3)):
        assert len(await told(pair, query)) == count
    for limit in ("0", "-1", "x", "1e3", "99999", "", "9" * 50, "%C2%B2"):
        reply = await ask(pair.port, f"{PATH}?limit={limit}&limit={limit or 'none'}")
        assert (reply.status, reply.error["param"]) == (400, "limit")


async def test_a_fallback_and_a_request_without_an_engine(pair: Site) -> None:
    await pair.engines["p"].stop()
    assert (await asked(pair)).status == 200
    await pair.engines["d"].stop()
    assert (await asked(pair)).status == 503
    nobody, fallback = await told(pair)
    assert (fallback["fallback"], fallback["fallback_cause"], fallback["prefill"]) == (True, "prefill-connect", None)
    assert (nobody["status"], nobody["result"]) == (503, "failed")


async def test_only_the_last_ones_are_kept(pair: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.router.decisions = Decisions()
    kept = Kept(record(), Trace(), pair.view.deployments["m"], None, None, ())
    for number in range(decisions.KEPT + 7):
        pair.router.decisions.add(kept._replace(record=record(id=str(number), at=float(number))))
    found = await told(pair, "?limit=1000")
    assert [d["id"] for d in found] == [str(n) for n in range(decisions.KEPT + 6, 6, -1)]


class TokenIds:
    marks = ()

    def at_once(self, endpoint: Endpoint, body: bytes) -> array[int]:
        return array("I", msgspec.json.decode(body)["prompt"])


async def test_every_candidate_with_the_parts_of_its_cost(make_site: MakeSite) -> None:
    site = await make_site()
    for name, role in (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d", Role.DECODE)):
        await site.engine(name, role, block_size=16)
    site.publish(policy=RoutingPolicy(mode=RoutingMode.KV_APPROXIMATE, disaggregate=Disaggregate.ALWAYS))
    cache = site.cache
    cache.tokens = TokenIds()
    body = {"model": "m", "prompt": list(range(100)), "max_tokens": 4}
    for _ in range(2):
        assert (await ask(site.port, "/v1/completions", body)).status == 200
    await site.settled()
    again, first = await told(site)
    assert (first["reason"], first["overlap_tokens"], first["prompt_tokens"]) == ("no-overlap", 0, 100)
    assert (again["reason"], again["overlap_tokens"], again["prompt_tokens"]) == ("overlap", 96, 100)
    assert again["prefill"] == first["prefill"]
    assert (again["state"], again["state_because"]["*"][:9]) == ("approximate", "by choice")
    kept = site.router.decisions._kept[-1]
    assert not [found for found in gc.get_referents(*kept, *kept.trace.weighed) if isinstance(found, Prompt | Cache)], (
        "hashes of long prompts and the index of a deployment that is gone would stay"
    )
    readers = {c["engine"]: c for c in again["candidates"] if c["part"] == "prefill"}
    assert set(readers) == {"p0", "p1"}
    assert {c["engine"] for c in again["candidates"] if c["part"] == "decode"} == {"d"}
    for candidate in again["candidates"]:
        parts = [candidate[part] for part in ("queue", "compute", "transfer", "stalls", "streams")]
        assert candidate["total"] == pytest.approx(sum(parts))
    warm = readers.pop(again["prefill"])
    (cold,) = readers.values()
    assert (warm["overlap"], warm["taken"], cold["overlap"], cold["taken"]) == (96, True, 0, False)
    assert warm["total"] < cold["total"]


async def test_modes_that_weigh_nothing_tell_what_they_would_have_weighed(pair: Site) -> None:
    await pair.engine("d2", Role.DECODE)
    pair.publish()
    for weighed in ("now", "then"):
        assert (await asked(pair)).status == 200
        newest = (await told(pair))[0]
        assert newest["weighed"] == weighed, "once somebody has looked, each choice is weighed"
        assert {(c["engine"], c["part"]) for c in newest["candidates"]} == {
            ("p", "prefill"),
            ("d", "decode"),
            ("d2", "decode"),
        }
        assert {c["engine"] for c in newest["candidates"] if c["taken"]} == {newest["prefill"], newest["decode"]}
        assert all(c["overlap"] == 0 <= c["total"] for c in newest["candidates"])


async def test_the_reply_explains_itself_in_every_mode(pair: Site) -> None:
    for mode in RoutingMode:
        pair.publish(policy=RoutingPolicy(mode=mode), tokenizer="")
        reply = await ask(pair.port, CHAT, PROMPT, **{"x-tandem-explain": "1"})
        told = {k[9:]: v for k, v in reply.headers.items() if k.startswith("x-tandem-")}
        assert (told["mode"], told["prefill"], told["decode"]) == (mode, "p", "d")
        parts = [candidate.split()[:2] for candidate in told["candidates"].split("; ")]
        assert parts == [["p", "prefill"], ["d", "decode"]]
        spent = dict(part.split("=") for part in told["overhead-stages"].split())
        assert list(spent) == ["read", "tokenise", "choose", "send"]
        assert abs(sum(map(int, spent.values())) - int(told["overhead-us"])) <= 3
        assert ("state" in told) == (mode in (RoutingMode.KV, RoutingMode.KV_APPROXIMATE))
    silent = await ask(pair.port, CHAT, PROMPT)
    assert not [name for name in silent.headers if name.startswith("x-tandem-")]


async def test_a_reply_tells_of_no_more_candidates_than_clients_bear(make_site: MakeSite) -> None:
    site = await make_site()
    await site.engine("a0", Role.AGGREGATED)
    for number in range(1, 40):
        site.add(SnapshotEngine(id=f"a{number}", name="a", attempt=1, role=Role.AGGREGATED, url="http://127.0.0.1:9"))
    site.publish()
    reply = await ask(site.port, CHAT, PROMPT, **{"x-tandem-explain": "1"})
    assert reply.headers["x-tandem-candidates"].count("total=") == 16
    assert reply.headers["x-tandem-candidates"].endswith("; 24 more for alone")
    await site.settled()
    assert len((await told(site))[0]["candidates"]) == 40


async def test_a_reply_tells_of_no_more_reasons_than_clients_bear(make_site: MakeSite) -> None:
    site = await make_site()
    await site.engine("a0", Role.AGGREGATED)
    for number in range(1, 40):
        site.add(SnapshotEngine(id=f"a{number}", name="a", attempt=1, role=Role.AGGREGATED, url="http://127.0.0.1:9"))
    site.publish(policy=RoutingPolicy(mode=RoutingMode.KV))
    cache = site.cache
    cache.tokens = TokenIds()
    reply = await ask(site.port, "/v1/completions", {"model": "m", "prompt": [1]}, **{"x-tandem-explain": "1"})
    because = reply.headers["x-tandem-state-because"]
    assert (because.count("="), because[-7:]) == (16, "24 more")


def some(index: int, board: Board | None, count: int = 2) -> Decisions:
    from frontend_api.routing.view import View

    view = View()
    view.take(snapshot("d"))
    found = Decisions(board, index)
    for number in range(count):
        kept = record(id=f"{index}-{number}", at=float(number * 10 + index))
        found.add(Kept(kept, Trace(), view.deployments["m-d"], None, None, ()))
    return found


async def test_whoever_is_asked_hears_the_others() -> None:
    board = Board(3)
    processes = [some(index, board) for index in range(3)]
    running = [asyncio.create_task(process.run()) for process in processes]
    try:
        for process in (processes[1], processes[0], processes[2]):
            answer = json.loads(await process.told("", 5))
            assert [d["id"] for d in answer["decisions"]] == ["2-1", "1-1", "0-1", "2-0", "1-0"]
            assert [d["process"] for d in answer["decisions"]] == [2, 1, 0, 2, 1]
            assert (answer["processes"], answer["silent_processes"]) == (3, [])
        processes[2].add(processes[2]._kept[0]._replace(record=record(id="late", at=99.0)))
        both = await asyncio.gather(processes[0].told("", 1), processes[1].told("", 1))
        assert [json.loads(answer)["decisions"][0]["id"] for answer in both] == ["late", "late"]
    finally:
        for task in running:
            task.cancel()


async def test_a_process_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "ANSWER_SECONDS", 0.1)
    board = Board(2)
    some(1, board)
    answer = json.loads(await some(0, board).told("", 5))
    assert [d["id"] for d in answer["decisions"]] == ["0-1", "0-0"]
    assert answer["silent_processes"] == [1]


async def test_an_answer_that_does_not_fit_keeps_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Board, "SLOT", 4096)
    board = Board(2)
    full = some(1, board, count=50)
    task = asyncio.create_task(full.run())
    try:
        answer = json.loads(await some(0, board, count=0).told("", 100))
    finally:
        task.cancel()
    ids = [d["id"] for d in answer["decisions"]]
    assert 1 < len(ids) < 50
    assert ids == [f"1-{n}" for n in range(49, 49 - len(ids), -1)]


async def test_a_half_written_answer_is_not_taken() -> None:
    board = Board(1)
    board.answer(0, b"whole", 5.0)
    assert board.answered(0, 5.0) == b"whole"
    assert board.answered(0, 5.1) is None
    at = board._at(0) + Board._HEAD.size
    board._memory[at : at + 1] = b"W"
    assert board.answered(0, 5.0) is None


async def test_a_client_that_leaves_is_not_answered(pair: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board(2)
    pair.router.decisions = Decisions(board, 0)
    async with Client(pair.port) as client:
        client.post(PATH)
        await until(lambda: board.asked_at > 0)
        (connection,) = pair.server.connections
        telling = connection.exchange
        assert isinstance(telling, decisions.Telling)
    await until(lambda: telling._work.cancelled())


async def test_a_defect_is_told(pair: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(model: str, limit: int) -> bytes:
        raise RuntimeError

    monkeypatch.setattr(pair.router.decisions, "told", broken)
    reply = await ask(pair.port, PATH)
    assert (reply.status, reply.error["code"]) == (500, "internal_error")


async def test_both_processes_of_the_program_are_heard(run: Run, engine: ScriptedEngine) -> None:  # noqa: F811
    program = await run("--no-auth", "--model", "m", "--aggregated", engine.url, "--processes", "2")
    sent = [(await ask(program.port, CHAT, PROMPT)).headers["x-request-id"] for _ in range(12)]
    for _ in range(4):
        reply = await ask(program.port, PATH)
        assert reply.json["silent_processes"] == []
        assert sorted(d["id"] for d in reply.json["decisions"]) == sorted(sent)
