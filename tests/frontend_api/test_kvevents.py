"""What a rank's frames prove, as tables: sequences, gaps, replays, restarts, both encodings. No sockets."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend_api.kvevents import CHECK_SECONDS, END, OWED_SECONDS, Knowledge, Rank, Trouble
from frontend_api.kvindex import Index, chain

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

    def __init__(self, *, replays: bool = True, block_size: int | None = SIZE) -> None:
        self.index = Index()
        self.now = 0.0
        self.rank = Rank(self.index, block_size=block_size, replays=replays, now=0.0)
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
        return self.index.match(chain(prompt, SIZE)).get(self.rank.holder.bit, 0)

    @property
    def state(self) -> tuple[Knowledge, int, list[Trouble]]:
        return self.rank.knowledge, self.depth, list(self.rank.trouble)


def ready(*, upto: int = 2) -> Line:
    line = Line()
    line.buffer = run(0, upto)
    line.replay()
    return line


def test_a_fresh_engine_is_known_wholly() -> None:
    line = Line()
    assert line.state == (Knowledge.UNHEARD, 0, [])
    line.replay()
    assert line.state == (Knowledge.COMPLETE, 0, [])
    line.publish(*run(0, 3))
    assert line.state == (Knowledge.COMPLETE, 4, [])
    assert line.asked == [0]


def test_a_late_start_replays_from_the_beginning() -> None:
    line = Line()
    line.buffer = run(0, 4)
    line.live((4, line.buffer[-1][1]))
    line.replay(while_running=tuple(run(5, 6)))
    assert line.state == (Knowledge.COMPLETE, 7, [])


def test_a_replay_that_begins_later_is_known_in_part() -> None:
    line = Line()
    line.buffer = [(7, batch(stored(0)))]
    line.replay()
    assert line.state == (Knowledge.PARTIAL, 1, [])
    line.publish((8, pack([1.0, [{"type": "AllBlocksCleared"}], 0])), (9, batch(stored(0))))
    assert line.state == (Knowledge.COMPLETE, 1, [])


def test_a_gap_is_closed_by_replay() -> None:
    line = ready()
    line.buffer += run(3, 6)
    line.live(line.buffer[5])
    assert line.depth == 3
    line.replay(while_running=(line.buffer[6],))
    assert line.state == (Knowledge.COMPLETE, 7, [])
    assert line.asked == [0, 2]


def test_a_gap_that_replay_does_not_close_costs_the_blocks() -> None:
    line = ready()
    line.buffer = [(5, batch(stored(0)))]
    line.live(line.buffer[0])
    line.replay()
    assert line.state == (Knowledge.PARTIAL, 1, [Trouble.GAP])
    assert line.rank.gaps == 1


def test_a_batch_that_the_replay_lacks_in_its_middle_counts_as_a_gap() -> None:
    line = Line()
    line.buffer = [*run(0, 1), (3, batch(stored(0)))]
    line.replay()
    assert line.state == (Knowledge.PARTIAL, 1, [Trouble.GAP])


def test_without_a_replay_address_a_gap_costs_the_blocks_at_once() -> None:
    line = Line(replays=False)
    line.live(*run(0, 2))
    assert line.state == (Knowledge.COMPLETE, 3, [])
    line.live((5, batch(stored(0))))
    assert line.state == (Knowledge.PARTIAL, 1, [Trouble.GAP])


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_lower_sequence_is_a_restart(first: int) -> None:
    line = ready(upto=4)
    line.buffer = [(n, batch(stored(0), stored(n + 1, parent_block_hash=100))) for n in range(first + 1)]
    line.live(line.buffer[first])
    line.replay()
    assert line.state == (Knowledge.COMPLETE, 2, [])
    assert line.rank.restarts == 1
    assert (
        line.index.match(chain(array("I", [t for b in range(5) for t in tokens(b)]), SIZE))[line.rank.holder.bit] == 2
    )


def test_without_a_replay_address_a_restart_starts_empty() -> None:
    line = Line(replays=False)
    line.live(*run(0, 4))
    line.live((0, batch(stored(0))))
    assert line.state == (Knowledge.COMPLETE, 1, [])
    line.live(*run(1, 4), (2, batch(stored(0))))
    assert line.state == (Knowledge.PARTIAL, 1, [])


@pytest.mark.parametrize("batches", [1, 3, 5])
def test_a_restart_behind_our_back_is_found_when_it_is_quiet(batches: int) -> None:
    line = ready(upto=2)
    line.buffer = [(n, batch(stored(0), removed(0), stored(0), rank=0)) for n in range(batches)]
    line.check()
    assert line.state == (Knowledge.COMPLETE, 1, [])
    assert line.rank.restarts == 1


def test_a_batch_that_was_lost_at_the_end_is_found_when_it_is_quiet() -> None:
    line = ready()
    line.buffer += run(3, 4)
    line.check()
    assert line.state == (Knowledge.COMPLETE, 5, [])
    assert line.rank.restarts == 0
    line.check()
    assert line.state == (Knowledge.COMPLETE, 5, [])
    assert line.asked == [0, 2, 4]


def test_a_batch_that_comes_twice_or_was_replayed_already_is_taken_once() -> None:
    line = ready()
    line.live(line.buffer[-1])
    assert line.state == (Knowledge.COMPLETE, 3, [])
    assert line.rank.restarts == 0


def test_no_answer_to_a_replay() -> None:
    line = Line()
    line.rank.asked()
    line.live((6, batch(stored(0))), (7, batch(stored(1))))
    line.rank.replay_failed(5.0)
    assert line.state == (Knowledge.PARTIAL, 2, [])
    line.now = 20.0
    line.rank.tick(line.now)
    line.rank.asked()
    line.rank.replay_failed(line.now)
    assert line.state == (Knowledge.PARTIAL, 2, [Trouble.SILENT])
    line.buffer = [(7, batch(stored(1)))]
    line.check()
    assert line.state == (Knowledge.PARTIAL, 2, [])


def test_an_engine_that_computes_and_tells_nothing() -> None:
    line = Line()
    line.replay()
    line.rank.computed(1.0)
    line.rank.tick(1.0 + OWED_SECONDS)
    assert line.rank.evident
    line.rank.tick(1.1 + OWED_SECONDS)
    assert line.state == (Knowledge.COMPLETE, 0, [Trouble.NOT_OBSERVED])
    assert not line.rank.evident
    line.replay()
    line.publish(*run(0, 0))
    assert line.state == (Knowledge.COMPLETE, 1, [])
    assert line.rank.evident


def test_two_sources_on_one_address() -> None:
    line = ready()
    line.live((3, batch(stored(3), rank=1)))
    assert line.state == (Knowledge.COMPLETE, 4, [Trouble.AMBIGUOUS])


ROW = ["BlockStored", [100], None, tokens(0), SIZE, None, "GPU", None]


@pytest.mark.parametrize(
    "event",
    [
        stored(0),
        stored(0, block_hashes=[b"\x01" * 32]),
        stored(0, group_idx=0, kv_cache_spec_kind="full_attention", locality="LOCAL", something={"new": [1]}),
        stored(0, medium=None),
        ROW,
        ROW[:5],
        [*ROW, [None], None, 0, "full_attention", None, "LOCAL", {"new": 1}],
        [ROW[0], [b"\x01" * 32], *ROW[2:]],
    ],
)
def test_both_encodings_and_what_versions_add(event: Any) -> None:
    line = ready(upto=-1)
    line.live((0, batch(event, rank=None)))
    assert line.state == (Knowledge.COMPLETE, 1, [])
    hashes = event["block_hashes"] if isinstance(event, dict) else event[1]
    end = removed(0, block_hashes=hashes) if isinstance(event, dict) else ["BlockRemoved", hashes, "GPU", 0, "new"]
    line.live((1, batch(end)))
    assert line.depth == 0
    assert not line.index.counts["unreadable"]


@pytest.mark.parametrize(
    ("events", "depth", "counted", "trouble"),
    [
        ([stored(0, kv_cache_spec_kind="sliding_window", group_idx=1)], 0, "other-group", []),
        (
            [stored(0), stored(0, kv_cache_spec_kind="mamba", group_idx=1), removed(0, group_idx=1)],
            1,
            "other-group",
            [],
        ),
        ([stored(0, medium="CPU")], 0, "other-medium", []),
        ([stored(0), removed(0, medium="CPU")], 1, "other-medium", []),
        ([stored(0, block_size=2 * SIZE, token_ids=[*tokens(0), *tokens(1)])], 0, "block-size", [Trouble.MISMATCH]),
        ([stored(3), stored(0)], 1, "orphaned", []),
        ([stored(0, token_ids=[1])], 0, "mismatched", []),
        ([{"type": "BlockMoved"}, stored(0)], 1, "unreadable", []),
        ([["BlockStored", "?"], stored(0)], 1, "unreadable", []),
        ([17, stored(0)], 1, "unreadable", []),
        ([removed(9)], 0, "unknown", []),
    ],
)
def test_what_is_left_out(events: list[Any], depth: int, counted: str, trouble: list[Trouble]) -> None:
    line = ready(upto=-1)
    line.live((0, batch(*events)))
    in_part = counted in ("orphaned", "mismatched")
    assert line.state == (Knowledge.PARTIAL if in_part else Knowledge.COMPLETE, depth, trouble)
    assert line.index.counts[counted] >= 1


@given(st.binary(max_size=40))
def test_bytes_of_any_kind_break_nothing(payload: bytes) -> None:
    line = ready()
    line.live((3, payload), (4, batch(stored(3))))
    assert line.rank.knowledge is Knowledge.COMPLETE
    assert line.rank.gaps == 0


@given(st.data())
def test_lost_batches_are_always_made_good_or_told(data: st.DataObject) -> None:
    """A publisher loses live batches at will and forgets its oldest: what is indexed is never what the engine removed."""
    line = Line()
    held: set[int] = set()
    forgotten = 0
    for sequence in range(data.draw(st.integers(1, 25))):
        block = data.draw(st.integers(0, 5))
        add = block not in held and (not block or block - 1 in held)
        gone = [b for b in held if b >= block] if not add else []
        held = held | {block} if add else held - set(gone)
        entry = (sequence, batch(*([stored(block)] if add else [removed(b) for b in sorted(gone, reverse=True)])))
        line.buffer.append(entry)
        if data.draw(st.booleans()):
            line.live(entry)
        if data.draw(st.booleans()):
            line.replay()
        if data.draw(st.integers(0, 9)) == 0:
            keep = data.draw(st.integers(1, 3))
            forgotten = max(forgotten, len(line.buffer) - keep)
            line.buffer = line.buffer[-keep:]
    line.check()
    assert line.depth <= len(held)
    if not forgotten:
        assert line.state == (Knowledge.COMPLETE, len(held), [])
