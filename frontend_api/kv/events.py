"""KV events of one engine rank: how its batches are read, and what they prove. Pure: frames and times in, index changes out.

A publisher loses what a slow or late subscriber misses, and says so only by its sequence. So every number is checked, live
and in replay: a gap is closed by replay or costs the rank its blocks. A rank that has been quiet is asked for its last batch
once more. The answer shows that it lives, that no batch was lost at the end, and that it is still the same process: another
payload under the same number is a restart (llm-d-router#2853).

What a rank held before its events could be followed is not known. Engines reuse the block that was used longest ago, so that
it ends of itself (`_turn_over`), or a saved index knows it (`restore`).
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterator

from xxhash import xxh3_128_digest

from frontend_api.kv import wire
from frontend_api.kv.debt import Debt
from frontend_api.kv.index import DEVICE, FULL_ATTENTION, Index
from frontend_api.kv.knowledge import Bound, Knowledge, Saved, Trouble
from frontend_api.kv.wire import Event, Removed, RemovedRow, Stored, StoredRow

END = -1
"""The sequence that ends a replay."""
REPLAY_SECONDS = 5.0
"""Longest silence of a replay."""
CHECK_SECONDS = 5.0
"""A rank that has been quiet for so long is asked for its last batch."""
WAITING = 10_000
"""Live batches kept during a replay; with more the oldest are lost, and the sequence shows it."""
UNSTEADY = 5
"""Restarts within …"""
UNSTEADY_SECONDS = 600.0
"""… which are those of no engine: events and replay come from different ones."""
FILLED = 0.9
"""Share of a rank's blocks that must be known before nothing else is taken to be there: a few are never full."""


