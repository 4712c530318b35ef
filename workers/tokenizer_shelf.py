"""Offers the tokenizers of this node's engines to routers on other machines: a few megabytes each, under keys of the node's
own in Redis. What Redis loses is put there again; what no engine needs any more expires by itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import redis

from controlplane.fleet import tokenizer_files, wire
from controlplane.fleet.tokenizer_files import Unpackable
from workers.tokenizer_folder import read_files

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
KEEP_LOOKS = 6
"""A key that was put there is looked for again after so many looks."""


class TokenizerShelf:
    """`wanted`: digest → folder of the tokenizers of the engines of now."""

    def __init__(self, node: str, client: redis.Redis, wanted: Callable[[], Mapping[str, Path]]) -> None:
        self._node = node
        self._client = client
        self._wanted = wanted
        self._rests: dict[str, int] = {}
        """Looks until a digest is seen to again."""

    def start(self, stopping: threading.Event) -> None:
        threading.Thread(target=self._run, args=(stopping,), name="tokenizers", daemon=True).start()

    def _run(self, stopping: threading.Event) -> None:
        while not stopping.wait(LOOK_SECONDS):
            try:
                self.one_step()
            except Exception:
                log.exception("The tokenizers could not be offered; it is tried again.")

    def one_step(self) -> None:
        """See to what is due. Redis being away is no error: the next step tries again."""
        wanted = self._wanted()
        self._rests = {digest: rest - 1 for digest, rest in self._rests.items() if digest in wanted}
        for digest, folder in wanted.items():
            if self._rests.get(digest, 0) <= 0:
                try:
                    self._offer(digest, folder)
                    self._rests[digest] = KEEP_LOOKS
                except redis.RedisError as error:
                    log.debug("The tokenizer in %s is not offered yet: %s", folder, type(error).__name__)

    def _offer(self, digest: str, folder: Path) -> None:
        key = wire.tokenizer_key(self._node, digest)
        if self._client.expire(key, wire.TOKENIZER_TTL):
            return
        try:
            files = read_files(folder)
            if tokenizer_files.digest(files) != digest:
                raise Unpackable("its files are others by now")
            data = tokenizer_files.pack(files)
        except (OSError, Unpackable) as error:
            log.warning("The tokenizer in %s is not offered to other machines: %s", folder, error)
            return
        self._client.set(key, data, ex=wire.TOKENIZER_TTL)
        log.info("The tokenizer in %s is offered to routers (%d bytes).", folder, len(data))
