"""Requests that wait while all engines are full: in what order, for how long, and that nobody is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from time import monotonic
from typing import Any
from zlib import crc32

import pytest

from controlplane.fleet.model import Role
from controlplane.fleet.wire import FleetSnapshot, RequestRecord, Result, RoutingPolicy, SnapshotDeployment
from frontend_api.routing import waiting as routing_waiting
from frontend_api.routing.loads import Table
from frontend_api.routing.view import Deployment
from frontend_api.routing.waiting import Waiting
from tests.frontend_api.client import PROMPT, Client, ask
from tests.frontend_api.conftest import MakeSite, Site, until
from tests.frontend_api.scripted import Heard, answer_well, chat_reply, unary
from tests.frontend_api.test_loads import Process

CHAT = "/v1/chat/completions"
SEVERAL = {**PROMPT, "n": 2}
"""Goes to an answering engine alone."""


class Gated:
    """An engine that answers one request per `go`."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Heard, asyncio.Event]] = []
        self.most = 0

    async def __call__(self, heard: Heard, writer: asyncio.StreamWriter) -> None:
        event = asyncio.Event()
        self.waiting.append((heard, event))
        self.most = max(self.most, len(self.waiting))
        try:
            await event.wait()
        finally:
            self.waiting = [entry for entry in self.waiting if entry[1] is not event]
        await answer_well(heard, writer)

    def go(self) -> str:
        """Let the oldest one have its answer. Returns who it is."""
        heard, event = self.waiting.pop(0)
        event.set()
        return str(heard.body.get("user"))


def policy(limit: int = 1, **more: Any) -> RoutingPolicy:
    return RoutingPolicy(max_in_flight=limit, **more)


async def one_engine(make_site: MakeSite, gate: Gated, routing: RoutingPolicy | None = None, **options: Any) -> Site:
    site = await make_site(**options)
    await site.engine("a", Role.AGGREGATED, gate)
    site.publish(policy=routing or policy())
    return site


def waiting(site: Site) -> int:
    return sum(many for _, many in site.router.waiting.counts())


class Asking:
    """Requests that run, by who asks."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.tasks: dict[str, asyncio.Task[Any]] = {}

    async def ask(self, who: str, body: Any = PROMPT, key: str = "tdm-inference") -> None:
        """Returns when the router has it in line."""
        before = waiting(self.site)
        body = {**body, "user": who}
        self.tasks[who] = asyncio.create_task(ask(self.site.port, CHAT, body, Authorization=f"Bearer {key}"))
        await until(lambda: waiting(self.site) > before)

    async def statuses(self) -> dict[str, int]:
        return {who: (await task).status for who, task in self.tasks.items()}


async def test_one_at_a_time_in_the_order_of_arrival(make_site: MakeSite) -> None:
    gate = Gated()
    site = await one_engine(make_site, gate)
    asking = Asking(site)
    first = asyncio.create_task(ask(site.port, CHAT, {**PROMPT, "user": "0"}))
    await until(lambda: bool(gate.waiting))
    for who in "1234":
        await asking.ask(who)
    text = (await ask(site.port, "/metrics")).body
    assert b'tandem_router_waiting{deployment="dep"} 4' in text
    served = []
    for left in (4, 3, 2, 1, 0):
        await until(lambda: len(gate.waiting) == 1)
        assert waiting(site) == left
        served.append(gate.go())
    assert served == ["0", "1", "2", "3", "4"]
    assert (await first).status == 200
    assert set((await asking.statuses()).values()) == {200}
    assert gate.most == 1
    await site.settled()
    records = site.telemetry.records
    assert records[0].queue_seconds is None
    assert all(r.queue_seconds is not None and r.overhead_us < 1e6 * (r.e2e - r.queue_seconds) for r in records[1:])
    text = (await ask(site.port, "/metrics")).body
    assert b'tandem_router_queue_seconds_count{deployment="dep"} 4' in text
    assert b'tandem_router_waiting{deployment="dep"}' not in text


async def test_a_higher_priority_goes_first(make_site: MakeSite) -> None:
    gate = Gated()
    site = await one_engine(make_site, gate, auth=True)
    keys = site.view.keys
    for digest, key in list(keys.items()):
        if key.id == "k-other":
            keys[digest] = key.__class__(id=key.id, digest=digest, priority=5)
    asking = Asking(site)
    asking.tasks["0"] = asyncio.create_task(ask(site.port, CHAT, PROMPT, Authorization="Bearer tdm-inference"))
    await until(lambda: bool(gate.waiting))
    await asking.ask("low 1")
    await asking.ask("low 2")
    await asking.ask("high 1", key="tdm-other")
    await asking.ask("high 2", key="tdm-other")
    served = []
    for _ in range(5):
        await until(lambda: len(gate.waiting) == 1)
        served.append(gate.go())
    assert served == ["None", "high 1", "high 2", "low 1", "low 2"]
    assert set((await asking.statuses()).values()) == {200}


async def test_a_full_line_and_a_deadline_are_429_with_retry_after(make_site: MakeSite) -> None:
    gate = Gated()
    site = await one_engine(make_site, gate, policy(queue_limit=1, queue_seconds=0.2))
    asking = Asking(site)
    first = asyncio.create_task(ask(site.port, CHAT, PROMPT))
    await until(lambda: bool(gate.waiting))
    await asking.ask("late")
    full = await ask(site.port, CHAT, PROMPT)
    assert (full.status, full.error["code"], full.error["type"]) == (429, "engines_busy", "rate_limit_error")
    assert "1 requests wait" in full.error["message"]
    assert full.headers["retry-after"] == "2"
    late = await asking.tasks["late"]
    assert (late.status, late.error["code"]) == (429, "engines_busy")
    assert "0.2 seconds" in late.error["message"]
    assert len(site.engines["a"].heard) == 1
    gate.go()
    assert (await first).status == 200
    await site.settled()
    assert [(r.status, r.result, r.reason) for r in site.telemetry.records[:2]] == [
        (429, Result.REFUSED, "engines-full")
    ] * 2
    zero, spent, _ = (r.queue_seconds for r in site.telemetry.records)
    assert zero == 0.0
    assert spent is not None
    assert spent >= 0.15


async def test_a_client_that_leaves_leaves_the_line_at_once(make_site: MakeSite) -> None:
    gate = Gated()
    site = await one_engine(make_site, gate)
    asking = Asking(site)
    first = asyncio.create_task(ask(site.port, CHAT, PROMPT))
    await until(lambda: bool(gate.waiting))
    async with Client(site.port) as client:
        client.post(CHAT, PROMPT)
        await until(lambda: waiting(site) == 1)
        await asking.ask("stays")
    await until(lambda: waiting(site) == 1)
    gate.go()
    assert (await first).status == 200
    await until(lambda: len(gate.waiting) == 1)
    assert gate.go() == "stays"
    assert (await asking.tasks["stays"]).status == 200
    await site.settled()
    aborted = next(r for r in site.telemetry.records if r.result is Result.ABORTED)
    assert aborted.queue_seconds is not None
    assert (aborted.decode, aborted.reason) == (None, "engines-full")


async def test_those_who_need_another_pool_pass(make_site: MakeSite) -> None:
    """Prefill is full: who needs decode alone does not wait, and prefill's queue does not fall back to decode alone."""
    gate = Gated()
    site = await make_site()
    await site.engine("p", Role.PREFILL, gate)
    await site.engine("d", Role.DECODE)
    site.publish(policy=policy(2))
    asking = Asking(site)
    both = [asyncio.create_task(ask(site.port, CHAT, PROMPT)) for _ in range(2)]
    await until(lambda: len(gate.waiting) == 2)
    site.publish(policy=policy(3))  # decode has room, prefill has not
    both.append(asyncio.create_task(ask(site.port, CHAT, PROMPT)))
    await until(lambda: len(gate.waiting) == 3)
    site.publish(policy=policy(4))
    site.router.loads.hear("elsewhere", {"p:1": (1, 0, 0)}, monotonic())
    await asking.ask("waits")
    assert (await ask(site.port, CHAT, SEVERAL)).status == 200
    assert waiting(site) == 1
    site.router.loads.hear("elsewhere", {}, monotonic())
    site.router.waiting.look()
    await until(lambda: len(gate.waiting) == 4)
    while gate.waiting:
        gate.go()
        await asyncio.sleep(0)
    assert [(await task).status for task in both] == [200, 200, 200]
    assert await asking.statuses() == {"waits": 200}
    await site.settled()
    assert not any(r.fallback for r in site.telemetry.records)


