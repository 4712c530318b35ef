"""Connections for several processes behind one port: their parent accepts, and hands each to the process with the fewest.

Left to the kernel, the processes race for the one listening socket, and one that is awake takes nearly all of a burst (of 32
connections on 4 processes: 32, 0, 0, 0), for as long as the clients keep them. Sockets of their own with SO_REUSEPORT would
spread by chance only, hide an occupied port, and lose what waits at a process that dies. This costs tens of microseconds per
connection and nothing per request.

The parent reads no byte of a connection. What was handed to a process that died is taken back and handed to another.
"""

from __future__ import annotations

import logging
import mmap
import socket
from collections import deque
from collections.abc import Iterator
from itertools import count
from time import monotonic

log = logging.getLogger(__name__)

AT_ONCE = 64
"""Connections between two looks at anything else."""
START_SECONDS = 10.0
"""For which a new process need not show itself."""
STILL_SECONDS = 3.0
"""A process that has not shown itself for so long gets no connection while another has: it hangs or is stopped."""
_CELLS = 3
_ENDED, _LEAVING, _SEEN = 0, 1, 2


class Entrance:
    """Where one process gets its connections from."""

    def __init__(self, sock: socket.socket, cells: memoryview[int]) -> None:
        self.sock = sock
        """Readable when connections wait."""
        self._cells = cells
        self.over = False
        """The parent is gone: nobody comes any more."""

    def arrivals(self) -> Iterator[socket.socket]:
        """The connections that wait, a limited number at once."""
        for _ in range(AT_ONCE):
            try:
                mark, descriptors, _, _ = socket.recv_fds(self.sock, 1, 1)
            except (BlockingIOError, InterruptedError):
                return
            if not mark:
                self.over = True
                return
            if not descriptors:
                log.warning("A connection is lost: this process cannot open more files.")
                self.ended()
            for descriptor in descriptors:
                connection = socket.socket(fileno=descriptor)
                connection.setblocking(False)
                yield connection

    def ended(self) -> None:
        """One of its connections is over."""
        self._cells[_ENDED] += 1

    def beat(self, now: float) -> None:
        """It lives. `now`: monotonic, here and below, which all processes of a host have in common."""
        self._cells[_SEEN] = int(now * 1000)

    def leave(self) -> None:
        """No more, please."""
        self._cells[_LEAVING] = 1


class Handout:
    """The parent's side, for `processes` processes."""

    def __init__(self, sock: socket.socket, processes: int) -> None:
        self.sock = sock
        """Listening; readable when somebody connects."""
        self._cells = memoryview(mmap.mmap(-1, processes * _CELLS * 8)).cast("q")
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        for _ in range(processes):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            theirs.setblocking(False)
            self._pairs.append((ours, theirs))
        self._given = [0] * processes
        self._turns = count(1)
        self._last = [0] * processes
        self._held: deque[socket.socket] = deque()
        """Accepted, and no process could take them yet."""
        self._full = False
        """This process may open no more files, and has said so."""
        for index in range(processes):
            self._row(index)[_LEAVING] = 1  # until it is there

    def _row(self, index: int) -> memoryview[int]:
        return self._cells[index * _CELLS : (index + 1) * _CELLS]

    def open(self, index: int) -> None:
        """A process is about to be started."""
        self._given[index] = 0
        row = self._row(index)
        row[_ENDED] = row[_LEAVING] = 0
        row[_SEEN] = int((monotonic() + START_SECONDS) * 1000)

    def entrance(self, index: int) -> Entrance:
        """In the process itself: what it needs, with everything else closed."""
        self.sock.close()
        for other, (ours, theirs) in enumerate(self._pairs):
            ours.close()
            if other != index:
                theirs.close()
        while self._held:
            self._held.pop().close()
        return Entrance(self._pairs[index][1], self._row(index))

    def recover(self, index: int) -> None:
        """A process is dead: connections that it had not taken yet go to others."""
        self._row(index)[_LEAVING] = 1
        self._take_back(index)

    def _take_back(self, index: int) -> None:
        entrance = Entrance(self._pairs[index][1], self._row(index))
        while waiting := [*entrance.arrivals()]:
            self._held.extend(waiting)
            self._given[index] -= len(waiting)

    def hand_out(self) -> bool:
        """Accept who has come, and hand them out. False: no process can take any more now."""
        for _ in range(AT_ONCE):
            if not self._held:
                try:
                    connection, _ = self.sock.accept()
                except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                    return True
                except OSError as error:
                    if not self._full:
                        log.warning("No connection can be accepted now: %s", error)
                    self._full = True
                    return False
                self._full = False
                self._held.append(connection)
            if not self._give(self._held[0]):
                return False
            self._held.popleft().close()
        return True

    def _give(self, connection: socket.socket) -> bool:
        cells, given, last = self._cells, self._given, self._last
        for index in sorted(self.awake(), key=lambda i: (given[i] - cells[i * _CELLS + _ENDED], last[i])):
            try:
                socket.send_fds(self._pairs[index][0], [b"c"], [connection.fileno()])
            except OSError:  # it has many to take yet
                continue
            given[index] += 1
            last[index] = next(self._turns)
            return True
        return False

    @property
    def waiting(self) -> bool:
        """There are connections that no process has."""
        return bool(self._held)

    def awake(self) -> list[int]:
        """The processes that want connections and have shown themselves lately, or all if none has. What those that stand still
        have not taken yet is taken back from them."""
        cells = self._cells
        since = int((monotonic() - STILL_SECONDS) * 1000)
        there = [index for index in range(len(self._given)) if not cells[index * _CELLS + _LEAVING]]
        still = [index for index in there if cells[index * _CELLS + _SEEN] < since]
        if not still or len(still) == len(there):
            return there
        for index in still:
            self._take_back(index)
        return [index for index in there if index not in still]

    def close(self) -> None:
        """Nobody may connect any more. Who has come until now is handed out."""
        while self._pending() and self.hand_out():
            pass
        self.sock.close()

    def _pending(self) -> bool:
        if not self._held:
            try:
                self._held.append(self.sock.accept()[0])
            except OSError:
                return False
        return True
