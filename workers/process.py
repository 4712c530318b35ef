"""One engine's operating-system process: started in a session and folder of its own, found again, ended with all it started.

Knows nothing of plans or HTTP. A process is recognised by boot, pid and start time, and its helpers by the folder they
work in: never by name.

Seen with vLLM 0.32: however it ends, it leaves seven sockets and a file in the temporary folder, so that each attempt has
one of its own. If it is killed, up to 400 MB stay in `/dev/shm`, which only the resource tracker of its Python can name,
and removes when all who had it are gone. The tracker is therefore left to end by itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from controlplane.fleet.config import VARIABLES
from controlplane.fleet.outbound import with_no_proxy
from workers.engine_user import EngineUser, as_user, temporary_folder
from workers.record import LOG, open_appending, private_folder

TEMPORARY = "tmp"
"""In an attempt's folder, while it runs: a link to its temporary folder, as the names of sockets must be short. An engine of another
user works there, as that user may not enter the attempt's folder."""


def boot_id() -> str:
    """Changes with every boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Stat(NamedTuple):
    """What `/proc` says of a process that is alive."""

    ticks: int
    """Start time in clock ticks since boot (psutil's `create_time` moves when the clock is set)."""
    terminal: int
    """0: it has none."""


def stat(pid: int) -> Stat | None:
    """None: the process is gone, or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else Stat(ticks=int(fields[18]), terminal=int(fields[3]))


def members(folder: Path) -> list[int]:
    """Every process that works in an attempt's folder or its temporary one: the engine, what it started, and what outlived it.

    One with a terminal is somebody who looks at the log, not ours.
    """
    found = []
    places = {folder}
    with contextlib.suppress(OSError):
        places.add((folder / TEMPORARY).readlink())
    for pid in psutil.pids():
        try:
            if Path(f"/proc/{pid}/cwd").readlink() not in places:
                continue
        except OSError:
            continue
        seen = stat(pid)
        if seen is not None and seen.terminal == 0:
            found.append(pid)
    return found


def base_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What an engine inherits: the agent's environment without Tandem's own settings and secrets, its proxies for public hosts
    alone: engines of a node and of others reach each other straight."""
    ours = {name for variable in VARIABLES for name in (variable.name, variable.name + "_FILE")}
    return {name: value for name, value in environ.items() if name not in ours} | with_no_proxy(environ)


class EngineProcess:
    """A running, or just ended, engine process."""

    def __init__(self, pid: int, folder: Path, ticks: int, *, child: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self.folder = folder
        self.ticks = ticks
        self._child = child

    @classmethod
    def launch(
        cls, argv: Sequence[str], env: Mapping[str, str], folder: Path, *, user: EngineUser | None = None
    ) -> EngineProcess:
        """Starts the engine in its own session, working in its folder, its output appended to the attempt's log, its
        temporary files in a folder that `sweep` removes. As another `user` it works in the latter, and of the log it has
        nothing but the open file.

        Raises `OSError` when the program cannot be executed.
        """
        folder = private_folder(folder).resolve()
        _remove_temporary(folder)
        (folder / TEMPORARY).symlink_to(temporary := temporary_folder(user))
        inherited = base_environment(os.environ)
        try:
            with open_appending(folder / LOG) as log:
                child = subprocess.Popen(
                    argv,
                    env={**(user.environment(inherited) if user else inherited), "TMPDIR": temporary, **env},
                    cwd=temporary if user else folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    **as_user(user),
                )
        except OSError:
            _remove_temporary(folder)
            raise
        return cls(child.pid, folder, (stat(child.pid) or Stat(0, 0)).ticks, child=child)

    @classmethod
    def adopt(cls, pid: int, ticks: int, boot: str, folder: Path) -> EngineProcess | None:
        """The process that a former agent started, if it still runs."""
        process = cls(pid, folder.resolve(), ticks)
        return process if boot == boot_id() and process.running() else None

    def running(self) -> bool:
        if self._child is not None:
            return self._child.poll() is None
        seen = stat(self.pid)
        return seen is not None and seen.ticks == self.ticks

    @property
    def exit_code(self) -> int | None:
        """Negative: the signal that ended it. None: it runs, or it was adopted and only init knows."""
        return None if self._child is None else self._child.poll()

    def terminate(self) -> None:
        """Asks the engine to end; it ends its helpers itself."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends the engine and everything that works in its folder, at once; `sweep` waits for it."""
        self._signal(signal.SIGKILL)
        for pid in members(self.folder):
            if not _tracks_resources(pid):
                _kill(pid, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.running():
            _kill(self.pid, number)


def sweep(folder: Path, *, patience: float = 5.0) -> None:
    """Ends whatever still works in an attempt's folder, waits (seconds) until it is gone, and removes its temporary files.

    It never waits on the processes themselves: that would take an exit code away from its owner.
    """
    deadline = time.monotonic() + patience
    while left := members(folder):
        late = time.monotonic() >= deadline
        for pid in left:
            if late or not _tracks_resources(pid):
                _kill(pid, signal.SIGKILL)
        if late:
            break
        time.sleep(0.02)
    _remove_temporary(folder)


def _tracks_resources(pid: int) -> bool:
    """It is Python's own helper, which removes what the others leave in shared memory, and ends after them."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _remove_temporary(folder: Path) -> None:
    link = folder / TEMPORARY
    with contextlib.suppress(OSError):
        shutil.rmtree(link.readlink(), ignore_errors=True)
        link.unlink()


def _kill(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