async def test_new_engines_serve_those_who_wait(make_site: MakeSite) -> None:
    gate = Gated()
    site = await one_engine(make_site, gate)
    asking = Asking(site)
    first = asyncio.create_task(ask(site.port, CHAT, PROMPT))
    await until(lambda: bool(gate.waiting))
    await asking.ask("1")
    await asking.ask("2")
    await site.engine("b", Role.AGGREGATED)
    site.publish(policy=policy())
    assert await asking.statuses() == {"1": 200, "2": 200}
    assert len(site.engines["b"].heard) == 2
    gate.go()
    assert (await first).status == 200


async def test_a_deployment_that_goes_takes_its_line_along(make_site: MakeSite) -> None:
    gate = Gated()
    site = await one_engine(make_site, gate)
    asking = Asking(site)
    first = asyncio.create_task(ask(site.port, CHAT, PROMPT))
    await until(lambda: bool(gate.waiting))
    await asking.ask("1")
    site.view.take(FleetSnapshot(99))
    reply = await asking.tasks["1"]
    assert (reply.status, reply.error["code"]) == (503, "no_engine")
    gate.go()
    assert (await first).status == 200


async def test_without_an_engine_nobody_waits(make_site: MakeSite) -> None:
    site = await make_site()
    site.publish(policy=policy())
    reply = await ask(site.port, CHAT, PROMPT)
    assert (reply.status, reply.error["code"]) == (503, "no_engine")


async def test_a_drain_serves_those_who_wait(make_site: MakeSite) -> None:
    gate = Gated()
    site = await one_engine(make_site, gate)
    asking = Asking(site)
    first = asyncio.create_task(ask(site.port, CHAT, PROMPT))
    await until(lambda: bool(gate.waiting))
    await asking.ask("1")
    site.server.stop_accepting()
    gate.go()
    await first
    await until(lambda: len(gate.waiting) == 1)
    gate.go()
    assert await asking.statuses() == {"1": 200}
    await until(lambda: not site.server.connections)


async def test_engines_that_fail_while_others_are_full_cost_no_place(make_site: MakeSite) -> None:
    """One engine is full and the other breaks: the request waits for the full one instead of failing."""
    gate = Gated()
    site = await one_engine(make_site, gate)
    await site.engine("b", Role.AGGREGATED)
    site.publish(policy=policy())
    first = asyncio.create_task(ask(site.port, CHAT, PROMPT))
    await until(lambda: bool(gate.waiting))
    await site.engines["b"].stop()
    asking = Asking(site)
    await asking.ask("1")
    gate.go()
    await first
    await until(lambda: len(gate.waiting) == 1)
    gate.go()
    assert await asking.statuses() == {"1": 200}


# ---- several processes


@pytest.fixture
def table() -> Iterator[Table]:
    made = Table(3)
    yield made
    made.close()


async def several(make_site: MakeSite, table: Table, gate: Gated, routing: RoutingPolicy) -> list[Site]:
    """Router processes of one host in front of one engine."""
    sites: list[Site] = []
    for index in range(3):
        site = await make_site(table=table, index=index)
        if not sites:
            await site.engine("a", Role.AGGREGATED, gate)
        else:
            site.add(next(iter(sites[0].view.engines())).spec)
        site.publish(policy=routing)
        sites.append(site)
    return sites


