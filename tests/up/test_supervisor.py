"""Real supervisord with programs of a few lines: order, stubbornness, what is left behind and how it is ended."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from controlplane.fleet.errors import Unavailable
from controlplane.up.programs import Program, supervisord
from controlplane.up.screen import Screen
from controlplane.up.state import StateFolder
from controlplane.up.supervisor import Supervisor, tail
from controlplane.up.watch import Watch

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
)
DYING = "import sys; print('the reason', flush=True); sys.exit(3)"


def program(name: str, code: str, stops: int, stop_seconds: int = 10) -> Program:
    return Program(name, (sys.executable, "-c", code), stops, stop_seconds=stop_seconds)


PROGRAMS = (
    program("redis", "import time; time.sleep(600)", 60),
    program("web", STUBBORN, 50, stop_seconds=1),
    program("router", "import time; time.sleep(600)", 10),
)


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    state = StateFolder(tmp_path / "h")
    state.prepare()
    return state


@pytest.fixture
def supervisor(state: StateFolder) -> Iterator[Supervisor]:
    supervisor = Supervisor(state)
    yield supervisor
    supervisor.kill(engines_stay=False)


def start(supervisor: Supervisor, programs: tuple[Program, ...] = PROGRAMS) -> dict[str, int]:
    state = supervisor.state
    text = supervisord(programs, state, folder=state.home, root=os.geteuid() == 0, open_files=256)
    supervisor.start(text, os.environ)
    for one in programs:
        supervisor.begin(one.name)
    pids = {p.name: p.pid for p in supervisor.processes()}
    if "web" in pids:
        until(lambda: tail(state.logs / "web.log") == ["deaf"])
    return pids


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_full_disk_ends_no_program(supervisor: Supervisor) -> None:
    """Lines are lost then, not the service."""
    logs = supervisor.state.logs
    for log in ("supervisord.out", "supervisord.log", "talker.log"):
        (logs / log).symlink_to("/dev/full")
    done = supervisor.state.home / "done"
    code = f"import pathlib, time; print('x' * 9000, flush=True); pathlib.Path({str(done)!r}).touch(); time.sleep(600)"
    pids = start(supervisor, (program("talker", code, 1),))
    until(done.exists)
    for _ in range(3):  # each answer comes from one more round of supervisord's loop
        assert supervisor.answers()
    assert supervisor.alive()
    assert {p.name: p.pid for p in supervisor.processes()} == pids


def test_it_stops_in_order_and_kills_what_does_not_listen(supervisor: Supervisor) -> None:
    pids = start(supervisor)
    told: list[str] = []
    supervisor.stop(PROGRAMS, lambda name, what: told.append(f"{name} {what.split()[0]}"))
    assert told == [
        "router stopping", "router stopped", "web stopping", "web stopped", "redis stopping", "redis stopped",
    ]  # fmt: skip
    assert not any(alive(pid) for pid in pids.values())
    assert not supervisor.alive()
    assert list(supervisor.left_behind()) == []
    assert not supervisor.state.supervisor_socket.exists()


def test_the_socket_is_the_owners_alone(supervisor: Supervisor) -> None:
    start(supervisor)
    assert supervisor.state.supervisor_socket.stat().st_mode & 0o777 == 0o600


def test_what_a_killed_supervisord_left_behind_is_found_and_ended(supervisor: Supervisor) -> None:
    pids = start(supervisor)
    (root,) = [f.process for f in supervisor.left_behind() if f.name == "supervisord"]
    root.kill()
    root.wait(10)
    assert all(alive(pid) for pid in pids.values())
    assert {f.name: f.process.pid for f in supervisor.left_behind()} == pids
    assert sorted(Supervisor(supervisor.state).sweep(PROGRAMS, engines_stay=True)) == ["redis", "router", "web"]
    assert not any(alive(pid) for pid in pids.values())
    assert not supervisor.state.supervisor_socket.exists()


def test_a_sweep_finds_a_supervisord_that_still_runs(supervisor: Supervisor) -> None:
    """Its `make up` was killed: it goes first, since it would start the others again."""
    pids = start(supervisor)
    assert "supervisord" in Supervisor(supervisor.state).sweep(PROGRAMS, engines_stay=True)
    assert not any(alive(pid) for pid in pids.values())


@pytest.mark.parametrize("stay", [True, False])
def test_engines_are_known_by_where_they_work(supervisor: Supervisor, stay: bool) -> None:
    folder = supervisor.state.home / "agents" / "node-a" / "engines" / "e" / "1"
    folder.mkdir(parents=True)
    engine = subprocess.Popen(["sleep", "600"], cwd=folder, start_new_session=True)
    try:
        assert [f.name for f in supervisor.left_behind()] == ["engine"]
        assert supervisor.sweep((), engines_stay=stay) == []
        assert (engine.poll() is None) is stay
        supervisor.kill(engines_stay=stay)
        assert (engine.poll() is None) is stay
    finally:
        engine.kill()
        engine.wait()


def test_the_shared_memory_of_engines_is_removed(supervisor: Supervisor) -> None:
    """By the resource tracker that Python starts beside an engine, which works where the engine does."""
    folder = supervisor.state.home / "agents" / "node-a" / "engines" / "e" / "1"
    folder.mkdir(parents=True)
    code = (
        "import time; from multiprocessing.shared_memory import SharedMemory; "
        "print(SharedMemory(create=True, size=100).name, flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=folder, start_new_session=True, stdout=subprocess.PIPE
    ) as engine:
        assert engine.stdout
        shared = Path("/dev/shm") / engine.stdout.readline().decode().strip()
        assert shared.exists()
        supervisor.kill(engines_stay=False)
        until(lambda: not shared.exists())
    assert engine.returncode == -signal.SIGKILL


def test_processes_of_other_folders_are_left_alone(supervisor: Supervisor, tmp_path: Path) -> None:
    other = StateFolder(tmp_path / "other")
    other.prepare()
    pids = start(supervisor)
    Supervisor(other).kill(engines_stay=False)
    assert Supervisor(other).sweep(PROGRAMS, engines_stay=False) == []
    assert all(alive(pid) for pid in pids.values())


def test_a_program_that_keeps_ending_is_told_with_its_last_lines(supervisor: Supervisor) -> None:
    programs = (program("router", DYING, 10),)
    start(supervisor, programs)
    text = io.StringIO()
    watch = Watch(supervisor, programs, Screen(Console(file=text, width=300)), lambda: None)
    while not watch.hopeless:
        watch.pause(0.05)
    assert watch.hopeless["router"][-1] == "the reason"
    assert f"router keeps ending. Its last lines, from {supervisor.state.logs / 'router.log'}:" in text.getvalue()


def test_a_death_by_a_signal_is_seen_and_healed(supervisor: Supervisor) -> None:
    pids = start(supervisor)
    text = io.StringIO()
    watch = Watch(supervisor, PROGRAMS, Screen(Console(file=text, width=300)), lambda: None)
    watch.look()
    os.kill(pids["router"], signal.SIGKILL)
    while "router ended" not in text.getvalue():
        watch.pause(0.05)
    until(lambda: next(p.pid for p in supervisor.processes() if p.name == "router") not in (0, pids["router"]))


def test_a_supervisord_that_cannot_start_says_why(supervisor: Supervisor) -> None:
    with pytest.raises(Unavailable, match=r"The process supervisor did not start: .*no_such_setting"):
        supervisor.start("[supervisord]\nnodaemon=true\nloglevel=no_such_setting\n", os.environ)
