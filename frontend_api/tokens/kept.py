"""Token ids kept by what they are the ids of, within a number of bytes: what was not asked for longest goes first.

It may be used by several threads.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
ENTRY_BYTES = 250
"""About what an entry costs beside its key's text and its ids."""


class Kept(Generic[K]):
    def __init__(self, capacity: int) -> None:
        """`capacity`: bytes, at most."""
        self._capacity = capacity
        self._known: OrderedDict[K, array[int]] = OrderedDict()
        self._lock = Lock()
        self.bytes = 0

    def __contains__(self, key: K) -> bool:
        return key in self._known

    def get(self, key: K) -> array[int] | None:
        with self._lock:
            found = self._known.get(key)
            if found is not None:
                self._known.move_to_end(key)
            return found

    def put(self, key: K, ids: array[int]) -> None:
        size = _size(key, ids)
        if size > self._capacity:
            return
        with self._lock:
            if key in self._known:
                return
            self._known[key] = ids
            self.bytes += size
            while self.bytes > self._capacity:
                self.bytes -= _size(*self._known.popitem(last=False))


def _size(key: Hashable, ids: array[int]) -> int:
    text = len(key) * (1 if key.isascii() else 4) if isinstance(key, str) else 0
    return text + len(ids) * ids.itemsize + ENTRY_BYTES