async def test_who_waited_and_got_nothing_from_its_engine_keeps_its_age(make_site: MakeSite) -> None:
    gate, busy = Gated(), asyncio.Event()
    site = await one_engine(make_site, gate)
    asking = Asking(site)
    first = asyncio.create_task(ask(site.port, CHAT, {**PROMPT, "user": "0"}))
    await until(lambda: bool(gate.waiting))

    async def refuse(heard: Heard, writer: asyncio.StreamWriter) -> None:
        await busy.wait()
        writer.write(unary({"error": {"message": "busy"}}, 503))

    await asking.ask("old")
    began_at = monotonic()
    await asyncio.sleep(0.05)
    waited = monotonic() - began_at
    await site.engine("b", Role.AGGREGATED, refuse)
    site.publish(policy=policy())
    await until(lambda: waiting(site) == 0)
    await asking.ask("young")
    busy.set()
    await until(lambda: waiting(site) == 2)
    place = site.router.waiting._lines["m"].first(alone=False)
    assert place is not None
    assert place.timer is not None
    assert place.timer.when() <= asyncio.get_running_loop().time() + policy().queue_seconds - waited / 2
    for who in ("0", "old", "young"):
        await until(lambda: len(gate.waiting) == 1)
        assert gate.go() == who
    await first
    assert await asking.statuses() == {"old": 200, "young": 200}


async def test_limits_and_the_line_hold_over_all_processes(
    make_site: MakeSite, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing_waiting, "HEAD_STARTS", 5_000)  # a busy machine: wait for whose turn it is
    gate = Gated()
    sites = await several(make_site, table, gate, policy(2))
    running = [asyncio.create_task(ask(sites[0].port, CHAT, PROMPT)) for _ in range(2)]
    await until(lambda: len(gate.waiting) == 2)
    askings = [Asking(site) for site in sites]
    await askings[2].ask("1")
    await askings[0].ask("2")
    await askings[1].ask("3")
    served: list[str] = []
    while gate.waiting:
        served.append(gate.go())
        await until(lambda: len(gate.waiting) == min(2, 5 - len(served)))
    assert served == ["None", "None", "1", "2", "3"]
    assert gate.most == 2
    for asking in askings:
        assert set((await asking.statuses()).values()) <= {200}
    assert [(await task).status for task in running] == [200, 200]
    for site in sites:
        await site.settled()


def test_newcomers_queue_up_behind_a_siblings_requests_too(table: Table) -> None:
    one, two = Process(table, 0).take("a"), Process(table, 1).take("a")
    waiting = Waiting(one.view, one.loads)

    def behind(priority: int = 0) -> bool:
        return waiting.before(one.deployment, alone=False, priority=priority)

    assert not behind()
    two.loads.claim((int(monotonic() * 1000), crc32(b"m")))
    assert behind()
    assert not behind(priority=1)
    two.loads.claim((int(monotonic() * 1000), crc32(b"another")))
    assert not behind()
    two.loads.claim((-1 << 48, crc32(b"m")))
    assert behind()
    table.clear(1)
    assert not behind()


async def test_newcomers_queue_up_in_every_line_in_which_a_sibling_waits(table: Table) -> None:
    one, two = Process(table, 0).take("a"), Process(table, 1).take("a")
    entry = SnapshotDeployment("d2", "another", RoutingPolicy(), ())
    here, there = Waiting(one.view, one.loads), Waiting(two.view, two.loads)
    lines = [one.deployment, Deployment(entry, ())]

    class Patient:
        def room(self, deployment: Deployment | None) -> None: ...
        def no_room(self) -> None: ...

    def behind() -> list[bool]:
        return [here.before(deployment, alone=False, priority=0) for deployment in lines]

    places = [there.join(deployment, Patient(), alone=False, priority=0) for deployment in lines]
    assert behind() == [True, True]
    for place, left in zip(places, ([False, True], [False, False]), strict=True):
        assert place is not None
        there.leave(place)
        assert behind() == left


async def test_a_storm_on_several_processes_never_exceeds_the_limit(make_site: MakeSite, table: Table) -> None:
    now = most = 0

    async def brief(heard: Heard, writer: asyncio.StreamWriter) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        writer.write(unary(chat_reply()))

    gate = Gated()
    sites = await several(make_site, table, gate, policy(3))
    sites[0].engines["a"].answer = brief
    replies = await asyncio.gather(*(ask(sites[n % 3].port, CHAT, PROMPT) for n in range(240)))
    assert {reply.status for reply in replies} == {200}
    assert most <= 3
    records: list[RequestRecord] = [record for site in sites for record in site.telemetry.records]
    assert any(record.queue_seconds for record in records)
    for site in sites:
        await site.settled()
        assert waiting(site) == 0
