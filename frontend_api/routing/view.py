"""What this router process knows of the fleet: the snapshot, each engine's in-flight load and its health.

It does no IO. Load is written by `carrying` alone, and `loads` adds what the other routers have; a health check or a new
snapshot never touches it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from itertools import count
from math import ceil, inf
from time import monotonic
from types import TracebackType
from typing import Protocol

from xxhash import xxh3_64_intdigest

from controlplane.fleet.model import Role
from controlplane.fleet.wire import (
    FleetSnapshot,
    OnPrefillFailure,
    RoutingPolicy,
    SnapshotDeployment,
    SnapshotEngine,
    SnapshotKey,
)
from frontend_api.routing import intake
from frontend_api.routing.rates import USUAL_PULL, USUAL_READ, USUAL_STEP, Rate, settle

LAST_MOMENT = 1e11
"""Seconds since 1970 that a calendar has."""
HANG_PAUSE = 5.0
"""Seconds for which an engine that answers nothing at all is not even tried as the last resort."""
OVERLOAD_PAUSE = 1.0
"""Seconds for which an engine that has too much to do is left alone, if it asks for no more."""
LONGEST_OVERLOAD = 30.0
LEAST_LEARNED = 256
"""Tokens; shorter prompts tell more of the way than of the engine."""
LEAST_STEPS = 8
"""Tokens of an answer."""
ROOM_SECONDS = 5.0
"""After which what an engine told of its free KV is not known any more: neither that there is room nor that there is none."""
USUAL_ANSWER = 256
"""Tokens of an answer, while nothing is known of how long they are."""
ANSWER_FADES = 0.05
"""Part that one answer has in what is expected of the next."""
UNKNOWN_ROOM = 1 << 60
"""KV tokens: more than any request needs."""


class Health(Enum):
    """What the last connections to an engine told."""

    UP = "up"
    HALF_OPEN = "half-open"
    """It accepts connections again; one request at a time may prove that it answers."""
    OVERLOADED = "overloaded"
    """It answered that it has too much to do: for a short time it is used when no other can serve."""
    FAILING = "failing"
    """It takes connections, but requests or probes get no good answer (`outcomes`): used when no other can serve."""
    DOWN = "down"


class Cells(Protocol):
    """A list, or memory that other processes see."""

    def __setitem__(self, at: int, value: int, /) -> None: ...


class Engine:
    """One engine process as this router sees it. (id, attempt, url) names it for ever."""

    __slots__ = (
        "answer",
        "answers",
        "cell",
        "cells",
        "down_cause",
        "down_since",
        "fails",
        "fingerprint",
        "freed",
        "health",
        "in_flight",
        "kv",
        "kv_pending",
        "last_taken",
        "others",
        "others_kv",
        "others_queued",
        "pull",
        "queued",
        "read",
        "refused",
        "retry_at",
        "room",
        "room_told_at",
        "seed",
        "spec",
        "step",
    )

    def __init__(self, spec: SnapshotEngine) -> None:
        self.spec = spec
        self.refused = ""
        """Why its KV is not followed although it tells of it; empty: it is."""
        self.in_flight = 0
        """Requests that this process has there."""
        self.last_taken = 0
        """Rises over all engines with each request taken: the smallest was taken longest ago."""
        self.queued = 0
        """Prompt tokens that these still have to have computed, as far as they are known."""
        self.kv = 0
        """KV tokens that requests of this process took there since the engine told of its free KV, less what those that
        ended since gave back."""
        self.kv_pending = 0
        """KV tokens of the requests of this process that the engine has not begun: its figures do not show them."""
        self.cells: Cells = [0, 0, 0]
        """Where `in_flight`, `queued` and `kv` are shown to the other processes: at `cell` and behind it."""
        self.cell = 0
        self.freed: Callable[[], None] | None = None
        """Told of each request that ends there, where requests may wait for that."""
        self.others = 0
        """Requests that other router processes have there, as far as known: `loads` writes it."""
        self.others_queued = 0
        """Prompt tokens that these still have to have computed."""
        self.others_kv = 0
        """What `kv` is of the other router processes."""
        self.room = UNKNOWN_ROOM
        """KV tokens that a new request can have there at once; far more than any needs while that is not known."""
        self.room_told_at = -inf
        """Monotonic time at which the engine told of its free KV; never, or too long ago: -inf."""
        self.read = Rate(USUAL_READ, LEAST_LEARNED)
        """Computing prompts."""
        self.pull = Rate(USUAL_PULL, LEAST_LEARNED)
        """Hand-over of KV from prefill engines."""
        self.step = Rate(USUAL_STEP, LEAST_STEPS)
        """Writing one answer, token by token."""
        self.answer = float(USUAL_ANSWER)
        """Tokens that an answer there lately had."""
        self.seed = xxh3_64_intdigest(spec.id.encode())
        """What tells it from others in the hash of a session: the same in every router."""
        self.fingerprint = b""
        """What it calls its `system_fingerprint`, as JSON; empty: not known."""
        self.health = Health.UP
        self.answers = 0
        """Replies of any kind, since the router knows it."""
        self.fails = False
        """`outcomes` says so: it is FAILING unless it is something worse."""
        self.down_since = 0.0
        self.down_cause = ""
        self.retry_at = 0.0
        """Monotonic time from which a DOWN engine may be tried when no other is left, and an OVERLOADED one again."""

    @property
    def id(self) -> str:
        return self.spec.id

    @property
    def load(self) -> int:
        """Requests that all routers have there."""
        return self.in_flight + self.others

    @property
    def known_room(self) -> int | None:
        """KV tokens that a new request can have there at once; None: not known."""
        return self.room if self.room_told_at > -inf else None

    def tells_room(self, free: int, at: float) -> None:
        """The engine has so many KV tokens free. `at`: monotonic."""
        self.kv = self.kv_pending  # of those that it has begun its figure tells
        self.cells[self.cell + 2] = self.kv
        self.room_told_at = at
        self.room = free - self.kv - self.others_kv

    def wrote(self, tokens: int) -> None:
        """An answer of so many tokens."""
        self.answer += ANSWER_FADES * (tokens - self.answer)

    def takes(self, tokens: int) -> None:
        """A request needs so many KV tokens there. Less than 0: it has ended."""
        self.kv += tokens
        self.cells[self.cell + 2] = self.kv
        self.room -= tokens

    def others_take(self, tokens: int) -> None:
        """What `kv` of the other processes is now."""
        self.room -= tokens - self.others_kv
        self.others_kv = tokens

    def failed(self, now: float, *, hangs: bool, cause: str = "connect") -> None:
        """A connection could not be made, or broke before the first byte. `hangs`: it ran into a time limit."""
        if self.health is not Health.DOWN:
            self.down_since = now
        self.down_cause = cause
        self.health = Health.DOWN
        self.retry_at = now + HANG_PAUSE if hangs else now

    def accepts(self) -> None:
        """A probe could connect again."""
        if self.health is Health.DOWN:
            self.health = Health.FAILING if self.fails else Health.HALF_OPEN

    def answered(self) -> None:
        self.answers += 1
        if self.health is not Health.OVERLOADED:  # one answer does not say that there is room for more
            self.health = Health.FAILING if self.fails else Health.UP

    def judge(self, *, fails: bool) -> None:
        """What requests and probes show, whatever its connections do."""
        self.fails = fails
        if self.health is Health.UP or self.health is Health.FAILING:
            self.health = Health.FAILING if fails else Health.UP

    def overloaded(self, now: float, pause: float | None = None) -> None:
        """It refused a request because it has too many. `pause`: seconds that it asks for. `now`: monotonic."""
        self.health = Health.OVERLOADED
        self.retry_at = now + min(max(pause or OVERLOAD_PAUSE, OVERLOAD_PAUSE), LONGEST_OVERLOAD)

    def rest(self, now: float) -> None:
        """Let an overload be over when its time has passed, and forget what is too old."""
        if self.health is Health.OVERLOADED and self.retry_at <= now:
            self.health = Health.FAILING if self.fails else Health.UP
        if -inf < self.room_told_at < now - ROOM_SECONDS:
            self.room_told_at = -inf
            self.room = UNKNOWN_ROOM - self.kv - self.others_kv

    def __repr__(self) -> str:
        return f"<Engine {self.spec.id} {self.health.value} in_flight={self.in_flight}>"


_turns = count(1)


class carrying:
    """`with carrying(engine):` counts one request at the engine, from before the connection until the block is left.

    `tokens` of its prompt are to be computed there, and it needs `kv` tokens of KV; `computed` says that the engine has
    begun: the prompt is computed or fetched. `release` gives the load back early; it is given back exactly once however the
    block ends.
    """

    __slots__ = ("_engine", "_kv", "_pending", "_tokens")

    def __init__(self, engine: Engine, tokens: int = 0, kv: int = 0) -> None:
        self._engine: Engine | None = engine
        self._tokens = tokens
        self._kv = kv
        self._pending = 0
        """What of it the engine has not begun."""

    def __enter__(self) -> carrying:
        engine = self._engine
        assert engine is not None
        self._count(engine)
        return self

    def _count(self, engine: Engine) -> None:
        engine.in_flight += 1
        engine.cells[engine.cell] = engine.in_flight
        if self._tokens:
            self._wait(engine, self._tokens)
        if self._kv:
            self._pending = self._kv
            engine.kv_pending += self._kv
            engine.takes(self._kv)
        engine.last_taken = next(_turns)

    def computed(self) -> None:
        """The prompt is there; the request stays."""
        engine = self._engine
        if engine is None:
            return
        if self._tokens:
            self._wait(engine, -self._tokens)
            self._tokens = 0
        engine.kv_pending -= self._pending
        self._pending = 0

    def move(self, engine: Engine) -> None:
        """The same request at another engine."""
        self.release()
        self._engine = engine
        self._count(engine)

    def release(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.in_flight -= 1
            engine.cells[engine.cell] = engine.in_flight
            if self._tokens:
                self._wait(engine, -self._tokens)
            if self._kv:
                engine.kv_pending -= self._pending
                self._pending = 0
                engine.takes(-self._kv)
            if engine.freed is not None:
                engine.freed()

    def _wait(self, engine: Engine, tokens: int) -> None:
        engine.queued += tokens
        engine.cells[engine.cell + 1] = engine.queued

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Deployment:
    """One deployment of the snapshot with its live engines by role."""

    __slots__ = (
        "aggregated",
        "answer_tokens",
        "broken_pairs",
        "decode",
        "name",
        "prefill",
        "routing",
        "served_name",
        "status",
        "tokenizer",
        "tokenizer_key",
        "unproved_pairs",
        "wants_prefill",
    )

    def __init__(self, entry: SnapshotDeployment, engines: tuple[Engine, ...], trouble: str = "") -> None:
        """`trouble`: why engines are left out."""
        self.name = entry.name
        self.served_name = entry.served_name
        self.routing: RoutingPolicy = entry.routing
        self.status = entry.status or trouble
        self.tokenizer = entry.tokenizer
        self.tokenizer_key = intake.tokenizer_key(entry.tokenizer_key)
        self.wants_prefill = entry.wants_prefill
        self.unproved_pairs = frozenset(entry.broken_pairs)
        """Pairs whose transfer failed the node agent's probe …"""
        self.broken_pairs = self.unproved_pairs
        """… and those besides of which requests show it: `outcomes` writes them."""
        self.prefill = tuple(e for e in engines if e.spec.role is Role.PREFILL)
        self.decode = tuple(e for e in engines if e.spec.role is Role.DECODE)
        self.aggregated = tuple(e for e in engines if e.spec.role is Role.AGGREGATED)
        self.answer_tokens = USUAL_ANSWER
        """Expected of the next answer."""

    @property
    def answering(self) -> tuple[Engine, ...]:
        """The engines that can answer a client alone."""
        return self.decode or self.aggregated

    @property
    def falls_back(self) -> bool:
        """Decode computes a prompt of which no prefill engine can give the KV."""
        return self.routing.on_prefill_failure is OnPrefillFailure.FALLBACK

    @property
    def ready(self) -> bool:
        return any(engine.health is not Health.DOWN for engine in self.answering)

    def settle(self, now: float) -> None:
        """Once a second: what is known of an engine's rates ages, and is replaced by what its kind shows."""
        engines = (*self.prefill, *self.decode, *self.aggregated)
        if answering := self.answering:
            self.answer_tokens = ceil(sum(engine.answer for engine in answering) / len(answering))
        reads = [engine.read for engine in engines]
        steps = [engine.step for engine in engines]
        for pool in (self.prefill, self.decode, self.aggregated):
            settle([engine.read for engine in pool], reads, now)
            settle([engine.step for engine in pool], steps, now)
        # one slow hand-over can make all look too dear to be tried, and so to be measured, ever again
        settle([engine.pull for engine in self.decode], (), now, USUAL_PULL)


