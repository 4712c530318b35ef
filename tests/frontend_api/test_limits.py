"""Limited keys at the door: refused without an engine, charged for what was seen, given back exactly once; and what holds
when the counter is slow, away or back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import Counter as Tally
from hashlib import sha256
from random import Random
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from controlplane.fleet.model import Role
from controlplane.fleet.wire import SnapshotKey
from frontend_api.limits.answers import Refusal
from frontend_api.limits.charges import Estimate
from frontend_api.limits.counter import Forgotten, Line, Reply
from frontend_api.limits.reserve import KeyLimits
from frontend_api.limits.use import Hold
from frontend_api.limits.windows import Bound
from tests.frontend_api.client import PROMPT, Client, ask
from tests.frontend_api.client import Reply as Answer
from tests.frontend_api.conftest import MakeSite, Site, until
from tests.frontend_api.scripted import (
    PARAMS,
    ROLE,
    STREAM_HEAD,
    Heard,
    answer_well,
    chat_reply,
    chunk,
    framed,
    unary,
)

CHAT = "/v1/chat/completions"
SECRET = "tdm-limited"


def key(name: str = "k", **limits: Any) -> SnapshotKey:
    return SnapshotKey(id=name, digest=sha256(SECRET.encode()).hexdigest(), **limits)


@pytest.fixture
async def site(make_site: MakeSite) -> Site:
    made = await make_site(auth=True)
    await made.engine("a", Role.AGGREGATED)
    made.publish()
    return made


def limit(site: Site, **limits: Any) -> None:
    site.view.keys[key().digest] = key(**limits)


async def post(site: Site, path: str = CHAT, body: Any = None, secret: str = SECRET) -> Answer:
    return await ask(site.port, path, body or PROMPT, Authorization=f"Bearer {secret}")


def use(site: Site) -> tuple[int, int, int]:
    """Requests and tokens in the key's window, and requests now."""
    found = site.router.limits._uses["k"]
    return found.window.requests, found.window.tokens, found.held


# ---- refusals and headers


async def test_a_refused_request_costs_no_engine_work_and_says_when_to_come_back(site: Site) -> None:
    limit(site, requests_per_minute=2, tokens_per_minute=100_000)
    for left in (1, 0):
        good = await post(site)
        assert good.status == 200
        assert good.headers["x-ratelimit-limit-requests"] == "2"
        assert good.headers["x-ratelimit-remaining-requests"] == str(left)
        assert good.headers["x-ratelimit-limit-tokens"] == "100000"
        assert good.headers["x-ratelimit-reset-requests"].startswith(("1m", "59.", "60"))
    refused = await post(site)
    assert (refused.status, refused.error["code"], refused.error["type"]) == (429, "rate_limit_exceeded", "requests")
    assert "Limit 2, Used 2, Requested 1" in refused.error["message"]
    assert 55 <= int(refused.headers["retry-after"]) <= 61
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert len(site.engines["a"].heard) == 2
    assert use(site)[0] == 2, "what is refused is not charged"
    assert site.telemetry.records[-1].status == 429
    assert (site.telemetry.records[-1].key, site.telemetry.records[-1].decode) == ("k", None)
    assert (await post(site, secret="tdm-inference")).status == 200, "other keys are not concerned"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_anthropics_endpoints_refuse_in_their_own_shape(site: Site, path: str) -> None:
    limit(site, requests_per_minute=1)
    await post(site)
    refused = await post(site, path, {**PROMPT, "max_tokens": 5})
    assert refused.status == 429
    assert (refused.json["type"], refused.json["error"]["type"]) == ("error", "rate_limit_error")
    assert "retry-after" in refused.headers


