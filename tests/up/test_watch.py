"""What the watcher tells and does, step by step, with a supervisor of the test's own and a clock of its own."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from controlplane.up.programs import Program
from controlplane.up.screen import Line, Screen
from controlplane.up.supervisor import Process
from controlplane.up.watch import REVIVE_SECONDS, Watch


class Supervised:
    """The part of `Supervisor` that a watcher uses."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.now: tuple[str, int, int] = ("RUNNING", 100, 0)
        self.is_alive = True
        self.begun: list[str] = []

    def processes(self) -> list[Process]:
        if not self.is_alive:
            raise ConnectionRefusedError
        state, pid, status = self.now
        return [Process("router", state, pid, 0.0, status, self.log)]

    def begin(self, name: str) -> None:
        self.begun.append(name)


class Scene:
    def __init__(self, folder: Path) -> None:
        self.supervised = Supervised(folder / "router.log")
        self.supervised.log.write_text("first line\nthe reason\n")
        self.text = io.StringIO()
        self.seconds = 0.0
        self.revived = 0
        program = Program("router", ("python", "-m", "frontend_api"), 10, "http://127.0.0.1:8080/v1")
        supervisor: Any = self.supervised
        console = Console(file=self.text, highlight=False, markup=False, width=200)
        self.watch = Watch(supervisor, (program,), Screen(console), self.revive, lambda: self.seconds)

    def revive(self) -> None:
        self.revived += 1
        self.supervised.is_alive = True

    def look(self, state: str, pid: int, status: int = 0) -> str:
        """What is told when this is seen next, a second later."""
        self.supervised.now = (state, pid, status)
        self.seconds += 1
        self.text.seek(0)
        self.text.truncate()
        self.watch.look()
        return self.text.getvalue()


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_line_tells_what_runs_and_where_and_is_not_repeated(scene: Scene) -> None:
    assert scene.look("RUNNING", 100) == "  router running (process 100): http://127.0.0.1:8080/v1\n"
    assert scene.look("RUNNING", 100) == ""


def test_one_death_is_one_sentence(scene: Scene) -> None:
    scene.look("RUNNING", 100)
    told = scene.look("STARTING", 101, 3)
    assert "✗ router ended with exit status 3; it was started again as process 101." in told
    assert "the reason" not in told
    assert not scene.watch.hopeless


def test_many_deaths_show_the_log_once(scene: Scene) -> None:
    scene.look("RUNNING", 100)
    told = [scene.look("STARTING", pid) for pid in range(101, 110)]
    assert ["keeps ending" in t for t in told] == [False, False, True, *[False] * 6]
    assert "    the reason" in told[2]
    assert scene.watch.hopeless == {"router": ["first line", "the reason"]}
    scene.seconds += 60
    assert "keeps ending" in "".join(scene.look("STARTING", pid) for pid in range(110, 114))


def test_deaths_far_apart_are_no_pattern(scene: Scene) -> None:
    scene.look("RUNNING", 100)
    for pid in range(101, 110):
        scene.seconds += 60
        assert "keeps ending" not in scene.look("RUNNING", pid)


def test_what_supervisord_gave_up_is_tried_again_after_a_while(scene: Scene) -> None:
    scene.look("RUNNING", 100)
    assert "keeps ending" in scene.look("FATAL", 0)
    scene.seconds += REVIVE_SECONDS - 2
    scene.look("FATAL", 0)
    assert scene.supervised.begun == []
    scene.seconds += 2
    assert "router is tried again" in scene.look("FATAL", 0)
    assert scene.supervised.begun == ["router"]
    scene.look("RUNNING", 105)
    scene.look("FATAL", 0)
    assert scene.supervised.begun == ["router"]  # the wait begins anew


def test_a_silent_supervisord_is_left_to_who_started_it(scene: Scene) -> None:
    scene.look("RUNNING", 100)
    scene.supervised.is_alive = False
    assert scene.look("RUNNING", 100) == ""
    assert scene.revived == 1
    assert "router ended" not in scene.look("STARTING", 200)  # that all was started again is told elsewhere, once


def test_engines_are_shown_below_the_programs(scene: Scene) -> None:
    scene.watch.more_lines = [Line("smollm2 decode-0", "installing", "40% torch")]
    assert scene.look("RUNNING", 100).splitlines()[1] == "  smollm2 decode-0 installing: 40% torch"


def test_without_a_terminal_progress_is_a_line_now_and_then() -> None:
    seconds, text = 0.0, io.StringIO()
    screen = Screen(Console(file=text, highlight=False, markup=False, width=200), lambda: seconds)
    for seconds in range(20):
        screen.lines([Line("decode-0", "installing", f"{seconds}% torch")])
    screen.lines([Line("decode-0", "fetching", "the model")])
    assert text.getvalue().split("\n")[:-1] == [
        *(f"  decode-0 installing: {percent}% torch" for percent in (0, 5, 10, 15)),
        "  decode-0 fetching: the model",
    ]


def test_a_terminal_shows_one_table_and_keeps_what_was_said() -> None:
    text = io.StringIO()
    screen = Screen(Console(file=text, force_terminal=True, highlight=False, markup=False, width=100))
    screen.stage("Redis", "Valkey 8 on 127.0.0.1:17001")
    screen.lines([Line("web", "running", "http://127.0.0.1:8000", 4711, 1.0)])
    screen.working("Waiting for the router")
    long = "  curl " + "x" * 300
    screen.say(long)
    screen.close()
    told = text.getvalue()
    assert "4711" in told
    assert "Waiting for the router" in told
    assert long in told  # whole, so that it can be pasted
