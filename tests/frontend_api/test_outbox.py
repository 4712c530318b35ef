"""When bytes leave."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from frontend_api.http.outbox import ENOUGH, LARGE, Outbox


class _Transport:
    def __init__(self, log: list[bytes]) -> None:
        self.log = log
        self.closing = False

    def write(self, data: bytes) -> None:
        self.log.append(data)

    def is_closing(self) -> bool:
        return self.closing


async def test_the_first_write_leaves_at_once_and_the_others_in_their_order_after_a_turn_without_more() -> None:
    log: list[bytes] = []
    one, other = (cast(asyncio.Transport, _Transport(log)) for _ in range(2))
    outbox = Outbox()
    for time in (b"1", b"2"):
        log.clear()
        outbox.write(one, time + b"a")
        outbox.write(other, time + b"b")
        await asyncio.sleep(0)
        outbox.write(one, time + b"c")
        await asyncio.sleep(0)
        assert log == [time + b"a"]
        await asyncio.sleep(0)
        assert log == [time + b"a", time + b"b", time + b"c"]


async def test_one_write_a_turn_leaves_at_once() -> None:
    log: list[bytes] = []
    outbox = Outbox()
    for number in range(5):
        outbox.write(cast(asyncio.Transport, _Transport(log)), b"%d" % number)
        assert len(log) == number + 1
        await asyncio.sleep(0)


@pytest.mark.parametrize("each_turn", [1, 3, ENOUGH + 1])
async def test_however_much_comes_it_is_not_held_for_ever(each_turn: int) -> None:
    log: list[bytes] = []
    transport = cast(asyncio.Transport, _Transport(log))
    outbox = Outbox()
    outbox.write(transport, b"first")
    written = 0
    while len(log) == 1:
        for _ in range(each_turn):
            outbox.write(transport, b"more")
        written += each_turn
        await asyncio.sleep(0)
    assert len(log) == 1 + written < 1 + ENOUGH + each_turn


async def test_flush_holds_nothing_back_and_writes_nothing_twice() -> None:
    log: list[bytes] = []
    gone, there = _Transport(log), _Transport(log)
    outbox = Outbox()
    for data in (b"a", b"b"):
        outbox.write(cast(asyncio.Transport, gone), data)
    outbox.write(cast(asyncio.Transport, there), b"c")
    gone.closing = True
    outbox.flush()
    assert log == [b"a", b"c"]
    await asyncio.sleep(0)
    assert log == [b"a", b"c"]


async def test_a_large_write_is_never_held_nor_overtakes_what_is() -> None:
    """Its transport is to say at once that it is too much: what is held is bounded in writes, not in bytes."""
    log: list[bytes] = []
    transport = cast(asyncio.Transport, _Transport(log))
    outbox = Outbox()
    sent = [b"a", b"b", b"x" * LARGE, b"y" * LARGE, b"c"]
    for data in sent:
        outbox.write(transport, data)
    assert log == sent[:-1]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert log == sent
