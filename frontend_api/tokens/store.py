"""Where the files of a model's tokenizer are for this router: in its engines' own folder where that is on this machine, else
in a copy under TANDEM_HOME, fetched once from the engines' node through Redis.

A copy is named by the digest of its files and is kept, so that a router starts without Redis. It is never written to again.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

from controlplane.fleet import tokenizer_files
from controlplane.fleet.tokenizer_files import Unpackable

log = logging.getLogger(__name__)

KEEP = 8
"""Copies of tokenizers, the newest; a deployment that needs an older one fetches it again."""


class Absent(Exception):
    """The files are not to be had now, and may come; the text says why."""


class TokenizerStore:
    """`fetch`: the value of a Redis key, None where there is none; raises `OSError` when Redis is away."""

    def __init__(self, root: Path, fetch: Callable[[str], bytes | None] | None) -> None:
        self._root = root
        self._fetch = fetch

    def folder(self, path: str, key: str) -> Path:
        """The folder with the files: `path` on this machine, or a copy of what is offered under `key`. Raises `Absent`. May
        take seconds: for a thread."""
        digest = key.rpartition(":")[2]
        copy = self._root / digest
        if (
            path and Path(path).is_dir() and (not digest or os.access(path, os.R_OK | os.X_OK))
        ):  # another user's agent's
            return Path(path)
        if not digest:
            raise Absent(f"there is no folder {path} on this machine, and no copy of the tokenizer is offered")
        if copy.is_dir():
            return copy
        if self._fetch is None:
            raise Absent("there is no Redis to have the engines' tokenizer from")
        try:
            data = self._fetch(key)
            if data is None:
                raise Absent("the engines' machine has not offered their tokenizer yet")
            self._keep(copy, tokenizer_files.unpack(data, digest))
        except (Unpackable, OSError) as error:
            raise Absent(f"the engines' tokenizer cannot be had: {error}") from None
        return copy

    def _keep(self, copy: Path, files: dict[str, bytes]) -> None:
        """Other processes do the same at the same time."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = Path(mkdtemp(prefix=".", dir=self._root))
        try:
            for name, content in files.items():
                (fresh / name).parent.mkdir(mode=0o700, exist_ok=True)
                with open(os.open(fresh / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(content)
            if not copy.is_dir():
                fresh.rename(copy)
        except OSError:
            if not copy.is_dir():  # else another process was quicker
                raise
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        self._prune(copy)

    def _prune(self, newest: Path) -> None:
        copies = [path for path in self._root.iterdir() if path != newest and not path.name.startswith(".")]
        copies.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for old in copies[KEEP - 1 :]:
            shutil.rmtree(old, ignore_errors=True)
