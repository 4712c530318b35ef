"""Where an engine goes: pure. One `Placer` holds what is taken during one step; `place` answers with a place or a reason.

Whole GPUs by tensor parallelism; prefill and decode of one deployment share a card only when there are not enough cards.
CPU engines go by memory. Free memory is what the node observed, foreign processes included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from msgspec import Struct

from controlplane.deployments.world import EngineRecord, NodeRecord
from controlplane.fleet.lifecycle import BOOT, HOLDS_NODE, State
from controlplane.fleet.model import GpuFacts, NodeFacts, Role, Runtime
from controlplane.fleet.spec import DeploymentSpec
from controlplane.nodes.presence import Presence, presence

GIB = 1 << 30
CPU_ENGINE_BYTES = 3 * GIB
"""Of one CPU engine without its KV cache: weights of a small model, libraries, buffers (3.9 GB with 1 GiB of KV, seen)."""
CPU_KV_BYTES = 1 * GIB
WHOLE_FRACTION = 0.9
SHARED_FRACTION = 0.44
"""Two of them and their CUDA contexts fit one card."""
CARD_LIMIT = 0.92
"""Largest sum of fractions on one card."""
SMALLEST_FRACTION = 0.3
CONTEXT_FRACTION = 0.02
"""Left for an engine's own context beside a foreign process."""
SETTLE_SECONDS = 10.0
"""After an engine has left a card, its memory is still being freed and the observed figure is old."""
_SHOWN = 3
_LEAVING = (State.DRAINING, State.STOPPING)


class Place(NamedTuple):
    node: str
    runtime: Runtime
    gpus: tuple[int, ...] = ()
    memory_fraction: float | None = None


class Waits(NamedTuple):
    reason: str
    """What it waits for, as a sentence."""


class Need(Struct, frozen=True):
    """One engine to be placed."""

    engine: str
    deployment: str
    role: Role
    spec: DeploymentSpec
    avoid: str | None = None
    """A node on which its last attempt failed: taken only when no other has room."""


class _Card(Struct):
    facts: GpuFacts
    occupants: list[tuple[str, Role, float]]
    """(deployment, role, fraction) of our engines that stay on it."""
    leaving: bool = False
    """An engine is ending on it, or ended a moment ago: nothing is placed on it yet."""

    def room(self) -> float:
        """Largest fraction that one more engine may take."""
        total = self.facts.memory_bytes
        if total <= 0 or self.leaving:
            return 0.0
        if not self.occupants:
            free = self.facts.memory_free_bytes / total
            return min(WHOLE_FRACTION, int((free - CONTEXT_FRACTION) * 100) / 100)
        foreign = sum(process.memory_bytes for process in self.facts.foreign) / total
        return CARD_LIMIT - foreign - sum(fraction for _, _, fraction in self.occupants)


class _Host(Struct):
    node: NodeRecord
    cards: dict[int, _Card]
    engines: list[tuple[str, Role]]
    """(deployment, role) of each engine that holds a place."""
    memory_free: int
    """Observed, less what engines that are still starting will take."""


