"""What this router process knows: the snapshot, each engine's in-flight load and its health. The only mutable state.

It does no IO. Load is written by `carrying` alone; a health check or a new snapshot never touches it.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from itertools import count
from types import TracebackType

from controlplane.fleet.model import Role
from controlplane.fleet.wire import FleetSnapshot, RoutingPolicy, SnapshotDeployment, SnapshotEngine, SnapshotKey

HANG_PAUSE = 5.0
"""Seconds for which an engine that answers nothing at all is not even tried as the last resort."""


USUAL_PACE = 1e-4
"""Seconds per prompt token of an engine that has not shown its own yet."""
PACE_WEIGHT = 0.2
"""Of the newest measurement."""
LEAST_LEARNED = 256
"""Tokens; shorter prompts tell more of the way than of the engine."""


class Health(Enum):
    """What the last connections to an engine told."""

    UP = "up"
    HALF_OPEN = "half-open"
    """It accepts connections again; one request at a time may prove that it answers."""
    DOWN = "down"


class Engine:
    """One engine process as this router sees it. (id, attempt, url) names it for ever."""

    __slots__ = ("health", "in_flight", "last_taken", "pace", "queued", "retry_at", "spec")

    def __init__(self, spec: SnapshotEngine) -> None:
        self.spec = spec
        self.in_flight = 0
        self.last_taken = 0
        """Rises over all engines with each request taken: the smallest was taken longest ago."""
        self.queued = 0
        """Prompt tokens that its requests still have to have computed, as far as they are known."""
        self.pace = USUAL_PACE
        """Seconds in which it computes one token of a prompt, learned."""
        self.health = Health.UP
        self.retry_at = 0.0
        """Monotonic time from which a DOWN engine may be tried when no other is left."""

    @property
    def id(self) -> str:
        return self.spec.id

    def failed(self, now: float, *, hangs: bool) -> None:
        """A connection could not be made, or broke before the first byte. `hangs`: it ran into a time limit."""
        self.health = Health.DOWN
        self.retry_at = now + HANG_PAUSE if hangs else now

    def accepts(self) -> None:
        """A probe could connect again."""
        if self.health is Health.DOWN:
            self.health = Health.HALF_OPEN

    def answered(self) -> None:
        self.health = Health.UP

    def learn(self, tokens: int, seconds: float) -> None:
        """It took so long for its first token, with so many to compute before."""
        if tokens >= LEAST_LEARNED and seconds > 0:
            self.pace += PACE_WEIGHT * (min(max(seconds / tokens, 1e-6), 0.1) - self.pace)

    def __repr__(self) -> str:
        return f"<Engine {self.spec.id} {self.health.value} in_flight={self.in_flight}>"


_turns = count(1)


class carrying:
    """`with carrying(engine):` counts one request at the engine, from before the connection until the block is left.

    `tokens` of its prompt are to be computed there; `computed` says that they are. `release` gives the load back early;
    it is given back exactly once however the block ends.
    """

    __slots__ = ("_engine", "_tokens")

    def __init__(self, engine: Engine, tokens: int = 0) -> None:
        self._engine: Engine | None = engine
        self._tokens = tokens

    def __enter__(self) -> carrying:
        engine = self._engine
        assert engine is not None
        engine.in_flight += 1
        engine.queued += self._tokens
        engine.last_taken = next(_turns)
        return self

    def computed(self) -> None:
        """The prompt has been read; the request stays."""
        if self._engine is not None:
            self._engine.queued -= self._tokens
            self._tokens = 0

    def release(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.in_flight -= 1
            engine.queued -= self._tokens

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Deployment:
    """One deployment of the snapshot with its live engines by role."""

    __slots__ = (
        "aggregated",
        "broken_pairs",
        "decode",
        "name",
        "prefill",
        "routing",
        "served_name",
        "status",
        "tokenizer",
        "wants_prefill",
    )

    def __init__(self, entry: SnapshotDeployment, engines: tuple[Engine, ...]) -> None:
        self.name = entry.name
        self.served_name = entry.served_name
        self.routing: RoutingPolicy = entry.routing
        self.status = entry.status
        self.tokenizer = entry.tokenizer
        self.wants_prefill = entry.wants_prefill
        self.broken_pairs = frozenset(entry.broken_pairs)
        self.prefill = tuple(e for e in engines if e.spec.role is Role.PREFILL)
        self.decode = tuple(e for e in engines if e.spec.role is Role.DECODE)
        self.aggregated = tuple(e for e in engines if e.spec.role is Role.AGGREGATED)

    @property
    def answering(self) -> tuple[Engine, ...]:
        """The engines that can answer a client alone."""
        return self.decode or self.aggregated

    @property
    def ready(self) -> bool:
        return any(engine.health is not Health.DOWN for engine in self.answering)


class View:
    """The newest snapshot, ready for look-ups. Swapped whole; engines that stay keep their load and health."""

    def __init__(self) -> None:
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
        for entry in snapshot.deployments:
            members = []
            for spec in entry.engines:
                key = (spec.id, spec.attempt, spec.url)
                engine = now.get(key) or before.get(key) or Engine(spec)
                engine.spec = spec
                now[key] = engine
                members.append(engine)
            deployments[entry.served_name] = Deployment(entry, tuple(members))
        self._engines = now
        self.deployments = deployments
        self.keys = {key.digest: key for key in snapshot.keys}
        self.version = snapshot.version
        self.made_at = snapshot.made_at
        return [engine for key, engine in before.items() if key not in now]

    def engines(self) -> Iterator[Engine]:
        return iter(self._engines.values())

    @property
    def ready(self) -> bool:
        return any(deployment.ready for deployment in self.deployments.values())
