"""A long cold prompt delays nobody: neither the event loop while it is tokenised, nor shorter prompts that need a thread too."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from controlplane.fleet.model import Role
from controlplane.fleet.wire import RoutingMode, RoutingPolicy
from frontend_api.formats.openai import Endpoint
from frontend_api.tokens.tokenizer import AT_ONCE_CHARACTERS, Slow, Tokenizer
from tests.frontend_api.client import Client, ask
from tests.frontend_api.conftest import MakeSite, Site, until
from tests.frontend_api.tiny_model import write_model

CHAT = "/v1/chat/completions"
WORDS = "The river rises in the hills and turns east before it meets the sea. "


class Work(NamedTuple):
    ids: Callable[[], array[int] | None]


class Watched:
    """A tokenizer that tells what it does in threads. `gate`: very long prompts wait for it."""

    marks = ()

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.gate = threading.Event()
        self.begun = self.ended = 0

    def at_once(self, endpoint: Endpoint, body: bytes) -> array[int] | Work | None:
        found = self.tokenizer.at_once(endpoint, body)
        if not isinstance(found, Slow) or len(body) < 1 << 18:
            return found

        def work() -> array[int] | None:
            self.begun += 1
            assert self.gate.wait(60)
            ids = found.ids()
            self.ended += 1
            return ids

        return Work(work)


async def watched(make_site: MakeSite, folder: Path) -> tuple[Site, Watched]:
    site = await make_site()
    await site.engine("a0", Role.AGGREGATED)
    site.publish(policy=RoutingPolicy(mode=RoutingMode.KV_APPROXIMATE))
    tokens = site.cache.tokens = Watched(Tokenizer(write_model(folder)))
    return site, tokens


def chat(text: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 1}


async def test_others_are_served_while_a_megabyte_is_tokenised(make_site: MakeSite, tmp_path: Path) -> None:
    site, tokens = await watched(make_site, tmp_path)
    tokens.gate.set()
    async with Client(site.port) as client:
        client.post(CHAT, chat(WORDS * ((1 << 20) // len(WORDS))))
        await until(lambda: tokens.begun == 1)
        served = 0
        while not tokens.ended:
            reply = await ask(site.port, CHAT, chat(f"short {served}"), **{"x-tandem-explain": "1"})
            assert reply.status == 200
            assert reply.headers["x-tandem-overlap"].startswith("0/")
            served += not tokens.ended
        assert served >= 3
        assert (await client.reply()).status == 200
    record = site.telemetry.records[-1]
    assert (record.status, record.overlap_tokens) == (200, 0)


async def test_prompts_of_a_few_pages_do_not_wait_behind_huge_ones(make_site: MakeSite, tmp_path: Path) -> None:
    site, tokens = await watched(make_site, tmp_path)
    clients = [await Client(site.port).__aenter__() for _ in range(8)]
    for number, client in enumerate(clients):
        client.post(CHAT, chat(f"{number} " + WORDS * 4_000))
    await until(lambda: tokens.begun == 2 and len(site.router.exchanges) == 8)
    pages = WORDS * (2 * AT_ONCE_CHARACTERS // len(WORDS))
    reply = await ask(site.port, CHAT, chat(pages), **{"x-tandem-explain": "1"})
    assert (reply.status, reply.headers["x-tandem-overlap"].partition("/")[0]) == (200, "0")
    assert tokens.ended == 0
    for client in clients[1:]:
        await client.__aexit__(None, None, None)
    await until(lambda: len(site.router.exchanges) == 1)
    tokens.gate.set()
    assert (await clients[0].reply()).status == 200
    await clients[0].__aexit__(None, None, None)
    await until(lambda: tokens.ended == tokens.begun)
    assert tokens.begun == 2, "what nobody waits for any more is not begun"
    await site.settled()


class Odd:
    """It ends with what is no token ids."""

    marks = ()

    def at_once(self, endpoint: Endpoint, body: bytes) -> Any:
        return Work(object)  # type: ignore[arg-type]


async def test_what_breaks_after_a_thread_has_worked_is_answered(alone: Site) -> None:
    alone.publish(policy=RoutingPolicy(mode=RoutingMode.KV_APPROXIMATE))
    alone.cache.tokens = Odd()
    reply = await ask(alone.port, CHAT, chat("Hello."))
    assert (reply.status, reply.error["code"]) == (500, "internal_error")
    await alone.settled()
