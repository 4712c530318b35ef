"""The KV index against a naive model, and what it must not take."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend_api.kv.index import Holder, Index, Sent, begin, chain

SIZE = 4
LINES = [[n * 1_000 + i for i in range(6 * SIZE)] for n in range(3)]
"""Three prompts of six blocks; the second shares two blocks with the first."""
LINES[1][: 2 * SIZE] = LINES[0][: 2 * SIZE]


def own(line: int, blocks: int = 6, **more: str) -> list[int]:
    return chain(array("I", LINES[line][: blocks * SIZE]), SIZE, **more)


class Engine:
    """An engine whose hashes are its own, and what it holds: (prompt's tokens so far) of each block."""

    def __init__(self, index: Index, number: int) -> None:
        self.index = index
        self.number = number
        self.holder = index.add_holder()
        self.held: set[tuple[int, ...]] = set()

    def name(self, line: int, block: int) -> int:
        return hash((self.number, *LINES[line][: (block + 1) * SIZE])) & 0xFFFF_FFFF_FFFF_FFFF

    def store(self, line: int, start: int, end: int) -> None:
        parent = self.name(line, start - 1) if start else None
        hashes = [self.name(line, block) for block in range(start, end)]
        fits = not start or tuple(LINES[line][: start * SIZE]) in self.held
        refused = self.index.stored(self.holder, hashes, parent, LINES[line][start * SIZE : end * SIZE], SIZE)
        assert (refused is None) is fits
        if fits:
            self.held |= {tuple(LINES[line][: (block + 1) * SIZE]) for block in range(start, end)}

    def remove(self, line: int, block: int) -> None:
        self.index.removed(self.holder, [self.name(line, block)])
        self.held.discard(tuple(LINES[line][: (block + 1) * SIZE]))

    def clear(self) -> None:
        self.index.clear(self.holder)
        self.held.clear()

    def matched(self, line: int) -> int:
        depth = 0
        while depth < 6 and tuple(LINES[line][: (depth + 1) * SIZE]) in self.held:
            depth += 1
        return depth


STEPS = st.tuples(
    st.sampled_from(["store", "store", "remove", "clear", "leave", "sweep"]),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(0, 5),
    st.integers(1, 6),
)


@given(st.lists(STEPS, max_size=40))
def test_it_matches_what_a_naive_model_matches(steps: list[tuple[str, int, int, int, int]]) -> None:
    index = Index()
    engines = [Engine(index, number) for number in range(3)]
    for action, number, line, start, length in steps:
        engine = engines[number]
        match action:
            case "store":
                engine.store(line, start, min(start + length, 6))
            case "remove":
                engine.remove(line, start)
            case "clear":
                engine.clear()
            case "leave":
                index.drop_holder(engine.holder)
                engines[number] = Engine(index, number)
            case "sweep":
                index.sweep(2)
        for asked in range(3):
            found = index.match(own(asked))
            assert [found.get(e.holder.bit, 0) for e in engines] == [e.matched(asked) for e in engines]
            assert len(found) == sum(e.matched(asked) > 0 for e in engines)
    while index.sweep():
        pass
    assert index.entries == sum(len(e.held) for e in engines)
    assert len(index) == len(set().union(*(e.held for e in engines)))


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=70), st.sets(st.tuples(st.integers(0, 69), st.integers(0, 11)))
)
def test_a_match_ends_at_each_holders_first_gap(have: list[int], gaps: set[tuple[int, int]]) -> None:
    """More holders than a machine word has bits; some have equal sets of blocks, some are hidden."""
    index, tokens = Index(), array("I", range(12 * SIZE))
    hashes = chain(tokens, SIZE)
    wanted: dict[int, int] = {}
    for number, blocks in enumerate(have):
        holder = index.add_holder()
        index.stored(holder, range(blocks), None, tokens[: blocks * SIZE], SIZE)
        lost = [block for block in range(blocks) if (number, block) in gaps]
        index.removed(holder, lost)
        if number % 7 == 3:
            index.hide(holder)
        elif depth := min(lost, default=blocks):
            wanted[holder.bit] = depth
    assert index.match(hashes) == wanted
    assert index.match(hashes[:5]) == {bit: min(depth, 5) for bit, depth in wanted.items()}
    assert index.match([]) == {}


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 5))
def test_only_full_blocks_count_and_a_longer_prompt_continues_the_chain(tokens: list[int], size: int) -> None:
    hashes = chain(array("I", tokens), size)
    assert len(hashes) == len(tokens) // size
    assert chain(array("I", tokens[: size * 2]), size) == hashes[:2]
    assert all(0 <= h < 1 << 60 for h in hashes)


def test_block_size_lora_and_salt_keep_prompts_apart() -> None:
    begins = {
        begin(16),
        begin(32),
        begin(16, "a"),
        begin(16, "b"),
        begin(16, None, "a"),
        begin(16, "a", "b"),
        begin(16, "b", "a"),
    }
    assert len(begins) == 7
    firsts = {own(0, 1)[0], own(0, 1, lora="x")[0], own(0, 1, salt="x")[0], own(0, 1, lora="x", salt="x")[0]}
    assert len(firsts) == 4


