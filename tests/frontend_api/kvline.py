"""A rank without sockets: its publisher's batches and replay buffer, and a clock."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from frontend_api.kv.contents import Contents
from frontend_api.kv.debt import Debt
from frontend_api.kv.index import Index, chain
from frontend_api.kv.knowledge import Knowledge, Saved, Trouble
from frontend_api.kv.sequence import CHECK_SECONDS, END, Rank

SIZE = 4
pack = msgspec.msgpack.encode


def tokens(block: int) -> list[int]:
    return [block * SIZE + i for i in range(SIZE)]


def stored(block: int, **more: Any) -> dict[str, Any]:
    """Block number `block` of the one prompt there is."""
    event = {
        "type": "BlockStored",
        "block_hashes": [100 + block],
        "parent_block_hash": 99 + block if block else None,
        "token_ids": tokens(block),
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return {**event, **more}


def removed(block: int, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [100 + block], "medium": "GPU", **more}


def batch(*events: Any, rank: int | None = 0) -> bytes:
    return pack([1.5, list(events), rank])


def run(first: int, last: int) -> list[tuple[int, bytes]]:
    """Batches `first` to `last`: batch n stores block n."""
    return [(n, batch(stored(n))) for n in range(first, last + 1)]


class Line:
    """A rank, its publisher's replay buffer, and a clock."""

    def __init__(
        self, *, replays: bool = True, block_size: int | None = SIZE, capacity: int | None = None, limit: int = 1_000
    ) -> None:
        self.index = Index(limit)
        self.now = 0.0
        self.debt = Debt()
        contents = Contents(self.index, block_size=block_size, capacity=capacity, debt=self.debt)
        self.rank = Rank(contents, replays=replays, now=0.0)
        self.buffer: list[tuple[int, bytes]] = []
        self.asked: list[int] = []

    def live(self, *batches: tuple[int, bytes]) -> None:
        for sequence, payload in batches:
            self.rank.live(sequence, payload, self.now)

    def publish(self, *batches: tuple[int, bytes]) -> None:
        self.buffer += batches
        self.live(*batches)

    def replay(self, *, while_running: tuple[tuple[int, bytes], ...] = ()) -> None:
        """Serve what is wanted, until nothing is."""
        while self.rank.wanted is not None:
            start = self.rank.asked()
            self.asked.append(start)
            self.live(*while_running)
            for sequence, payload in list(self.buffer):
                if sequence >= start:
                    self.rank.replayed(sequence, payload, self.now)
            self.rank.replayed(END, b"", self.now)

    def check(self) -> None:
        """Let the rank be quiet until it is asked for its last batch."""
        self.now += CHECK_SECONDS + 0.1
        self.rank.tick(self.now)
        self.replay()

    @property
    def depth(self) -> int:
        prompt = array("I", [t for block in range(20) for t in tokens(block)])
        return self.index.match(chain(prompt, SIZE)).get(self.rank.contents.holder.bit, 0)

    @property
    def state(self) -> tuple[Knowledge, int, list[Trouble]]:
        return self.rank.knowledge, self.depth, self.rank.trouble


def ready(*, upto: int = 2) -> Line:
    line = Line()
    line.buffer = run(0, upto)
    line.replay()
    return line


def restored(line: Line, saved: Saved, *, before: tuple[tuple[int, bytes], ...] = ()) -> Line:
    """A later process with the same publisher."""
    later = Line()
    later.buffer = line.buffer
    for _ in later.rank.restore(saved):
        later.live(*before)
        assert later.depth == 0
    return later


def saved_of(line: Line) -> Saved:
    saved = line.rank.saved()
    assert saved is not None
    return saved
