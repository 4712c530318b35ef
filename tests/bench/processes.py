"""Processes of the bench: started on the cores that are theirs, watched for CPU and memory, ended with their children."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).parents[2]


class Cores(NamedTuple):
    """Whose cores are whose: the last is the router's alone, where there are two."""

    router: frozenset[int]
    others: frozenset[int]

    @classmethod
    def shared_out(cls) -> Cores:
        have = sorted(os.sched_getaffinity(0))
        return cls(frozenset(have[-1:]), frozenset(have[:-1] or have))


class NotStarted(Exception):
    """A program did not come up; the text says why."""


@contextmanager
def started(
    *command: str | Path,
    cores: frozenset[int],
    log: Path,
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Until the block is left. Its output goes to `log`."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
    family: list[psutil.Process] = []
    try:
        yield process
    finally:
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        for child in family:
            with suppress(psutil.NoSuchProcess):
                child.kill()


def listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def await_true(
    condition: Callable[[], bool], *, seconds: float, process: subprocess.Popen[bytes], log: Path, what: str
) -> None:
    """Raises `NotStarted` with the end of the log when the process ends first or the time is over."""
    deadline = time.monotonic() + seconds
    while not condition():
        over = process.poll() is not None
        if over or time.monotonic() > deadline:
            why = f"it ended with status {process.returncode}" if over else f"not within {seconds:g} s: {what}"
            raise NotStarted(f"{why}; {_last_line(log)}")
        time.sleep(0.02)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it gave no reason"


_CPU_CLOCK = 2
"""With a process id above it, the name of that process's CPU clock: clock_getcpuclockid(3), which Python lacks."""


class Usage:
    """CPU and memory of a process and its descendants. Raises `OSError` once one of them has ended."""

    def __init__(self, pid: int) -> None:
        root = psutil.Process(pid)
        self._pids = [pid, *(child.pid for child in root.children(recursive=True))]

    def cpu_seconds(self) -> float:
        """Time that all threads have run, also those that ended, as the scheduler says."""
        return sum(time.clock_gettime(~pid << 3 | _CPU_CLOCK) for pid in self._pids)

    def memory_mib(self) -> float:
        """Resident memory; pages that its processes share count once."""
        total = 0
        for pid in self._pids:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
        return total / 1024
