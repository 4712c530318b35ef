"""What a rank's events tell of its blocks, as tables: what is taken and what left out, and when that is all it holds."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend_api.kv.contents import Contents
from frontend_api.kv.debt import OWED_SECONDS, Debt
from frontend_api.kv.index import Index, chain
from frontend_api.kv.knowledge import Bound, Knowledge, Trouble
from frontend_api.kv.sequence import Rank
from tests.frontend_api.kvline import SIZE, Line, batch, pack, ready, removed, restored, run, saved_of, stored, tokens

DEEP = msgspec.Raw(b"\x91" * 5_000 + b"\xc0")
"""A list in a list in a list …"""


def owe(debt: Debt, block: int, now: float) -> None:
    """The engine has computed the prompt up to this block."""
    own = chain(array("I", [t for n in range(block + 1) for t in tokens(n)]), SIZE)[-1]
    debt.sent(own, now)
    debt.computed(own, now)


@pytest.mark.parametrize(
    "event",
    [
        stored(0, block_hashes=[], token_ids=[], block_size=1 << 62),
        stored(0, block_hashes=[], token_ids=[], block_size=7),
        stored(0, block_size=-SIZE),
        stored(0, block_size=2 * SIZE),
    ],
)
def test_what_was_not_taken_proves_no_block_size(event: dict[str, Any]) -> None:
    line = Line(block_size=None)
    line.replay()
    line.publish((0, batch(event)), (1, batch(stored(0), stored(1))))
    assert line.depth == 2
    assert line.rank.trouble == []
    assert line.index.block_sizes == {SIZE}


def test_an_engine_that_computes_and_tells_nothing() -> None:
    line = Line()
    line.replay()
    owe(line.debt, 0, 1.0)
    line.rank.tick(1.0 + OWED_SECONDS)
    assert line.rank.evident
    line.rank.tick(1.1 + OWED_SECONDS)
    assert line.state == (Knowledge.COMPLETE, 0, [Trouble.NOT_OBSERVED])
    assert not line.rank.evident
    line.replay()
    line.publish(*run(0, 0))
    line.rank.tick(1.2 + OWED_SECONDS)
    assert line.state == (Knowledge.COMPLETE, 1, [])
    assert line.rank.evident


def test_of_several_ranks_any_may_pay_what_the_engine_owes() -> None:
    index, debt = Index(), Debt()
    first, second = (Rank(Contents(index, block_size=SIZE, debt=debt), replays=False, now=0.0) for _ in range(2))
    for rank in (first, second):
        rank.live(0, batch(stored(0)), 0.0)
        owe(debt, 1, 1.0)
        rank.tick(1.1 + OWED_SECONDS)
    assert first.trouble == second.trouble == [Trouble.NOT_OBSERVED]
    second.live(1, batch(stored(1)), 20.0)
    first.tick(20.0)
    second.tick(20.0)
    assert first.trouble == second.trouble == []


def test_a_block_is_there_until_the_last_copy_of_it_is_gone() -> None:
    """vLLM keeps a copy for each of two prompts that come at once, and tells of the end of each; so too after a restart."""
    line = ready()
    line.publish((3, batch(stored(2), stored(3))), (4, batch(stored(3))), (5, batch(stored(2), stored(3))))
    late = restored(line, saved_of(line))
    late.replay()
    for each in (line, late):
        for number, depth in ((6, 4), (7, 4), (8, 3)):
            each.live((number, batch(removed(3))))
            assert each.depth == depth
        each.live((9, batch(removed(2))), (10, batch(removed(2))))
        assert each.depth == 3
        each.live((11, batch(removed(2))))
        assert each.state == (Knowledge.COMPLETE, 2, [])
        assert not each.index.counts["unknown"]
        assert each.rank.contents.holder.copies == {}


def test_copies_go_with_all_else() -> None:
    line = ready()
    line.publish(*((number, batch(stored(2))) for number in (3, 4)))
    line.publish((5, batch({"type": "AllBlocksCleared"})), (6, batch(stored(0), stored(1), stored(2))))
    line.publish((7, batch(removed(2))))
    assert line.depth == 2


def test_what_the_own_limit_takes_makes_no_copies() -> None:
    line = Line(limit=3)
    line.replay()
    line.publish(*run(0, 2))
    event = stored(0, block_hashes=[201, 202], token_ids=[7] * 2 * SIZE)
    line.publish((3, batch(event)))
    assert line.rank.contents.holder.copies == {}


def one(number: int) -> dict[str, Any]:
    """A prompt of one block."""
    return stored(0, block_hashes=[1_000 + number], token_ids=[number] * SIZE)


def gone(number: int) -> dict[str, Any]:
    return removed(0, block_hashes=[1_000 + number])


class Turning:
    """A rank whose beginning is lost, and its engine: `capacity` blocks, the one used longest ago is reused."""

    def __init__(self, *, told: bool, capacity: int = 10, unknown: int = 6) -> None:
        self.line = Line(replays=False, capacity=capacity if told else None)
        self.capacity = capacity
        self.held = [-1 - n for n in range(unknown)]
        self.sequence = 100

    def store(self, number: int) -> Knowledge:
        events = []
        if len(self.held) == self.capacity:
            events.append(gone(self.held.pop(0)))
        self.held.append(number)
        return self.tell(*events, one(number))

    def tell(self, *events: dict[str, Any]) -> Knowledge:
        self.line.publish((self.sequence, batch(*events)))
        self.sequence += 1
        return self.line.rank.knowledge


def test_what_was_there_before_is_gone_once_the_engine_has_stored_as_much_as_it_has() -> None:
    engine = Turning(told=True)
    known = [engine.store(number) for number in range(20)]
    assert known.index(Knowledge.COMPLETE) == 18  # the last unknown block goes with the store of number 9
    assert all(number >= 0 for number in engine.held)


def test_where_its_size_is_not_known_it_has_to_give_up_as_much_as_it_holds() -> None:
    engine = Turning(told=False)
    known = [engine.store(number) for number in range(40)]
    assert 18 <= known.index(Knowledge.COMPLETE) <= 20
    assert all(number >= 0 for number in engine.held)


@given(st.integers(1, 12), st.integers(0, 12), st.booleans())
def test_it_never_turns_over_while_unknown_blocks_are_left(capacity: int, unknown: int, told: bool) -> None:
    engine = Turning(told=told, capacity=capacity, unknown=min(unknown, capacity))
    for number in range(3 * capacity + 1):
        complete = engine.store(number) is Knowledge.COMPLETE
        assert not complete or all(block >= 0 for block in engine.held)
    assert complete


def test_an_unknown_block_that_is_still_used_shows_itself() -> None:
    engine = Turning(told=True)
    for number in range(100):
        if number % 9 == 0:
            engine.tell(stored(1, block_hashes=[5_000], parent_block_hash=77))
        assert engine.store(number) is Knowledge.PARTIAL


def test_blocks_that_do_not_fill_the_engine_leave_room_for_unknown_ones() -> None:
    engine = Turning(told=True, capacity=10)
    for number in range(50):
        assert engine.tell(one(number), gone(number)) is Knowledge.PARTIAL


def test_a_gap_is_forgiven_when_all_has_turned_over() -> None:
    engine = Turning(told=True)
    for number in range(30):
        engine.store(number)
    engine.sequence += 1
    engine.store(30)
    assert engine.line.state[::2] == (Knowledge.PARTIAL, [Trouble.GAP])
    for number in range(31, 60):
        engine.store(number)
    assert engine.line.state[::2] == (Knowledge.COMPLETE, [])


def test_what_the_own_limit_took_is_not_known_any_more() -> None:
    line = Line(limit=8)
    line.replay()
    for number in range(10):
        line.publish((number, batch(one(number))))
    line.rank.tick(line.now)
    assert (line.rank.knowledge, line.rank.contents.bounds) == (Knowledge.PARTIAL, {Bound.INDEX_FULL})
    line.publish((10, pack([1.0, [{"type": "AllBlocksCleared"}], 0])))
    assert (line.rank.knowledge, line.rank.contents.bounds) == (Knowledge.COMPLETE, set())


@pytest.mark.parametrize(
    ("event", "bound"),
    [
        (stored(0, medium="CPU"), Bound.LOWER_TIER),
        (stored(0, medium="STORAGE", locality="REMOTE"), Bound.LOWER_TIER),
        (stored(0, locality="REMOTE"), Bound.LOWER_TIER),
        (stored(0, kv_cache_spec_kind="mamba", group_idx=1), Bound.OTHER_GROUPS),
        (stored(0, kv_cache_spec_kind="sliding_window", group_idx=1), Bound.OTHER_GROUPS),
    ],
)
def test_what_else_decides_about_a_hit_is_told(event: dict[str, Any], bound: Bound) -> None:
    line = ready()
    assert line.rank.contents.bounds == set()
    line.publish((3, batch(event)))
    assert line.rank.contents.bounds == {bound}
    assert line.state == (Knowledge.COMPLETE, 3, [])


def test_the_partial_block_at_the_end_of_a_prompt_is_no_other_block_size() -> None:
    line = ready()
    line.publish((3, batch(stored(3, block_size=2, token_ids=[1, 2]))))
    assert line.state == (Knowledge.COMPLETE, 3, [])
    assert line.index.counts["partial-block"] == 1


def test_what_was_known_in_part_stays_so() -> None:
    line = Line()
    line.buffer = [(7, batch(stored(0), stored(0, kv_cache_spec_kind="mamba", group_idx=3)))]
    line.replay()
    late = restored(line, saved_of(line))
    late.replay()
    assert late.state == (Knowledge.PARTIAL, 1, [])
    late.live((8, batch(removed(0, group_idx=3))))
    assert late.depth == 1


def test_what_is_not_known_may_have_been_used_just_before_the_index_was_saved() -> None:
    engine = Turning(told=False)
    engine.line = Line()
    engine.tell()
    engine.line.replay()
    for number in range(8):
        engine.store(number)
    engine.held.append(engine.held.pop(0))
    engine.tell(stored(1, block_hashes=[5_000], parent_block_hash=77))
    engine.line = restored(engine.line, saved_of(engine.line))
    engine.line.replay()
    known = [engine.store(number) for number in range(8, 40)]
    assert known.index(Knowledge.COMPLETE) > engine.capacity  # and not when only that one is left
    assert all(number >= 0 for number in engine.held)


def test_what_the_own_limit_takes_is_not_saved_or_restored_as_complete() -> None:
    line, whole = Line(limit=8), Line()
    for each in (line, whole):
        each.replay()
        for number in range(10):
            each.publish((number, batch(one(number))))
    assert not saved_of(line).complete
    late = Line(limit=8)
    late.buffer = whole.buffer
    for _ in late.rank.restore(saved_of(whole)):
        pass
    late.rank.tick(late.now)
    late.replay()
    assert late.rank.knowledge is Knowledge.PARTIAL


def test_blocks_of_another_size_are_missing_after_a_restart_too() -> None:
    line = ready(upto=-1)
    line.publish((0, batch(stored(0, block_size=2 * SIZE, token_ids=[*tokens(0), *tokens(1)]))))
    assert line.state == (Knowledge.COMPLETE, 0, [Trouble.MISMATCH])
    late = restored(line, saved_of(line))
    late.replay()
    assert late.state == (Knowledge.PARTIAL, 0, [])


def test_what_comes_after_the_end_of_a_rank_is_nobody_elses() -> None:
    line = ready()
    line.rank.contents.close()
    line.index.sweep()
    other = line.index.add_holder()
    line.live(*run(3, 3), (4, batch(stored(0))))
    assert line.index.match(chain(array("I", tokens(0)), SIZE)) == {}
    assert (line.index.entries, len(other.blocks)) == (0, 0)


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
        ([[*ROW[:7], "a-lora", [5]], stored(0)], 1, "unreadable", []),
        ([17, stored(0)], 1, "unreadable", []),
        ([stored(0, extra_keys=DEEP), stored(0)], 0, "unreadable", []),
        ([stored(0, new=DEEP), stored(0)], 0, "unreadable", []),
        ([removed(9)], 0, "unknown", []),
    ],
)
def test_what_is_left_out(events: list[Any], depth: int, counted: str, trouble: list[Trouble]) -> None:
    line = ready(upto=-1)
    line.live((0, batch(*events)))
    in_part = counted in ("orphaned", "mismatched", "unreadable")
    assert line.state == (Knowledge.PARTIAL if in_part else Knowledge.COMPLETE, depth, trouble)
    assert line.index.counts[counted] >= 1


@given(st.binary(max_size=40))
def test_bytes_of_any_kind_break_nothing(payload: bytes) -> None:
    line = ready()
    line.live((3, payload), (4, batch(stored(3))))
    assert line.rank.knowledge is Knowledge.PARTIAL or not line.index.counts["unreadable"]
    assert line.rank.gaps == 0
