"""One ledger: however a request ends, its record, the metrics, its key's limits and the decisions count the same of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random
from typing import Any

import pytest

from controlplane.fleet.model import Role
from controlplane.fleet.wire import RoutingMode, RoutingPolicy
from tests.frontend_api.client import PROMPT, Client, ask
from tests.frontend_api.conftest import MakeSite, Site, until
from tests.frontend_api.scripted import Heard, answer_well
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
