"""What a rank's frames prove, as tables: sequences, gaps, replays, restarts, both encodings. No sockets."""

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
from frontend_api.kv.knowledge import Bound, Knowledge, Saved, Trouble
from frontend_api.kv.sequence import CHECK_SECONDS, END, UNSTEADY, UNSTEADY_SECONDS, Rank

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


DEEP = msgspec.Raw(b"\x91" * 5_000 + b"\xc0")
"""A list in a list in a list …"""


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


def owe(debt: Debt, block: int, now: float) -> None:
    """The engine has computed the prompt up to this block."""
    own = chain(array("I", [t for n in range(block + 1) for t in tokens(n)]), SIZE)[-1]
    debt.sent(own, now)
    debt.computed(own, now)


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
        line.index.match(chain(array("I", [t for b in range(5) for t in tokens(b)]), SIZE))[
            line.rank.contents.holder.bit
        ]
        == 2
    )


@pytest.mark.parametrize(("said", "trouble"), [(None, []), (SIZE, [Trouble.MISMATCH])])
def test_a_restarted_engine_may_have_another_block_size_unless_one_was_said(
    said: int | None, trouble: list[Trouble]
) -> None:
    line = Line(block_size=said)
    line.publish(*run(0, 2))
    line.replay()
    assert line.depth == 3
    line.buffer = [(0, batch(stored(0, block_size=2 * SIZE, token_ids=[*tokens(0), *tokens(1)])))]
    line.check()
    assert line.rank.trouble == trouble
    assert len(line.rank.contents.holder.blocks) == (0 if said else 1)


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


def test_batches_that_only_replay_brings_are_told() -> None:
    line = ready()
    for block in (3, 4):
        assert line.state == (Knowledge.COMPLETE, block, [])
        line.buffer += run(block, block)
        line.check()
    assert line.state == (Knowledge.COMPLETE, 5, [Trouble.REPLAY_ONLY])
    line.check()
    assert line.state == (Knowledge.COMPLETE, 5, [Trouble.REPLAY_ONLY])
    line.publish(*run(5, 5))
    assert line.state == (Knowledge.COMPLETE, 6, [])


def test_one_batch_that_was_lost_now_and_then_is_no_trouble() -> None:
    line = ready()
    for block in range(3, 11, 2):
        line.buffer += run(block, block)
        line.check()
        line.publish(*run(block + 1, block + 1))
    assert line.state == (Knowledge.COMPLETE, 11, [])


def test_a_batch_that_comes_twice_or_was_replayed_already_is_taken_once() -> None:
    line = ready()
    line.live(line.buffer[-1])
    assert line.state == (Knowledge.COMPLETE, 3, [])
    assert line.rank.restarts == 0


def test_batches_that_come_after_the_replay_has_brought_them_are_no_restart() -> None:
    line = ready()
    late = run(3, 6)
    line.buffer = [*line.buffer[2:], *late]  # its beginning is no longer kept
    line.check()
    line.live(*late)
    line.replay()
    line.publish(*run(7, 7))
    assert line.state == (Knowledge.COMPLETE, 8, [])
    assert line.rank.restarts == 0


@pytest.mark.parametrize("again", [False, True])
def test_the_next_number_after_a_lost_connection_may_be_another_process(again: bool) -> None:
    line = ready()
    line.buffer = line.buffer if again else [(n, batch(stored(0), removed(0))) for n in range(3)]
    line.rank.disconnected()
    line.publish(*run(3, 3) if again else [(3, batch(stored(0)))])
    line.replay()
    assert line.state == (Knowledge.COMPLETE, 4 if again else 1, [])
    assert line.rank.restarts == (not again)


def test_what_was_wrong_before_a_lost_connection_says_nothing_of_the_next() -> None:
    line = Line(replays=False)
    line.live(*run(0, 0), *run(5, 5))
    assert line.state == (Knowledge.PARTIAL, 0, [Trouble.GAP])
    line.rank.disconnected()
    assert line.state == (Knowledge.UNHEARD, 0, [])
    line.live(*run(0, 0))
    assert line.state == (Knowledge.COMPLETE, 1, [])


def test_a_lower_sequence_that_no_replay_explains_is_a_restart() -> None:
    line = ready()
    line.live((0, batch(stored(0))))
    line.rank.asked()
    line.rank.replay_failed(line.now)
    assert line.state == (Knowledge.REPLAYING, 0, [])
    line.rank.asked()
    line.rank.replay_failed(line.now)
    line.live((1, batch(stored(0))))
    assert line.state == (Knowledge.PARTIAL, 1, [])
    assert line.rank.restarts == 1


def test_a_replay_that_is_another_engines_is_told() -> None:
    line = ready(upto=8)
    for number in range(20):
        line.live((number, batch(stored(0), rank=None)))
        line.replay()
        line.now += 20
    assert Trouble.AMBIGUOUS in line.rank.trouble
    assert line.rank.restarts >= UNSTEADY
    line.buffer = [(n, batch(stored(0))) for n in range(2)]
    line.check()
    line.now += UNSTEADY_SECONDS
    line.check()
    assert line.state == (Knowledge.COMPLETE, 1, [])


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


