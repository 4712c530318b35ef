"""The blocks of one engine rank: what its events change in the index, and whether that is all it holds. Pure.

What a rank held before its events could be followed is not known. Engines reuse the block that was used longest ago, so that
it ends of itself (`_turn_over`), or a saved index knows it (`restore`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from frontend_api.kv.debt import Debt
from frontend_api.kv.index import DEVICE, FULL_ATTENTION, Index
from frontend_api.kv.knowledge import Bound, Knowledge, Saved, Trouble
from frontend_api.kv.wire import Event, Removed, RemovedRow, Stored, StoredRow

FILLED = 0.9
"""Share of a rank's blocks that must be known before nothing else is taken to be there: a few are never full."""


class Contents:
    """What one rank holds, as far as its batches tell. `sequence.Rank` hands them over, each once and in order, or says that
    some are lost.

    `block_size`: what the engine is said to use, if known. `capacity`: blocks that the rank has in all, if known. `debt`:
    shared by the ranks of one engine, of which any may compute a prompt. Times are monotonic.
    """

    def __init__(
        self, index: Index, *, block_size: int | None, capacity: int | None = None, debt: Debt | None = None
    ) -> None:
        self.index = index
        self.holder = index.add_holder()
        self.block_size = self.said_size = block_size
        self.capacity = capacity
        self.trouble: dict[Trouble, float] = {}
        """What is wrong with what it tells, and since when."""
        self.restored: Knowledge | None = None
        """What a saved index knew, until it is proved to hold: nothing of it counts."""
        self._debt = debt or Debt()
        self._knowledge = Knowledge.UNHEARD
        self._bounds: set[Bound] = set()
        self._stored = self._removed = 0
        """Blocks since the last sign of one that is not known; removed: less those that were known then."""

    @property
    def knowledge(self) -> Knowledge:
        return self._knowledge if self.restored is None else Knowledge.RESTORED

    @property
    def bounds(self) -> set[Bound]:
        """Why it is not all, although it is COMPLETE."""
        return self._bounds | {Bound.OTHER_GROUPS} if self.holder.skipped_groups else self._bounds

    # ---- what its sequence proves

    def begin(self, *, whole: bool) -> None:
        """What comes is the first that is known of it. `whole`: nothing was before."""
        self._knowledge = Knowledge.COMPLETE if whole else Knowledge.PARTIAL
        self._debt.paid()

    def unread(self) -> None:
        """Whatever a batch or an event told, the index does not have it."""
        self.index.left_out("unreadable")
        self._in_part()

    def lost(self, now: float) -> None:
        """Batches are gone for good: any block may have been removed in them."""
        self.index.clear(self.holder)
        self.trouble.setdefault(Trouble.GAP, now)
        self.block_size = self.said_size
        self._in_part()

    def forget(self) -> None:
        """Nothing that was known holds."""
        self.index.clear(self.holder)
        self.index.show(self.holder)
        self._bounds.clear()
        self.trouble.clear()
        self.restored = None
        self._debt.forgive()
        self.block_size = self.said_size
        self._knowledge = Knowledge.UNHEARD
        self._stored = self._removed = 0

    def close(self) -> None:
        """The engine is gone, and its blocks with it."""
        self.index.drop_holder(self.holder)
        self.index = Index()  # for what is still under way: the holder's bit may soon be another one's
        self.holder = self.index.add_holder()

    def tick(self, now: float) -> None:
        """Once a second: take note of what it owes, and of what the index's own limit has cost it."""
        if self._knowledge is Knowledge.PARTIAL and self._debt.overdue(now):
            self._in_part()  # it had the prompt already, unknown, and has used it just now
        if self._debt.failed(now):
            self.trouble.setdefault(Trouble.NOT_OBSERVED, now)
        else:
            self.trouble.pop(Trouble.NOT_OBSERVED, None)
        if self.holder.forgot:
            self.holder.forgot = False
            self._bounds.add(Bound.INDEX_FULL)
            self._in_part()
            if self.restored is not None:
                self.restored = Knowledge.PARTIAL

    # ---- saved and restored

    def saved(self, sequence: int, digest: bytes, source: int | None) -> Saved:
        """What a later process can go on with after this batch. Takes a millisecond for 100,000 blocks."""
        keys, values = self.holder.blocks.dump()
        return Saved(
            sequence=sequence,
            digest=digest,
            complete=self._knowledge is Knowledge.COMPLETE
            and not self.holder.forgot
            and Trouble.MISMATCH not in self.trouble,
            block_size=self.block_size,
            source=source,
            groups=tuple(sorted(self.holder.skipped_groups)),
            tiered=Bound.LOWER_TIER in self._bounds,
            copies=array("Q", self.holder.copies.elements()).tobytes(),
            keys=keys,
            values=values,
        )

    def restore(self, saved: Saved) -> Iterator[None]:
        """Load what an earlier process knew, by and by. It counts once it is `proved`."""
        keys, values = array("Q", saved.keys), array("Q", saved.values)
        self.restored = Knowledge.COMPLETE if saved.complete else Knowledge.PARTIAL
        self.index.hide(self.holder)
        holder = self.holder
        for _ in self.index.restore(holder, keys, values):
            yield
            if self.holder is not holder:
                return  # it is closed
        holder.skipped_groups.update(saved.groups)
        holder.copies.update(array("Q", saved.copies))
        if saved.tiered:
            self._bounds.add(Bound.LOWER_TIER)
        self.block_size = self.block_size or saved.block_size
        if saved.block_size:
            self.index.block_sizes.add(saved.block_size)

    def proved(self) -> None:
        """The publisher is the one that told of what was restored."""
        assert self.restored is not None
        self._knowledge, self.restored = self.restored, None
        self._debt.paid()
        self.index.show(self.holder)
        if self._knowledge is Knowledge.PARTIAL:
            self._in_part()  # nobody has saved when it used what is not known

    # ---- the events of a batch

    def apply(self, events: Sequence[Event | None], now: float) -> None:
        """None: an event that is not understood."""
        for event in events:
            if event is None:
                self.unread()
            else:
                self._event(event, now)
        own = self._debt.own
        if own is None or self.bounds or self.index.has(self.holder, own):
            self._debt.paid()
        elif self._knowledge is Knowledge.COMPLETE:
            self._debt.unpaid(now)

    def _event(self, event: Event, now: float) -> None:
        if isinstance(event, (Stored, StoredRow)):  # compiled code makes a union anew each time
            self._store(event, now)
        elif isinstance(event, (Removed, RemovedRow)):
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
            self.trouble.setdefault(Trouble.MISMATCH, now)
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
            new = len(holder.blocks) - held
            again = len(event.block_hashes) - new
            if again and not holder.forgot:  # the first ones: no block is there without those before it
                holder.copied(event.block_hashes[:again])
            if self._knowledge is Knowledge.PARTIAL:
                self._stored += new
                self._turn_over()

    def _remove(self, event: Removed | RemovedRow) -> None:
        index, holder = self.index, self.holder
        if event.medium not in DEVICE or event.locality == "REMOTE":
            index.left_out("other-medium")
        elif event.group_idx in holder.skipped_groups:
            index.left_out("other-group")
        else:
            held = len(holder.blocks)
            ended = holder.last(event.block_hashes)
            index.removed(holder, ended)
            if self._knowledge is Knowledge.PARTIAL:
                gone = held - len(holder.blocks)
                self._removed += gone
                if gone < len(ended):
                    self._stored, self._removed = 0, min(self._removed, 0)
                self._turn_over()

    # ---- whether that is all

    def _in_part(self) -> None:
        """It holds blocks that are not known, and may have used them just now: all that are known may go before them."""
        self._knowledge = Knowledge.PARTIAL
        self._stored, self._removed = 0, -len(self.holder.blocks)
        self._debt.paid()

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
        self.trouble.pop(Trouble.GAP, None)
