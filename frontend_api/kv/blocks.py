"""Own hashes of blocks -> a number each, in about 40 bytes besides the hash, and never a pause in which all is moved.

Pure. One large dict doubles at once: a tenth of a second for millions of blocks, and with blocks that come and go it takes
100 bytes for each. Here it is many small ones, found through a directory by the hash's low bits; one that is full is split by
one more bit (extendible hashing).
"""

from __future__ import annotations

from array import array
from sys import getsizeof

FULL = 85
"""Entries of a bucket: as many as CPython keeps in a dict of 128 slots."""
ROOMY = 60
"""Bytes per entry that a bucket may take."""
SPARSE = 16
"""The directory has at most one place per so many entries: hashes chosen to collide must not make it grow."""


class Blocks:
    """A mapping of 60-bit hashes to numbers other than 0. The hot loops use `table` and `mask` themselves."""

    __slots__ = ("_depths", "_hand", "_pops", "count", "mask", "table")

    def __init__(self) -> None:
        self.table: list[dict[int, int]] = [{}]
        """`table[hash & mask]` is the bucket of a hash."""
        self.mask = 0
        self._depths = array("B", [0])
        """Bits that the bucket at this place has been chosen by."""
        self.count = 0
        self._pops = 0
        self._hand = 0

    def __len__(self) -> int:
        return self.count

    def bucket(self, own: int) -> dict[int, int]:
        """Where a hash lies; to be changed by those alone who neither add nor remove."""
        return self.table[own & self.mask]

    def get(self, own: int) -> int:
        """0: it is not there."""
        return self.table[own & self.mask].get(own, 0)

    def put(self, own: int, value: int) -> None:
        bucket = self.table[own & self.mask]
        if own not in bucket:
            self.count += 1
            if len(bucket) >= FULL:
                bucket = self.split(own)
        bucket[own] = value

    def pop(self, own: int) -> None:
        """It must be there."""
        bucket = self.table[own & self.mask]
        del bucket[own]
        self.count -= 1
        self._pops += 1
        if not self._pops & 15:
            self._tidy()

    def _tidy(self) -> None:
        """Give back what one bucket, the next in turn, keeps for entries that are gone."""
        self._hand = (self._hand + 1) & self.mask
        bucket = self.table[self._hand]
        if getsizeof(bucket) > ROOMY * len(bucket) + 100:
            entries = list(bucket.items())
            bucket.clear()
            bucket.update(entries)

    def split(self, own: int) -> dict[int, int]:
        """Make room in the bucket of a hash. Returns its bucket from now on; `table` and `mask` may be others."""
        depth = self._depths[own & self.mask]
        step = 1 << depth
        if step > self.mask:
            if len(self.table) * SPARSE > self.count:
                return self.table[own & self.mask]
            self.table += self.table
            self._depths += self._depths
            self.mask = 2 * self.mask + 1
        full = self.table[own & self.mask]
        low = {key: value for key, value in full.items() if not key & step}
        high = {key: value for key, value in full.items() if key & step}
        for place in range(own & (step - 1), len(self.table), 2 * step):
            self.table[place], self.table[place + step] = low, high
            self._depths[place] = self._depths[place + step] = depth + 1
        return self.table[own & self.mask]