async def test_streams_and_errors_carry_the_headers_too(site: Site) -> None:
    limit(site, requests_per_minute=5)
    stream = await post(site, body={**PROMPT, "stream": True})
    assert stream.headers["x-ratelimit-remaining-requests"] == "4"

    async def refuse(heard: Heard, writer: asyncio.StreamWriter) -> None:
        writer.write(unary({"error": {"message": "no"}}, 400))

    site.engines["a"].answer = refuse
    assert (await post(site)).headers["x-ratelimit-remaining-requests"] == "3"
    site.publish(without=("a",))
    limit(site, requests_per_minute=5)
    assert (await post(site)).headers["x-ratelimit-remaining-requests"] == "2"


async def test_unlimited_keys_never_come_to_the_counter(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeyLimits, "reserve", None)
    reply = await post(site, secret="tdm-inference")
    assert reply.status == 200
    assert not [name for name in reply.headers if name.startswith("x-ratelimit")]


async def test_a_prompt_that_can_never_pass_is_told_so(site: Site) -> None:
    limit(site, tokens_per_minute=100)
    refused = await post(site, body={**PROMPT, "max_tokens": 101})
    assert (refused.status, refused.error["type"]) == (429, "tokens")
    assert "Request too large" in refused.error["message"]
    assert (await post(site, body={**PROMPT, "max_tokens": 60})).status == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"])
async def test_every_endpoint_is_metered(site: Site, path: str) -> None:
    limit(site, tokens_per_minute=1000)
    assert (await post(site, path, {**PROMPT, "max_tokens": 20, "input": "x"})).status == 200
    await site.settled()
    assert use(site) == (1, 10, 0)  # as the scripted engine counts


async def test_a_rotated_keys_two_secrets_count_as_one(site: Site) -> None:
    limit(site, requests_per_minute=2)
    site.view.keys[sha256(b"tdm-new").hexdigest()] = key(requests_per_minute=2)
    assert [(await post(site, secret=s)).status for s in (SECRET, "tdm-new", SECRET, "tdm-new")] == [200, 200, 429, 429]


