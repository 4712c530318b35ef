"""Connections that one process accepts and others serve: evenly, and none is lost with a process that dies."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from time import monotonic

import pytest

from frontend_api.command import bind
from frontend_api.processes import handout
from frontend_api.processes.handout import AT_ONCE, Entrance, Handout


class House:
    """A port with some processes behind it, all played by this one."""

    def __init__(self, processes: int) -> None:
        self.handout = Handout(bind("127.0.0.1", 0), processes)
        self.address = self.handout.sock.getsockname()
        self.entrances = [Entrance(self.handout._pairs[at][1], self.handout._row(at)) for at in range(processes)]
        self.stack = ExitStack()
        self.taken: list[list[socket.socket]] = [[] for _ in range(processes)]

    def connect(self, many: int) -> None:
        for _ in range(many):
            self.stack.enter_context(socket.create_connection(self.address))

    def take(self, index: int) -> int:
        """What one process finds at its entrance."""
        found = []
        while more := [*self.entrances[index].arrivals()]:
            found += more
        self.taken[index] += found
        return len(found)

    def close(self) -> None:
        self.handout.close()
        self.stack.close()
        for sock in [s for taken in self.taken for s in taken]:
            sock.close()
        for pair in self.handout._pairs:
            for sock in pair:
                sock.close()
        for held in self.handout._held:
            held.close()


@pytest.fixture
def house() -> Iterator[House]:
    made = House(3)
    for index in range(3):
        made.handout.open(index)
    yield made
    made.close()


def test_each_gets_as_many_and_newcomers_go_where_some_have_ended(house: House) -> None:
    house.connect(30)
    assert house.handout.hand_out()
    assert [house.take(index) for index in range(3)] == [10, 10, 10]
    for _ in range(6):
        house.entrances[1].ended()
    house.connect(8)
    assert house.handout.hand_out()
    got = [house.take(index) for index in range(3)]
    assert sum(got) == 8
    assert got[1] in (6, 7)  # six have ended there; the last two go round


def test_bytes_go_both_ways(house: House) -> None:
    client = house.stack.enter_context(socket.create_connection(house.address))
    house.handout.hand_out()
    assert sum(house.take(index) for index in range(3)) == 1
    (server,) = [sock for taken in house.taken for sock in taken]
    client.send(b"ping")
    server.setblocking(True)
    assert server.recv(4) == b"ping"
    server.send(b"pong")
    assert client.recv(4) == b"pong"
    assert server.getpeername() == client.getsockname()


def test_what_a_dead_process_had_not_taken_goes_to_the_others(house: House) -> None:
    house.connect(30)
    house.handout.hand_out()
    house.handout.recover(0)
    assert house.handout.hand_out()
    assert [house.take(index) for index in range(3)] == [0, 15, 15]
    house.handout.open(0)  # its successor
    house.connect(15)
    house.handout.hand_out()
    assert [house.take(index) for index in range(3)] == [15, 0, 0]


def test_who_leaves_gets_no_more(house: House) -> None:
    house.entrances[2].leave()
    house.connect(10)
    house.handout.hand_out()
    assert [house.take(index) for index in range(3)] == [5, 5, 0]


def test_with_nobody_there_connections_wait(house: House) -> None:
    for index in range(3):
        house.handout.recover(index)
    house.connect(5)
    assert not house.handout.hand_out()
    house.handout.open(1)
    assert house.handout.hand_out()
    assert house.take(1) == 5


def test_a_process_that_takes_nothing_holds_nobody_up(house: House) -> None:
    """It hangs: its share is what fits into its entrance, the others serve the rest."""
    left, rounds = 0, 0
    while rounds < 40:
        house.connect(AT_ONCE)
        house.handout.hand_out()
        left += house.take(1) + house.take(2)
        rounds += 1
    assert left > 40 * AT_ONCE * 2 / 3 - 1
    for index in (1, 2):  # all their connections end: without a limit the one that hangs would still look full
        for _ in house.taken[index]:
            house.entrances[index].ended()
    house.connect(10)
    house.handout.hand_out()
    assert house.take(1) + house.take(2) == 10


def test_a_process_that_stands_still_gets_no_more_and_gives_back_what_it_had_not_taken(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.connect(9)
    house.handout.hand_out()
    assert house.take(1) + house.take(2) == 6
    later = monotonic() + 60
    monkeypatch.setattr(handout, "monotonic", lambda: later)
    for index in (1, 2):
        house.entrances[index].beat(later)
    house.handout.awake()
    assert house.handout.waiting
    house.connect(21)
    house.handout.hand_out()
    assert [house.take(index) for index in range(3)] == [0, 12, 12]
    house.entrances[0].beat(later)
    house.connect(15)
    house.handout.hand_out()
    assert [house.take(index) for index in range(3)] == [15, 0, 0]


def test_where_all_stand_still_all_are_taken_for_alive(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    later = monotonic() + 60
    monkeypatch.setattr(handout, "monotonic", lambda: later)
    house.connect(6)
    house.handout.hand_out()
    assert [house.take(index) for index in range(3)] == [2, 2, 2]


def test_a_process_sees_that_its_parent_is_gone(house: House) -> None:
    house.handout._pairs[0][0].close()
    assert not house.take(0)
    assert house.entrances[0].over
    assert not house.take(1)
    assert not house.entrances[1].over


def test_a_connection_for_which_there_is_no_descriptor_counts_as_ended(house: House) -> None:
    house.connect(6)
    house.handout.hand_out()
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # all that may be opened are
    try:
        assert not house.take(0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    house.connect(2)
    house.handout.hand_out()
    assert house.take(0) == 2


def test_a_parent_that_may_open_no_more_files_says_so_once(house: House, caplog: pytest.LogCaptureFixture) -> None:
    house.connect(2)
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for _ in range(2):
        caplog.clear()
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            assert not any(house.handout.hand_out() for _ in range(3))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        assert len(caplog.records) == 1
        assert house.handout.hand_out()
        house.connect(1)


def test_whoever_connected_before_the_end_is_served(house: House) -> None:
    house.connect(9)
    house.handout.close()
    assert [house.take(index) for index in range(3)] == [3, 3, 3]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(house.address)
