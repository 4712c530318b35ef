"""How much KV each engine has free, as it tells itself: asked once a second, by one process of a host, beside the requests.

Only a few lines of an engine's `/metrics` are looked at. What it says is believed within bounds; what it does not say is not
known, and what it said long ago neither (`Engine.rest`).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from math import inf
from time import monotonic
from typing import NamedTuple

from frontend_api.http.ask import Reply, ask
from frontend_api.http.upstream import Upstreams
from frontend_api.routing.loads import Loads
from frontend_api.routing.view import Engine, Health, View

log = logging.getLogger(__name__)

EVERY_SECONDS = 1.0
SELDOM_SECONDS = 30.0
"""For an engine that does not tell of its KV."""
ANSWER_SECONDS = 1.0
AT_ONCE = 8
"""Engines that are asked at the same time."""
MOST_TOKENS = 1 << 40
_SIZE = re.compile(rb'\b(block_size|num_gpu_blocks)="(\d{1,12})"')


class Told(NamedTuple):
    """What an engine's figures say of its KV."""

    usage: float
    """Of its KV, 0 to 1; of several data-parallel ranks the emptiest one's, as the engine chooses the rank itself."""
    preemptions: float
    """Requests that it has put back because there was no KV for them to go on, since it started."""
    block_size: int | None
    blocks: int | None
    """Of one rank."""


def read(page: bytes) -> Told | None:
    """What a `/metrics` page says; None: nothing of KV."""
    usages = [value for _, value in _series(page, b"kv_cache_usage_perc") if 0 <= value <= 1]
    if not usages:
        return None
    sizes = {
        name: int(number) for labels, _ in _series(page, b"cache_config_info") for name, number in _SIZE.findall(labels)
    }
    preemptions = sum(value for _, value in _series(page, b"num_preemptions_total") if value < inf)
    return Told(min(usages), preemptions, sizes.get(b"block_size") or None, sizes.get(b"num_gpu_blocks") or None)


def work_done(page: bytes) -> tuple[float, ...]:
    """What of a `/metrics` page changes while an engine works: tokens read and written, requests ended, KV in use."""
    names = b"prompt_tokens_total", b"generation_tokens_total", b"request_success_total", b"kv_cache_usage_perc"
    return tuple(sum(value for _, value in _series(page, name)) for name in names)


def _series(page: bytes, name: bytes) -> Iterator[tuple[bytes, float]]:
    """Labels and value of each line of a metric."""
    begins = b"\nvllm:" + name
    at = page.find(begins)
    while at >= 0:
        end = page.find(b"\n", at + 1)
        line = page[at + len(begins) : end if end >= 0 else len(page)]
        labels, _, value = line.rpartition(b" ")
        if labels[:1] in (b"", b"{"):
            with suppress(ValueError):
                yield labels, float(value)
        at = page.find(begins, at + 1)


class RoomReader:
    """Keeps `Engine.room` true, for this process and its siblings."""

    def __init__(self, view: View, loads: Loads, upstreams: Upstreams) -> None:
        self._view = view
        self._loads = loads
        self._upstreams = upstreams
        self._due: dict[Engine, float] = {}
        """Of the engines that do not tell, when they are asked next; monotonic."""
        self._preemptions: dict[Engine, float] = {}
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def run(self) -> None:
        """For ever. A round that fails by a defect is logged, and the next one follows."""
        while True:
            try:
                await self.one_round()
            except Exception:
                log.exception("The engines' free KV could not be read.")
            await asyncio.sleep(EVERY_SECONDS)

    async def one_round(self) -> None:
        """Ask each engine whose turn it is."""
        engines = [*self._view.engines()]
        self._due = {engine: due for engine in engines if (due := self._due.get(engine, 0.0))}
        self._preemptions = {e: count for e in engines if (count := self._preemptions.get(e)) is not None}
        now = monotonic()
        asked = [e for e in engines if e.health is not Health.DOWN and self._due.get(e, 0.0) <= now]
        await asyncio.gather(*map(self._ask, asked))

    async def _ask(self, engine: Engine) -> None:
        async with self._turns:
            at = monotonic()  # requests that begin after it may not be in the figures
            page = await self._page(engine)
        if page is not None:
            self.take(engine, page, at)

    def take(self, engine: Engine, page: bytes, at: float) -> None:
        """What an engine's figures said. `at`: monotonic."""
        told = read(page)
        size, blocks = engine.spec.block_size, engine.spec.kv_blocks
        if told is not None:
            size, blocks = told.block_size or size, told.blocks or blocks
        if told is None or not size or not blocks or size * blocks > MOST_TOKENS:
            self._due[engine] = at + SELDOM_SECONDS
            return
        self._due.pop(engine, None)
        before = self._preemptions.get(engine, told.preemptions)
        self._preemptions[engine] = told.preemptions
        # an engine that puts requests back has none, however little one more would need
        free = 0 if told.preemptions > before else int(blocks * (1 - told.usage)) * size
        self._loads.tell_room(engine, free, at)

    async def _page(self, engine: Engine) -> bytes | None:
        """Empty: it has none. None: it did not answer."""
        pool = self._upstreams.pool(engine)
        reply = await ask(pool, b"/metrics", b"", ANSWER_SECONDS, method=b"GET", fresh=False)
        if not isinstance(reply, Reply):
            return None
        return b"\n" + reply.body if reply.status == 200 else b""