class Rank:
    """The events of one engine rank and the blocks they tell of.

    `block_size`: what the engine is said to use, if known. `capacity`: blocks that the rank has in all, if known. `debt`:
    shared by the ranks of one engine, of which any may compute a prompt.
    """

    def __init__(
        self,
        index: Index,
        *,
        block_size: int | None,
        replays: bool,
        now: float,
        capacity: int | None = None,
        debt: Debt | None = None,
    ) -> None:
        self.index = index
        self.holder = index.add_holder()
        self.block_size = self._said_size = block_size
        self.capacity = capacity
        self.batches = self.gaps = self.restarts = self.replays = 0
        self.wanted: int | None = None
        """Ask for a replay from this sequence."""
        self._replays = replays
        self._knowledge = Knowledge.UNHEARD
        self._trouble: dict[Trouble, float] = {}
        self._next: int | None = None
        """Sequence of the batch that must come next; None: any, the first one tells."""
        self._last: bytes = b""
        """Digest of the batch before."""
        self._source: int | None = None
        self._restarted_at: deque[float] = deque(maxlen=UNSTEADY)
        self._waiting: deque[tuple[int, bytes]] = deque(maxlen=WAITING)
        self._asked: int | None = None
        self._answered = False
        self._unproved: set[tuple[int, bytes]] = set()
        """Batches, by number and digest, that the replay must know: else another process has sent one of them."""
        self._checking = False
        """The replay is only to show whether something was missed."""
        self._missed = 0
        """Checks in a row that brought batches of which none had come live."""
        self._quiet_since = now
        self._debt = debt or Debt()
        self._restored: Knowledge | None = None
        """What the saved index knew, until the publisher proves that it still holds."""
        self._bounds: set[Bound] = set()
        self._stored = self._removed = 0
        """Blocks since the last sign of one that is not known; removed: less those that were known then."""
        if replays:
            self.wanted = 0

    # ---- what the sockets bring

    def live(self, sequence: int, payload: bytes, now: float) -> None:
        """A batch from the publisher. `now`: monotonic, here and below."""
        if Trouble.SILENT not in self._trouble:  # else its replay is to be asked again, however busy it is
            self._heard(now)
        self._missed = 0
        self._trouble.pop(Trouble.REPLAY_ONLY, None)
        if self.wanted is not None or self._asked is not None:
            self._waiting.append((sequence, payload))
        else:
            self._take(sequence, payload, now)

    def disconnected(self) -> None:
        """The publisher's connection has ended: what comes next may be another process's, also under the next number."""
        if not self._replays:
            self._forget()
        elif self._next:
            self._doubt()
        else:
            self._waiting.clear()
            if self._asked is not None:
                self.wanted = 0

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
        first, self._answered = not self._answered, True
        if self.wanted is not None:
            return  # a restart was found on the way: another replay follows
        if self._unproved:
            self._unproved.discard((sequence, xxh3_128_digest(payload)))
        if self._restored is not None and self._next is not None and sequence >= self._next:
            self._forget()  # the batches between are no longer kept: the saved index helps nobody
        if self._next is None:
            self._begin(sequence)
            self._apply(sequence, payload, now)
        elif sequence == self._next - 1:
            if xxh3_128_digest(payload) != self._last:
                self._restarted(now)
            elif self._restored is not None:
                self._knowledge, self._restored = self._restored, None
                self.index.show(self.holder)
        elif first and self._unproved and sequence >= self._next:
            self._restarted(now)  # what waits may be of two processes
        elif sequence >= self._next:
            if sequence > self._next or (first and sequence != self._asked):  # nothing shows who sends it
                self._lost(now)
            self._apply(sequence, payload, now)
            if self._checking:
                self._checking = False
                self._missed += 1
                if self._missed > 1:
                    self._trouble.setdefault(Trouble.REPLAY_ONLY, now)

    def replay_failed(self, now: float) -> None:
        """The replay gave no answer, or none any more."""
        self._asked = None
        self._checking = False
        self._quiet_since = now
        if self._restored is not None:
            self._forget()
        elif self._unproved and self._waiting:
            self._restarted(now)
        if self._knowledge is not Knowledge.UNHEARD:
            self._trouble.setdefault(Trouble.SILENT, now)
        if self.wanted is None:
            self._drain(now)

    def tick(self, now: float) -> None:
        """Once a second: time limits."""
        quiet = now - self._quiet_since > CHECK_SECONDS
        if quiet and self._replays and self._asked is None and self.wanted is None:
            self.wanted = max((self._next or 0) - 1, 0)
            self._checking = True
        if self._knowledge is Knowledge.PARTIAL and self._debt.overdue(now):
            self._in_part()  # it had the prompt already, unknown, and has used it just now
        if self._debt.failed(now):
            self._trouble.setdefault(Trouble.NOT_OBSERVED, now)
        else:
            self._trouble.pop(Trouble.NOT_OBSERVED, None)
        if now - self._trouble.get(Trouble.AMBIGUOUS, now) > UNSTEADY_SECONDS:
            del self._trouble[Trouble.AMBIGUOUS]  # if it still holds, the next batches show it
        if self.holder.forgot:
            self.holder.forgot = False
            self._bounds.add(Bound.INDEX_FULL)
            self._in_part()
            if self._restored is not None:
                self._restored = Knowledge.PARTIAL

    def close(self) -> None:
        """The engine is gone, and its blocks with it."""
        self.index.drop_holder(self.holder)
        self.index = Index()  # for what is still under way: the holder's bit may soon be another one's
        self.holder = self.index.add_holder()

    def counts(self) -> Counter[str]:
        """What its sequence went through."""
        return Counter(batches=self.batches, gaps=self.gaps, restarts=self.restarts, replays=self.replays)

    # ---- saved and restored

    def saved(self) -> Saved | None:
        """What a later process can go on with; None: nothing. Takes a millisecond for 100,000 blocks."""
        if not self._next or not self._replays or self._restored is not None:
            return None
        keys, values = self.holder.blocks.dump()
        return Saved(
            sequence=self._next - 1,
            digest=self._last,
            complete=self._knowledge is Knowledge.COMPLETE
            and not self.holder.forgot
            and Trouble.MISMATCH not in self._trouble,
            block_size=self.block_size,
            source=self._source,
            groups=tuple(sorted(self.holder.skipped_groups)),
            keys=keys,
            values=values,
        )

    def restore(self, saved: Saved) -> Iterator[None]:
        """Begin with what an earlier process knew, by and by, before the first replay is asked for.

        Nothing of it counts until the replay brings the batch that it ended with: the publisher might be another process.
        """
        if self._next is not None or self.batches or not self._replays:
            return
        keys, values = array("Q", saved.keys), array("Q", saved.values)
        self._restored = Knowledge.COMPLETE if saved.complete else Knowledge.PARTIAL
        self.index.hide(self.holder)
        holder = self.holder
        for _ in self.index.restore(holder, keys, values):
            yield
            if self.holder is not holder:
                return  # it is closed
        self.holder.skipped_groups.update(saved.groups)
        self.block_size = self.block_size or saved.block_size
        if saved.block_size:
            self.index.block_sizes.add(saved.block_size)
        self._source = saved.source
        self._last = saved.digest
        self._next = saved.sequence + 1
        self.wanted = saved.sequence

    # ---- what they prove

    @property
    def bounds(self) -> set[Bound]:
        """Why it is not all, although it is COMPLETE."""
        return self._bounds | {Bound.OTHER_GROUPS} if self.holder.skipped_groups else self._bounds

    @property
    def knowledge(self) -> Knowledge:
        if self._restored is not None:
            return Knowledge.RESTORED
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
        self._quiet_since = now

    def _begin(self, sequence: int) -> None:
        self._knowledge = Knowledge.COMPLETE if sequence == 0 else Knowledge.PARTIAL

    def _take(self, sequence: int, payload: bytes, now: float) -> None:
        expected = self._next
        if expected is not None and (sequence != expected or self._unproved):
            if sequence == expected - 1 and xxh3_128_digest(payload) == self._last:
                return
            if self._replays and (sequence < expected or self._unproved):  # it is late, or another process sends it
                self._doubt((sequence, xxh3_128_digest(payload)))
            elif self._replays:
                self.wanted = max(expected - 1, 0)
            elif sequence > expected:
                self._lost(now)
            else:
                self._restarted(now)
                expected = None
        if self.wanted is not None:
            self._waiting.append((sequence, payload))
            return
        if expected is None:
            self._begin(sequence)
        self._apply(sequence, payload, now)

    def _doubt(self, *others: tuple[int, bytes]) -> None:
        """Let a replay show that the process that has sent the last batch, and these, is the one that answers."""
        assert self._next
        self._unproved.update(others, ((self._next - 1, self._last),))
        self.wanted = min(sequence for sequence, _ in self._unproved)

    def _replay_ended(self, now: float) -> None:
        asked, self._asked = self._asked, None
        self._checking = False
        if self.wanted is not None:
            return
        if self._restored is not None:
            self._restarted(now)  # it does not know the batch that the saved index ends with
            return
        if self._next is None:
            self._knowledge, self._next = Knowledge.COMPLETE, 0
        elif self._unproved or (self._next and not self._answered and asked == self._next - 1):
            self._restarted(now)  # it does not know what it has sent
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

    def _restarted(self, now: float) -> None:
        """Another process sends now: nothing that was known holds."""
        self.restarts += 1
        self._restarted_at.append(now)
        self._forget()
        if len(self._restarted_at) == UNSTEADY and now - self._restarted_at[0] < UNSTEADY_SECONDS:
            self._trouble[Trouble.AMBIGUOUS] = now
        if self._replays:
            self._waiting.clear()  # some may be the old one's; the replay brings those that are not
            self.wanted = 0

    def _forget(self) -> None:
        """Nothing is known."""
        self.index.clear(self.holder)
        self.index.show(self.holder)
        self._bounds.clear()
        self._debt.forgive()
        self._next = self._source = self._restored = None
        self.block_size = self._said_size
        self._last = b""
        self._unproved.clear()
        self._trouble.clear()
        self._knowledge = Knowledge.UNHEARD
        self._stored = self._removed = 0
        if self.wanted:
            self.wanted = 0

    def _lost(self, now: float) -> None:
        """Batches are gone for good: any block may have been removed in them."""
        self.gaps += 1
        self.index.clear(self.holder)
        self._trouble[Trouble.GAP] = now
        self._unproved.clear()
        self.block_size = self._said_size
        self._in_part()

    def _in_part(self) -> None:
        """It holds blocks that are not known, and may have used them just now: all that are known may go before them."""
        self._knowledge = Knowledge.PARTIAL
        self._stored, self._removed = 0, -len(self.holder.blocks)
        self._debt.paid()

    # ---- one batch

    def _apply(self, sequence: int, payload: bytes, now: float) -> None:
        self._next = sequence + 1
        self._last = xxh3_128_digest(payload)
        self.batches += 1
        try:
            batch = wire.batch(payload)
        except wire.UNREADABLE:
            self._unread()
            return
        if batch.data_parallel_rank is not None:
            if self._source is None:
                self._source = batch.data_parallel_rank
            elif self._source != batch.data_parallel_rank:
                self._trouble.setdefault(Trouble.AMBIGUOUS, now)
        for data in batch.events:
            try:
                event = wire.event(data)
            except wire.UNREADABLE:
                self._unread()
                continue
            self._event(event, now)
        own = self._debt.own
        if own is not None:
            if self.bounds or self.index.has(self.holder, own):
                self._debt.paid()
            elif self._knowledge is Knowledge.COMPLETE:
                self._debt.unpaid(now)

    def _unread(self) -> None:
        """Whatever it told, the index does not have it."""
        self.index.left_out("unreadable")
        self._in_part()

    def _event(self, event: Event, now: float) -> None:
        if isinstance(event, Stored | StoredRow):
            self._store(event, now)
        elif isinstance(event, Removed | RemovedRow):
            self._remove(event)
        else:  # nothing is cached any more, so nothing is unknown
            self.index.clear(self.holder)
            self._complete()

    def _store(self, event: Stored | StoredRow, now: float) -> None:
        index, holder = self.index, self.holder
        if not event.block_hashes:
            return  # not even a block size
        if event.kv_cache_spec_kind not in FULL_ATTENTION:
            if event.group_idx is not None:
                holder.skipped_groups.add(event.group_idx)
            index.left_out("other-group")
        elif event.medium not in DEVICE or event.locality == "REMOTE":
            self._bounds.add(Bound.LOWER_TIER)
            index.left_out("other-medium")
        elif event.block_size != (self.block_size or event.block_size):
            if len(event.block_hashes) == 1 and event.block_size < (self.block_size or 0):
                index.left_out("partial-block")  # vLLM names the end of a prompt so in models of several groups
                return
            self._trouble.setdefault(Trouble.MISMATCH, now)
            index.left_out("block-size")
        else:
            held = len(holder.blocks)
            left_out = index.stored(
                holder, event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size,
                lora=event.lora_name, extra=event.extra_keys,
            )  # fmt: skip
            if left_out is not None:
                self._in_part()
                return
            self.block_size = event.block_size
            if self._knowledge is Knowledge.PARTIAL:
                self._stored += len(holder.blocks) - held
                self._turn_over()

    def _remove(self, event: Removed | RemovedRow) -> None:
        index, holder = self.index, self.holder
        if event.medium not in DEVICE or event.locality == "REMOTE":
            index.left_out("other-medium")
        elif event.group_idx in holder.skipped_groups:
            index.left_out("other-group")
        else:
            held = len(holder.blocks)
            index.removed(holder, event.block_hashes)
            if self._knowledge is Knowledge.PARTIAL:
                gone = held - len(holder.blocks)
                self._removed += gone
                if gone < len(event.block_hashes):
                    self._stored, self._removed = 0, min(self._removed, 0)
                self._turn_over()

    def _turn_over(self) -> None:
        """Whether what is not known must be gone by now.

        An engine reuses the block that was used longest ago: blocks that nobody has used since go before any that came later,
        and one that is used shows itself as the parent of new ones. So all is known once the engine has stored as many blocks
        as it has, without a sign of unknown ones, and the known ones fill it. Where its size is not known: once it has given
        up as many known blocks as it holds now.
        """
        held = len(self.holder.blocks)
        if self.capacity:
            over = self._stored >= self.capacity and held >= self.capacity * FILLED
        else:
            over = 0 < held <= self._removed
        if over:
            self._complete()

    def _complete(self) -> None:
        self._knowledge = Knowledge.COMPLETE
        self._debt.paid()
        self._bounds.discard(Bound.INDEX_FULL)
        self._trouble.pop(Trouble.GAP, None)