class Follower(Protocol):
    """Who wants to know of each snapshot."""

    def follow(self, view: View) -> None: ...


class View:
    """The newest snapshot, ready for look-ups. Swapped whole; engines that stay keep their load and health."""

    def __init__(self, followers: Iterable[Follower] = (), *, ranks: int = 4_096) -> None:
        """`ranks`: whose KV events may be followed, of all engines together."""
        self._ranks = ranks
        self.trouble: list[str] = []
        """What of the snapshot cannot be used, and why: a sentence each."""
        self.followers = [*followers]
        """Told after each snapshot, in this order."""
        self.version = -1
        self.made_at = 0.0
        self.deployments: dict[str, Deployment] = {}
        """By served name."""
        self.keys: dict[str, SnapshotKey] = {}
        """By digest."""
        self._engines: dict[tuple[str, int, str], Engine] = {}

    def take(self, snapshot: FleetSnapshot) -> list[Engine]:
        """Swap in a snapshot. Returns the engines that left, so that their idle connections can be closed."""
        before = self._engines
        now: dict[tuple[str, int, str], Engine] = {}
        deployments: dict[str, Deployment] = {}
        usable = [(entry, *intake.engines(entry)) for entry in snapshot.deployments]
        crowded = intake.crowd_out((one for _, taken, _ in usable for one in taken), self._ranks)
        for entry, taken, trouble in usable:
            members = []
            for one in taken:
                key = (one.spec.id, one.spec.attempt, one.spec.url)
                engine = now.get(key) or before.get(key) or Engine(one.spec)
                engine.spec, engine.refused = one.spec, one.refused
                now[key] = engine
                members.append(engine)
            deployments[entry.served_name] = Deployment(entry, tuple(members), " ".join(trouble[:3]))
        self.trouble = [*(why for _, _, trouble in usable for why in trouble), *crowded]
        self._engines = now
        self.deployments = deployments
        self.settle(monotonic())  # a newcomer begins as one of its kind
        self.keys = {key.digest: key for key in snapshot.keys}
        self.version = snapshot.version
        self.made_at = snapshot.made_at if 0 <= snapshot.made_at < LAST_MOMENT else 0.0
        for follower in self.followers:
            follower.follow(self)
        return [engine for key, engine in before.items() if key not in now]

    def settle(self, now: float) -> None:
        """Once a second. `now`: monotonic."""
        for deployment in self.deployments.values():
            deployment.settle(now)

    def engines(self) -> Iterator[Engine]:
        return iter(self._engines.values())

    @property
    def ready(self) -> bool:
        return any(deployment.ready for deployment in self.deployments.values())
