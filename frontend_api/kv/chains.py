"""The own hashes of prompts' blocks, without hashing again what prompts have in common: system prompts, documents, histories.

Pure. A run of blocks is known by the hash of all its tokens at once, begun from the block before it: one call instead of one for
each block. Those not asked for lately are forgotten, in two generations.
"""

from __future__ import annotations

from array import array

from xxhash import xxh3_64_intdigest

from frontend_api.kv.index import TOKEN_BYTES, begin, hashed

RUN = 16
"""Blocks; at a prompt's end fewer."""
MOST = 2_048
"""Runs of a generation, about a kilobyte each."""


class Chains:
    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._young: dict[int, list[int]] = {}
        self._old: dict[int, list[int]] = {}

    def of(self, tokens: array[int], block_size: int, salt: str | None = None) -> list[int]:
        """What `index.chain` gives."""
        data, step = tokens.tobytes(), block_size * TOKEN_BYTES
        own, at, whole = begin(block_size, None, salt), 0, len(data) - len(data) % step
        hashes: list[int] = []
        while at < whole:
            run = data[at : min(at + RUN * step, whole)]
            key = xxh3_64_intdigest(run, own)
            known = self._young.get(key)
            if known is None:
                known = self._old.get(key) or hashed(run, step, own)
                if len(self._young) >= self._most:
                    self._old, self._young = self._young, {}
                self._young[key] = known
            hashes += known
            own, at = known[-1], at + len(run)
        return hashes
