"""Supervisord of one state folder: start it, speak with it over its unix socket, end it, and find what it left behind.

What is left behind is read from the process table, never from a file of ours: each supervised process carries the address
of its supervisor's socket in its environment, each engine works in its own folder below the state folder.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import xmlrpc.client
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from supervisor.xmlrpc import SupervisorTransport

from controlplane.fleet.errors import Unavailable
from controlplane.up.programs import Program
from controlplane.up.state import StateFolder

ENGINE = "engine"


class Process(NamedTuple):
    """What supervisord says of one program."""

    name: str
    state: str
    """RUNNING, STARTING, BACKOFF, STOPPING, STOPPED, EXITED or FATAL."""
    pid: int
    since: float
    exit_status: int
    log: Path


class Found(NamedTuple):
    """A process of the table that belongs to this state folder."""

    name: str
    """Of its program, or `supervisord`, or `engine`."""
    process: psutil.Process


class Supervisor:
    def __init__(self, state: StateFolder) -> None:
        self.state = state
        self._url = f"unix://{state.supervisor_socket}"
        self._child: subprocess.Popen[bytes] | None = None

    def start(self, config: str, environment: Mapping[str, str]) -> None:
        """Start supervisord with no program running yet. Raises `Unavailable` with its last words."""
        self.state.write(self.state.supervisor_config, config)
        self.state.supervisor_socket.unlink(missing_ok=True)
        # A file in memory: supervisord tells there of a log that it cannot write, and would end when that fails as well.
        with os.fdopen(os.memfd_create("supervisord"), "w+", errors="replace") as output:
            # A session of its own: the terminal's Ctrl-C is for `make up` alone, which then stops things in order.
            self._child = subprocess.Popen(
                [sys.executable, "-m", "supervisor.supervisord", "-c", str(self.state.supervisor_config)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=dict(environment), start_new_session=True,
            )  # fmt: skip
            deadline = time.monotonic() + 20
            while not self.answers():
                if self._child.poll() is not None or time.monotonic() > deadline:
                    output.seek(0)
                    raise Unavailable(f"The process supervisor did not start: {output.read().strip()[-500:]}")
                time.sleep(0.02)

    def answers(self) -> bool:
        try:
            self._call("getState")
        except (OSError, xmlrpc.client.Error):
            return False
        return True

    @property
    def started(self) -> bool:
        return self._child is not None

    def alive(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def processes(self) -> list[Process]:
        """All programs, as they are now. Raises `OSError` when supervisord is gone."""
        infos = self._call("getAllProcessInfo")
        return [
            Process(i["name"], i["statename"], i["pid"], float(i["start"]), i["exitstatus"], Path(i["logfile"]))
            for i in infos
        ]

    def begin(self, name: str) -> None:
        """Start one program and return at once; nothing happens when it runs already."""
        with contextlib.suppress(xmlrpc.client.Fault):
            self._call("startProcess", name, False)

    def end(self, name: str) -> None:
        """Ask one program to stop and return at once; supervisord kills it when its time is up."""
        with contextlib.suppress(xmlrpc.client.Fault):
            self._call("stopProcess", name, False)

    def stop(self, programs: tuple[Program, ...], tell: Callable[[str, str], None]) -> None:
        """Stop all programs in their order, then supervisord itself. `tell(name, what)` hears of each."""
        running = {p.name for p in self.processes() if p.pid}
        for program in sorted((p for p in programs if p.name in running), key=lambda p: p.stops):
            started = time.monotonic()
            self.end(program.name)
            tell(program.name, "stopping")
            while any(p.name == program.name and p.pid for p in self.processes()):
                time.sleep(0.05)
            tell(program.name, f"stopped in {time.monotonic() - started:.1f} s")
        self._call("shutdown")
        if self._child is not None:
            self._child.wait(20)

    def abandon(self) -> None:
        """End supervisord without its socket; it stops its programs itself, in order."""
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()
            self._child.wait()

    def _call(self, method: str, *arguments: Any) -> Any:
        # A fresh connection each time: supervisord may have been started anew.
        transport = SupervisorTransport(None, None, self._url)
        with xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport) as proxy:
            return getattr(proxy.supervisor, method)(*arguments)

    def left_behind(self) -> Iterator[Found]:
        """Supervisord, every process it started, and every engine of this state folder, read from the process table."""
        engines = self.state.home / "agents"
        for process in psutil.process_iter(["cmdline"]):
            with contextlib.suppress(psutil.Error, OSError):
                argv = process.info["cmdline"] or []
                if any("multiprocessing.resource_tracker" in word for word in argv):
                    continue  # removes what a killed engine leaves in shared memory, and ends after it
                if str(self.state.supervisor_config) in argv:
                    yield Found("supervisord", process)
                elif engines in Path(process.cwd()).parents:
                    # Asked before the environment, which an engine inherits and may overwrite when it renames itself.
                    if process.terminal() is None:  # else: somebody who looks at a log
                        yield Found(ENGINE, process)
                elif (variables := process.environ()).get("SUPERVISOR_SERVER_URL") == self._url:
                    yield Found(variables.get("SUPERVISOR_PROCESS_NAME", ""), process)

    def sweep(self, programs: tuple[Program, ...], *, engines_stay: bool) -> list[str]:
        """End what a supervisord that is not ours any more left running; the names of the programs found.

        Supervisord goes first, since it would start the others again. An agent that is killed, not asked, leaves its
        engines for the next agent to adopt.
        """
        found = list(self.left_behind())
        order = {program.name: program.stops for program in programs} | {"supervisord": 0, ENGINE: 1000}
        patience = {program.name: program.stop_seconds for program in programs}
        for one in sorted(found, key=lambda f: order.get(f.name, 999)):
            if one.name == ENGINE and engines_stay:
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                if one.name not in (ENGINE, "supervisord") and not (one.name == "agent" and engines_stay):
                    one.process.terminate()
                    _await_end(one.process, patience.get(one.name, 15))
                one.process.kill()
                _await_end(one.process, 5)
        self._forget()
        return [name for name in dict.fromkeys(f.name for f in found) if name != ENGINE]

    def kill(self, *, engines_stay: bool) -> None:
        """The forced way: everything at once."""
        for _ in range(2):  # supervisord may have started one more while the first round went
            for one in list(self.left_behind()):
                if not (one.name == ENGINE and engines_stay):
                    with contextlib.suppress(psutil.Error):
                        one.process.kill()
        self._forget()

    def _forget(self) -> None:
        self.state.supervisor_socket.unlink(missing_ok=True)
        self.state.supervisor_pid.unlink(missing_ok=True)


def _await_end(process: psutil.Process, seconds: float) -> None:
    """Wait until it is gone, or a zombie: whose parent died is buried by init, which may take its time, or never come."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
            time.sleep(0.02)


def tail(path: Path, lines: int = 12) -> list[str]:
    """The last lines of a log; empty when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 16_384))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []
