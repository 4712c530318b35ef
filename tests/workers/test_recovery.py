"""An agent that is started anew finds what the former one left: by boot, pid and start time, never by name."""

from __future__ import annotations

import errno
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from controlplane.fleet.model import EngineAssignment, Observation, Peer, Phase, Ports, Role
from controlplane.fleet.wire import NodePlan
from tests.workers.conftest import Node, assignment, until
from tests.workers.test_agent import running, up, with_peer
from workers.process import EngineProcess, base_environment, boot_id, members, stat, sweep
from workers.record import EngineRecord, Records


def record(node: Node, engine: EngineAssignment) -> EngineRecord:
    path = node.folder / "engines" / engine.engine / str(engine.attempt) / "engine.json"
    return msgspec.json.decode(path.read_bytes(), type=EngineRecord)


def rewrite(node: Node, changed: EngineRecord) -> None:
    who = changed.assignment
    path = node.folder / "engines" / who.engine / str(who.attempt) / "engine.json"
    path.write_bytes(msgspec.json.encode(changed))


def only(node: Node) -> Observation:
    (one,) = node.mailbox.reports[-1].engines
    return one


def test_a_running_engine_is_adopted_with_its_proofs(node: Node) -> None:
    prefill, decode = assignment("p", Role.PREFILL), assignment("d", Role.DECODE)
    seen_p, seen_d = up(node, prefill, decode)
    node.want(prefill, with_peer(decode, prefill, seen_p))
    until(lambda: (seen := node.seen("d")) and seen.pairs)
    node.mailbox.reports.clear()
    node.new_agent().one_step()
    first = {one.engine: one for one in node.mailbox.reports[0].engines}
    assert {name: one.pid for name, one in first.items()} == {"p": seen_p.pid, "d": seen_d.pid}
    assert {one.phase for one in first.values()} == {Phase.WARMING}, (
        "it was warm, and a restart of the agent changes nothing"
    )
    assert first["d"].pairs[0].ok
    until(lambda: (seen := node.seen("d")) and seen.version and seen.detail == "Answers completions.")
    node.want()
    until(lambda: node.seen("d") is None and not node.mailbox.reports[-1].engines)
    assert not running(seen_d.pid)


def test_nothing_is_touched_before_a_plan_was_read(node: Node) -> None:
    (seen,) = up(node, assignment("d"))
    node.mailbox.plan = None
    agent = node.new_agent()
    for _ in range(3):
        agent.report_now()
        agent.one_step()
    assert running(seen.pid)
    assert only(node).pid == seen.pid
    report = node.mailbox.reports[-1]
    assert (report.plan_generation, report.holds_plan) == (1, False)


def test_an_older_plan_is_still_older_after_a_restart(node: Node) -> None:
    node.generation = 6
    (seen,) = up(node, assignment("d"))
    node.mailbox.plan = NodePlan(node.name, 6)
    node.new_agent().one_step()
    assert running(seen.pid)
    assert node.mailbox.reports[-1].plan_generation == 7


def test_an_orphan_of_a_former_agent_is_ended(node: Node) -> None:
    (seen,) = up(node, assignment("d"))
    node.want()
    node.new_agent().one_step()
    until(lambda: node.seen("d") is None)
    assert not running(seen.pid)


def test_an_engine_that_died_unseen_is_told_and_not_started_again(node: Node) -> None:
    engine = assignment("d")
    (seen,) = up(node, engine)
    former = node.agent
    psutil.Process(seen.pid).kill()
    until(lambda: all(run.ended for run in former.runs()) and record(node, engine).ended)  # the file comes last
    unseen = record(node, engine)
    unseen.ended, unseen.exit_code, unseen.detail = False, None, ""
    rewrite(node, unseen)
    node.new_agent().one_step()
    dead = only(node)
    assert (dead.phase, dead.exit_code, dead.pid) == (Phase.EXITED, None, seen.pid)
    assert "unknown" in dead.detail
    node.new_agent().one_step()
    assert only(node) == dead


def test_a_pid_that_the_system_used_again_is_left_alone(node: Node, tmp_path: Path) -> None:
    engine = assignment("d")
    (seen,) = up(node, engine)
    innocent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, cwd=tmp_path)
    try:
        mistaken = record(node, engine)
        mistaken.pid = innocent.pid
        rewrite(node, mistaken)
        node.new_agent().one_step()
        assert only(node).phase is Phase.EXITED
        node.want()
        node.agent.one_step()
        assert innocent.poll() is None
        assert not running(seen.pid), "what works in the attempt's folder is its own, and ends"
    finally:
        innocent.communicate(b"\n")


def test_another_boot_is_another_machine(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, cwd=tmp_path) as process:
        seen = stat(process.pid)
        assert seen
        assert EngineProcess.adopt(process.pid, seen.ticks, boot_id(), tmp_path)
        assert EngineProcess.adopt(process.pid, seen.ticks + 1, boot_id(), tmp_path) is None
        assert EngineProcess.adopt(process.pid, seen.ticks, "another boot", tmp_path) is None
        process.communicate(b"\n")
        assert EngineProcess.adopt(process.pid, seen.ticks, boot_id(), tmp_path) is None


def test_an_agent_killed_while_it_launched_leaves_no_stray(node: Node) -> None:
    """The record says that a start was begun; which pid it got, nobody could write down."""
    engine = assignment("d")
    records = Records(node.folder / "engines")
    records.save(EngineRecord(assignment=engine, ports=Ports(1, 2, 3, 4)))
    stray = EngineProcess.launch((sys.executable, "-c", "import time; time.sleep(600)"), {}, records.folder("d", 1))
    node.want(engine)
    node.new_agent()
    assert not stray.running()
    again = node.until_phase("d", Phase.WARMING)
    assert again.pid != stray.pid