def test_a_replay_that_answers_again_is_noticed_however_busy_the_engine_is() -> None:
    line = ready()
    line.now = CHECK_SECONDS + 0.1
    line.rank.tick(line.now)
    line.rank.asked()
    line.rank.replay_failed(line.now)
    assert line.state == (Knowledge.COMPLETE, 3, [Trouble.SILENT])
    for block in range(3, 10):
        line.now += 1.0
        line.publish(*run(block, block))
        line.rank.tick(line.now)
        line.replay()
    assert line.state == (Knowledge.COMPLETE, 10, [])
    assert len(line.asked) == 2


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


def test_two_sources_on_one_address() -> None:
    line = ready()
    line.live((3, batch(stored(3), rank=1)))
    assert line.state == (Knowledge.COMPLETE, 4, [Trouble.AMBIGUOUS])


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


# ---- saved and restored


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


def test_a_saved_index_is_gone_on_with() -> None:
    line = ready(upto=5)
    saved = saved_of(line)
    line.buffer += [(6, batch(removed(5))), *run(6, 7)]
    line.buffer[-2:] = [(7, batch(stored(5))), (8, batch(stored(6)))]
    del line.buffer[:4]  # the publisher has forgotten its beginning
    late = restored(line, saved)
    assert late.state == (Knowledge.RESTORED, 0, [])
    late.replay()
    assert late.asked == [5]
    assert late.state == (Knowledge.COMPLETE, 7, [])
    assert (late.rank.gaps, late.rank.restarts) == (0, 0)


def test_batches_that_come_while_it_is_loaded_wait() -> None:
    line = ready(upto=5)
    saved = saved_of(line)
    line.buffer += run(6, 6)
    late = restored(line, saved, before=((6, line.buffer[-1][1]),))
    late.replay()
    assert late.state == (Knowledge.COMPLETE, 7, [])


def test_a_saved_index_that_the_replay_no_longer_reaches_is_dropped() -> None:
    line = ready(upto=5)
    saved = saved_of(line)
    line.buffer = [(9, batch(stored(0)))]
    late = restored(line, saved)
    late.replay()
    assert late.state == (Knowledge.PARTIAL, 1, [])
    assert late.rank.gaps == 0


@pytest.mark.parametrize("upto", [-1, 0, 2, 5, 7])
def test_the_saved_index_of_a_publisher_that_restarted_is_dropped(upto: int) -> None:
    line = ready(upto=5)
    saved = saved_of(line)
    line.buffer = [(n, batch(stored(n), rank=None)) for n in range(upto + 1)]
    late = restored(line, saved)
    late.replay()
    assert late.state == (Knowledge.COMPLETE, upto + 1, [])
    assert late.rank.restarts == 1


def test_a_saved_index_that_nobody_vouches_for_is_dropped() -> None:
    line = ready(upto=5)
    late = restored(line, saved_of(line))
    late.rank.asked()
    late.rank.replay_failed(5.0)
    assert late.state == (Knowledge.UNHEARD, 0, [])
    late.live((6, batch(stored(0))))
    assert late.state == (Knowledge.PARTIAL, 1, [])


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


def test_what_is_not_worth_saving() -> None:
    line = Line()
    assert line.rank.saved() is None
    line.replay()
    assert line.rank.saved() is None
    without_replay = Line(replays=False)
    without_replay.live(*run(0, 1))
    assert without_replay.rank.saved() is None
    line = ready()
    late = restored(line, saved_of(line))
    assert late.rank.saved() is None


def test_it_is_restored_before_anything_else_or_not_at_all() -> None:
    line = ready(upto=5)
    other = ready(upto=1)
    assert list(other.rank.restore(saved_of(line))) == []
    assert other.state == (Knowledge.COMPLETE, 2, [])


@given(st.data())
def test_saved_at_any_time_it_ends_in_the_same_index(data: st.DataObject) -> None:
    """Whatever happened before and after: a process that was restored knows what one that never ended knows."""
    line = Line()
    held: list[int] = []
    saved = None
    for sequence in range(data.draw(st.integers(2, 20))):
        block = data.draw(st.integers(0, 5))
        if block not in held and (not block or block - 1 in held):
            held.append(block)
            events = [stored(block)]
        else:
            events = [removed(b) for b in sorted((b for b in held if b >= block), reverse=True)]
            held = [b for b in held if b < block]
        line.publish((sequence, batch(*events, rank=None)))
        line.replay()
        if data.draw(st.booleans()):
            saved = line.rank.saved()
    if saved is not None:
        del line.buffer[: saved.sequence]
        late = restored(line, saved)
        late.replay()
        assert late.state == line.state == (Knowledge.COMPLETE, len(held), [])
        assert late.index.entries == line.index.entries


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
