"""Which engine holds which KV block: own hashes of token blocks, and for each the set of engines as bits of an integer.

Pure. An engine's hashes are opaque and differ by process (vllm#51875): they only name a block of that engine when it is
removed or is somebody's parent. What counts are our own hashes over the token ids, chained from the first block on and
begun from block size, LoRA name and cache salt. What cannot be trusted is counted and left out, never guessed.

The own hash is XXH3-64, seeded with the parent's: one C call of 0.12 µs per block, where blake2b and SHA-256 of the
standard library cost 0.7 to 0.8 µs, and `hash()` of bytes differs between router processes. It is cut to 60 bits, as a
wider int takes 48 bytes instead of 32. Among 10 million blocks a chance collision has a probability of 0.004 %; a wilful one
misleads a routing choice, and never gives anybody another one's KV: the engine looks its blocks up by its own hashes.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from struct import iter_unpack
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from frontend_api.kv.blocks import FULL, Blocks
from frontend_api.kv.names import Names

MASK = (1 << 60) - 1
LIMIT = 4_000_000
"""(engine, block) entries of one index, about half a gigabyte."""
EVICTED_AT_ONCE = 512
"""Entries: a fraction of a millisecond."""
FULL_ATTENTION = frozenset((None, "full_attention", "mla_attention", "sink_full_attention"))
"""Cache groups whose blocks hold a prefix for good; a sliding window or a state space does not (dynamo#9376)."""
DEVICE = frozenset((None, "GPU"))

_MASK: Any = MASK
"""`Any`, here and where hashes and sets of holders go through a hot loop: of an `int` that it only passes on, compiled code
makes a machine word and then an object again."""
TOKEN_BYTES = array("I").itemsize
_pack = msgspec.msgpack.encode


def begin(block_size: int, lora: str | None = None, salt: str | None = None) -> int:
    """The hash before the first block."""
    seed = _seed(block_size, lora)
    return _with_extra(seed, (salt,)) if salt else seed


@lru_cache(256)
def _seed(block_size: int, lora: str | None) -> int:
    return xxh3_64_intdigest((lora or "").encode("utf-8", "surrogatepass"), block_size)


def _with_extra(parent: int, keys: Sequence[Any]) -> int:
    """A hash that also stands for what the next block holds beside its tokens: cache salt, images."""
    return xxh3_64_intdigest(_pack(keys), parent & MASK)


def chain(tokens: array[int], block_size: int, *, lora: str | None = None, salt: str | None = None) -> list[int]:
    """The own hashes of all full blocks of a prompt."""
    return hashed(tokens.tobytes(), block_size * TOKEN_BYTES, begin(block_size, lora, salt))


def hashed(data: bytes, step: int, own: Any) -> list[int]:
    """The own hashes of all full blocks, of `step` bytes each, that follow the one with the hash `own`."""
    digest, mask = xxh3_64_intdigest, _MASK
    found = []
    for (block,) in iter_unpack(f"{step}s", data[: len(data) - len(data) % step]):  # faster than slices
        own = digest(block, own) & mask
        found.append(own)
    return found


def _key(engine_hash: int | bytes) -> int:
    return (engine_hash if isinstance(engine_hash, int) else int.from_bytes(engine_hash[-8:], "big")) & MASK


class Holder:
    """One source of KV: an engine's rank, or what was sent to an engine."""

    __slots__ = ("bit", "blocks", "copies", "forgot", "skipped_groups")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.blocks = Names()
        """The engine's hash (cut) -> own hash."""
        self.copies: Counter[int] = Counter()
        """By the engine's hash (cut): how often it has a block besides. vLLM keeps both of two that come at once, as pulls of one
        prompt do, and tells of the end of each."""
        self.forgot = False
        """The index's own limit has cost it blocks. Whoever has taken note of it sets it back."""
        self.skipped_groups: set[int] = set()

    def copied(self, hashes: Sequence[int | bytes]) -> None:
        """It was told of blocks that it has."""
        self.copies.update(map(_key, hashes))

    def last(self, hashes: Sequence[int | bytes]) -> Sequence[int | bytes]:
        """Those of the blocks of which there is no other copy; the others have one less."""
        if not self.copies:
            return hashes
        return [engine_hash for engine_hash in hashes if not self._uncopied(_key(engine_hash))]

    def _uncopied(self, key: int) -> bool:
        count = self.copies.get(key, 0)
        if count > 1:
            self.copies[key] = count - 1
        elif count:
            del self.copies[key]
        return count > 0


class Index:
    """The blocks of all engines of one deployment. `limit`: most (holder, block) entries."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.counts: Counter[str] = Counter()
        """What happened: stored, removed, cleared, evicted, and the events that were not taken, by cause."""
        self.entries = 0
        self.block_sizes: set[int] = set()
        """Those that engines have used."""
        self._blocks = Blocks()
        """Own hash -> bits of the holders."""
        self._sets: dict[int, int] = {}
        """One object for equal sets of holders."""
        self._holders: list[Holder] = []
        self._alive = 0
        self._retired: list[tuple[int, Names]] = []
        """Bits and blocks of holders that are gone: no longer matched, swept little by little."""
        self._free_bits: list[int] = []
        self._bits = 0
        """That have ever been given out."""
        self._used: set[int] = set()
        """Blocks that were matched lately: they get a second chance at eviction."""

    def __len__(self) -> int:
        return len(self._blocks)

    # ---- holders

    def add_holder(self) -> Holder:
        holder = Holder(self._take_bit())
        self._holders.append(holder)
        return holder

    def clear(self, holder: Holder) -> None:
        """Forget all its blocks at once; their memory comes back by `sweep`."""
        holder.skipped_groups.clear()
        holder.copies.clear()
        holder.forgot = False
        if holder.blocks:
            self._alive &= ~holder.bit
            self._retired.append((holder.bit, holder.blocks))
            holder.blocks = Names()
            holder.bit = self._take_bit()
            self.counts["cleared"] += 1

    def drop_holder(self, holder: Holder) -> None:
        """It is gone, and its blocks with it."""
        self._holders.remove(holder)
        self._alive &= ~holder.bit
        self._retired.append((holder.bit, holder.blocks))
        holder.blocks = Names()

    def hide(self, holder: Holder) -> None:
        """Match none of its blocks until it is shown."""
        self._alive &= ~holder.bit

    def show(self, holder: Holder) -> None:
        self._alive |= holder.bit

    def restore(self, holder: Holder, keys: array[int], values: array[int], most: int = 1_000) -> Iterator[None]:
        """Blocks as `Names.dump` gave them, by and by: a pause after each `most`."""
        put = holder.blocks.put
        for at in range(0, len(keys), most):
            for key, own in zip(keys[at : at + most], values[at : at + most], strict=True):
                if put(key, own) is None:
                    self._mark(own, holder.bit)
            if self.entries > self.limit:
                self._evict()
            yield

    def sweep(self, most: int = 2_500) -> bool:
        """Free some memory of holders that are gone. True: there is more to do."""
        if self._retired:
            bit, blocks = self._retired[-1]
            for own in blocks.drain(most):
                self._unmark(own, bit)
            if not blocks:
                self._retired.pop()
                heappush(self._free_bits, bit)
        return bool(self._retired)

    def _take_bit(self) -> int:
        if self._free_bits:
            bit = heappop(self._free_bits)
        else:
            bit = 1 << self._bits
            self._bits += 1
        self._alive |= bit
        return bit

    # ---- what events say

    def stored(
        self,
        holder: Holder,
        hashes: Sequence[int | bytes],
        parent: int | bytes | None,
        tokens: Sequence[int],
        block_size: int,
        *,
        lora: str | None = None,
        extra: Sequence[Sequence[Any] | None] | None = None,
    ) -> str | None:
        """A run of blocks, one after the other. Returns why the run was not taken.

        A block that is known already only becomes young again.
        """
        if block_size < 1 or len(tokens) != len(hashes) * block_size:
            return self.left_out("mismatched")  # vllm#44451
        blocks = holder.blocks
        if parent is None:
            own = begin(block_size, lora)
        else:
            known = blocks.get(_key(parent))
            if known is None:
                return self.left_out("orphaned")  # vllm#58119: its children follow it
            own = known
        try:
            data = array("I", tokens).tobytes()
        except (OverflowError, TypeError):
            return self.left_out("mismatched")
        of_block, bit, sets, step = self._blocks, holder.bit, self._sets, block_size * TOKEN_BYTES
        table, mask = of_block.table, of_block.mask
        added = new = 0
        put = blocks.put
        if extra is not None and not any(extra):
            extra = None
        pieces = [data] if len(hashes) == 1 else [piece for (piece,) in iter_unpack(f"{step}s", data)]
        for number, block in enumerate(pieces):
            engine_hash = hashes[number]
            if extra is not None and number < len(extra) and (keys := extra[number]):
                if lora is not None and keys[0] == lora:
                    keys = keys[1:]
                if keys:
                    own = _with_extra(own, keys)
            own = xxh3_64_intdigest(block, own) & MASK
            before = put(engine_hash & MASK if type(engine_hash) is int else _key(engine_hash), own)
            if before is not None:
                if before == own:
                    continue
                self._unmark(before, bit)
            added += 1
            bucket = table[own & mask]
            having = bucket.get(own)
            if having is None:
                if len(bucket) >= FULL:
                    bucket = of_block.split(own)
                    mask = of_block.mask
                bucket[own] = bit
                new += 1
            else:
                having |= bit
                bucket[own] = sets.setdefault(having, having)
        self.entries += added
        of_block.count += new
        self.block_sizes.add(block_size)
        self.counts["stored"] += len(hashes)
        if len(sets) > 4_096:
            sets.clear()
        if self.entries > self.limit:
            self._evict()
        return None

    def removed(self, holder: Holder, hashes: Iterable[int | bytes]) -> None:
        """Blocks are gone; those that were not known are counted."""
        blocks, bit = holder.blocks, holder.bit
        for engine_hash in hashes:
            own = blocks.pop(_key(engine_hash))
            if own is None:
                self.counts["unknown"] += 1
            else:
                self._unmark(own, bit)
                self.counts["removed"] += 1

    def hold(self, holder: Holder, own: int) -> None:
        """A block by its own hash, for those who know no engine's hash."""
        if holder.blocks.put(own, own) is None:
            self._mark(own, holder.bit)
        if self.entries > self.limit:
            self._evict()

    def left_out(self, cause: str) -> str:
        """Count what was not taken."""
        self.counts[cause] += 1
        return cause

    def _mark(self, own: int, bit: int) -> None:
        having = self._blocks.get(own) | bit
        self._blocks.put(own, self._sets.setdefault(having, having))
        self.entries += 1

    def _unmark(self, own: int, bit: int) -> None:
        bucket = self._blocks.bucket(own)
        having = bucket.get(own, 0) & ~bit
        if having:
            bucket[own] = self._sets.setdefault(having, having)
        elif own in bucket:
            self._blocks.pop(own)
        self.entries -= 1

    def _evict(self) -> None:
        """Let the fullest holder forget what it stored longest ago, a few more than need be."""
        while self.entries > self.limit and (self._retired or self._holders):
            if self._retired:
                self.sweep()
                continue
            holder = max(self._holders, key=lambda h: len(h.blocks))
            holder.forgot = True
            for _ in range(min(self.limit // 64 + 1, EVICTED_AT_ONCE, len(holder.blocks))):
                key, own = holder.blocks.pop_old()
                if own in self._used:
                    self._used.discard(own)
                    holder.blocks.put(key, own)
                else:
                    self._unmark(own, holder.bit)
                    self.counts["evicted"] += 1

    # ---- what routing asks

    def has(self, holder: Holder, own: int) -> bool:
        return bool(self._blocks.get(own) & holder.bit)

    def match(self, hashes: Sequence[int]) -> dict[int, int]:
        """How many blocks from the first on each holder has without a gap: by its bit; those with none are left out."""
        found: dict[Any, int] = {}
        left: Any = self._blocks.get(hashes[0]) & self._alive if hashes else 0
        if not left:
            return found
        table: list[dict[Any, Any]] = self._blocks.table
        mask = self._blocks.mask
        seen: Any = None
        depth = 0
        own: Any
        for own in hashes:
            low: int = own
            having = table[low & mask].get(own, 0)
            if having is not seen:  # equal sets are one object, but for a few
                seen = having
                having &= left
                if having != left:
                    gone = left ^ having
                    if not gone & (gone - 1):
                        found[gone] = depth
                    else:
                        _spread(found, gone, depth)
                    left = having
            if not left:
                break
            depth += 1
        _spread(found, left, depth)
        if self.entries > self.limit // 2:
            self._used.update(hashes[:depth])
            if len(self._used) > self.limit // 4:
                self._used.clear()
        return found


def _spread(found: dict[Any, int], bits: Any, depth: int) -> None:
    while bits:
        rest = bits & (bits - 1)
        found[bits ^ rest] = depth
        bits = rest


class Sent:
    """What was sent where within the last `ttl` seconds: the evidence of engines without events. Fills an index."""

    def __init__(self, index: Index, ttl: float = 120.0) -> None:
        self._index = index
        self._ttl = ttl
        self._log: deque[tuple[float, Holder, Sequence[int]]] = deque()
        self._times: dict[Holder, Counter[int]] = {}

    def record(self, holder: Holder, hashes: Sequence[int], now: float) -> None:
        """These blocks are being computed by the holder. `now`: monotonic."""
        self._log.append((now, holder, hashes))
        self._times.setdefault(holder, Counter()).update(hashes)
        for own in hashes:
            self._index.hold(holder, own)

    def expire(self, now: float) -> None:
        """Forget what was sent last before the TTL."""
        log = self._log
        while log and log[0][0] <= now - self._ttl:
            _, holder, hashes = log.popleft()
            times = self._times.get(holder)
            if times is None:
                continue
            for own in hashes:
                times[own] -= 1
                if times[own] <= 0:
                    del times[own]
                    if own in holder.blocks:
                        self._index.removed(holder, (own,))

    def forget(self, holder: Holder) -> None:
        """The holder is gone."""
        self._times.pop(holder, None)
