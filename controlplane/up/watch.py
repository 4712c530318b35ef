"""Keeps an eye on the programs while something else is awaited: draws their lines, tells of deaths, revives what gave up."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable

from controlplane.up.programs import Program
from controlplane.up.screen import Line, Screen
from controlplane.up.supervisor import Process, Supervisor, tail

REVIVE_SECONDS = 30.0
"""After supervisord gave a program up, until it is tried again."""
OFTEN = 3
"""So many ends within `OFTEN_SECONDS` mean that starting it again does not help: its log is shown."""
OFTEN_SECONDS = 60.0

_WORDS = {
    "RUNNING": "running", "STARTING": "starting", "STOPPING": "stopping", "STOPPED": "stopped", "EXITED": "ended",
    "BACKOFF": "retrying", "FATAL": "gave up",
}  # fmt: skip


class Watch:
    def __init__(
        self,
        supervisor: Supervisor,
        programs: tuple[Program, ...],
        screen: Screen,
        on_silence: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._supervisor = supervisor
        self._programs = programs
        self._screen = screen
        self._on_silence = on_silence
        self._clock = clock
        self._seen: dict[str, Process] = {}
        self._ends: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=OFTEN))
        self._given_up: dict[str, float] = {}
        self._told: dict[str, float] = {}
        self.hopeless: dict[str, list[str]] = {}
        """Programs that kept ending, with their last lines then."""
        self.more_lines: Iterable[Line] = ()
        """Shown below the programs: the engines, while they are awaited."""

    def pause(self, seconds: float) -> None:
        """Wait so long, and look once. Raises whatever a signal handler raises."""
        time.sleep(seconds)
        self.look()

    def look(self) -> None:
        """One step: gather what supervisord says, tell what changed, start again what was given up.

        When supervisord says nothing, `on_silence` decides; what it raises is raised here.
        """
        try:
            processes = {p.name: p for p in self._supervisor.processes()}
        except OSError:
            self._seen.clear()
            self._on_silence()
            return
        for name, process in processes.items():
            self._tell(self._seen.get(name), process)
            self._revive(process)
        self._seen = processes
        self._screen.lines([*(self._line(p, processes[p.name]) for p in self._programs), *self.more_lines])

    def _tell(self, before: Process | None, now: Process) -> None:
        gave_up = now.state == "FATAL" and (before is None or before.state != "FATAL")
        if not gave_up and not (before is not None and before.pid and now.pid != before.pid):
            return
        moment = self._clock()
        ends = self._ends[now.name]
        ends.append(moment)
        if moment - self._told.get(now.name, -OFTEN_SECONDS) < OFTEN_SECONDS:
            return  # its log was shown a moment ago
        code = f" with exit status {now.exit_status}" if now.exit_status > 0 else ""
        again = f"; it was started again as process {now.pid}" if now.pid else ""
        self._screen.problem(f"{now.name} ended{code}{again}.")
        if gave_up or (len(ends) == OFTEN and ends[-1] - ends[0] < OFTEN_SECONDS):
            self._told[now.name] = moment
            self.hopeless[now.name] = tail(now.log)
            self._screen.problem(f"{now.name} keeps ending. Its last lines, from {now.log}:")
            for line in self.hopeless[now.name]:
                self._screen.say(f"    {line}", "dim")

    def _revive(self, process: Process) -> None:
        if process.state != "FATAL":
            self._given_up.pop(process.name, None)
        elif self._clock() - self._given_up.setdefault(process.name, self._clock()) > REVIVE_SECONDS:
            del self._given_up[process.name]
            self._screen.say(f"{process.name} is tried again.")
            self._supervisor.begin(process.name)

    def _line(self, program: Program, process: Process) -> Line:
        state = _WORDS.get(process.state, process.state.lower())
        return Line(program.name, state, program.listens, process.pid, process.since if process.pid else 0.0)
