"""Figures of all router processes behind one port, so that whichever is scraped tells of all.

One slot of shared memory per process, made by the parent before it forks. A slot is written by its process alone; a reader
that meets a half-written one sees it by the checksum and keeps what it read before.
"""

from __future__ import annotations

import logging
import mmap
import struct
from zlib import crc32

import msgspec

from frontend_api.observe.decisions import Board
from frontend_api.observe.figures import Figures

log = logging.getLogger(__name__)

SLOT = 1 << 20
"""Bytes of one process's figures."""
_HEAD = struct.Struct("<II")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Figures)


class Slots:
    """The shared memory of `count` processes."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.decisions = Board(count)
        self._memory = mmap.mmap(-1, count * SLOT)
        self._last: dict[int, Figures] = {}

    def write(self, index: int, figures: Figures) -> None:
        data = _encoder.encode(figures)
        if len(data) + _HEAD.size > SLOT:
            log.error("The figures of process %d take %d bytes: too many for the others to see.", index, len(data))
            return
        at = index * SLOT
        self._memory[at : at + _HEAD.size + len(data)] = _HEAD.pack(len(data), crc32(data)) + data

    def read(self, index: int) -> Figures | None:
        """What a process wrote last; None: nothing yet."""
        at = index * SLOT
        length, checksum = _HEAD.unpack_from(self._memory, at)
        data = self._memory[at + _HEAD.size : at + _HEAD.size + min(length, SLOT)]
        if length and crc32(data) == checksum:
            self._last[index] = _decoder.decode(data)
        return self._last.get(index)

    def others(self, index: int) -> list[Figures]:
        found = (self.read(other) for other in range(self.count) if other != index)
        return [figures for figures in found if figures is not None]