async def test_the_key_is_told_as_used(site: Site) -> None:
    limit(site, requests_per_minute=1)
    await post(site)
    await post(site)
    status = site.telemetry.status(site.view, site.evidence, site.router.outcomes)
    assert set(status.keys_seen) == {"k"}
    first = status.keys_seen["k"]
    await post(site, secret="tdm-inference")
    seen = site.telemetry.status(site.view, site.evidence, site.router.outcomes).keys_seen
    assert seen["k"] == first, "one note a minute"
    assert set(seen) == {"k", "k-all"}


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
async def test_it_is_told_too_when_the_clock_was_set(site: Site, step: float, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(site, requests_per_minute=9)
    await post(site)
    now = time.time
    for name in ("observe.account", "observe.telemetry"):
        monkeypatch.setattr(f"frontend_api.{name}.time", lambda: now() + step)
    await post(site)
    status = site.telemetry.status(site.view, site.evidence, site.router.outcomes)
    assert abs(status.keys_seen["k"] - now() - step) < 30


# ---- charges, and what is given back


async def never(heard: Heard, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def cut(heard: Heard, writer: asyncio.StreamWriter) -> None:
    """Role and two words, then the connection breaks."""
    writer.write(STREAM_HEAD + b"".join(framed(part) for part in (ROLE, chunk("a"), chunk("b"))))
    await writer.drain()
    writer.transport.abort()


async def hang_up(heard: Heard, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def fail(heard: Heard, writer: asyncio.StreamWriter) -> None:
    writer.write(unary({"error": {"message": "broken"}}, 500))


async def refuse(heard: Heard, writer: asyncio.StreamWriter) -> None:
    writer.write(unary({"error": {"message": "too long"}}, 400))


async def countless(heard: Heard, writer: asyncio.StreamWriter) -> None:
    reply = chat_reply()
    del reply["usage"]
    writer.write(unary(reply))


PROMPT_GUESS = -(-len(b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}') // 4)


@pytest.mark.parametrize(
    ("answer", "stream", "charged"),
    [
        (answer_well, False, (1, 10, 0)),
        (answer_well, True, (1, 10, 0)),
        (cut, True, (1, None, 0)),
        (hang_up, False, (0, 0, 0)),
        (fail, False, (0, 0, 0)),
        (refuse, False, (1, 0, 0)),
        (countless, False, (1, PROMPT_GUESS + 50, 0)),
    ],
)
async def test_every_end_is_settled_once(site: Site, answer: Any, stream: bool, charged: tuple[int, int, int]) -> None:
    limit(site, tokens_per_minute=10_000, requests_per_minute=100, concurrency=3)
    site.engines["a"].answer = answer
    body = {**PROMPT, "max_tokens": 50, **({"stream": True} if stream else {})}
    await post(site, body=body)
    await site.settled()
    requests, tokens, held = use(site)
    if charged[1] is None:  # of a cut stream: the prompt, guessed, and two words
        size = len(b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50, "stream": true}')
        charged = (charged[0], -(-size // 4) + 2, charged[2])
    assert (requests, tokens, held) == charged


async def test_a_client_that_leaves_pays_for_what_it_caused(site: Site) -> None:
    limit(site, tokens_per_minute=10_000, concurrency=1)
    site.engines["a"].answer = never
    async with Client(site.port) as client:
        client.post(CHAT, {**PROMPT, "max_tokens": 50}, Authorization=f"Bearer {SECRET}")
        await until(lambda: bool(site.engines["a"].heard))
        assert (await post(site)).error["message"].startswith("Rate limit reached for m on requests at a time: Limit 1")
    await site.settled()
    assert use(site) == (1, PROMPT_GUESS, 0)
    site.engines["a"].answer = answer_well
    assert (await post(site)).status == 200


async def test_many_at_once_never_pass_the_limit_together(site: Site) -> None:
    limit(site, requests_per_minute=7, concurrency=100)
    replies = await asyncio.gather(*(post(site) for _ in range(30)))
    assert Tally(reply.status for reply in replies) == {200: 7, 429: 23}
    limit(site, concurrency=4)
    release = asyncio.Event()

    async def later(heard: Heard, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        await answer_well(heard, writer)

    site.engines["a"].answer = later
    tasks = [asyncio.create_task(post(site)) for _ in range(20)]
    await until(lambda: sum(task.done() for task in tasks) == 16)
    release.set()
    assert Tally([(await task).status for task in tasks]) == {200: 4, 429: 16}
    await site.settled()
    assert use(site)[2] == 0


async def test_whatever_happens_nothing_stays_held(site: Site) -> None:
    """Engines that answer, break, refuse or never speak, and clients that leave at any moment."""
    limit(site, requests_per_minute=10_000, tokens_per_minute=10_000_000, concurrency=10_000)
    chance = Random(7)
    kinds = [answer_well, cut, hang_up, fail, refuse, countless, never]

    async def any_of_them(heard: Heard, writer: asyncio.StreamWriter) -> None:
        await chance.choice(kinds)(heard, writer)

    site.engines["a"].answer = any_of_them

    async def one() -> None:
        async with Client(site.port) as client:
            body = {**PROMPT, "max_tokens": 9, "stream": chance.random() < 0.5}
            client.post(CHAT, body, Authorization=f"Bearer {SECRET}")
            with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError, ConnectionError):
                async with asyncio.timeout(chance.choice([0.001, 0.01, 0.05])):
                    await client.reply()

    for _ in range(10):
        await asyncio.gather(*(one() for _ in range(30)))
    await site.settled()
    requests, tokens, held = use(site)
    assert held == 0
    assert 0 < requests <= 300
    assert 0 < tokens <= requests * 100


# ---- the counter elsewhere


class Far:
    """A counter whose answers the test gives."""

    def __init__(self) -> None:
        self.calls: list[list[Line]] = []
        self.answers: asyncio.Queue[Reply | Exception] = asyncio.Queue()
        self.dropped = 0
        self.last = False

    async def ask(self, lines: list[Line], *, last: bool = False) -> Reply:
        self.calls.append(lines)
        self.last = last
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def drop(self) -> None:
        self.dropped += 1


def granted(lines: list[Line], *, now: float = 1_700_000_000.5, routers: int = 2) -> Reply:
    return Reply(now, routers, [[0, 0, 0, *[0.0, 0, 1, 5] * len(line.asks)] for line in lines])


class Requests:
    """What became of each hold."""

    def __init__(self, limits: KeyLimits, **caps: Any) -> None:
        self.limits = limits
        self.key = key(**caps)
        self.answers: list[Refusal | None] = []

    def ask(self, tokens: int = 5) -> Hold:
        hold = Hold(self.key, Estimate(tokens, 0, tokens), self.answers.append)
        self.limits.reserve(hold)
        return hold


async def test_a_turns_reservations_are_one_call_and_the_next_wait_for_its_answer() -> None:
    far = Far()
    limits = KeyLimits(far)
    requests = Requests(limits, requests_per_minute=9)
    [requests.ask() for _ in range(3)]
    task = asyncio.create_task(limits.tell())
    await until(lambda: len(far.calls) == 1)
    [requests.ask() for _ in range(2)]
    assert [len(line.asks) for line in far.calls[0]] == [3]
    assert not requests.answers
    far.answers.put_nowait(granted(far.calls[0]))
    await task
    assert requests.answers == [None] * 3
    far.answers.put_nowait(granted(far.calls[0]))
    task = asyncio.create_task(limits.tell())
    await until(lambda: len(far.calls) == 2)
    assert [(line.held, len(line.asks)) for line in far.calls[1]] == [(3, 2)]
    task.cancel()


async def test_a_silent_counter_holds_up_nobody_for_long(caplog: pytest.LogCaptureFixture) -> None:
    far, fell_back = Far(), Tally[str]()
    limits = KeyLimits(far, processes=2, patience=0.02, fell_back=lambda: fell_back.update("x"))
    requests = Requests(limits, requests_per_minute=6, concurrency=100)
    run = asyncio.create_task(limits.run())
    [requests.ask() for _ in range(5)]
    await until(lambda: len(requests.answers) == 5)
    assert limits.away
    assert far.dropped == 1
    assert requests.answers.count(None) == 3, "half of six: one of two processes"
    assert {r.bound for r in requests.answers if r} == {Bound.REQUESTS}
    requests.ask()
    assert len(requests.answers) == 6, "now at once"
    assert fell_back["x"] == 6
    assert [r.levelno for r in caplog.records if "does not count limits" in r.message] == [logging.WARNING]
    run.cancel()


async def test_what_was_granted_meanwhile_is_told_when_the_counter_is_back() -> None:
    far = Far()
    limits = KeyLimits(far, patience=0.02)
    requests = Requests(limits, requests_per_minute=60, tokens_per_minute=1000, concurrency=9)
    far.answers.put_nowait(RedisConnectionError("gone"))
    holds = [requests.ask(), requests.ask()]
    await limits.tell()
    assert requests.answers == [None, None]
    limits.settle(holds[0], 3)
    requests.ask()
    far.answers.put_nowait(Reply(1_700_000_000.5, 3, [[0, 0, 0]]))
    await limits.tell()
    (line,) = far.calls[-1]
    assert line.held == 2
    assert (sum(r for _, r, _ in line.owed), sum(t for _, _, t in line.owed)) == (3, 13)
    assert not limits.away
    far.answers.put_nowait(Reply(1_700_000_001.5, 3, []))
    await limits.tell()
    assert far.calls[-1] == [], "told once"


async def test_a_counter_that_forgot_everything_is_told_again_before_it_is_asked() -> None:
    far = Far()
    limits = KeyLimits(far)
    requests = Requests(limits, requests_per_minute=9)
    requests.ask()
    far.answers.put_nowait(granted([Line("k", 9, 0, 0, 0, [], [5])]))
    await limits.tell()
    requests.ask()
    far.answers.put_nowait(Forgotten())
    await limits.tell()
    assert requests.answers == [None]
    far.answers.put_nowait(granted(far.calls[-1]))
    await limits.tell()
    assert far.calls[-1] == [Line("k", 9, 0, 0, 1, [(1_700_000_000, 1, 5)], [5])]
    assert requests.answers == [None, None]


async def test_what_can_never_pass_is_told_too_what_all_routers_have_used() -> None:
    far = Far()
    limits = KeyLimits(far, processes=2)
    requests = Requests(limits, tokens_per_minute=100)
    hold = requests.ask(tokens=500)
    far.answers.put_nowait(Reply(1_700_000_000.5, 2, [[1_700_000_000, 3, 40, Bound.TOKENS, 61.0, 3, 40]]))
    await limits.tell()
    assert b"x-ratelimit-remaining-tokens: 60\r\n" in hold.headers
    requests.ask(tokens=500)
    far.answers.put_nowait(RedisConnectionError("gone"))
    await limits.tell()
    requests.ask(tokens=500)
    assert [refusal and (refusal.bound, refusal.wait) for refusal in requests.answers] == [(Bound.TOKENS, 61.0)] * 3


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
async def test_a_clock_that_is_set_neither_opens_nor_shuts_the_gate(
    step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the counter is away, only this machine's clock is there."""
    far = Far()
    limits = KeyLimits(far, patience=0.02)
    requests = Requests(limits, requests_per_minute=6)
    requests.ask()
    far.answers.put_nowait(Reply(time.time(), 1, [[0, 1, 5, 0, 0.0, 1, 5]]))
    await limits.tell()
    requests.ask()
    far.answers.put_nowait(RedisConnectionError("gone"))
    await limits.tell()
    assert requests.answers == [None] * 2
    now = time.time
    monkeypatch.setattr("time.time", lambda: now() + step)
    monkeypatch.setattr("frontend_api.limits.reserve.time", time.time)
    [requests.ask() for _ in range(8)]
    assert requests.answers[:6] == [None] * 6
    assert all(refusal and 0 < refusal.wait <= 61 for refusal in requests.answers[6:])
    far.answers.put_nowait(Reply(now(), 1, [[0, 0, 0]]))
    await limits.tell()
    (line,) = far.calls[-1]
    assert sum(more for _, more, _ in line.owed) == 5
    assert all(now() - 61 < second <= now() for second, _, _ in line.owed), "else the counter would drop it"


async def test_what_is_left_is_not_believed_of_a_counter_whose_clock_was_set_back() -> None:
    far = Far()
    limits = KeyLimits(far, patience=0.02)
    one, other = Requests(limits, requests_per_minute=6), Requests(limits, requests_per_minute=6, name="other")
    one.ask()
    far.answers.put_nowait(Reply(1_700_000_000.5, 1, [[0, 6, 5, Bound.REQUESTS, 60.0, 6, 5]]))
    await limits.tell()
    other.ask()
    far.answers.put_nowait(Reply(1_700_000_000.5 - 3600, 1, [[0, 1, 5, 0, 0.0, 1, 5]]))
    await limits.tell()
    other.ask()
    far.answers.put_nowait(RedisConnectionError("gone"))
    await limits.tell()
    one.ask()
    assert one.answers[1:] == [None]


async def test_a_counter_that_is_far_away_is_reached_again() -> None:
    far = Far()
    limits = KeyLimits(far, patience=0.02)
    requests = Requests(limits, requests_per_minute=9)
    requests.ask()
    far.answers.put_nowait(RedisConnectionError("gone"))
    await limits.tell()
    assert limits.away
    asyncio.get_running_loop().call_later(1.5, far.answers.put_nowait, Reply(1_700_000_001.0, 1, [[0, 0, 0]]))
    await limits.tell()
    assert not limits.away


async def test_a_client_that_leaves_while_it_waits_holds_nothing() -> None:
    far = Far()
    limits = KeyLimits(far)
    requests = Requests(limits, tokens_per_minute=1000, concurrency=1)
    early = requests.ask()
    limits.settle(early, 0)  # before it was sent
    late = requests.ask()
    task = asyncio.create_task(limits.tell())
    await until(lambda: len(far.calls) == 1)
    assert [len(line.asks) for line in far.calls[0]] == [1]
    limits.settle(late, 0)  # while it is asked for
    limits.settle(late, 0)
    far.answers.put_nowait(granted(far.calls[0]))
    await task
    assert requests.answers == []
    far.answers.put_nowait(Reply(1_700_000_001.0, 1, [[0, 0, 0]]))
    await limits.tell()
    assert far.calls[-1] == [Line("k", 0, 1000, 1, 0, [(1_700_000_000, -1, -5)], [])]


async def test_what_a_call_might_have_counted_is_never_given_back_twice() -> None:
    far = Far()
    limits = KeyLimits(far, patience=0.02)
    requests = Requests(limits, tokens_per_minute=1000)
    hold = requests.ask(tokens=100)
    far.answers.put_nowait(granted([Line("k", 0, 1000, 0, 0, [], [100])]))
    await limits.tell()
    limits.settle(hold, 40)
    far.answers.put_nowait(RedisConnectionError("while it counted"))
    await limits.tell()
    far.answers.put_nowait(Reply(1_700_000_001.0, 1, [[0, 0, 0]]))
    await limits.tell()
    assert far.calls[-1][0].owed in ([], [(1_700_000_000, 0, 0)])


async def test_a_defect_behind_one_request_leaves_the_others_their_answer(caplog: pytest.LogCaptureFixture) -> None:
    far = Far()
    limits = KeyLimits(far)
    requests = Requests(limits, concurrency=9)

    def broken(refusal: Refusal | None) -> None:
        raise RuntimeError("defect")

    limits.reserve(Hold(requests.key, Estimate(1, 0, 1), broken))
    requests.ask()
    far.answers.put_nowait(granted([Line("k", 0, 0, 9, 0, [], [1, 1])]))
    await limits.tell()
    assert requests.answers == [None]
    assert "defect in the router" in caplog.text


async def test_of_what_was_left_when_the_counter_last_spoke_each_takes_its_part() -> None:
    far = Far()
    limits = KeyLimits(far, patience=0.02, processes=2)
    requests = Requests(limits, requests_per_minute=20)
    requests.ask()
    far.answers.put_nowait(Reply(1_700_000_000.5, 2, [[1_700_000_000, 15, 75, 0, 0.0, 15, 75]]))
    await limits.tell()
    far.answers.put_nowait(RedisConnectionError("gone"))
    for _ in range(4):
        requests.ask()
    await limits.tell()
    assert [answer is None for answer in requests.answers] == [True, True, True, False, False], (
        "two of five: the other's three"
    )
    refusal = requests.answers[-1]
    assert refusal is not None
    assert (refusal.bound, 59 < refusal.wait <= 61) == (Bound.REQUESTS, True)


@pytest.mark.parametrize(("limit", "caps"), [("concurrency", (0, 0, 3)), ("requests_per_minute", (3, 0, 0))])
async def test_a_beat_tells_again_what_is_held_and_forgets_only_what_is_over(limit: str, caps: Any) -> None:
    far = Far()
    limits = KeyLimits(far)
    requests = Requests(limits, **{limit: 3})
    requests.ask()
    task = asyncio.create_task(limits.tell())
    await until(lambda: len(far.calls) == 1)
    limits.beat()  # while the counter is asked
    far.answers.put_nowait(granted(far.calls[0]))
    await task
    assert requests.answers == [None]
    limits.beat()
    far.answers.put_nowait(Reply(1_700_000_001.0, 1, [[0, 0, 0]]))
    await limits.tell()
    assert far.calls[-1] == [Line("k", *caps, 1, [], [])]
    limits._uses["k"].window.slide(2e9)
    limits._uses["k"].held = 0
    limits.beat()
    assert not limits._uses


async def test_requests_larger_than_a_share_pass_one_at_a_time() -> None:
    limits = KeyLimits(processes=4)
    requests = Requests(limits, tokens_per_minute=1000)
    for _ in range(3):
        requests.ask(tokens=600)
    assert [answer is None for answer in requests.answers] == [True, False, False]


async def test_many_keys_go_in_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontend_api.limits.reserve.CALL_KEYS", 2)
    far, answers = Far(), []
    limits = KeyLimits(far)
    for number in range(5):
        one = SnapshotKey(id=f"k{number}", digest=f"d{number}", requests_per_minute=9)
        limits.reserve(Hold(one, Estimate(1, 0, 1), answers.append))
    run = asyncio.create_task(limits.run())
    for call in range(3):
        await until(lambda call=call: len(far.calls) == call + 1)
        far.answers.put_nowait(granted(far.calls[call]))
    await until(lambda: answers == [None] * 5)
    assert [len(lines) for lines in far.calls[:3]] == [2, 2, 1]
    run.cancel()


async def test_the_end_frees_what_is_left() -> None:
    far = Far()
    limits = KeyLimits(far)
    requests = Requests(limits, concurrency=9)
    requests.ask()
    far.answers.put_nowait(granted([Line("k", 0, 0, 9, 0, [], [1])]))
    await limits.tell()
    far.answers.put_nowait(Reply(1.0, 1, [[0, 0, 0]]))
    far.answers.put_nowait(Reply(1.0, 0, []))
    await limits.end()
    assert far.last
    assert far.dropped == 1


async def test_a_process_that_stood_still_reads_the_answer_first() -> None:
    far = Far()
    limits = KeyLimits(far, patience=0.03)
    requests = Requests(limits, requests_per_minute=9)
    requests.ask()
    task = asyncio.create_task(limits.tell())
    await until(lambda: len(far.calls) == 1)
    loop = asyncio.get_running_loop()
    loop.call_soon(time.sleep, 0.1)  # the deadline passes while nothing can be read
    loop.call_later(
        0.035, far.answers.put_nowait, granted(far.calls[0])
    )  # due when the loop goes on: behind the deadline
    await task
    assert requests.answers == [None]
    assert not limits.away


async def test_a_cancelled_router_is_not_taken_for_a_late_counter() -> None:
    far = Far()
    limits = KeyLimits(far)
    Requests(limits, requests_per_minute=9).ask()
    task = asyncio.create_task(limits.tell())
    await until(lambda: len(far.calls) == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not limits.away


async def test_however_deep_a_body_is_nested_it_is_served_or_refused(
    make_site: MakeSite, caplog: pytest.LogCaptureFixture
) -> None:
    """It is read several times, on stacks of different heights."""
    site = await make_site(auth=True)

    async def answer(heard: Heard, writer: asyncio.StreamWriter) -> None:
        """Reads nothing: it would have limits of its own."""
        writer.write(unary(chat_reply(kv_transfer_params=PARAMS)))

    await site.engine("p", Role.PREFILL, answer)
    await site.engine("d", Role.DECODE, answer)
    site.publish()
    limit(site, requests_per_minute=100_000)
    statuses = set()
    for depth in range(880, 1_000):
        body = b'%b,"x":%b}' % (json.dumps(PROMPT).encode()[:-1], b"[" * depth + b"]" * depth)
        statuses.add((await post(site, body=body)).status)
    assert statuses == {200, 400}
    assert "defect" not in caplog.text
    await site.settled()
