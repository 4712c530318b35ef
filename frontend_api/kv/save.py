"""The router's index on disk: what was known of each engine rank, so that a later process can go on with it.

An engine keeps only its last 10,000 batches for replay; without this a router that starts anew would know older blocks only
once they are gone. One file per rank, replaced whole, readable by its owner alone. It holds hashes and no token. What is torn,
foreign or of another version is passed over with one line in the log: it is a help and never a condition.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from hashlib import sha256
from pathlib import Path
from time import time

import msgspec
from msgspec import Struct
from xxhash import xxh3_128_digest

from frontend_api.kv.evidence import Evidence, Source
from frontend_api.kv.knowledge import Saved
from frontend_api.kv.sequence import Rank
from frontend_api.processes.listeners import write_private

log = logging.getLogger(__name__)

VERSION = 1
SAVE_SECONDS = 60.0
KEPT_SECONDS = 86_400.0
"""For which a file that nobody has renewed is kept."""
ENTRY_BYTES = 16
_MAGIC = b"tandem-kv-index\n"
_DIGEST = 16
_encoder = msgspec.msgpack.Encoder()


class Unreadable(Exception):
    """No saved index; the message says why."""


class _Head(Struct, frozen=True, array_like=True):
    version: int
    byteorder: str
    hashing: str
    """Changes with the way in which own hashes are made."""
    source: Source


class _File(Struct, frozen=True, array_like=True):
    head: _Head
    saved: Saved


_head_decoder = msgspec.msgpack.Decoder(tuple[_Head, msgspec.Raw])
_decoder = msgspec.msgpack.Decoder(_File)
HASHING = "xxh3-64/60"


def encode(source: Source, saved: Saved) -> bytes:
    """A whole file."""
    body = _encoder.encode(_File(_Head(VERSION, sys.byteorder, HASHING, source), saved))
    return b"".join((_MAGIC, xxh3_128_digest(body), body))


def decode(data: bytes, source: Source) -> Saved:
    """What a file knows of a rank. Raises `Unreadable`."""
    start = len(_MAGIC) + _DIGEST
    body = memoryview(data)[start:]
    if data[: len(_MAGIC)] != _MAGIC:
        raise Unreadable("it is no saved index")
    if xxh3_128_digest(body) != data[len(_MAGIC) : start]:
        raise Unreadable("it is torn")
    try:
        head, _ = _head_decoder.decode(body)
        if (head.version, head.byteorder, head.hashing) != (VERSION, sys.byteorder, HASHING):
            raise Unreadable("another version wrote it")
        saved = _decoder.decode(body).saved
    except msgspec.MsgspecError:
        raise Unreadable("another version wrote it") from None
    if head.source != source:
        raise Unreadable("it tells of another engine")
    if len(saved.keys) != len(saved.values) or len(saved.keys) % 8 or len(saved.copies) % 8:
        raise Unreadable("its parts name or the password is wrong")
    return saved


def file_name(source: Source) -> str:
    """One per rank of one incarnation of an engine."""
    return sha256(repr(tuple(source)).encode()).hexdigest()[:32] + ".kv"


class SavedIndex:
    """The files of one router. Several processes behind one port read them; one of them writes."""

    def __init__(self, evidence: Evidence, folder: Path) -> None:
        self._evidence = evidence
        self._folder = folder
        self._written: dict[Source, tuple[Rank, int]] = {}
        """As of which batch each rank was saved."""
        self._lock = asyncio.Lock()

    async def restore(self, source: Source, rank: Rank) -> None:
        """Let a rank begin with what was saved of it, if anything; other tasks get their turn meanwhile."""
        saved = await asyncio.to_thread(self._read, source)
        if saved is None:
            return
        for _ in rank.restore(saved):
            await asyncio.sleep(0)
        log.info("%s rank %d: %d blocks are known from disk.", source.engine, source.rank, len(saved.keys) // 8)

    async def run(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(SAVE_SECONDS)
            await self.save()

    async def save(self) -> None:
        """Write what has changed. The event loop is held for a copy of one rank's index at a time, a thread does the rest."""
        async with self._lock:
            sources = self._evidence.sources()
            for source, rank in sources.items():
                state = rank, rank.batches
                if self._written.get(source) == state or (saved := rank.saved()) is None:
                    continue
                try:
                    await asyncio.to_thread(self._write, source, saved)
                except OSError as error:
                    log.warning(
                        "The index of %s cannot be saved in %s: %s", source.engine, self._folder, error.strerror
                    )
                    return
                self._written[source] = state
            self._written = {source: state for source, state in self._written.items() if source in sources}
            await asyncio.to_thread(self._tidy, {file_name(source) for source in sources})

    def _write(self, source: Source, saved: Saved) -> None:
        write_private(self._folder / file_name(source), encode(source, saved))

    def _read(self, source: Source) -> Saved | None:
        path = self._folder / file_name(source)
        try:
            if path.stat().st_size > self._evidence.limit * ENTRY_BYTES + (64 << 10):
                raise Unreadable("it is larger than the index may be")
            return decode(path.read_bytes(), source)
        except FileNotFoundError:
            return None
        except (OSError, Unreadable) as error:
            log.warning("The saved index %s cannot be used: %s", path, error)
            return None

    def _tidy(self, wanted: set[str]) -> None:
        """Remove what nobody has renewed for long: engines that are gone, files that were never finished."""
        try:
            for path in self._folder.glob("*.kv*"):
                if path.name not in wanted and path.stat().st_mtime < time() - KEPT_SECONDS:
                    path.unlink(missing_ok=True)
        except OSError as error:
            log.debug("%s cannot be tidied: %s", self._folder, error)