def test_the_hash_is_the_same_in_every_process() -> None:
    assert chain(array("I", range(16)), 16) == [58670086219780470]


def store(index: Index, holder: Holder, **more: object) -> str | None:
    event: dict[str, object] = {
        "hashes": [1, 2],
        "parent": None,
        "tokens": LINES[0][: 2 * SIZE],
        "block_size": SIZE,
        **more,
    }
    return index.stored(holder, **event)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("more", "asked"),
    [
        ({}, {}),
        ({"lora": "x"}, {"lora": "x"}),
        ({"extra": [["pepper"], None]}, {"salt": "pepper"}),
        ({"lora": "x", "extra": [["x", "pepper"], ["x"]]}, {"lora": "x", "salt": "pepper"}),
        ({"hashes": [b"\xff" * 32, b"\xfe" * 32]}, {}),
    ],
)
def test_events_and_requests_agree(more: dict[str, object], asked: dict[str, str]) -> None:
    index = Index()
    holder = index.add_holder()
    assert store(index, holder, **more) is None
    assert index.match(own(0, **asked)) == {holder.bit: 2}
    if asked:
        assert index.match(own(0)) == {}


def test_an_image_makes_another_block_of_the_same_tokens() -> None:
    index = Index()
    holder = index.add_holder()
    store(index, holder, extra=[None, [["image-1", 0]]])
    assert index.match(own(0)) == {holder.bit: 1}


@pytest.mark.parametrize(
    ("more", "cause"),
    [
        ({"tokens": LINES[0][: 2 * SIZE - 1]}, "mismatched"),
        ({"block_size": 0}, "mismatched"),
        ({"block_size": SIZE * 2}, "mismatched"),
        ({"tokens": [-1] * 2 * SIZE}, "mismatched"),
        ({"tokens": [2**32] * 2 * SIZE}, "mismatched"),
        ({"parent": 77}, "orphaned"),
        ({"parent": b"never"}, "orphaned"),
    ],
)
def test_what_cannot_be_trusted_is_left_out_and_counted(more: dict[str, object], cause: str) -> None:
    index = Index()
    holder = index.add_holder()
    assert store(index, holder, **more) == cause
    assert index.counts == {cause: 1}
    assert (len(index), index.entries, len(holder.blocks)) == (0, 0, 0)


def test_a_block_that_is_reported_twice_is_one_and_ends_with_one_removal() -> None:
    index = Index()
    holder = index.add_holder()
    store(index, holder)
    store(index, holder)
    assert index.entries == 2
    index.removed(holder, [2, 2])
    assert (index.entries, index.counts["unknown"]) == (1, 1)
    assert index.match(own(0)) == {holder.bit: 1}


def test_a_hash_that_now_names_other_tokens_no_longer_counts_for_the_old_ones() -> None:
    index = Index()
    holder = index.add_holder()
    store(index, holder)
    store(index, holder, tokens=LINES[2][: 2 * SIZE])
    assert index.match(own(0)) == {}
    assert index.match(own(2)) == {holder.bit: 2}
    assert index.entries == 2


def test_it_stays_within_its_limit_and_keeps_what_is_asked_for() -> None:
    index = Index(limit=256)
    holder = index.add_holder()
    store(index, holder)
    for number in range(5_000):
        tokens = [number] * SIZE
        index.stored(holder, [1_000 + number], None, tokens, SIZE)
        assert index.match(own(0)) == {holder.bit: 2}
        assert index.entries <= 256
    assert len(index) == index.entries == len(holder.blocks)
    assert index.counts["evicted"] == 5_002 - index.entries
    assert index.match(chain(array("I", [0] * SIZE), SIZE)) == {}


def test_no_two_holders_are_ever_taken_for_one() -> None:
    index = Index()
    first = index.add_holder()
    store(index, first)
    index.clear(first)
    second, third = index.add_holder(), index.add_holder()
    assert len({first.bit, second.bit, third.bit}) == 3
    store(index, first)
    assert index.match(own(0)) == {first.bit: 2}


def test_engines_that_come_and_go_leave_nothing_behind() -> None:
    index = Index()
    widest = 0
    for _ in range(200):
        holder = index.add_holder()
        widest = max(widest, holder.bit.bit_length())
        store(index, holder)
        index.drop_holder(holder)
        while index.sweep():
            pass
    assert (len(index), index.entries) == (0, 0)
    assert widest <= 2


def test_what_was_sent_counts_until_its_time_is_over() -> None:
    index = Index()
    sent = Sent(index, ttl=10.0)
    holder, other = index.add_holder(), index.add_holder()
    sent.record(holder, own(0, 3), 0.0)
    sent.record(holder, own(0, 2), 5.0)
    sent.record(other, own(2, 1), 6.0)
    sent.expire(9.9)
    assert index.match(own(0)) == {holder.bit: 3}
    sent.expire(10.0)
    assert index.match(own(0)) == {holder.bit: 2}
    sent.forget(other)
    index.drop_holder(other)
    sent.expire(16.0)
    index.sweep()
    assert (len(index), index.entries) == (0, 0)
