"""Sends each engine's log on to a capped stream in Redis, and keeps the file on disk small.

Has a thread of its own and remembers how far it came, so that Redis being away, or the agent being started anew, loses
nothing that is still in the file. Secrets are blotted out on the way. What the stream no longer holds is in the file.
"""

from __future__ import annotations

import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import redis

from controlplane.fleet import wire
from workers.record import LOG

log = logging.getLogger(__name__)

SHIPPED = "shipped"
EVERY_SECONDS = 0.5
CHUNK_BYTES = 256 << 10
"""Read from one log at a time, so that a chatty engine does not hold up the others."""
ROTATE_BYTES = 16 << 20
FULL_BYTES = 64 << 20
"""Then it is turned over even though Redis, being away, has not got all of it: the disk is worth more."""
PARTIAL_AFTER_SECONDS = 2.0
"""A last line without its newline is sent when it has not grown for so long."""


class Source(NamedTuple):
    """One attempt's log."""

    engine: str
    attempt: int
    folder: Path
    ended: bool
    secrets: tuple[str, ...]


class LogShipper:
    """`ship_once` is the loop's body, for tests too."""

    def __init__(
        self,
        node: str,
        client: redis.Redis,
        sources: Callable[[], Iterable[Source]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node = node
        self._client = client
        self._sources = sources
        self._clock = clock
        self._turn = threading.Lock()
        self._known: dict[tuple[str, int], Source] = {}
        self._partial: dict[Path, tuple[int, float]] = {}

    def start(self) -> None:
        threading.Thread(target=self._run, name="logs", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                more = self.ship_once()
            except redis.RedisError:
                more = False  # the agent's loop says that Redis is away; the file keeps the lines
            except Exception:
                log.exception("An engine's log could not be sent on.")
                more = False
            if not more:
                time.sleep(EVERY_SECONDS)

    def flush(self, seconds: float = 2.0) -> None:
        """Sends what the last engines said while they ended, if Redis still takes it."""
        until = self._clock() + seconds
        try:
            while self.ship_once() and self._clock() < until:
                pass
        except redis.RedisError:
            return

    def ship_once(self) -> bool:
        """Sends what is new in every log. True: there is more to send at once. Raises `redis.RedisError`."""
        with self._turn:
            now = {(source.engine, source.attempt): source for source in self._sources()}
            # An attempt is dropped as soon as it has ended: its last words are still to be sent.
            for key in self._known.keys() - now.keys():
                now[key] = self._known[key]._replace(ended=True)
            self._known = now
            turned = {key: self._keep_small(source) for key, source in now.items()}  # also while Redis is away
            more = {key: self._ship(source) or turned[key] for key, source in now.items()}
            self._known = {key: source for key, source in now.items() if more[key] or not source.ended}
            return any(more.values())

    def _ship(self, source: Source) -> bool:
        path = source.folder / LOG
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            return False
        offset = read_offset(source.folder)
        if offset > size:
            offset = 0  # the file was begun anew
        if offset == size:
            return False
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(CHUNK_BYTES)
        complete = self._complete(source, offset, data)
        if complete:
            self._send(source, data[:complete])
            write_offset(source.folder, offset + complete)
        return offset + complete < size and bool(complete)

    def _complete(self, source: Source, offset: int, data: bytes) -> int:
        """How many bytes end with a whole line; a cut-off line counts when nothing follows it, or nothing more can."""
        end = data.rfind(b"\n") + 1
        if end or len(data) == CHUNK_BYTES:
            self._partial.pop(source.folder, None)
            return end or len(data)
        if source.ended:
            return len(data)
        length, since = self._partial.get(source.folder, (-1, 0.0))
        if length != len(data):
            self._partial[source.folder] = (len(data), self._clock())
            return 0
        return len(data) if self._clock() - since >= PARTIAL_AFTER_SECONDS else 0

    def _send(self, source: Source, data: bytes) -> None:
        key = wire.log_key(self._node, source.engine, source.attempt)
        with self._client.pipeline(transaction=False) as pipe:
            for line in lines(data, source.secrets):
                pipe.xadd(key, {"line": line}, maxlen=wire.LOG_MAXLEN, approximate=True)
            pipe.expire(key, wire.LOG_TTL)
            pipe.execute()

    def _keep_small(self, source: Source) -> bool:
        """Turns a large log over, once all of it has been sent on. True: it did."""
        try:
            size = (source.folder / LOG).stat().st_size
        except FileNotFoundError:
            return False
        unsent = size - read_offset(source.folder)
        if size < ROTATE_BYTES or (unsent and size < FULL_BYTES):
            return False
        self._turn_over(source.folder, unsent=unsent)
        return True

    def _turn_over(self, folder: Path, *, unsent: int) -> None:
        """Copies the file away and empties it: the engine goes on writing to the same one, which it appends to.

        Lines written between the two steps are lost; that is the price of an engine that is never disturbed.
        """
        path = folder / LOG
        older = path.with_name(LOG + ".1")
        older.touch(0o600)
        shutil.copyfile(path, older)
        with path.open("r+b") as file:
            file.truncate(0)
            if unsent:
                file.write(
                    f"[tandem] {unsent} bytes before this line were not sent; they are in {older.name}\n".encode()
                )
        write_offset(folder, 0)


_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[@-Z\\^_])")
"""ECMA-48: colours, cursor movements, window titles."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain(line: str) -> str:
    """The line without what would command a terminal: engines print colours, and at times what clients sent."""
    return _CONTROLS.sub("\ufffd", _ESCAPES.sub("", line))


def lines(data: bytes, secrets: Iterable[str]) -> list[str]:
    """The bytes as lines for people: no secret, no escape sequence, no line longer than `LOG_LINE_BYTES`, of a progress bar its last state."""
    text = _ESCAPES.sub("", data.decode(errors="replace"))
    for secret in secrets:
        if secret:
            text = text.replace(secret, "[secret]")
    result = []
    for line in text.removesuffix("\n").split("\n"):
        shown = _CONTROLS.sub("\ufffd", line.rstrip("\r").rpartition("\r")[2])
        raw = shown.encode()
        if len(raw) > wire.LOG_LINE_BYTES:
            shown = raw[: wire.LOG_LINE_BYTES].decode(errors="ignore") + " … (cut)"
        result.append(shown)
    return result


def read_offset(folder: Path) -> int:
    try:
        return int((folder / SHIPPED).read_text())
    except (FileNotFoundError, ValueError):
        return 0


def write_offset(folder: Path, offset: int) -> None:
    (folder / SHIPPED).write_text(str(offset))