LITTERS = """
import socket, sys, tempfile, time
from multiprocessing.shared_memory import SharedMemory
shared = SharedMemory(create=True, size=100)
socket.socket(socket.AF_UNIX).bind(tempfile.gettempdir() + "/00000000-0000-0000-0000-000000000000")
print(shared.name, flush=True)
time.sleep(600)
"""


def test_a_killed_engine_leaves_nothing_on_the_node(tmp_path: Path) -> None:
    """As vLLM it has sockets in the temporary folder and shared memory, which only its resource tracker can name."""
    folder = tmp_path / ("a-long-name" * 12)
    process = EngineProcess.launch((sys.executable, "-c", LITTERS), {}, folder)
    until(lambda: b"\n" in (folder / "engine.log").read_bytes())
    shared = Path("/dev/shm") / (folder / "engine.log").read_text().strip()
    temporary = (folder / "tmp").resolve()
    assert shared.exists()
    assert any(path.is_socket() for path in temporary.iterdir())
    assert len(members(folder)) == 2, "its resource tracker works in the folder too"
    process.kill()
    sweep(folder)
    assert members(folder) == []
    assert not process.running()
    assert not shared.exists()
    assert not temporary.exists()


def test_a_resource_tracker_that_will_not_end_is_ended(tmp_path: Path) -> None:
    """Somebody else holds its pipe."""
    code = (
        "import time; from multiprocessing import resource_tracker as tracker; "
        "tracker.ensure_running(); print(tracker.getfd(), flush=True); time.sleep(600)"
    )
    engine = EngineProcess.launch((sys.executable, "-c", code), {}, tmp_path)
    until(lambda: b"\n" in (tmp_path / "engine.log").read_bytes())
    pipe = os.open(f"/proc/{engine.pid}/fd/{(tmp_path / 'engine.log').read_text().strip()}", os.O_WRONLY)
    try:
        sweep(tmp_path, patience=0.5)
        until(lambda: members(tmp_path) == [])
    finally:
        os.close(pipe)


def test_temporary_files_go_with_an_engine_that_died_watched_or_not(node: Node) -> None:
    (seen,) = up(node, assignment("d"))
    watched = (node.folder / "engines" / "d" / "1" / "tmp").resolve()
    assert seen.pid
    assert psutil.Process(seen.pid).environ()["TMPDIR"] == str(watched)
    assert watched.is_dir()
    os.kill(seen.pid, signal.SIGKILL)
    node.until_phase("d", Phase.EXITED)
    assert not watched.exists()

    records = Records(node.folder / "engines")
    process = EngineProcess.launch((sys.executable, "-c", ""), {}, records.folder("e", 1))
    unwatched = (records.folder("e", 1) / "tmp").resolve()
    assert unwatched.is_dir()
    until(lambda: not process.running())
    records.save(EngineRecord(assignment=assignment("e"), pid=process.pid, start_ticks=process.ticks, boot=boot_id()))
    node.new_agent()
    assert not unwatched.exists()


def test_somebody_who_looks_at_the_log_is_not_ended(tmp_path: Path) -> None:
    """A process with a terminal in an attempt's folder is no engine."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execv(sys.executable, [sys.executable, "-c", "print('here', flush=True); input()"])
    try:
        until(lambda: b"here" in os.read(terminal, 100))
        assert members(tmp_path) == []
    finally:
        os.write(terminal, b"\n")
        os.waitpid(pid, 0)
        os.close(terminal)


def test_the_base_environment_has_no_setting_of_tandem() -> None:
    inherited = {
        "PATH": "/bin",
        "REDIS_URL": "r",
        "REDIS_URL_FILE": "f",
        "TANDEM_HOME": "h",
        "HF_TOKEN": "t",
        "HF_HOME": "x",
    }
    given = base_environment(inherited)
    near = given.pop("NO_PROXY"), given.pop("no_proxy")
    assert given == {"PATH": "/bin", "HF_HOME": "x"}
    assert all("127.0.0.1,::1," in names and "10.0.0.0/8" in names for names in near), (
        "engines reach each other straight"
    )


def test_the_start_time_is_the_processs_own() -> None:
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        seen = stat(process.pid)
        assert seen
        assert seen.ticks / 100 >= before - 0.02
        process.communicate(b"\n")
        assert stat(process.pid) is None


def test_a_full_temporary_folder_is_named(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(prefix: str) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"/tmp/{prefix}1")

    monkeypatch.setattr("tempfile.mkdtemp", full)
    node.want(assignment("d"))
    dead = node.until_phase("d", Phase.EXITED)
    assert "No space left on device" in dead.detail
    assert "/tmp/tandem-engine-1" in dead.detail
    assert str(node.folder) not in dead.detail, "there is room"


def test_a_full_disk_is_a_sentence_and_the_report_still_goes(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    (seen,) = up(node, assignment("d"))

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("workers.record.write_private", full)
    monkeypatch.setattr("workers.agent.write_private", full)
    (kept,) = node.mailbox.plan.engines  # type: ignore[union-attr]
    node.want(kept, assignment("e"))
    dead = node.until_phase("e", Phase.EXITED)
    assert "No space left on device" in dead.detail
    assert str(node.folder) in dead.detail
    assert running(seen.pid)
    assert node.mailbox.reports[-1].plan_generation == node.generation
    node.want(msgspec.structs.replace(kept, peers=(Peer("p", 1, "http://127.0.0.1:9", "s"),)))
    until(lambda: node.seen("e") is None)
    assert running(seen.pid)
    assert node.until_phase("d", Phase.WARMING).pid == seen.pid