class Placer:
    """Places the pending engines of one step, one after the other."""

    def __init__(
        self,
        nodes: Iterable[NodeRecord],
        engines: Iterable[EngineRecord],
        specs: Mapping[tuple[str, int], DeploymentSpec],
        *,
        now: float,
    ) -> None:
        self._nodes = list(nodes)
        self._hosts: dict[str, _Host] = {}
        for node in self._nodes:
            if node.facts is not None and _usable(node):
                cards = {gpu.index: _Card(gpu, []) for gpu in node.facts.gpus}
                self._hosts[node.name] = _Host(node, cards, [], node.facts.memory_free_bytes)
        self._runtimes: dict[tuple[str, int], Runtime] = {}
        for engine in engines:
            self._occupy(engine, specs, now)

    def _occupy(self, engine: EngineRecord, specs: Mapping[tuple[str, int], DeploymentSpec], now: float) -> None:
        host = self._hosts.get(engine.node or "")
        holds = engine.state in HOLDS_NODE
        if holds and engine.runtime is not None and engine.state not in _LEAVING:
            self._runtimes[(engine.deployment, engine.revision)] = engine.runtime
        if host is None:
            return
        for card in (host.cards[index] for index in engine.gpus if index in host.cards):
            if holds and engine.state not in _LEAVING:
                card.occupants.append((engine.deployment, engine.role, engine.memory_fraction or WHOLE_FRACTION))
            elif holds or now - engine.since < SETTLE_SECONDS:
                card.leaving = True
        if holds:
            host.engines.append((engine.deployment, engine.role))
            spec = specs.get((engine.deployment, engine.revision))
            if engine.runtime is Runtime.CPU and engine.state in BOOT and spec is not None:
                host.memory_free -= _cpu_bytes(spec, engine.role)

    def place(self, need: Need, *, revision: int, pending: int) -> Place | Waits:
        """A place, which is then taken; or what it waits for. `pending`: engines of its deployment still to be placed in
        this step, itself included."""
        runtimes = self._runtimes_for(need, revision)
        for runtime in runtimes:
            place = self._place_on(runtime, need, pending)
            if place is not None:
                self._take(need, revision, place)
                return place
        return Waits(self._why_not(need, runtimes))

    def _runtimes_for(self, need: Need, revision: int) -> list[Runtime]:
        """What it may run on, best first. One deployment's engines are all of one kind: KV of different ones does not fit."""
        if need.spec.runtime != "auto":
            return [Runtime(need.spec.runtime)]
        if (used := self._runtimes.get((need.deployment, revision))) is not None:
            return [used]
        best = {_best(node) for node in self._nodes}
        real: list[Runtime] = [runtime for runtime in (Runtime.GPU, Runtime.CPU) if runtime in best]
        return real or [Runtime.SIM]  # never a stand-in because the real nodes are full or away

    def _place_on(self, runtime: Runtime, need: Need, pending: int) -> Place | None:
        hosts = [h for h in self._hosts.values() if runtime in _facts(h).runtimes]
        hosts.sort(key=lambda h: (h.node.name == need.avoid, *self._crowd(h, need), h.node.name))
        if runtime is Runtime.GPU:
            return self._place_on_gpus(hosts, need, pending)
        for host in hosts:
            if runtime is Runtime.SIM or host.memory_free >= _cpu_bytes(need.spec, need.role):
                return Place(host.node.name, runtime)
        return None

    @staticmethod
    def _crowd(host: _Host, need: Need) -> tuple[int, int, int]:
        """Spread: first by its own pool, then by all engines, then towards the most memory."""
        return host.engines.count((need.deployment, need.role)), len(host.engines), -host.memory_free

    def _place_on_gpus(self, hosts: list[_Host], need: Need, pending: int) -> Place | None:
        pool = need.spec.pool(need.role)
        wanted = pool.memory_fraction
        if pool.tensor_parallel == 1:
            if wanted is not None:
                return self._place_fraction(hosts, wanted)
            if need.spec.disaggregated and pending > self._obtainable(hosts):
                return self._place_shared(hosts, need)
        for host in hosts:
            empty = [(i, card.room()) for i, card in sorted(host.cards.items()) if not card.occupants]
            fit = [(i, room) for i, room in empty if room >= (wanted or SMALLEST_FRACTION)][: pool.tensor_parallel]
            if len(fit) == pool.tensor_parallel:
                fraction = wanted or min(room for _, room in fit)
                return Place(host.node.name, Runtime.GPU, tuple(i for i, _ in fit), fraction)
        return None

    @staticmethod
    def _place_fraction(hosts: list[_Host], wanted: float) -> Place | None:
        """A share the user named: an empty card if there is one, else beside others that leave room for it."""
        fits = [(h, i) for h in hosts for i, c in sorted(h.cards.items()) if c.room() >= wanted]
        fits.sort(key=lambda fit: len(fit[0].cards[fit[1]].occupants))
        if not fits:
            return None
        host, index = fits[0]
        return Place(host.node.name, Runtime.GPU, (index,), wanted)

    @staticmethod
    def _obtainable(hosts: list[_Host]) -> int:
        """Cards that are empty, or will be when what is ending has ended."""
        cards = [card for host in hosts for card in host.cards.values() if not card.occupants]
        return sum(card.leaving or card.room() >= SMALLEST_FRACTION for card in cards)

    @staticmethod
    def _place_shared(hosts: list[_Host], need: Need) -> Place | None:
        """Half a card: beside the other role of its own deployment, else on an empty one for the other to join."""
        other = Role.DECODE if need.role is Role.PREFILL else Role.PREFILL
        for beside in (True, False):
            for host in hosts:
                for index, card in sorted(host.cards.items()):
                    there = [(deployment, role) for deployment, role, _ in card.occupants]
                    matches = there == ([(need.deployment, other)] if beside else [])
                    if matches and card.room() >= SHARED_FRACTION:
                        return Place(host.node.name, Runtime.GPU, (index,), SHARED_FRACTION)
        return None

    def _take(self, need: Need, revision: int, place: Place) -> None:
        host = self._hosts[place.node]
        self._runtimes[(need.deployment, revision)] = place.runtime
        host.engines.append((need.deployment, need.role))
        for index in place.gpus:
            host.cards[index].occupants.append((need.deployment, need.role, place.memory_fraction or WHOLE_FRACTION))
        if place.runtime is Runtime.CPU:
            host.memory_free -= _cpu_bytes(need.spec, need.role)

    def _why_not(self, need: Need, runtimes: list[Runtime]) -> str:
        if not self._nodes:
            return "Waiting for a node: none has joined yet."
        if not self._hosts:
            return f"Waiting for a node that takes engines: {_listed([_absence(node) for node in self._nodes])}."
        kind = need.spec.runtime if need.spec.runtime != "auto" else " or ".join(runtimes)
        reasons = []
        for host in self._hosts.values():
            able = [runtime for runtime in runtimes if runtime in _facts(host).runtimes]
            if not able:
                reasons.append(f"{host.node.name} runs {', '.join(_facts(host).runtimes) or 'nothing'}")
            elif able[0] is Runtime.GPU:
                reasons.append(_gpu_reason(host, need))
            else:
                reasons.append(
                    f"{host.node.name} has {max(0, host.memory_free) / GIB:.0f} GiB free, and "
                    f"the engine needs {_cpu_bytes(need.spec, need.role) / GIB:.0f} GiB"
                )
        reasons += [_absence(node) for node in self._nodes if node.name not in self._hosts]
        cards = need.spec.pool(need.role).tensor_parallel
        what = (
            f"{cards} free GPUs on one node" if cards > 1 and Runtime.GPU in runtimes else f"a node with room ({kind})"
        )
        return f"Waiting for {what}: {_listed(reasons)}."


