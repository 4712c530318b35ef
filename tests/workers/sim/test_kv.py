"""The block pool against a model of itself: nothing leaks, nothing is found that is not there."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.sim.kv import BlockPool, OutOfBlocks

SIZE = 4


class Told:
    """A pool, and the prefix cache as a listener to its events would know it."""

    def __init__(self, blocks: int) -> None:
        self.cached: dict[bytes, bytes | None] = {}
        self.pool = BlockPool(blocks, SIZE, seed=b"s", on_stored=self._stored, on_removed=self._removed)

    def _stored(self, digests: list[bytes], parent: bytes | None, tokens: list[int], salt: str | None) -> None:
        assert len(tokens) == len(digests) * SIZE
        for digest in digests:
            assert digest not in self.cached
            self.cached[digest] = parent
            parent = digest

    def _removed(self, digest: bytes) -> None:
        del self.cached[digest]

    def use(self, tokens: list[int], salt: str | None = None) -> list:
        """What the engine does with a prompt: the blocks it then holds."""
        digests = self.pool.digests(tokens, salt, [])
        hits = self.pool.match(digests, (len(tokens) - 1) // SIZE)
        held = self.pool.take(hits, -(-len(tokens) // SIZE) - len(hits))
        self.pool.publish(held, digests, tokens, salt, len(hits))
        return held


@settings(max_examples=200, deadline=None)
@given(
    st.integers(4, 12),
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=16), st.sampled_from([None, "a"]), st.booleans())
    ),
)
def test_pool_keeps_its_books(blocks: int, steps: list[tuple[list[int], str | None, bool]]) -> None:
    told = Told(blocks)
    pool, held = told.pool, []
    for tokens, salt, release in steps:
        try:
            held.append(told.use(tokens, salt))
        except OutOfBlocks:
            assert pool.free < -(-len(tokens) // SIZE)
        if release and held:
            pool.give_back(held.pop(0))
        references: dict[int, int] = {}
        for block in (block for blocks_of_one in held for block in blocks_of_one):
            references[block.id] = references.get(block.id, 0) + 1
        assert {block.id: block.references for block in pool.blocks if block.references} == references
        assert pool.free == blocks - len(references)
        assert {block.digest for block in pool.blocks if block.digest} == told.cached.keys()
    for blocks_of_one in held:
        pool.give_back(blocks_of_one)
    assert pool.free == blocks
    assert pool.usage == 0


def test_prefix_is_found_up_to_the_last_token() -> None:
    told = Told(8)
    prompt = list(range(8))
    told.pool.give_back(told.use(prompt))
    digests = told.pool.digests(prompt, None, [])
    assert len(told.pool.match(digests, (len(prompt) - 1) // SIZE)) == 1
    assert len(told.pool.match(digests, len(digests))) == 2
    assert told.pool.match(told.pool.digests(prompt, "salt", []), 2) == []


def test_least_recently_used_goes_first_and_tails_before_heads() -> None:
    told = Told(4)
    old, new = list(range(8)), list(range(100, 108))
    for prompt in (old, new):
        told.pool.give_back(told.use(prompt))
    told.pool.give_back(told.use(list(range(200, 204))))
    assert len(told.pool.match(told.pool.digests(old, None, []), 2)) == 1
    assert len(told.pool.match(told.pool.digests(new, None, []), 2)) == 2


def test_taking_too_much_takes_nothing() -> None:
    told = Told(4)
    told.pool.give_back(told.use(list(range(8))))
    hits = told.pool.match(told.pool.digests(list(range(8)), None, []), 2)
    with pytest.raises(OutOfBlocks):
        told.pool.take(hits, 3)
    assert told.pool.free == 4


def test_a_freed_block_keeps_its_content_until_it_is_written_again() -> None:
    told = Told(4)
    (block,) = told.use([1, 2])
    block.content = b"kv"
    told.pool.give_back([block])
    assert told.pool.blocks[block.id].content == b"kv"


def test_clear_only_when_idle() -> None:
    told = Told(4)
    held = told.use(list(range(8)))
    assert not told.pool.clear()
    told.pool.give_back(held)
    assert told.pool.clear()
    assert told.pool.match(told.pool.digests(list(range(8)), None, []), 2) == []
