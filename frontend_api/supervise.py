"""The parent of the router processes: holds the listening socket, starts them, restarts what dies, passes on SIGTERM.

It serves no request and holds no state of its own. Children see its death by a pipe and drain.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import time

import uvloop

from frontend_api import process
from frontend_api.process import Options
from frontend_api.shared import Slots

log = logging.getLogger(__name__)

RESTART_PAUSE = 1.0
"""Seconds that a child must have lived to be restarted at once."""
GRACE = 5.0
"""Seconds after the drain limit at which a child that hangs is killed."""


class Supervisor:
    def __init__(self, options: Options, sock: socket.socket, processes: int) -> None:
        self._options = options
        self._sock = sock
        self._wanted = processes
        self._slots = Slots(processes)
        self._children: dict[int, tuple[int, float]] = {}
        """pid -> index, monotonic time of start"""
        self._stopping = False
        self._alive, self._hold = os.pipe()

    def run(self) -> int:
        """Until SIGTERM or SIGINT. Returns the exit code."""
        _raise_file_limit()
        signals = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        for index in range(self._wanted):
            self._start(index)
        while not self._stopping:
            if signal.sigwait(signals) == signal.SIGCHLD:
                self._reap()
            else:
                self._stopping = True
        self._sock.close()
        self._signal_all(signal.SIGTERM)
        deadline = time.monotonic() + self._options.drain_seconds + GRACE
        while self._children:
            left = deadline - time.monotonic()
            if left <= 0 or signal.sigtimedwait({signal.SIGCHLD}, left) is None:
                self._signal_all(signal.SIGKILL)
                deadline = time.monotonic() + GRACE
            self._reap()
        return 0

    def _start(self, index: int) -> None:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(self._hold)
                gc.freeze()  # what is loaded by now stays: the collector need not walk it again and again
                gc.set_threshold(20_000, 20, 50)  # requests leave no cycles behind
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    runner.run(
                        process.run(self._options, self._sock, parent_gone=self._alive, slots=self._slots, index=index)
                    )
                code = 0
            except BaseException:
                log.exception("The router process failed.")
            finally:
                os._exit(code)
        self._children[pid] = index, time.monotonic()

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            child = self._children.pop(pid, None)
            if child is None or self._stopping:
                continue
            index, started = child
            log.error("Router process %d ended (%s); starting another.", pid, os.waitstatus_to_exitcode(status))
            if time.monotonic() - started < RESTART_PAUSE:
                time.sleep(RESTART_PAUSE)
            self._start(index)

    def _signal_all(self, number: signal.Signals) -> None:
        for pid in self._children:
            os.kill(pid, number)


def _raise_file_limit() -> None:
    """A connection is a descriptor: take as many as this user may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
