"""What is written down about one engine attempt, so that the next agent process can find it again: `engine.json`, 0600.

    HOME/agents/<node>/engines/<engine>/<attempt>/
        engine.json   this record (holds the engine's secret)
        engine.log    everything the process printed
        shipped       how far the log has been sent on
        tmp           while the process runs: where its temporary folder is

A pair (engine, attempt) names one process for ever: a record with an end is never started again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Struct

from controlplane.fleet.model import EngineAssignment, PairProof, Ports

RECORD = "engine.json"
LOG = "engine.log"
KEEP_ATTEMPTS = 5
KEEP_DROPPED = 20
"""Engines that no plan wants any more, whose logs stay on the node."""


class EngineRecord(Struct, kw_only=True):
    """One attempt. The process is named by boot, pid and start time together; each alone is used again by the system."""

    assignment: EngineAssignment
    address: str = ""
    ports: Ports | None = None
    command: tuple[str, ...] = ()
    model_folder: str = ""
    tokenizer_folder: str = ""
    tokenizer: str = ""
    """Digest of the files in there."""
    pid: int | None = None
    start_ticks: int = 0
    """Start time in clock ticks since boot."""
    boot: str = ""
    started_at: float | None = None
    warmed: bool = False
    """It has answered a real completion."""
    pairs: tuple[PairProof, ...] = ()
    ended: bool = False
    exit_code: int | None = None
    stopped: bool = False
    """It ended because the agent was told to end it."""
    detail: str = ""
    """Why it ended."""


def write_private(path: Path, data: bytes) -> None:
    """Replaces a file in one step; only the owner may read it."""
    fresh = path.with_name(path.name + ".new")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
    fresh.replace(path)


def open_appending(path: Path) -> IO[bytes]:
    """For a log: made readable by the owner alone, and always written at its end."""
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def note(folder: Path, text: str) -> None:
    """A line of the agent's own in an attempt's log, so that it also tells what came before and after the process."""
    with open_appending(folder / LOG) as file:
        file.write(f"[tandem] {text}\n".encode())


def tail(folder: Path, size: int) -> str:
    """The last `size` bytes of an attempt's log."""
    with (folder / LOG).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size))
        return file.read().decode(errors="replace")


def private_folder(path: Path) -> Path:
    """The folder, made with its parents; only the owner may enter it."""
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o700)
    return path


class Records:
    """The engines folder of one agent."""

    def __init__(self, root: Path) -> None:
        self.root = private_folder(root)

    def folder(self, engine: str, attempt: int) -> Path:
        return self.root / engine / str(attempt)

    def save(self, record: EngineRecord) -> None:
        folder = private_folder(self.folder(record.assignment.engine, record.assignment.attempt))
        write_private(folder / RECORD, msgspec.json.encode(record))

    def load(self, engine: str, attempt: int) -> EngineRecord | None:
        """None: there is none that can be read."""
        try:
            return msgspec.json.decode((self.folder(engine, attempt) / RECORD).read_bytes(), type=EngineRecord)
        except (OSError, msgspec.DecodeError):
            return None

    def attempts(self) -> Iterator[tuple[str, int]]:
        """Every attempt that has a folder, oldest first."""
        for folder in sorted(self.root.glob("*/*"), key=lambda path: (path.parent.name, path.name.zfill(9))):
            if folder.name.isdigit():
                yield folder.parent.name, int(folder.name)

    def prune(self, held: Collection[str]) -> None:
        """Removes the folders of older attempts, and of engines that were dropped long ago. `held`: engines of now."""
        for engine in {engine for engine, _ in self.attempts()}:
            attempts = sorted((number for name, number in self.attempts() if name == engine), reverse=True)
            for number in attempts[KEEP_ATTEMPTS:]:
                shutil.rmtree(self.folder(engine, number), ignore_errors=True)
        dropped = [folder for folder in self.root.iterdir() if folder.name not in held]
        for folder in sorted(dropped, key=lambda path: path.stat().st_mtime, reverse=True)[KEEP_DROPPED:]:
            shutil.rmtree(folder, ignore_errors=True)
