"""What a rank's sequence proves, as tables: gaps, replays, restarts, who is silent, what was saved. No sockets."""

from __future__ import annotations

from array import array
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend_api.kv import sequence as rules
from frontend_api.kv.budget import BURST_SECONDS, PAUSE_SECONDS, SHARE, Budget
from frontend_api.kv.index import chain
from frontend_api.kv.knowledge import Knowledge, Trouble
from frontend_api.kv.sequence import CALM_SECONDS, CHECK_SECONDS, LONGEST_PAUSE, UNSTEADY, UNSTEADY_SECONDS
from tests.frontend_api.kvline import SIZE, Line, batch, pack, ready, removed, restored, run, saved_of, stored, tokens


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


def test_who_seems_to_restart_with_every_batch_is_asked_for_replays_less_and_less_often() -> None:
    """Events of one engine and the replay of another: each batch looks like a restart, and would cost a whole replay."""
    line = ready(upto=8)
    for number in range(6_000):  # ten a second
        line.now = number / 10
        line.live((number % 50, batch(stored(0), rank=None)))
        line.rank.tick(line.now)
        if line.now >= line.rank.ask_at:
            line.replay()
    assert Trouble.AMBIGUOUS in line.rank.trouble
    assert UNSTEADY < line.rank.restarts <= 30
    assert len(line.asked) <= 60
    line.buffer = run(0, 4)  # now it is the engine's own
    line.now += LONGEST_PAUSE
    line.live(*run(4, 4))
    line.replay()
    line.now += UNSTEADY_SECONDS
    line.check()
    assert line.state == (Knowledge.COMPLETE, 5, [])


def test_replays_that_are_not_answered_are_asked_for_less_and_less_often() -> None:
    line, asked = Line(), []
    for number in range(600):
        line.now = number / 10
        if line.rank.wanted is not None and line.now >= line.rank.ask_at:
            asked.append(line.now)
            line.rank.asked()
            line.rank.replay_failed(line.now)
            line.rank.disconnected()
            line.rank.wanted = 0
    pauses = [round(after - before, 1) for before, after in pairwise(asked)]
    assert pauses[:6] == [0.3, 0.5, 1.0, 2.0, 4.0, 5.0]
    assert set(pauses[6:]) == {5.0}


def test_what_waits_for_a_replay_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "WAITING_BYTES", 1_000)
    line = ready(upto=0)
    line.rank.disconnected()  # a replay is wanted
    for number in range(1, 100):
        line.live((number, batch(stored(0), rank=None) + bytes(100)))
        assert sum(len(payload) for _, payload in line.rank._waiting) <= 1_000
    line.buffer = [(0, line.buffer[0][1])]
    line.replay()
    assert line.rank.gaps == 1, "it is seen that the oldest are lost"


def test_who_takes_too_much_begins_anew_and_that_is_told() -> None:
    line = ready()
    line.rank.excessive(line.now)
    assert line.state == (Knowledge.REPLAYING, 0, [Trouble.EXCESSIVE])
    line.replay()
    assert line.state == (Knowledge.COMPLETE, 3, [Trouble.EXCESSIVE])
    line.now += CALM_SECONDS + 1
    line.check()
    assert line.state == (Knowledge.COMPLETE, 3, [])


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 0.1)), max_size=200))
def test_a_budget_is_a_burst_and_a_share_of_the_time(turns: list[tuple[float, float]]) -> None:
    budget, now, used = Budget(0.0), 0.0, 0.0
    for passes, takes in turns:
        now += passes
        used += takes
        if budget.spend(takes, now):
            now += PAUSE_SECONDS
        assert used <= BURST_SECONDS + SHARE * now + 0.1 + 1e-9
    assert not Budget(0.0).spend(BURST_SECONDS, 0.0)


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


def test_two_sources_on_one_address() -> None:
    line = ready()
    line.live((3, batch(stored(3), rank=1)))
    assert line.state == (Knowledge.COMPLETE, 4, [Trouble.AMBIGUOUS])


# ---- saved and restored


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
