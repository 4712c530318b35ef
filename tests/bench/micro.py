"""`python -m tests.bench.index`: how fast the KV index takes events and answers, and what an entry weighs."""

from __future__ import annotations

import json
import random
import tracemalloc
from array import array
from time import perf_counter, process_time

from frontend_api.kvindex import Index, chain

BLOCK = 16
RUN = 32
"""Blocks of one event."""
ENGINES = 64


def _fill(index: Index, blocks: int, seed: int) -> tuple[float, int]:
    """CPU seconds spent inside the index, and the entries that came of it."""
    draw = random.Random(seed)
    holder = index.add_holder()
    events = []
    for _ in range(blocks // RUN):
        tokens = [draw.randrange(150_000) for _ in range(RUN * BLOCK)]
        events.append(([draw.getrandbits(64) for _ in range(RUN)], tokens))
    before, began = index.entries, process_time()
    for hashes, tokens in events:
        index.stored(holder, hashes, None, tokens, BLOCK)
    return process_time() - began, index.entries - before


def _weight(blocks: int, engines: int) -> float:
    """Bytes per (engine, block) entry when `engines` hold the same blocks."""
    tracemalloc.start()
    index = Index()
    for number in range(engines):
        draw, hashes = random.Random(1), random.Random(number)
        holder = index.add_holder()
        for _ in range(blocks // RUN):
            tokens = [draw.randrange(150_000) for _ in range(RUN * BLOCK)]
            index.stored(holder, [hashes.getrandbits(64) for _ in range(RUN)], None, tokens, BLOCK)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return size / index.entries


def _match() -> float:
    """Seconds of one question: 100 blocks, 64 engines that have 0 to 100 of them."""
    index = Index()
    tokens = array("I", range(100 * BLOCK))
    for number in range(ENGINES):
        have = number * 100 // (ENGINES - 1)
        index.stored(index.add_holder(), range(have), None, tokens[: have * BLOCK], BLOCK)
    hashes = chain(tokens, BLOCK)
    best = 1.0
    for _ in range(300):
        began = perf_counter()
        index.match(hashes)
        best = min(best, perf_counter() - began)
    return best


def main() -> None:
    seconds, entries = min(_fill(Index(), 64_000, seed) for seed in range(5))
    tokens = array("I", range(100 * BLOCK))
    began = perf_counter()
    for _ in range(200):
        chain(tokens, BLOCK)
    hashing = (perf_counter() - began) / 200
    figures = {
        "blocks_per_second": round(entries / seconds),
        "bytes_per_entry": {
            f"{blocks} blocks on {engines}": round(_weight(blocks, engines), 1)
            for blocks, engines in ((40_000, 1), (44_000, 1), (40_000, 2), (20_000, 8))
        },
        "match_us_64_engines_100_blocks": round(_match() * 1e6, 1),
        "hash_us_100_blocks": round(hashing * 1e6, 1),
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
