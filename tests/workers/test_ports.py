"""Ports by bind test: disjoint, free, promised once."""

from __future__ import annotations

import random
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.fleet.errors import Unavailable
from controlplane.fleet.model import Ports, Role
from workers.ports import is_free, numbers, take


def test_a_listening_port_is_not_free() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert not is_free("127.0.0.1", taken.getsockname()[1])
    assert is_free("127.0.0.1", 0)


def test_a_wildcard_listener_takes_the_port_of_each_address() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        assert not is_free("127.0.0.1", taken.getsockname()[1])


@given(st.sets(st.integers(21000, 21019)), st.sets(st.integers(21000, 21019)), st.sampled_from(Role), st.randoms())
def test_what_is_taken_is_disjoint_free_and_in_range(
    promised: set[int], busy: set[int], role: Role, chance: random.Random
) -> None:
    wanted = 3 if role is Role.AGGREGATED else 4
    room = set(range(21000, 21020)) - promised - busy
    try:
        ports = take(
            "127.0.0.1", (21000, 21019), role, promised=promised, chance=chance, free=lambda _, port: port not in busy
        )
    except Unavailable:
        assert len(room) < wanted
        return
    assert len(set(numbers(ports))) == wanted
    assert set(numbers(ports)) <= room
    assert (ports.side_channel == 0) == (role is Role.AGGREGATED)


def test_an_engine_that_has_not_bound_yet_keeps_its_ports() -> None:
    chance = random.Random(1)
    first = take("127.0.0.1", (21000, 21007), Role.DECODE, promised=(), chance=chance, free=lambda *_: True)
    second = take(
        "127.0.0.1", (21000, 21007), Role.DECODE, promised=numbers(first), chance=chance, free=lambda *_: True
    )
    assert not set(numbers(first)) & set(numbers(second))
    with pytest.raises(Unavailable, match="TANDEM_ENGINE_PORTS"):
        take("127.0.0.1", (21000, 21007), Role.DECODE, promised=(*numbers(first), *numbers(second)), chance=chance)


def test_no_ports_are_no_numbers() -> None:
    assert numbers(None) == ()
    assert numbers(Ports(http=5, side_channel=0, events=6, replay=7)) == (5, 6, 7)
