"""An engine's names for its blocks: its hash of a block -> our own, in about 30 bytes each, where a dict takes 60 to 90.

Pure. Buckets of plain arrays, grown one by one (linear hashing): there is never a pause in which all is moved. A bucket is in
order of arrival, so its first entry is among the oldest of all.
"""

from __future__ import annotations

from array import array

FILL = 16
"""Entries per bucket on average. More cost less memory and longer searches."""


class Names:
    """A mapping of unsigned 64-bit numbers."""

    __slots__ = ("_hand", "_keys", "_mask", "_size", "_split", "_values")

    def __init__(self) -> None:
        self._keys = [array("Q")]
        self._values = [array("Q")]
        self._size = 0
        self._mask = 0
        """Buckets at the beginning of this round of growth, less one."""
        self._split = 0
        """The bucket to be split next; those in front of it have been."""
        self._hand = 0
        """Where the search for old entries goes on."""

    def __len__(self) -> int:
        return self._size

    def __contains__(self, key: int) -> bool:
        return key in self._keys[self._bucket(key)]

    def get(self, key: int) -> int | None:
        number = self._bucket(key)
        keys = self._keys[number]
        return self._values[number][keys.index(key)] if key in keys else None

    def put(self, key: int, value: int) -> int | None:
        """Set it and make it the youngest of its bucket. Returns what it was."""
        number = key & self._mask
        if number < self._split:
            number = key & (self._mask * 2 + 1)
        keys, values = self._keys[number], self._values[number]
        before = None
        if key in keys:
            at = keys.index(key)
            del keys[at]
            before = values.pop(at)
        keys.append(key)
        values.append(value)
        if before is None:
            self._size += 1
            if self._size > FILL * len(self._keys):
                self._grow()
        return before

    def pop(self, key: int) -> int | None:
        """Remove it. Returns what it was."""
        number = self._bucket(key)
        keys = self._keys[number]
        try:
            at = keys.index(key)
        except ValueError:
            return None
        del keys[at]
        self._size -= 1
        return self._values[number].pop(at)

    def pop_old(self) -> tuple[int, int]:
        """Remove one of the oldest entries. Raises `KeyError` when there are none."""
        if not self._size:
            raise KeyError
        while True:
            self._hand = (self._hand + 1) % len(self._keys)
            keys = self._keys[self._hand]
            if keys:
                self._size -= 1
                return keys.pop(0), self._values[self._hand].pop(0)

    def dump(self) -> tuple[bytes, bytes]:
        """All keys and their values, 8 bytes each in this machine's order, the oldest of a bucket first. One pass in C."""
        return b"".join(self._keys), b"".join(self._values)

    def drain(self, most: int) -> list[int]:
        """Remove about so many entries, any, for good: nothing may be put in again. Returns their values."""
        drained: list[int] = []
        while self._values and len(drained) < most:
            drained += self._values.pop()
            self._keys.pop()
        self._size -= len(drained)
        return drained

    def _bucket(self, key: int) -> int:
        number = key & self._mask
        return key & (self._mask * 2 + 1) if number < self._split else number

    def _grow(self) -> None:
        """Split one bucket by one more bit of its keys."""
        wide = self._mask * 2 + 1
        split = self._split
        entries = list(zip(self._keys[split], self._values[split], strict=True))
        stay = [entry for entry in entries if entry[0] & wide == split]
        move = [entry for entry in entries if entry[0] & wide != split]
        self._keys[split], self._values[split] = array("Q", [k for k, _ in stay]), array("Q", [v for _, v in stay])
        self._keys.append(array("Q", [k for k, _ in move]))
        self._values.append(array("Q", [v for _, v in move]))
        self._split += 1
        if self._split > self._mask:
            self._mask, self._split = wide, 0
