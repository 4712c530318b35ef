"""The parent of the router processes: holds the listening socket, starts them, restarts what dies, passes on SIGTERM.

It serves no request and holds no state of its own; with several processes it hands out their connections (`handout`).
Children see its death by a pipe and drain.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import select
import signal
import socket
import time
from math import inf
from types import FrameType

import uvloop

from frontend_api.observe.shared import Slots
from frontend_api.processes import process
from frontend_api.processes.handout import Handout
from frontend_api.processes.process import Options
from frontend_api.routing.loads import Table

log = logging.getLogger(__name__)

RESTART_PAUSE = 1.0
"""Seconds that a child must have lived to be restarted at once."""
LOOK_PAUSE = 1.0
"""Seconds between two looks for processes that stand still."""
FULL_PAUSE = 0.01
"""Seconds until the next try when no process can take a connection."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
GRACE = 5.0
"""Seconds after the drain limit at which a child that hangs is killed."""


class Supervisor:
    def __init__(self, options: Options, sock: socket.socket, processes: int) -> None:
        self._options = options
        self._sock = sock
        self._wanted = processes
        self._slots = Slots(processes)
        self._loads = Table(processes)
        self._handout = Handout(sock, processes) if processes > 1 else None
        """None: one process accepts for itself."""
        self._children: dict[int, tuple[int, float]] = {}
        """pid -> index, monotonic time of start"""
        self._due: list[tuple[float, int]] = []
        """Monotonic time from which a process is to be started, and its index."""
        self._alive, self._hold = os.pipe()
        self._signals = _Signals()

    def run(self) -> int:
        """Until SIGTERM or SIGINT. Returns the exit code."""
        _raise_file_limit()
        self._due = [(0.0, index) for index in range(self._wanted)]
        while not self._signals.stop:
            self._start_due()
            self._wait()
            self._reap()
        if self._handout is not None:
            self._handout.close()
        self._sock.close()
        self._signal_all(signal.SIGTERM)
        deadline = time.monotonic() + self._options.drain_seconds + GRACE
        while self._children:
            left = deadline - time.monotonic()
            if left <= 0:
                self._signal_all(signal.SIGKILL)
                deadline = time.monotonic() + GRACE
            else:
                self._signals.wait(left)
            self._reap()
        return 0

    def _wait(self) -> None:
        """For a signal, for the next start, or for connections, which are handed out."""
        pause = min((at for at, _ in self._due), default=inf) - time.monotonic()
        handout = self._handout
        if handout is None:
            self._signals.wait(pause)
            return
        came = self._signals.wait(min(pause, LOOK_PAUSE), handout.sock)
        handout.awake()
        if (came or handout.waiting) and not handout.hand_out():
            self._signals.wait(FULL_PAUSE)

    def _start_due(self) -> None:
        now = time.monotonic()
        due, self._due = self._due, [entry for entry in self._due if entry[0] > now]
        for at, index in due:
            if at <= now:
                self._start(index)

    def _start(self, index: int) -> None:
        self._loads.clear(index)
        if self._handout is not None:
            self._handout.open(index)
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(self._hold)
                self._signals.forget()
                gc.freeze()  # what is loaded by now stays: the collector need not walk it again and again
                gc.set_threshold(20_000, 20, 50)  # requests leave no cycles behind
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
                door = self._sock if self._handout is None else self._handout.entrance(index)
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    runner.run(
                        process.run(
                            self._options,
                            door,
                            parent_gone=self._alive,
                            slots=self._slots,
                            loads=self._loads,
                            index=index,
                        )
                    )
                code = 0
            except BaseException:
                log.exception("The router process failed.")
            finally:
                os._exit(code)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        self._children[pid] = index, time.monotonic()

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            child = self._children.pop(pid, None)
            if child is None:
                continue
            index, started = child
            self._loads.clear(index)
            if self._signals.stop:
                continue
            log.error("Router process %d ended (%s); starting another.", pid, os.waitstatus_to_exitcode(status))
            now = time.monotonic()
            self._due.append((now if now - started >= RESTART_PAUSE else now + RESTART_PAUSE, index))
            if self._handout is not None:
                self._handout.recover(index)

    def _signal_all(self, number: signal.Signals) -> None:
        for pid in self._children:
            os.kill(pid, number)


class _Signals:
    """The signals of the parent, as something that can be waited for beside connections."""

    def __init__(self) -> None:
        self.stop = False
        """SIGTERM or SIGINT came."""
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, self._came)

    def _came(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self.stop = True

    def wait(self, seconds: float, sock: socket.socket | None = None) -> bool:
        """Until a signal comes, the time has passed, or the socket is readable: then True."""
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        if sock is not None:
            poll.register(sock, select.POLLIN)
        ready = dict(poll.poll(None if seconds == inf else max(seconds, 0.0) * 1000))
        if self._read.fileno() in ready:
            self._read.recv(4096)
        return sock is not None and sock.fileno() in ready

    def forget(self) -> None:
        """In a child: it has its own ways."""
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        self._read.close()
        self._write.close()


def _raise_file_limit() -> None:
    """A connection is a descriptor: take as many as this user may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
