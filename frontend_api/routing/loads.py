"""What other routers have at each engine, seen in time for the next choice, so that N routers do not all take the same one.

Processes of one host share a table: a row for each, made by their parent before it forks. A row is written by its process
alone, cell by cell, the moment a load changes: no lock, and nothing to wait for. Which engine a cell belongs to is written in
the row itself, so that processes may take in snapshots at different moments. What routers of other hosts say arrives by
`hear`; a router that falls silent has no load any more.

No IO but for the wake-up calls to processes whose requests wait for room.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from math import inf
from random import getrandbits
from zlib import crc32

from frontend_api.routing.view import Engine, View

log = logging.getLogger(__name__)

ENGINES = 2_048
"""For which a process has room; the loads of further ones are not seen by its siblings."""
REFRESH_SECONDS = 0.00025
"""For each sibling that is to be looked at, so that looking costs a process about one part in a hundred at most …"""
LEAST_REFRESH_SECONDS = 0.001
"""… and no less than this."""
SILENCE_SECONDS = 3.0
"""After which a router of another host that says nothing is taken to have no load."""
LINES = 16
"""In which siblings see that a process has requests waiting: of more, those with the most urgent ones."""
_NAMES_SUM, _NAMES, _CLAIMS = 0, 1, 2
"""Head of a row: checksum and number of the names, and the claim of the first waiting request of each line, with the line."""
_HEAD = _CLAIMS + 2 * LINES
_VALUES = _HEAD + ENGINES
_STRIDE = 3
"""Values of one engine: requests, waiting prompt tokens, KV tokens taken since it told of its room."""
_ROOMS = _VALUES + _STRIDE * ENGINES
"""Two more of each: what an engine told of its free KV, in tokens, and when, in ms; 0: never."""
_ROW = _ROOMS + 2 * ENGINES

Heard = Mapping[str, tuple[int, int, int]]
"""The values of each engine, by `label`."""


def label(engine: Engine) -> str:
    """Names an engine process for all routers."""
    return f"{engine.spec.id}:{engine.spec.attempt}"


def _name(engine: Engine) -> int:
    digest = blake2b(f"{label(engine)} {engine.spec.url}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _room_of(cell: int) -> int:
    return _ROOMS + 2 * ((cell - _VALUES) // _STRIDE)


class Table:
    """The shared memory of `count` processes."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.host = f"{getrandbits(64):016x}"
        """Names this group of processes to routers elsewhere."""
        self._cells = memoryview(mmap.mmap(-1, count * _ROW * 8)).cast("q")
        self.wakers = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(count)]
        """Readable when a process should look whether there is room for its waiting requests."""

    def row(self, index: int) -> memoryview[int]:
        return self._cells[index * _ROW : (index + 1) * _ROW]

    def clear(self, index: int) -> None:
        """The process is dead, and its requests with it."""
        self.row(index)[:] = memoryview(bytes(_ROW * 8)).cast("q")

    def close(self) -> None:
        for waker in self.wakers:
            os.close(waker)


class _Sibling:
    """Another process's row, as it was read last."""

    def __init__(self, row: memoryview[int], waker: int) -> None:
        self.row = row
        self.waker = waker
        self._sum = 0
        self._values = row[:0]
        self._raw = b""
        self.positions: list[int] = []
        """Of the engines that its cells belong to; -1: an engine that is not known here."""
        self.loads: list[int] = []

    @property
    def current(self) -> bool:
        """Its cells belong to the engines that they belonged to when it was read last."""
        return self.row[_NAMES_SUM] == self._sum

    def look(self, positions: Mapping[int, int], *, anew: bool) -> bool:
        """Read the row. False: it says what it said before. `positions`: of engines by name; `anew`: they have changed."""
        row = self.row
        if anew or row[_NAMES_SUM] != self._sum:
            names = row[_HEAD : _HEAD + row[_NAMES]]
            if crc32(names.tobytes()) == row[_NAMES_SUM]:  # else it is half written
                self._sum = row[_NAMES_SUM]
                self.positions = [positions.get(name, -1) for name in names]
                self._values = row[_VALUES : _VALUES + _STRIDE * len(names)]
                anew = True
        raw = self._values.tobytes()
        if raw == self._raw and not anew:
            return False
        self._raw = raw
        self.loads = self._values.tolist()
        return True


