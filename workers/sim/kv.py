"""The KV block pool: finite, reference counted, with a prefix cache in least-recently-used order.

Pure bookkeeping of which block holds what; every change of the prefix cache is told to `on_stored` and `on_removed`.
A block's `content` stands for its KV tensors and stays as it was until the block is written again, so that reading a
block after its lease gives what real memory would: somebody else's KV.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence

from workers.sim.text import pack


class Block:
    """One KV block. `digest` is set while its tokens can be found by later prompts."""

    __slots__ = ("content", "digest", "id", "references")

    def __init__(self, id: int) -> None:
        self.id = id
        self.references = 0
        self.digest: bytes | None = None
        self.content = b""


def chain(parent: bytes | None, tokens: Sequence[int], salt: str | None, seed: bytes) -> bytes:
    """Hash of a full block: its tokens, all tokens before it, and the request's cache salt (first block only)."""
    state = hashlib.blake2b(parent or seed, digest_size=16)
    state.update(pack(tokens))
    if salt and parent is None:
        state.update(salt.encode())
    return state.digest()


def external(digest: bytes) -> int:
    """The hash as KV events carry it: 64 bits, opaque, different in each process."""
    return int.from_bytes(digest[-8:], "big")


class OutOfBlocks(Exception):
    """Not enough free blocks now: the caller waits or preempts."""


class BlockPool:
    def __init__(
        self,
        blocks: int,
        block_size: int,
        *,
        seed: bytes,
        on_stored: Callable[[list[bytes], bytes | None, Sequence[int], str | None], None],
        on_removed: Callable[[bytes], None],
    ) -> None:
        self.block_size = block_size
        self.blocks = [Block(n) for n in range(blocks)]
        self._seed = seed
        self._free: OrderedDict[int, Block] = OrderedDict((block.id, block) for block in self.blocks)
        """Blocks nobody holds, the one to be reused first in front. Some are still found by their digest."""
        self._cached: dict[bytes, Block] = {}
        self._on_stored = on_stored
        self._on_removed = on_removed

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of blocks that a request or a lease holds, 0..1."""
        return 1.0 - len(self._free) / len(self.blocks)

    def digests(self, tokens: Sequence[int], salt: str | None, known: list[bytes]) -> list[bytes]:
        """The digests of all full blocks of `tokens`, continuing (and extending) the list `known`."""
        size = self.block_size
        for start in range(len(known) * size, len(tokens) - size + 1, size):
            parent = known[-1] if known else None
            known.append(chain(parent, tokens[start : start + size], salt, self._seed))
        return known

    def match(self, digests: Sequence[bytes], most: int) -> list[Block]:
        """The longest cached prefix, at most `most` blocks. Takes no reference."""
        found = []
        for digest in digests[:most]:
            block = self._cached.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def take(self, hits: Sequence[Block], fresh: int) -> list[Block]:
        """References to the cached `hits` and `fresh` new blocks after them.

        Raises `OutOfBlocks` and takes nothing when there are not enough.
        """
        idle_hits = sum(block.references == 0 for block in hits)
        if fresh > len(self._free) - idle_hits:
            raise OutOfBlocks
        for block in hits:
            if block.references == 0:
                del self._free[block.id]
            block.references += 1
        return [*hits, *(self._take_one() for _ in range(fresh))]

    def _take_one(self) -> Block:
        _, block = self._free.popitem(last=False)
        self._forget(block)
        block.references = 1
        return block

    def _forget(self, block: Block) -> None:
        if block.digest is not None:
            del self._cached[block.digest]
            self._on_removed(block.digest)
            block.digest = None

    def give_back(self, blocks: Sequence[Block]) -> None:
        """Drops one reference to each block; the last ones of a sequence are reused first, as their prefix is rarer."""
        for block in reversed(blocks):
            block.references -= 1
            if block.references == 0:
                self._free[block.id] = block
                if block.digest is None:
                    self._free.move_to_end(block.id, last=False)

    def publish(
        self, blocks: Sequence[Block], digests: Sequence[bytes], tokens: Sequence[int], salt: str | None, start: int
    ) -> None:
        """Lets later prompts find the full blocks from index `start` on."""
        size = self.block_size
        run: list[bytes] = []
        first = start
        for index in range(start, len(digests)):
            block, digest = blocks[index], digests[index]
            if digest in self._cached or block.digest is not None:
                self._tell(run, digests, tokens, salt, first)
                run, first = [], index + 1
                continue
            block.digest = digest
            self._cached[digest] = block
            run.append(digest)
        self._tell(run, digests, tokens[: len(digests) * size], salt, first)

    def _tell(
        self, run: list[bytes], digests: Sequence[bytes], tokens: Sequence[int], salt: str | None, first: int
    ) -> None:
        if run:
            size = self.block_size
            parent = digests[first - 1] if first else None
            self._on_stored(run, parent, tokens[first * size : (first + len(run)) * size], salt if not first else None)

    def clear(self) -> bool:
        """Forgets every cached prefix. False (and nothing done) while a block is in use."""
        if len(self._free) != len(self.blocks):
            return False
        for block in self.blocks:
            block.digest = None
        self._cached.clear()
        return True
