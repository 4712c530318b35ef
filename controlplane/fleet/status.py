"""What a deployment is, derived from its intent and its engines' states: computed, never stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

from controlplane.fleet.lifecycle import BOOT, State
from controlplane.fleet.model import Role
from controlplane.fleet.pairing import NO_TRANSFER
from controlplane.fleet.plural import plural


class Status(StrEnum):
    STOPPED = "stopped"
    WAITING = "waiting"
    """Some engine has no node yet."""
    STARTING = "starting"
    READY = "ready"
    SCALING = "scaling"
    """It serves, and engines that were just asked for are on their way: no trouble."""
    DEGRADED = "degraded"
    """It serves, with fewer engines than wanted or without KV transfers, or nobody can tell whether it does."""
    FAILED = "failed"
    """It does not serve, and an engine has failed."""
    NOT_SERVING = "not-serving"
    """Engines are wanted, but none that answers clients: prefill alone cannot."""
    DELETING = "deleting"


class EngineView(NamedTuple):
    role: Role
    state: State
    name: str
    reason: str
    suspect: bool = False
    """It was ready when its node fell silent, and still gets requests."""
    attempt: int = 1
    failures: int = 0
    """Failed attempts in a row."""

    @property
    def fails(self) -> bool:
        """It does not do its work, or it is being tried again after it failed: a crash loop is one state, not two in turns."""
        return self.state in (State.FAILED, State.LOST, State.UNHEALTHY) or self.failures > 0

    @property
    def is_coming(self) -> bool:
        """Its first attempt has a place and is on its way."""
        return self.state in BOOT and self.attempt == 1 and not self.fails

    @property
    def said(self) -> str:
        """What is the matter with it, and how often it was so."""
        if not self.failures or self.state in (State.LOST, State.UNHEALTHY):
            return f"{self.name}: {self.reason}"
        times = "once" if self.failures == 1 else f"{self.failures} times in a row"
        now = "" if self.state is State.FAILED else f"Attempt {self.attempt}: "
        return f"{self.name} failed {times}. {now}{self.reason}".strip()


class Condition(NamedTuple):
    status: Status
    sentence: str
    """What is, what is awaited, what happens next."""
    ready: dict[Role, int]
    wanted: dict[Role, int]

    @property
    def serves(self) -> bool:
        """Whether an engine that can answer clients is ready."""
        return any(self.ready.get(role, 0) for role in ANSWERING)


ANSWERING = (Role.DECODE, Role.AGGREGATED)
"""Roles whose engines answer clients."""


def derive(wanted: Mapping[Role, int], engines: Iterable[EngineView], *, deleting: bool = False) -> Condition:
    """The condition of a deployment with `wanted` replicas per pool."""
    engines = list(engines)
    ready: Counter[Role] = Counter(e.role for e in engines if e.state is State.READY)
    counts = {role: ready[role] for role in wanted}
    total = sum(wanted.values())

    def condition(status: Status, sentence: str) -> Condition:
        return Condition(status, sentence, counts, dict(wanted))

    leaving = [e for e in engines if e.state in (State.DRAINING, State.STOPPING)]
    if deleting:
        rest = f": {plural(len(engines), 'engine is', 'engines are')} stopping." if engines else "."
        return condition(Status.DELETING, f"Being deleted{rest}")
    if total == 0:
        if leaving:
            return condition(
                Status.STOPPED,
                f"Stopping: {plural(len(leaving), 'engine finishes its', 'engines finish their')} requests.",
            )
        return condition(Status.STOPPED, "Stopped: 0 replicas are wanted. Scale a pool up to serve.")
    if not any(wanted.get(role, 0) for role in ANSWERING):
        return condition(Status.NOT_SERVING, "Not serving: no decode engine is wanted. Scale decode up to serve.")
    missing = [e for e in engines if e.state not in (State.READY, State.DRAINING, State.STOPPING, State.STOPPED)]
    short = {role: count - counts[role] for role, count in wanted.items() if count > counts[role]}
    alone = [e.reason == NO_TRANSFER for e in engines if e.role is Role.DECODE and e.state is State.READY]
    if not short and alone and all(alone):
        return condition(
            Status.DEGRADED, f"Serving with {_pools(counts)}, but no KV transfer works: decode computes every prompt."
        )
    if not short:
        return condition(Status.READY, f"Serving with {_pools(counts)}.")
    serves = any(counts.get(role, 0) for role in ANSWERING)
    failed = [e for e in missing if e.fails]
    pending = [e for e in missing if e.state is State.PENDING]
    worst = failed or pending or missing
    why = worst[0].said if worst and worst[0].reason else "Engines are being created."
    if serves and all(e.is_coming for e in missing):
        return condition(Status.SCALING, f"Serving with {_pools(counts)}. {_scaling(short, wanted)}")
    if serves:
        return condition(Status.DEGRADED, f"Serving with {_shares(counts, wanted)}. {why}")
    hoped = [e for e in engines if e.suspect and e.role is not Role.PREFILL]
    if hoped:
        return condition(Status.DEGRADED, f"Perhaps serving: requests still go to {hoped[0].name}. {hoped[0].reason}")
    if failed:
        return condition(Status.FAILED, f"Not serving. {why}")
    if pending:
        return condition(Status.WAITING, f"Not serving yet. {why}")
    return condition(Status.STARTING, f"Starting: {_shares(counts, wanted)} ready. {why}")


def _scaling(short: Mapping[Role, int], wanted: Mapping[Role, int]) -> str:
    parts = [
        f"Scaling {role} to {wanted[role]}: {plural(short[role], 'engine is', 'engines are')} starting."
        for role in Role
        if role in short
    ]
    return " ".join(parts)


def _pools(counts: Mapping[Role, int]) -> str:
    return " and ".join(f"{counts[role]} {role}" for role in Role if role in counts)


def _shares(counts: Mapping[Role, int], wanted: Mapping[Role, int]) -> str:
    return " and ".join(f"{counts[role]} of {wanted[role]} {role}" for role in Role if role in wanted)