class Loads:
    """What this process shows of its loads, and sees of the others'. Without a table it has no siblings."""

    def __init__(self, table: Table | None = None, index: int = 0) -> None:
        self.host = table.host if table is not None else f"{getrandbits(64):016x}"
        self.waker = table.wakers[index] if table is not None else None
        self._row = table.row(index) if table is not None else None
        self._siblings = (
            [_Sibling(table.row(other), table.wakers[other]) for other in range(table.count) if other != index]
            if table is not None
            else []
        )
        self._pause = max(LEAST_REFRESH_SECONDS, REFRESH_SECONDS * len(self._siblings))
        self._cells: dict[Engine, int] = {}
        self._engines: list[Engine] = []
        self._positions: dict[int, int] = {}
        self._labels: dict[str, int] = {}
        self._abroad: dict[str, tuple[float, Heard]] = {}
        """Router of another host -> until when what it said counts, and what it said."""
        self._expires = inf
        self._anew = True
        self._next = 0.0

    def follow(self, view: View) -> None:
        """Keep a cell for each engine of a snapshot, and for those that left as long as they have requests."""
        self._engines = [*view.engines()]
        self._positions = {_name(engine): at for at, engine in enumerate(self._engines)}
        self._labels = {label(engine): at for at, engine in enumerate(self._engines)}
        if self._row is not None:
            self._take_cells(self._row)
        self._anew = True
        self._next = 0.0

    def _take_cells(self, row: memoryview[int]) -> None:
        cells = self._cells
        present = set(self._engines)
        for engine in [e for e in cells if e not in present and not e.in_flight]:
            at = cells.pop(engine)
            engine.cells, engine.cell = [0] * _STRIDE, 0
            row[at] = row[at + 1] = row[at + 2] = 0
            room = _room_of(at)
            row[room] = row[room + 1] = 0
        taken = set(cells.values())
        free = (at for at in range(_VALUES, _ROOMS, _STRIDE) if at not in taken)
        for engine in self._engines:
            if engine not in cells:
                at = next(free, 0)
                if not at:
                    log.error("More than %d engines: the loads of %s are not shared.", ENGINES, engine.id)
                    continue
                cells[engine] = at
                row[at], row[at + 1], row[at + 2] = engine.in_flight, engine.queued, engine.kv
                engine.cells, engine.cell = row, at
        names = [0] * ((max(cells.values(), default=_VALUES - _STRIDE) - _VALUES) // _STRIDE + 1)
        for engine, at in cells.items():
            names[(at - _VALUES) // _STRIDE] = _name(engine)
        for at, name in enumerate(names, _HEAD):
            row[at] = name
        row[_NAMES] = len(names)
        row[_NAMES_SUM] = crc32(row[_HEAD : _HEAD + len(names)].tobytes())

    # ---- the others' loads

    @property
    def shared(self) -> bool:
        """Whether there is anybody else."""
        return bool(self._siblings or self._abroad)

    def refresh(self, now: float) -> None:
        """Before a choice: see what the others have, unless that was done just now. `now`: monotonic."""
        if now >= self._next:
            self.look(now)

    def look(self, now: float) -> None:
        """See what the others have at this moment."""
        self._next = now + self._pause
        anew, self._anew = self._anew, False
        changed = anew
        for sibling in self._siblings:
            if sibling.look(self._positions, anew=anew):
                changed = True
        if now >= self._expires:
            self._abroad = {router: said for router, said in self._abroad.items() if said[0] > now}
            self._expires = min((until for until, _ in self._abroad.values()), default=inf)
            changed = True
        if changed:
            self._add_up()

    def _add_up(self) -> None:
        requests = [0] * (len(self._engines) + 1)  # the last one is for engines that are not known here
        tokens = requests[:]
        taken = requests[:]
        for sibling in self._siblings:
            values = iter(sibling.loads)
            for at, have, wait, kv in zip(sibling.positions, values, values, values, strict=False):
                if have or kv:  # most have nothing at most engines
                    requests[at] += have
                    tokens[at] += wait
                    taken[at] += kv
        for _, heard in self._abroad.values():
            for name, (have, wait, kv) in heard.items():
                at = self._labels.get(name, -1)
                requests[at] += have
                tokens[at] += wait
                taken[at] += kv
        for at, engine in enumerate(self._engines):
            engine.others, engine.others_queued = requests[at], tokens[at]
            if taken[at] != engine.others_kv:
                engine.others_take(taken[at])

    def hear(self, router: str, heard: Heard, now: float) -> None:
        """What a router of another host has: all of it, in place of what it said before."""
        if heard:
            self._abroad[router] = now + SILENCE_SECONDS, heard
        else:
            self._abroad.pop(router, None)
        self._expires = min((until for until, _ in self._abroad.values()), default=inf)
        self._add_up()
        self._next = 0.0

    def said(self) -> dict[str, tuple[int, int, int]]:
        """What this process has, for routers of other hosts."""
        return {label(e): (e.in_flight, e.queued, e.kv) for e in self._engines if e.in_flight or e.queued or e.kv}

    # ---- what engines tell of their free KV: one process of a host asks them, its siblings see the answers

    def tell_room(self, engine: Engine, free: int, now: float) -> None:
        """An engine has so many KV tokens free. `now`: monotonic, one clock for all processes of a host."""
        engine.tells_room(free, now)
        at = self._cells.get(engine)
        if self._row is not None and at is not None:
            room = _room_of(at)
            self._row[room], self._row[room + 1] = free, int(now * 1_000)

    def see_rooms(self, now: float) -> None:
        """Take in what engines told a sibling since the last time. `now`: monotonic."""
        if self._siblings:
            self.look(now)  # whose cells are whose
        for sibling in self._siblings:
            row = sibling.row
            if not sibling.current:
                continue
            for number, position in enumerate(sibling.positions):
                room = _ROOMS + 2 * number
                told_at = row[room + 1] / 1_000
                if position >= 0 and told_at and told_at > self._engines[position].room_told_at + 0.001:
                    self._engines[position].tells_room(row[room], told_at)

    # ---- requests that wait for room

    def claim(self, *firsts: tuple[int, int]) -> None:
        """Show the siblings how urgent the first waiting request of each line is (never 0), and which line that is; the smallest
        first."""
        if self._row is not None:
            cells = [cell for first in firsts[:LINES] for cell in first]
            for at, cell in enumerate([*cells, 0] if len(firsts) < LINES else cells, _CLAIMS):
                self._row[at] = cell

    def claims(self) -> list[tuple[int, int]]:
        """The siblings' claims and their lines."""
        found = []
        for sibling in self._siblings:
            at = _CLAIMS
            while at < _HEAD and (claim := sibling.row[at]):
                found.append((claim, sibling.row[at + 1]))
                at += 2
        return found

    def answer_call(self) -> None:
        """A sibling has called."""
        if self.waker is not None:
            with suppress(BlockingIOError):
                os.eventfd_read(self.waker)

    def call(self) -> None:
        """Some load is gone: siblings whose requests wait shall look."""
        for sibling in self._siblings:
            if sibling.row[_CLAIMS]:
                os.eventfd_write(sibling.waker, 1)
