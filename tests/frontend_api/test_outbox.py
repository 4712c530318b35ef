"""When bytes leave."""

from __future__ import annotations

import asyncio
from typing import cast

from frontend_api.http.outbox import Outbox


class _Transport:
    def __init__(self, log: list[bytes]) -> None:
        self.log = log
        self.closing = False

    def write(self, data: bytes) -> None:
        self.log.append(data)

    def is_closing(self) -> bool:
        return self.closing


async def test_the_first_write_of_a_turn_leaves_at_once_and_the_others_at_its_end_in_their_order() -> None:
    log: list[bytes] = []
    one, other = (cast(asyncio.Transport, _Transport(log)) for _ in range(2))
    outbox = Outbox()
    for turn in (b"1", b"2"):
        log.clear()
        outbox.write(one, turn + b"a")
        outbox.write(other, turn + b"b")
        outbox.write(one, turn + b"c")
        assert log == [turn + b"a"]
        await asyncio.sleep(0)
        assert log == [turn + b"a", turn + b"b", turn + b"c"]


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
