"""What the KV index lives on: a subscriber per engine, a fresh connection for each replay, and the models' tokenizers.

It decides nothing: what frames mean is the part of `sequence`. A replay has a connection of its own, so that no late answer can be
taken for that of the next one.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from time import monotonic, thread_time
from typing import Any, TypeVar, cast

import zmq
import zmq.asyncio

from frontend_api.kv.budget import PAUSE_SECONDS, Budget
from frontend_api.kv.evidence import Cache, Evidence, Source, TokenSource
from frontend_api.kv.save import SavedIndex
from frontend_api.kv.sequence import END, REPLAY_SECONDS, Rank
from frontend_api.tokens.store import Absent

log = logging.getLogger(__name__)

HIGH_WATER_MARK = 10_000
"""Batches that may wait in a subscriber, as many as a publisher can replay."""
TICK_SECONDS = 0.25
RETRY_SECONDS = 5.0
HEARTBEAT_SECONDS = 10.0
"""Without a sign of life, twice this, a connection is made anew: a machine that vanished does not end it, and whoever publishes
there now would not be heard."""
LOOK_SECONDS = 0.05
"""So often batches are looked for while they follow each other more quickly: to be woken for each costs more than it says."""
SLOW_SECONDS = 1.0
SLOW_PAUSE = 10.0
"""A tokenizer that took longer to load is the last of its deployment for so many times as long: loading stops other threads."""
TURN_SECONDS = 0.002
"""For which batches are taken before other tasks get their turn."""
MOST_BYTES = 4 << 20
"""Of a batch. A real one tells of one step of an engine, some hundred kilobytes; whoever sends more is not listened to, which
the sequence or the replay shows."""

_NONE = END - 1
_S = TypeVar("_S", bound=zmq.Socket[Any])


class _NoReplay(Exception):
    """What comes is not in order: it might never end, and live batches wait for its end."""


class _Excessive(Exception):
    """A rank's events take too much of this process."""


class Unusable(Exception):
    """A folder from which no exact token ids can be had; the text says why."""


