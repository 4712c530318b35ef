"""The buckets of block hashes against a dict, through their splits, and hashes made to collide."""

from __future__ import annotations

import random
from sys import getsizeof

from hypothesis import given
from hypothesis import strategies as st

from frontend_api.kv.blocks import FULL, ROOMY, Blocks


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=300), st.integers(0, 2**20))
def test_it_is_a_mapping(steps: list[tuple[bool, int]], seed: int) -> None:
    draw = random.Random(seed)
    hashes = [draw.getrandbits(60) for _ in range(20 * FULL)]
    blocks, model = Blocks(), {}
    for number, own in enumerate(hashes):
        blocks.put(own, number + 1)
        model[own] = number + 1
    for put, number in steps:
        own = hashes[number]
        if put:
            blocks.put(own, number + 7)
            model[own] = number + 7
        elif own in model:
            blocks.pop(own)
            del model[own]
    assert len(blocks) == len(model)
    assert all(blocks.get(own) == model.get(own, 0) for own in hashes)
    assert blocks.get(1) == 0


def test_buckets_stay_small_and_give_memory_back() -> None:
    draw = random.Random(1)
    blocks = Blocks()
    live = []
    for _ in range(60_000):
        live.append(draw.getrandbits(60))
        blocks.put(live[-1], 1)
        if len(live) > 10_000:
            blocks.pop(live.pop(0))
    buckets = {id(bucket): bucket for bucket in blocks.table}.values()
    assert sum(map(len, buckets)) == len(blocks) == 10_000
    assert max(map(len, buckets)) <= FULL
    assert sum(map(getsizeof, buckets)) < 1.2 * ROOMY * 10_000
    for own in live:
        blocks.pop(own)
    assert len(blocks) == 0


def test_hashes_made_to_collide_do_not_make_the_directory_grow() -> None:
    blocks = Blocks()
    for number in range(5_000):
        blocks.put(number << 40, 1)
    assert len(blocks.table) <= 512
    assert all(blocks.get(number << 40) for number in range(5_000))