def _usable(node: NodeRecord) -> bool:
    return not node.cordoned and not node.barred and presence(node.silent_seconds) is Presence.REPORTING


def _facts(host: _Host) -> NodeFacts:
    assert host.node.facts is not None
    return host.node.facts


def _best(node: NodeRecord) -> Runtime | None:
    """A node's best real runtime; the stand-in only where there is nothing else."""
    runtimes = node.facts.runtimes if node.facts else ()
    return next((r for r in runtimes if r is not Runtime.SIM), runtimes[0] if runtimes else None)


def _cpu_bytes(spec: DeploymentSpec, role: Role) -> int:
    return CPU_ENGINE_BYTES + (spec.pool(role).kv_cache_bytes or CPU_KV_BYTES)


def _absence(node: NodeRecord) -> str:
    if node.cordoned:
        return f"{node.name} is cordoned"
    if node.barred:
        return f"{node.name} {node.barred}"
    if node.facts is None:
        return f"{node.name} has not reported yet"
    return f"{node.name} does not report"


def _gpu_reason(host: _Host, need: Need) -> str:
    free = sum(not card.occupants and card.room() >= SMALLEST_FRACTION for card in host.cards.values())
    text = f"{host.node.name} has {free} of {len(host.cards)} GPUs free"
    held = sorted({process.name for card in host.cards.values() for process in card.facts.foreign})
    return f"{text} (other processes hold memory: {', '.join(held[:_SHOWN])})" if held else text


def _listed(parts: list[str]) -> str:
    more = len(parts) - _SHOWN
    return "; ".join(parts[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