class Follower:
    """Follows the events of every engine in the evidence. `load`: the token source of a folder, or of what is offered under
    a Redis key, in any thread; raises `Unusable` where there is none, `Absent` where there may be one later."""

    def __init__(
        self, evidence: Evidence, load: Callable[[str, str], TokenSource], saved: SavedIndex | None = None
    ) -> None:
        """`saved`: what ranks may begin with."""
        self._evidence = evidence
        self._load = load
        self._saved = saved
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._rest_until: dict[str, float] = {}
        """By deployment, when its next tokenizer may be loaded; monotonic."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))  # each rank takes four
        self._futures = zmq.asyncio.Context(self._context)
        """The same, of sockets to be awaited."""
        self._tasks: dict[Source, asyncio.Task[None]] = {}
        self._wanted: dict[Source, asyncio.Event] = {}
        """Set when the rank wants a replay."""
        self._budgets: dict[Source, Budget] = {}

    async def run(self) -> None:
        """For ever. Its sockets are closed when it is cancelled."""
        try:
            while True:
                self._keep_up()
                await asyncio.sleep(TICK_SECONDS)
        finally:
            tasks = [*self._tasks.values(), *self._loading.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._context.destroy(linger=0)

    def _keep_up(self) -> None:
        self._evidence.tick(monotonic())
        sources = self._evidence.sources()
        for source in [s for s in self._tasks if s not in sources]:
            self._tasks.pop(source).cancel()
            del self._wanted[source]
            self._budgets.pop(source, None)
        for source, rank in sources.items():
            task = self._tasks.get(source)
            if task is None or task.done():
                wanted = self._wanted[source] = asyncio.Event()
                self._tasks[source] = asyncio.create_task(self._follow(source, rank, wanted))
            if rank.wanted is not None:
                self._wanted[source].set()
        for cache in self._evidence.caches.values():
            if why := getattr(cache.tokens, "given_up", ""):
                log.warning("%s: token ids are given up: %s.", cache.name, why)
                cache.tokens, cache.no_tokens, cache.awaits_tokens = None, why, False
            rests = self._rest_until.get(cache.name, 0.0) > monotonic()
            if cache.tokens is None and cache.awaits_tokens and cache.tokenizer not in self._loading and not rests:
                self._loading[cache.tokenizer] = asyncio.create_task(self._load_tokens(cache, cache.tokenizer))

    async def _load_tokens(self, cache: Cache, tokenizer: str) -> None:
        tokens: TokenSource | None = None
        why, pause, began_at = "the tokenizer cannot be used", 0.0, monotonic()
        try:
            tokens = await asyncio.to_thread(self._load, cache.folder, cache.tokenizer_key)
        except Absent as error:
            why, pause = str(error), RETRY_SECONDS
        except Unusable as error:
            log.warning("The tokenizer in %s cannot be used: %s", cache.folder, error)
        except Exception:
            log.exception("The tokenizer in %s cannot be used.", cache.folder)
        if cache.tokenizer == tokenizer:
            if pause and why != cache.no_tokens:
                log.warning("%s: %s.", cache.name, why)
            cache.tokens, cache.no_tokens, cache.awaits_tokens = tokens, why, bool(pause)
        if (took := monotonic() - began_at) > SLOW_SECONDS:  # nor may one that changes all the time take all of it
            pause = max(pause, took * SLOW_PAUSE)
            self._rest_until[cache.name] = monotonic() + pause
        await asyncio.sleep(pause)
        del self._loading[tokenizer]

    async def _follow(self, source: Source, rank: Rank, wanted: asyncio.Event) -> None:
        budget = self._budgets.setdefault(source, Budget(monotonic()))
        asking = asyncio.create_task(self._replays(source, rank, wanted, budget)) if source.replay else None
        kinds = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED
        try:  # a plain socket: futures cost more than what a message says
            with _prepared(self._context.socket(zmq.SUB)) as sub, sub.get_monitor_socket(kinds) as ends:
                sub.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
                sub.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_SECONDS * 1_000))
                sub.setsockopt(zmq.SUBSCRIBE, b"")
                sub.connect(source.events)
                await self._listen(_Heard(sub, ends, rank, wanted, budget))
        except zmq.ZMQError as error:
            log.error("The events of %s at %s cannot be followed: %s", source.engine, source.events, error)
        except _Excessive:
            if asking is not None:
                asking.cancel()
            await self._pause(source, rank)
            return
        finally:
            if asking is not None:
                asking.cancel()
        await asyncio.sleep(RETRY_SECONDS)

    async def _pause(self, source: Source, rank: Rank) -> None:
        rank.excessive(monotonic())
        text = "The KV events of %s (%s) take more of this process than any engine needs: not followed for %g s."
        log.warning(text, source.engine, source.deployment, PAUSE_SECONDS)
        await asyncio.sleep(PAUSE_SECONDS)

    async def _listen(self, heard: _Heard) -> None:
        """For ever."""
        loop, there, last = asyncio.get_running_loop(), asyncio.Event(), 0.0
        descriptors = heard.sub.fileno(), heard.ends.fileno()
        try:
            while True:
                for number in descriptors:
                    loop.add_reader(number, there.set)
                flows = False
                while not flows:
                    await there.wait()
                    there.clear()  # before looking: the descriptor says only that something has changed since the last look
                    await heard.tell()
                    last, flows = loop.time(), loop.time() - last < LOOK_SECONDS
                for number in descriptors:
                    loop.remove_reader(number)
                while flows:
                    await asyncio.sleep(_till_next_look(loop.time()))
                    flows = await heard.tell()
        finally:
            for number in descriptors:
                loop.remove_reader(number)
            heard.sub.disable_monitor()  # before `ends` closes: ZMQ's thread would wait for ever for somebody to tell

    async def _replays(self, source: Source, rank: Rank, wanted: asyncio.Event, budget: Budget) -> None:
        if self._saved is not None:
            await self._saved.restore(source, rank)
        while True:
            while rank.wanted is None:
                await wanted.wait()
                wanted.clear()
            if (pause := rank.ask_at - monotonic()) > 0:
                await asyncio.sleep(pause)
                continue
            start = rank.asked()
            try:
                with _prepared(self._futures.socket(zmq.DEALER)) as dealer:
                    dealer.connect(source.replay)
                    await dealer.send_multipart([b"", start.to_bytes(8, "big")])
                    turn, sequence = monotonic(), _NONE
                    while sequence != END:
                        async with asyncio.timeout(REPLAY_SECONDS):
                            frames = await dealer.recv_multipart()
                        before, sequence = sequence, _sequence(frames)
                        if sequence != END and sequence <= max(before, start - 1):
                            raise _NoReplay
                        began, now = thread_time(), monotonic()
                        rank.replayed(sequence, frames[-1], now)
                        if budget.spend(thread_time() - began, now):
                            raise _Excessive
                        turn = await _take_turns(turn)
            except (TimeoutError, zmq.ZMQError, _NoReplay):
                rank.replay_failed(monotonic())
            except _Excessive:
                await self._pause(source, rank)


class _Heard:
    """What a subscriber has heard. `ends`: tells of its connections; `wanted`: to be set when the rank wants a replay."""

    def __init__(
        self, sub: zmq.Socket[bytes], ends: zmq.Socket[bytes], rank: Rank, wanted: asyncio.Event, budget: Budget
    ) -> None:
        self.sub, self.ends = sub, ends
        self._rank, self._wanted, self._budget = rank, wanted, budget
        self._connected = False

    async def tell(self) -> bool:
        """Tell the rank; whether there was any batch. Raises `_Excessive` where that took too much."""
        told, began = False, thread_time()
        try:
            while True:
                self._follow_ends()
                until, now = monotonic() + TURN_SECONDS, 0.0
                while now < until:
                    frames = self.sub.recv_multipart(zmq.NOBLOCK)
                    told, now = True, monotonic()
                    if self._connected and (sequence := _sequence(frames)) >= 0:  # not left from an earlier connection
                        self._rank.live(sequence, frames[-1], now)
                if self._budget.spend(thread_time() - began, now):
                    raise _Excessive
                await asyncio.sleep(0)
                began = thread_time()
        except zmq.Again:
            if told and self._budget.spend(thread_time() - began, monotonic()):
                raise _Excessive from None
            if self._rank.wanted is not None:
                self._wanted.set()
            return told

    def _follow_ends(self) -> None:
        while cast(int, self.ends.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = int.from_bytes(self.ends.recv_multipart(zmq.NOBLOCK)[0][:2], sys.byteorder)
            self._connected = event == zmq.EVENT_CONNECTED
            if not self._connected:
                self._rank.disconnected()


def _till_next_look(now: float) -> float:
    """Seconds. All ranks look at the same moments, so that they share the cost. Who was woken a hair too early is not to look
    twice: the moment after the nearest one."""
    return (round(now / LOOK_SECONDS) + 1) * LOOK_SECONDS - now


def _sequence(frames: Sequence[bytes]) -> int:
    """Of a batch; `END`: of a replay's last frames; lower: these are neither."""
    return int.from_bytes(frames[-2], "big", signed=True) if len(frames) >= 2 and len(frames[-2]) == 8 else _NONE


def _prepared(socket: _S) -> _S:
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
    return socket


async def _take_turns(since: float) -> float:
    """Let other tasks run if ours has for long enough. Returns since when it runs (monotonic)."""
    if monotonic() - since < TURN_SECONDS:
        return since
    await asyncio.sleep(0)
    return monotonic()
