"""The engines as one step of the loop changes them: pure. `Draft.move` is the only way from one state to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from controlplane.deployments.blame import blamed
from controlplane.deployments.world import Decision, DeploymentRecord, EngineRecord, Move, World
from controlplane.fleet.lifecycle import Event, State, advance
from controlplane.fleet.model import Role
from controlplane.fleet.pairing import Incarnation
from controlplane.nodes.presence import Presence, presence

Token = Callable[[int], str]
"""So many random bytes as hex."""


class Draft:
    """Begins as the world is; every rule sees what the rules before it did."""

    def __init__(self, world: World, now: float, token: Token) -> None:
        self.world, self.now, self.token = world, now, token
        self.blamed = blamed(world)
        """Engines at fault, and why."""
        self.engines = dict(world.engines)
        self.moves: list[Move] = []
        self.created: list[EngineRecord] = []
        self.removed: list[str] = []
        self.ended: list[str] = []
        self._of: dict[str, list[str]] = {name: [] for name in world.deployments}
        for engine in world.engines.values():
            self._of[engine.deployment].append(engine.id)

    def all(self) -> list[EngineRecord]:
        """The engines as they are now; the list stays as it is while they change."""
        return list(self.engines.values())

    def of(self, deployment: str) -> list[EngineRecord]:
        """One deployment's engines as they are now."""
        return [self.engines[engine_id] for engine_id in self._of[deployment]]

    def presence_of(self, engine: EngineRecord) -> Presence | None:
        """Of its node; None: it has none, or the node was removed."""
        node = self.world.nodes.get(engine.node or "")
        return None if node is None else presence(node.silent_seconds)

    def create(self, deployment: DeploymentRecord, role: Role, index: int) -> None:
        """A new engine that waits for a place."""
        stem = f"{deployment.name}-{role}-{index}"
        engine_id = f"{stem}-{self.token(2)}"
        while engine_id in self.engines:
            engine_id = f"{stem}-{self.token(2)}"
        engine = EngineRecord(
            id=engine_id,
            deployment=deployment.name,
            revision=deployment.revision,
            role=role,
            index=index,
            state=State.PENDING,
            since=self.now,
            secret=self.token(32),
            reason="Waiting for a node.",
        )
        self.engines[engine.id] = engine
        self._of[deployment.name].append(engine.id)
        self.created.append(engine)

    def move(self, engine: EngineRecord, event: Event, reason: str, **changes: Any) -> EngineRecord:
        """The engine after a lifecycle event; its reason is always the new state's own. Raises `IllegalTransition`."""
        target = advance(engine.state, event)
        moved = replace(engine, state=target, since=self.now, reason=reason, **changes)
        self.engines[engine.id] = moved
        self.moves.append(Move(moved, event, engine.state, reason))
        return moved

    def fail(self, engine: EngineRecord, event: Event, reason: str) -> EngineRecord:
        """The attempt is over; the next comes when the back-off has passed."""
        return self.move(engine, event, reason, failures=engine.failures + 1)

    def try_again(self, engine: EngineRecord, reason: str) -> EngineRecord:
        """A new attempt: a new process with a secret of its own; what is known of the old one no longer counts."""
        return self.move(engine, Event.RETRY, reason, **self._new_attempt(engine))

    def start_over(self, engine: EngineRecord, reason: str) -> None:
        """A new attempt after one that was ended on purpose: no back-off."""
        halted = self.move(engine, Event.HALT, reason)
        self.note(halted, reason="Waiting for a node.", **self._new_attempt(engine))

    def _new_attempt(self, engine: EngineRecord) -> dict[str, Any]:
        return {
            "attempt": engine.attempt + 1,
            "secret": self.token(32),
            "observation": None,
            "reported": False,
            "ready_at": None,
            "left_version": None,
            "retry_asked": False,
        }

    def note(self, engine: EngineRecord, **changes: Any) -> None:
        """Change what is said of the engine, not its state: no history row."""
        self.engines[engine.id] = replace(engine, **changes)

    def decision(self) -> Decision:
        return Decision(self.engines, self.moves, self.created, self.removed, self.ended)


def proofs_of(engines: Mapping[str, EngineRecord]) -> dict[tuple[Incarnation, Incarnation], bool]:
    """Every transfer that was tried, by the two processes it was tried between: told by the decode side."""
    proofs: dict[tuple[Incarnation, Incarnation], bool] = {}
    for engine in engines.values():
        if engine.observation is not None:
            decode = engine.incarnation
            for pair in engine.observation.pairs:
                proofs[(Incarnation(pair.prefill, pair.prefill_attempt), decode)] = pair.ok
    return proofs
