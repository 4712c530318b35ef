"""KV events of one engine rank: how its batches are read, and what they prove. Pure: frames and times in, index changes out.

A publisher loses what a slow or late subscriber misses, and says so only by its sequence. So every number is checked, live
and in replay: a gap is closed by replay or costs the rank its blocks. A rank that has been quiet is asked for its last batch
once more. The answer shows that it lives, that no batch was lost at the end, and that it is still the same process: another
payload under the same number is a restart (llm-d-router#2853).
"""

from __future__ import annotations

from collections import Counter, deque
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Raw, Struct

from frontend_api.kvindex import DEVICE, FULL_ATTENTION, Index

END = -1
"""The sequence that ends a replay."""
REPLAY_SECONDS = 5.0
"""Longest silence of a replay."""
CHECK_SECONDS = 5.0
"""A rank that has been quiet for so long is asked for its last batch."""
OWED_SECONDS = 10.0
"""From a computed prompt to the events that must tell of it."""
WAITING = 10_000
"""Live batches kept during a replay; with more the oldest are lost, and the sequence shows it."""


class Stored(Struct, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class Removed(Struct, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None


class Cleared(Struct, tag="AllBlocksCleared"):
    pass


class StoredRow(Struct, tag="BlockStored", array_like=True):
    """As older versions send it: positions after the last known one are passed over."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Any = None
    block_mm_infos: Any = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class RemovedRow(Struct, tag="BlockRemoved", array_like=True):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None


class ClearedRow(Struct, tag="AllBlocksCleared", array_like=True):
    pass


class _Batch(Struct, array_like=True):
    ts: float
    events: list[Raw]
    data_parallel_rank: int | None = None


_batch = msgspec.msgpack.Decoder(_Batch)
_map = msgspec.msgpack.Decoder(Stored | Removed | Cleared)
_row = msgspec.msgpack.Decoder(StoredRow | RemovedRow | ClearedRow)


def _is_map(data: Raw) -> bool:
    first = memoryview(data)[0]
    return first & 0xF0 == 0x80 or first in (0xDE, 0xDF)


class Knowledge(StrEnum):
    """What the router knows of the blocks of one rank."""

    REPLAYING = "replay-running"
    """It restarted, and its first events are being fetched."""
    COMPLETE = "complete"
    PARTIAL = "known-in-part"
    """Its beginning, or batches since, are lost: what is indexed is there, more may be."""
    UNHEARD = "not-heard"
    """No batch and no answer to a replay yet: nothing is known."""


class Trouble(StrEnum):
    """What is wrong with the events of one rank."""

    NOT_OBSERVED = "kv_events_not_observed"
    GAP = "kv_events_gap"
    MISMATCH = "kv_block_mismatch"
    AMBIGUOUS = "kv_events_ambiguous"
    SILENT = "kv_events_silent"
    """It answered a replay before and no longer does."""


class Rank:
    """The events of one engine rank and the blocks they tell of. `block_size`: what the engine is said to use, if known."""

    def __init__(self, index: Index, *, block_size: int | None, replays: bool, now: float) -> None:
        self.index = index
        self.holder = index.add_holder()
        self.block_size = block_size
        self.batches = self.gaps = self.restarts = self.replays = 0
        self.heard_at: float | None = None
        self.wanted: int | None = None
        """Ask for a replay from this sequence."""
        self._replays = replays
        self._knowledge = Knowledge.UNHEARD
        self._trouble: dict[Trouble, float] = {}
        self._next: int | None = None
        """Sequence of the batch that must come next; None: any, the first one tells."""
        self._last: bytes = b""
        self._source: int | None = None
        self._waiting: deque[tuple[int, bytes]] = deque(maxlen=WAITING)
        self._asked: int | None = None
        self._answered = False
        self._quiet_since = now
        self._owed_since: float | None = None
        if replays:
            self.wanted = 0

    # ---- what the sockets bring

    def live(self, sequence: int, payload: bytes, now: float) -> None:
        """A batch from the publisher. `now`: monotonic, here and below."""
        self._heard(now)
        if self.wanted is not None or self._asked is not None:
            self._waiting.append((sequence, payload))
        else:
            self._take(sequence, payload, now)

    def asked(self) -> int:
        """The replay that is wanted is asked for now. Returns the sequence it begins at."""
        assert self.wanted is not None
        self._asked, self.wanted = self.wanted, None
        self._answered = False
        self.replays += 1
        return self._asked

    def replayed(self, sequence: int, payload: bytes, now: float) -> None:
        """A batch from the replay, or its end."""
        self._heard(now)
        self._trouble.pop(Trouble.SILENT, None)
        if sequence == END:
            self._replay_ended(now)
            return
        self._answered = True
        if self.wanted is not None:
            return  # a restart was found on the way: another replay follows
        if self._next is None:
            self._begin(sequence)
            self._apply(sequence, payload, now)
        elif sequence == self._next - 1:
            if payload != self._last:
                self._restarted()
        elif sequence >= self._next:
            if sequence > self._next:
                self._lost(now)
            self._apply(sequence, payload, now)

    def replay_failed(self, now: float) -> None:
        """The replay gave no answer, or none any more."""
        self._asked = None
        self._quiet_since = now
        if self._knowledge is not Knowledge.UNHEARD:
            self._trouble.setdefault(Trouble.SILENT, now)
        if self.wanted is None:
            self._drain(now)

    def tick(self, now: float) -> None:
        """Once a second: time limits."""
        quiet = now - self._quiet_since > CHECK_SECONDS
        if quiet and self._replays and self._asked is None and self.wanted is None:
            self.wanted = max((self._next or 0) - 1, 0)
        if self._owed_since is not None and now - self._owed_since > OWED_SECONDS:
            self._trouble.setdefault(Trouble.NOT_OBSERVED, now)

    def computed(self, now: float) -> None:
        """The engine has computed a prompt that fills blocks of which the index knows nothing: events must tell of them.

        Of an engine that is known in part nothing follows: it may have had them.
        """
        if self._owed_since is None and self._knowledge is Knowledge.COMPLETE:
            self._owed_since = now

    def close(self) -> None:
        """The engine is gone, and its blocks with it."""
        self.index.drop_holder(self.holder)

    def counts(self) -> Counter[str]:
        """What its sequence went through."""
        return Counter(batches=self.batches, gaps=self.gaps, restarts=self.restarts, replays=self.replays)

    # ---- what they prove

    @property
    def knowledge(self) -> Knowledge:
        asking = self.wanted is not None or self._asked is not None
        return Knowledge.REPLAYING if asking and self.batches and self._next is None else self._knowledge

    @property
    def trouble(self) -> dict[Trouble, float]:
        """What is wrong, and since when (monotonic)."""
        return self._trouble

    @property
    def evident(self) -> bool:
        """Something is known of its blocks, be it that there are none."""
        known = self._knowledge in (Knowledge.COMPLETE, Knowledge.PARTIAL)
        return known and (bool(self.holder.blocks) or not self._trouble)

    # ---- the sequence

    def _heard(self, now: float) -> None:
        self.heard_at = self._quiet_since = now

    def _begin(self, sequence: int) -> None:
        self._knowledge = Knowledge.COMPLETE if sequence == 0 else Knowledge.PARTIAL

    def _take(self, sequence: int, payload: bytes, now: float) -> None:
        expected = self._next
        if expected is not None and sequence < expected:
            if sequence == expected - 1 and payload == self._last:
                return
            self._restarted()
            expected = None
        if expected is not None and sequence > expected:
            if self._replays:
                self.wanted = max(expected - 1, 0)
            else:
                self._lost(now)
        if self.wanted is not None:
            self._waiting.append((sequence, payload))
            return
        if expected is None:
            self._begin(sequence)
        self._apply(sequence, payload, now)

    def _replay_ended(self, now: float) -> None:
        asked, self._asked = self._asked, None
        if self.wanted is not None:
            return
        if self._next is None:
            self._knowledge, self._next = Knowledge.COMPLETE, 0
        elif self._next and not self._answered and asked == self._next - 1:
            self._restarted()  # it does not know the batch that it sent last
            return
        self._drain(now)

    def _drain(self, now: float) -> None:
        """Take the batches that came during a replay. What is still missing is lost."""
        waiting, self._waiting = self._waiting, deque(maxlen=WAITING)
        for sequence, payload in waiting:
            if self._next is None:
                self._begin(sequence)
            elif sequence < self._next:
                continue  # replay has brought it
            elif sequence > self._next:
                self._lost(now)
            self._apply(sequence, payload, now)

    def _restarted(self) -> None:
        """Another process sends now: nothing that was known holds."""
        self.restarts += 1
        self.index.clear(self.holder)
        self._trouble.clear()
        self._owed_since = self._next = self._source = None
        self._last = b""
        self._knowledge = Knowledge.UNHEARD
        if self._replays:
            self.wanted = 0

    def _lost(self, now: float) -> None:
        """Batches are gone for good: any block may have been removed in them."""
        self.gaps += 1
        self.index.clear(self.holder)
        self._knowledge = Knowledge.PARTIAL
        self._trouble[Trouble.GAP] = now

    # ---- one batch

    def _apply(self, sequence: int, payload: bytes, now: float) -> None:
        self._next = sequence + 1
        self._last = payload
        self.batches += 1
        self._owed_since = None
        self._trouble.pop(Trouble.NOT_OBSERVED, None)
        try:
            batch = _batch.decode(payload)
        except msgspec.MsgspecError:
            self.index.left_out("unreadable")
            return
        if batch.data_parallel_rank is not None:
            if self._source is None:
                self._source = batch.data_parallel_rank
            elif self._source != batch.data_parallel_rank:
                self._trouble.setdefault(Trouble.AMBIGUOUS, now)
        for data in batch.events:
            try:
                event = _map.decode(data) if _is_map(data) else _row.decode(data)
            except msgspec.MsgspecError:
                self.index.left_out("unreadable")
                continue
            self._event(event, now)

    def _event(self, event: Stored | Removed | Cleared | StoredRow | RemovedRow | ClearedRow, now: float) -> None:
        index, holder = self.index, self.holder
        if isinstance(event, Stored | StoredRow):
            if event.kv_cache_spec_kind not in FULL_ATTENTION:
                if event.group_idx is not None:
                    holder.skipped_groups.add(event.group_idx)
                index.left_out("other-group")
            elif event.medium not in DEVICE:
                index.left_out("other-medium")
            elif event.block_size != (self.block_size or event.block_size):
                self._trouble.setdefault(Trouble.MISMATCH, now)
                index.left_out("block-size")
            else:
                self.block_size = event.block_size
                extra = event.extra_keys if isinstance(event.extra_keys, list) else None
                left_out = index.stored(
                    holder, event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size,
                    lora=event.lora_name, extra=extra,
                )  # fmt: skip
                if left_out is not None:
                    self._knowledge = Knowledge.PARTIAL
        elif isinstance(event, Removed | RemovedRow):
            if event.medium not in DEVICE or event.group_idx in holder.skipped_groups:
                index.left_out("other-medium" if event.medium not in DEVICE else "other-group")
            else:
                index.removed(holder, event.block_hashes)
        else:  # nothing is cached any more, so nothing is unknown
            index.clear(holder)
            self._knowledge = Knowledge.COMPLETE
            self._trouble.pop(Trouble.GAP, None)
