"""What a limited key may use, held over all routers: reserved before a request is served, settled when it has ended.

All reservations and settlements of a turn of the event loop go to the counter in Redis as one call, one call at a time, so
that load makes them cheaper. A reservation waits `patience` at the longest. Without Redis each process counts for itself, with
its share of every limit; it knows what it granted before, and tells Redis afterwards what it granted meanwhile. Keys without
limits never come here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import islice
from time import monotonic, time
from typing import Protocol

from msgspec import MsgspecError
from redis.exceptions import RedisError

from controlplane.fleet.wire import SnapshotKey
from frontend_api.limits import answers
from frontend_api.limits.answers import Refusal, Standing
from frontend_api.limits.counter import LEASE, Forgotten, Line, Reply
from frontend_api.limits.use import Hold, Sent, State, Use
from frontend_api.limits.windows import SPAN, Bound, Judged

log = logging.getLogger(__name__)

PATIENCE = 0.25
"""Seconds that a request may wait for the counter."""
LEAST_PATIENCE = 0.01
SETTLE_SECONDS = 0.01
"""For which a settlement waits for a reservation to go along with."""
STOOD_STILL = 0.02
"""Seconds by which a timer is late when this process had no CPU, or something kept its loop."""
CALL_KEYS = 500
"""In one call: more would keep Redis from others for too long."""
RETRY_SECONDS = 0.25
"""Between two tries while Redis is away."""
RECONNECT_SECONDS = 3.0
"""For a call that no request waits for. On a new connection it takes half a dozen round trips, each a fifth of a second where
Redis is on another continent."""
BEAT_SECONDS = LEASE / 4


class Counter(Protocol):
    """The counter that routers share: `counter.RedisCounter`."""

    async def ask(self, lines: list[Line], *, last: bool = False) -> Reply: ...
    async def drop(self) -> None: ...


class _Deadline:
    """When the current task's call is given up. Unlike `asyncio.timeout` it does not blame the other side for time in which this
    process itself stood still: then the answer may be there, and is read first."""

    def __init__(self, at: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._graced = self._cancelled = False
        self._at = at
        self._timer = self._loop.call_at(at, self._come)

    def end_by(self, at: float) -> None:
        if at < self._at and not self._cancelled:
            self._timer.cancel()
            self._at = at
            self._timer = self._loop.call_at(at, self._come)

    def _come(self) -> None:
        if self._loop.time() - self._at > STOOD_STILL and not self._graced:
            self._graced = True
            self._timer = self._loop.call_later(STOOD_STILL, self._come)
        elif self._task is not None:
            self._cancelled = True
            self._task.cancel()

    def passed(self) -> bool:
        """Whether a cancellation was ours, and ours alone."""
        return self._cancelled and self._task is not None and self._task.uncancel() == 0

    def over(self) -> None:
        self._timer.cancel()


class KeyLimits:
    """The limits of one router process. `processes`: that share a limit when nothing better is known."""

    def __init__(
        self,
        counter: Counter | None = None,
        *,
        processes: int = 1,
        patience: float = PATIENCE,
        refused: Callable[[Bound], None] = lambda bound: None,
        fell_back: Callable[[], None] = lambda: None,
    ) -> None:
        self._counter = counter
        self._processes = processes
        self._patience = patience
        self._refused = refused
        self._fell_back = fell_back
        self._uses: dict[str, Use] = {}
        self._touched: dict[Use, None] = {}
        """Keys that the counter is to hear of."""
        self._wanted = asyncio.Event()
        self._soon: asyncio.TimerHandle | None = None
        self._call: _Deadline | None = None
        self.away = False
        """Redis does not answer: this process counts for itself."""
        self._routers = processes
        self._ahead = time() - monotonic()
        """Seconds by which the counter's clock, until it has spoken this machine's, is ahead of our monotonic one, which nobody
        sets."""

    # ---- for requests

    def reserve(self, hold: Hold) -> None:
        """Ask for room. The answer comes at once or later."""
        use = hold.use = self._use(hold.key)
        if self._counter is None or self.away:
            self._decide(hold)
        else:
            loop = asyncio.get_running_loop()
            hold.at = loop.time()
            use.waiting.append(hold)
            self._touched[use] = None
            self._wanted.set()
            if self._call is not None:
                self._call.end_by(hold.at + self._patience)

    def settle(self, hold: Hold, tokens: int, *, counts: bool = True) -> None:
        """The request has ended, having cost so many tokens. `counts`: as a request. Whatever comes second does nothing."""
        state, hold.state = hold.state, State.OVER
        if state is State.HELD:
            self._give_back(hold, tokens, counts)

    def _give_back(self, hold: Hold, tokens: int, counts: bool) -> None:
        use = hold.use
        use.held -= 1
        more = tokens - hold.tokens
        if more < 0 or not counts:
            self._count(use, hold.second, 0 if counts else -1, min(more, 0))
        if more > 0:
            self._count(use, int(self._now()), 0, more)
        self._touch(use)

    # ---- deciding

    def _decide(self, hold: Hold) -> None:
        """Without the counter: by this process's share."""
        use, now = hold.use, self._now()
        caps = use.caps.share(self._share())
        # One that is larger than a share passes when nothing else is in the window: else it could not until Redis is back.
        tokens = min(hold.tokens, caps.tokens) if caps.tokens and hold.tokens <= use.caps.tokens else hold.tokens
        judged = use.window.judge(caps, use.held, tokens, now)
        if judged.bound is Bound.NONE and self._counter is not None:
            judged = use.spare(self._share(), hold.tokens, now)
        if judged.bound is Bound.NONE:
            use.since = use.since[0] + 1, use.since[1] + hold.tokens
            hold.second = int(now)
            self._count(use, hold.second, 1, hold.tokens)
            self._touch(use)
        if self._counter is not None:
            self._fell_back()
        self._answer(hold, judged, use.standing(self._now()))

    def _answer(self, hold: Hold, judged: Judged, standing: Standing) -> None:
        use = hold.use
        if judged.bound is Bound.NONE:
            use.held += 1
            if hold.state is State.OVER:  # its client left meanwhile
                self._give_back(hold, 0, counts=False)
                return
            hold.state = State.HELD
            refusal = None
        else:
            if hold.state is State.OVER:
                return
            hold.state = State.OVER
            self._refused(judged.bound)
            used = {Bound.REQUESTS: standing.requests, Bound.TOKENS: standing.tokens}.get(judged.bound, use.caps[2])
            refusal = Refusal(judged.bound, judged.wait, used, hold.tokens if judged.bound is Bound.TOKENS else 1)
        hold.headers = answers.headers(hold.key, standing)
        try:
            hold.answered(refusal)
        except Exception:
            log.exception("defect in the router")

    def _count(self, use: Use, second: int, requests: int, tokens: int) -> None:
        use.window.add(second, requests, tokens)
        if self._counter is not None and (use.caps.requests or use.caps.tokens):
            use.owe(second, requests, tokens)

    def _use(self, key: SnapshotKey) -> Use:
        use = self._uses.get(key.id)
        if use is None:
            use = self._uses[key.id] = Use()
        use.follow(key)
        return use

    def _share(self) -> int:
        return self._processes if self._counter is None else max(self._processes, self._routers)

    def _now(self) -> float:
        return monotonic() + self._ahead

    # ---- the counter

    def _touch(self, use: Use) -> None:
        """There is something to tell of the key, and nobody waits for it."""
        if self._counter is not None:
            self._touched[use] = None
            if self._soon is None:
                self._soon = asyncio.get_running_loop().call_later(SETTLE_SECONDS, self._wanted.set)

    async def run(self) -> None:
        """For ever: tell the counter what there is, and tell requests what it says."""
        beat = asyncio.get_running_loop().create_task(self._beats())
        try:
            while True:
                await self._wanted.wait()
                await self.tell()
                if self.away:
                    await asyncio.sleep(RETRY_SECONDS)
                    self._wanted.set()
        finally:
            beat.cancel()

    async def _beats(self) -> None:
        while True:
            self.beat()
            await asyncio.sleep(BEAT_SECONDS)

    def beat(self) -> None:
        """Keep this router's lease, and what it holds, alive: also in a Redis that has lost everything."""
        now = self._now()
        for name, use in list(self._uses.items()):
            use.window.slide(now)
            if use.idle and use not in self._touched:
                del self._uses[name]
            elif use.held:
                self._touched[use] = None
        self._wanted.set()

    async def tell(self, *, last: bool = False) -> None:
        """One call. `last`: this router ends; what it held is free."""
        assert self._counter is not None
        self._wanted.clear()
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        sent = [Sent(use) for use in islice(self._touched, CALL_KEYS)]
        for part in sent:
            del self._touched[part.use]
        if self._touched:
            self._wanted.set()
        oldest = int(self._now()) - SPAN
        began = [hold.at for part in sent for hold in part.asks]
        now = asyncio.get_running_loop().time()
        ends = max(min(began) + self._patience, now + LEAST_PATIENCE) if began else now + RECONNECT_SECONDS
        try:
            reply = await self._ask([part.line(oldest) for part in sent], ends, last)
        except Forgotten:
            self._again(sent)
        except (RedisError, OSError, TimeoutError, MsgspecError) as error:
            self._failed(sent, error)
            await self._counter.drop()
        else:
            self._succeeded(sent, reply)

    async def _ask(self, lines: list[Line], ends: float, last: bool) -> Reply:
        assert self._counter is not None
        call = self._call = _Deadline(ends)
        try:
            return await self._counter.ask(lines, last=last)
        except asyncio.CancelledError:
            if call.passed():
                raise TimeoutError from None
            raise
        finally:
            call.over()
            self._call = None

    def _succeeded(self, sent: list[Sent], reply: Reply) -> None:
        if self.away:
            log.warning("Redis is back: limits are counted there again.")
            self.away = False
        self._ahead = reply.now - monotonic()
        self._routers = reply.routers
        second = int(reply.now)
        for part, (last, requests_now, tokens_now, *verdicts) in zip(sent, reply.lines, strict=True):
            part.use.heard(reply.now, requests_now, tokens_now)
            part.use.asked = 0
            for number, hold in enumerate(part.asks):
                bound, wait, requests, tokens = verdicts[4 * number : 4 * number + 4]
                judged = Judged(Bound(int(bound)), wait)
                if judged.bound is Bound.NONE:
                    hold.second = second
                    part.use.window.add(second, 1, hold.tokens)
                self._answer(hold, judged, Standing(int(requests), int(tokens), last + SPAN + 1 - reply.now))

    def _again(self, sent: list[Sent]) -> None:
        """Tell all that this process has granted once more; then ask anew."""
        log.warning("Redis has lost its counts of limits: this process tells its part again.")
        for part in sent:
            part.use.asked = 0
            part.use.waiting = part.asks + part.use.waiting
            self._touched[part.use] = None
        for use in self._uses.values():
            use.owed = use.window.seconds()
            self._touched[use] = None
        self._wanted.set()

    def _failed(self, sent: list[Sent], error: Exception) -> None:
        if not self.away:
            log.warning(
                "Redis does not count limits (%s): each router process allows 1/%d of them until it does.",
                error if str(error) else type(error).__name__,
                self._share(),
            )
            self.away = True
        for part in sent:
            self._touched[part.use] = None
            part.use.asked = 0
            for second, (requests, tokens) in part.owed.items():
                # The counter may have heard of it: what is counted twice is refused too early, never granted too much.
                part.use.owe(second, max(0, requests), max(0, tokens))
        oldest = int(self._now()) - SPAN
        for use in self._touched:
            for second in [second for second in use.owed if second < oldest]:
                del use.owed[second]
        waiting = [hold for part in sent for hold in part.asks]
        for use in list(self._touched):
            waiting += use.waiting
            use.waiting = []
        for hold in waiting:
            if hold.state is State.WAITING:
                self._decide(hold)

    async def end(self) -> None:
        """No request is left: tell the counter the rest. `run` has ended before."""
        if self._counter is not None:
            self._touched.update(dict.fromkeys(self._uses.values()))
            while self._touched and not self.away:
                await self.tell()
            if not self.away:
                await self.tell(last=True)
            await self._counter.drop()
