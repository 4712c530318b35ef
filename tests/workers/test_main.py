"""The agent as a process of its own: joined, killed, told to end, started twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import redis

from controlplane.fleet import wire
from controlplane.fleet.model import EngineAssignment, Observation, Phase, Role, Runtime
from controlplane.fleet.this_node import NODE_FILE
from controlplane.fleet.wire import NodePlan, NodeReport
from tests.conftest import RedisServer
from tests.workers import test_redis_user
from tests.workers.conftest import assignment, until
from tests.workers.test_agent import running
from workers.__main__ import offered
from workers.app import make_app
from workers.join import Identity


class Machine:
    """A state folder, a Redis, and agents of node x as processes."""

    def __init__(self, home: Path, server: RedisServer) -> None:
        self.home = home
        self.server = server
        self.folder = home / "agents" / "x"
        self.folder.mkdir(parents=True)
        self.admin = redis.Redis.from_url(server.url)
        url = test_redis_user.join(self.admin, "x")
        (self.folder / NODE_FILE).write_bytes(msgspec.json.encode(Identity("x", url)))
        self.agents: list[subprocess.Popen[str]] = []
        self.generation = 0

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "workers", *arguments],
            env={**os.environ, "TANDEM_HOME": str(self.home), "TANDEM_NODE_NAME": "x", **env},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.agents.append(process)
        return process

    def want(self, *engines: EngineAssignment) -> None:
        self.generation += 1
        self.admin.set(wire.plan_key("x"), wire.encode(NodePlan("x", self.generation, engines)))

    def report(self) -> NodeReport | None:
        data = self.admin.get(wire.report_key("x"))
        return None if data is None else wire.decode(data, NodeReport)  # type: ignore[arg-type]

    def seen(self, engine: str) -> Observation | None:
        report = self.report()
        return next((one for one in report.engines if one.engine == engine), None) if report else None

    def until_warm(self, engine: str) -> Observation:
        until(lambda: (seen := self.seen(engine)) and seen.phase is Phase.WARMING, 60)
        seen = self.seen(engine)
        assert seen is not None
        return seen

    def end(self) -> None:
        for process in self.agents:
            if process.poll() is None:
                process.terminate()
                process.communicate(timeout=60)
        for process in psutil.process_iter(["cwd"]):
            if str(process.info["cwd"]).startswith(str(self.folder)):
                process.kill()


@pytest.fixture
def machine(tmp_path: Path, redis_url: str, redis_server: RedisServer) -> Iterator[Machine]:
    one = Machine(tmp_path / "home", redis_server)
    yield one
    one.end()


def test_a_killed_agent_leaves_its_engines_and_the_next_one_adopts_them(machine: Machine) -> None:
    machine.want(assignment("d", Role.DECODE))
    first = machine.start()
    before = machine.until_warm("d")
    report = machine.report()
    assert report is not None
    first.kill()
    first.wait()
    assert running(before.pid)
    machine.start()
    until(lambda: (now := machine.report()) and now.agent != report.agent and now.sequence > 2, 60)
    after = machine.until_warm("d")
    assert (after.pid, after.started_at, after.ports) == (before.pid, before.started_at, before.ports)
    machine.want()
    until(lambda: machine.seen("d") is None, 60)
    assert not running(before.pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_agent_told_to_end_ends_its_engines(machine: Machine, number: signal.Signals) -> None:
    machine.want(assignment("p", Role.PREFILL), assignment("d", Role.DECODE))
    ours = set(machine.home.rglob("*"))
    agent = machine.start()
    pids = [machine.until_warm("p").pid, machine.until_warm("d").pid]
    files = set(machine.home.rglob("*")) - ours
    assert len(files) > 8
    assert not [path for path in files if not path.is_symlink() and path.stat().st_mode & 0o077], "the owner's alone"
    agent.send_signal(number)
    agent.communicate(timeout=60)
    assert agent.returncode == 0
    assert not any(running(pid) for pid in pids)
    assert {(one.phase, one.stopped) for one in machine.report().engines} == {(Phase.EXITED, True)}  # type: ignore[union-attr]


def test_engines_may_be_kept(machine: Machine) -> None:
    machine.want(assignment("d", Role.DECODE))
    agent = machine.start(KEEP_ENGINES="1")
    seen = machine.until_warm("d")
    agent.terminate()
    agent.communicate(timeout=60)
    assert agent.returncode == 0
    assert running(seen.pid)
    machine.start()
    machine.want()
    until(lambda: (report := machine.report()) and report.plan_generation == 2 and not report.engines, 60)
    assert not running(seen.pid)


def test_two_agents_of_one_node_never_run_at_once(machine: Machine) -> None:
    first = machine.start()
    until(machine.report, 60)
    second = machine.start()
    _, said = second.communicate(timeout=60)
    assert second.returncode == 1
    assert f"pid {first.pid}" in said
    assert len(said.strip().splitlines()) == 1
    assert first.poll() is None


def test_a_task_hastens_the_next_step(machine: Machine) -> None:
    agent = machine.start()
    until(machine.report, 60)
    app = make_app("x", machine.server.url)
    for task in (wire.APPLY_PLAN_TASK, wire.REPORT_NOW_TASK, wire.APPLY_PLAN_TASK):
        app.send_task(task, expires=wire.PLAN_TASK_EXPIRES)
    prefix = wire.node_prefix("x")
    until(lambda: not machine.admin.exists(prefix + wire.queue_name("x"), prefix + "unacked"), 60)
    assert agent.poll() is None


def test_redis_and_the_agents_end_in_any_order(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> None:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    other = Machine(tmp_path_factory.mktemp("machine") / "home", server)
    try:
        other.want(assignment("d", Role.DECODE))
        agent = other.start()
        seen = other.until_warm("d")
        server.stop()
        assert running(seen.pid)
        agent.terminate()
        agent.communicate(timeout=60)
        assert agent.returncode == 0
        assert not running(seen.pid)
    finally:
        other.end()
        server.stop()


REFUSED: list[tuple[str, Callable[[Machine], dict[str, str]], list[str], str]] = [
    ("no identity", lambda m: {"TANDEM_NODE_NAME": "y"}, [], "--join URL"),
    ("no token", lambda m: {"TANDEM_NODE_NAME": "y"}, ["--join", "http://127.0.0.1:1"], "TANDEM_JOIN_TOKEN"),
    ("a wildcard", lambda m: {"TANDEM_NODE_ADDRESS": "0.0.0.0"}, [], "TANDEM_NODE_ADDRESS"),
    ("a name that is none", lambda m: {"TANDEM_NODE_NAME": "x*"}, [], "TANDEM_NODE_NAME"),
    ("nonsense", lambda m: {"TANDEM_ENGINE_PORTS": "many"}, [], "TANDEM_ENGINE_PORTS"),
]


@pytest.mark.parametrize(("env", "arguments", "says"), [pytest.param(*row[1:], id=row[0]) for row in REFUSED])
def test_what_is_wrong_at_the_start_is_one_sentence(
    machine: Machine, env: Callable[[Machine], dict[str, str]], arguments: list[str], says: str
) -> None:
    agent = machine.start(*arguments, **env(machine))
    _, said = agent.communicate(timeout=60)
    assert agent.returncode == 1
    assert says in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("wanted", "able", "offers"),
    [
        ("auto", "gpu cpu sim", "gpu cpu sim"),
        ("sim", "gpu cpu sim", "sim"),
        ("cpu", "gpu cpu sim", "cpu sim"),
        ("gpu", "gpu cpu sim", "gpu sim"),
        ("gpu", "cpu sim", "sim"),
    ],
)
def test_a_node_offers_the_runtime_it_was_told_to(wanted: str, able: str, offers: str) -> None:
    """On a node of stand-ins a deployment that leaves the choice open must not install gigabytes of vLLM."""
    assert " ".join(offered(wanted, tuple(Runtime(kind) for kind in able.split()))) == offers
