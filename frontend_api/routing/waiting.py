"""Requests that wait in this process while every engine they could go to is full: one line per deployment.

Of those that wait the one with the higher priority goes first, else the one that came first; so it is between the processes
of one host too, as each shows the claim of the first one of a line. They are called when load is released, here or elsewhere,
and when the fleet changes; nothing polls. It decides nothing about engines: who is called chooses anew, and stays if there was no room.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from time import monotonic
from typing import Protocol
from zlib import crc32

from frontend_api.routing.loads import Loads
from frontend_api.routing.view import Deployment, View

HEAD_START = 0.002
"""Seconds that a sibling with a more urgent request in the same line gets before this process looks for room …"""
HEAD_STARTS = 3
"""… and how often, if it still waits: what it waits for may be something else."""


class Waiter(Protocol):
    def room(self, deployment: Deployment | None) -> None:
        """There may be room: choose anew, among the engines of now. None: the deployment is gone. Leaves its place if served."""

    def no_room(self) -> None:
        """It has waited for as long as it may, and has left its place."""


def _claim(priority: int, since: float) -> int:
    """Smaller is more urgent; never 0. Comparable between the processes of one host. `since`: monotonic."""
    return (-max(min(priority, 1 << 14), -1 << 14) << 48) + int(since * 1000)


class Place:
    """One request's place in a line."""

    __slots__ = ("alone", "line", "priority", "since", "timer", "waited", "waiter")

    def __init__(self, waiter: Waiter, line: Line, *, alone: bool, priority: int, waited: float) -> None:
        self.waiter = waiter
        self.line: Line | None = line
        self.alone = alone
        """It needs an answering engine only: it may pass those that need a prefill engine too, and they it."""
        self.priority = priority
        self.waited = waited
        """Seconds, in places that it had before …"""
        self.since = monotonic() - waited
        """… which count for its age."""
        self.timer: asyncio.TimerHandle | None = None

    @property
    def claim(self) -> int:
        return _claim(self.priority, self.since)


class Line:
    """Those that wait for one deployment."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.key = crc32(name.encode())
        """The name, for siblings."""
        self._queues: dict[tuple[bool, int], OrderedDict[Place, None]] = {}
        """By `alone` and priority, the oldest first. A dict would keep the gaps of those that left at its front."""

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def add(self, place: Place) -> None:
        queue = self._queues.setdefault((place.alone, place.priority), OrderedDict())
        queue[place] = None
        if place.waited:
            for other in [other for other in queue if other.since > place.since]:
                queue.move_to_end(other)

    def remove(self, place: Place) -> None:
        key = place.alone, place.priority
        del self._queues[key][place]
        if not self._queues[key]:
            del self._queues[key]

    def first(self, *, alone: bool) -> Place | None:
        priority = max((priority for kind, priority in self._queues if kind is alone), default=None)
        return next(iter(self._queues[alone, priority])) if priority is not None else None

    def firsts(self) -> list[Place]:
        """The first of each kind, the most urgent one before."""
        found = [place for alone in (False, True) if (place := self.first(alone=alone)) is not None]
        return sorted(found, key=lambda place: place.claim)

    def serve(self, deployment: Deployment | None) -> None:
        """Call one after the other, of each kind until there is no room for the next."""
        blocked: set[bool] = set()
        while places := [place for place in self.firsts() if place.alone not in blocked]:
            place = places[0]
            place.waiter.room(deployment)
            if place.line is not None:
                blocked.add(place.alone)


class Waiting:
    """All lines of this process."""

    def __init__(self, view: View, loads: Loads) -> None:
        self._view = view
        self._loads = loads
        self._lines: dict[str, Line] = {}
        self._due: asyncio.Handle | None = None
        self._gave_way = 0

    def listen(self) -> None:
        """Hear the calls of sibling processes."""
        if self._loads.waker is not None:
            asyncio.get_running_loop().add_reader(self._loads.waker, self._called)

    def close(self) -> None:
        if self._loads.waker is not None:
            asyncio.get_running_loop().remove_reader(self._loads.waker)

    def counts(self) -> Iterator[tuple[str, int]]:
        """How many wait, by served name."""
        return ((name, len(line)) for name, line in self._lines.items())

    def before(self, deployment: Deployment, *, alone: bool, priority: int) -> bool:
        """Whether a newcomer has to queue up behind somebody, here or in a sibling."""
        line = self._lines.get(deployment.served_name)
        first = line.first(alone=alone) if line is not None else None
        if first is not None:
            return first.priority >= priority
        claims = self._loads.claims()
        if not claims:
            return False
        key, own = crc32(deployment.served_name.encode()), _claim(priority, monotonic())
        return any(of == key and claim <= own for claim, of in claims)

    def join(
        self, deployment: Deployment, waiter: Waiter, *, alone: bool, priority: int, waited: float = 0.0
    ) -> Place | None:
        """A place in the line; None: the line is full. `waited`: seconds for which it has waited before."""
        name, policy = deployment.served_name, deployment.routing
        line = self._lines.get(name) or Line(name)
        if len(line) >= policy.queue_limit:
            return None
        place = Place(waiter, line, alone=alone, priority=priority, waited=waited)
        left = max(policy.queue_seconds - waited, 0.0)
        place.timer = asyncio.get_running_loop().call_later(left, self._give_up, place)
        self._lines[name] = line
        line.add(place)
        self._show_claim()
        self._soon()  # what became free between looking and standing here was told to nobody
        return place

    def leave(self, place: Place) -> None:
        """For whatever reason; twice does no harm."""
        line, place.line = place.line, None
        if line is None:
            return
        if place.timer is not None:
            place.timer.cancel()
        line.remove(place)
        if not len(line):
            del self._lines[line.name]
        self._show_claim()

    def follow(self, view: View) -> None:
        """A new snapshot: other engines, other limits."""
        for deployment in view.deployments.values():
            freed = self.freed if deployment.routing.max_in_flight is not None else None
            for engine in (*deployment.prefill, *deployment.decode, *deployment.aggregated):
                engine.freed = freed
        self.look()

    def freed(self) -> None:
        """A request has ended at an engine whose number of requests is limited."""
        self._loads.call()
        self.look()

    def look(self) -> None:
        """There may be room somewhere."""
        if self._lines:
            self._soon()

    def _called(self) -> None:
        self._loads.answer_call()
        self.look()

    def _give_up(self, place: Place) -> None:
        self.leave(place)
        place.waiter.no_room()

    def _show_claim(self) -> None:
        self._loads.claim(*sorted((line.firsts()[0].claim, line.key) for line in self._lines.values()))

    def _gives_way(self) -> bool:
        """Whether a sibling has a more urgent request in a line that this process has too."""
        own = {line.key: line.firsts()[0].claim for line in self._lines.values()}
        return any(line in own and claim < own[line] for claim, line in self._loads.claims())

    def _soon(self) -> None:
        """Serve after what is being done now: who gave a load back may be about to take another."""
        if self._due is None:
            self._due = asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        self._due = None
        if self._gave_way < HEAD_STARTS and self._gives_way():
            self._gave_way += 1
            self._due = asyncio.get_running_loop().call_later(HEAD_START, self._serve)
            return
        self._gave_way = 0
        self._loads.look(monotonic())
        for name, line in list(self._lines.items()):
            line.serve(self._view.deployments.get(name))
