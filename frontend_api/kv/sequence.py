"""The sequence of one engine rank's event batches: none missed, none twice, all of one process. Pure: frames and times in.

A publisher loses what a slow or late subscriber misses, and says so only by its sequence. So every number is checked, live
and in replay: a gap is closed by replay or costs the rank its blocks. A rank that has been quiet is asked for its last batch
once more. The answer shows that it lives, that no batch was lost at the end, and that it is still the same process: another
payload under the same number is a restart (llm-d-router#2853).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from xxhash import xxh3_128_digest

from frontend_api.kv import wire
from frontend_api.kv.contents import Contents
from frontend_api.kv.knowledge import Knowledge, Saved, Trouble

END = -1
"""The sequence that ends a replay."""
REPLAY_SECONDS = 5.0
"""Longest silence of a replay."""
CHECK_SECONDS = 5.0
"""A rank that has been quiet for so long is asked for its last batch."""
WAITING, WAITING_BYTES = 10_000, 64 << 20
"""Live batches kept during a replay, and their bytes; with more the oldest are lost, and the sequence shows it."""
UNSTEADY = 5
"""Restarts within …"""
UNSTEADY_SECONDS = 600.0
"""… which are those of no engine: events and replay come from different ones."""
STEADY = 2
"""Restarts of which each is followed by a replay at once. Of more within that time each lets the next replay wait twice as long …"""
LONGEST_PAUSE = 60.0
"""… up to so many seconds."""
LONGEST_RETRY = 5.0
"""The same after replays without an answer, which begin with a quarter of a second."""
CALM_SECONDS = 60.0
"""After which what was too much is forgotten."""


class Rank:
    """One engine rank as its publisher tells of it.

    Whoever has its sockets hands over what they bring (`live`, `disconnected`), and where `wanted` is a number, asks for a
    replay from there (`asked`, `replayed`, `replay_failed`), but not before `ask_at`. `replays`: there is somebody to ask. Times
    are monotonic.
    """

    def __init__(self, contents: Contents, *, replays: bool, now: float) -> None:
        self.contents = contents
        self.batches = self.gaps = self.restarts = self.replays = 0
        self.wanted: int | None = 0 if replays else None
        """Ask for a replay from this sequence …"""
        self.ask_at = 0.0
        """… at this time: a publisher that seems to start again and again costs a replay each time."""
        self._lately = 0
        """Restarts, each soon after the one before."""
        self._vain = 0
        """Replays without an answer, one after another."""
        self._replays = replays
        self._trouble: dict[Trouble, float] = {}
        """Of its publisher; `contents` has its own."""
        self._next: int | None = None
        """Sequence of the batch that must come next; None: any, the first one tells."""
        self._last: bytes = b""
        """Digest of the batch before."""
        self._source: int | None = None
        self._restarted_at: deque[float] = deque(maxlen=UNSTEADY)
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._waiting_bytes = 0
        self._asked: int | None = None
        self._answered = False
        self._unproved: set[tuple[int, bytes]] = set()
        """Batches, by number and digest, that the replay must know: else another process has sent one of them."""
        self._checking = False
        """The replay is only to show whether something was missed."""
        self._missed = 0
        """Checks in a row that brought batches of which none had come live."""
        self._quiet_since = now

    # ---- what is known

    @property
    def knowledge(self) -> Knowledge:
        asking = self.wanted is not None or self._asked is not None
        return Knowledge.REPLAYING if asking and self.batches and self._next is None else self.contents.knowledge

    @property
    def trouble(self) -> list[Trouble]:
        """What is wrong, the first cause first."""
        since = self._trouble | self.contents.trouble
        return sorted(since, key=since.__getitem__)

    @property
    def evident(self) -> bool:
        """Something is known of its blocks, be it that there are none."""
        contents = self.contents
        known = contents.knowledge in (Knowledge.COMPLETE, Knowledge.PARTIAL)
        return known and (bool(contents.holder.blocks) or not (self._trouble or contents.trouble))

    def counts(self) -> Counter[str]:
        """What its sequence went through."""
        return Counter(batches=self.batches, gaps=self.gaps, restarts=self.restarts, replays=self.replays)

    # ---- what the sockets bring

    def live(self, sequence: int, payload: bytes, now: float) -> None:
        """A batch from the publisher."""
        if Trouble.SILENT not in self._trouble:  # else its replay is to be asked again, however busy it is
            self._quiet_since = now
        self._missed = 0
        self._trouble.pop(Trouble.REPLAY_ONLY, None)
        if self.wanted is not None or self._asked is not None:
            self._wait(sequence, payload)
        else:
            self._take(sequence, payload, now)

    def _wait(self, sequence: int, payload: bytes) -> None:
        """Keep a batch until the replay has ended."""
        waiting = self._waiting
        waiting.append((sequence, payload))
        self._waiting_bytes += len(payload)
        while len(waiting) > WAITING or self._waiting_bytes > WAITING_BYTES:
            self._waiting_bytes -= len(waiting.popleft()[1])

    def _drop_waiting(self) -> None:
        self._waiting.clear()
        self._waiting_bytes = 0

    def excessive(self, now: float) -> None:
        """Its events take too much of this process: it is not followed for a while, and then begins again."""
        self._forget()
        self._drop_waiting()
        self._asked, self._checking = None, False
        self._trouble[Trouble.EXCESSIVE] = now
        if self._replays:
            self.wanted = 0

    def disconnected(self) -> None:
        """The publisher's connection has ended: what comes next may be another process's, also under the next number."""
        if not self._replays:
            self._forget()
        elif self._next:
            self._doubt()
        else:
            self._drop_waiting()
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
        self._quiet_since = now
        self._vain = 0
        self._trouble.pop(Trouble.SILENT, None)
        if sequence == END:
            self._replay_ended(now)
            return
        first, self._answered = not self._answered, True
        if self.wanted is not None:
            return  # a restart was found on the way: another replay follows
        if self._unproved:
            self._unproved.discard((sequence, xxh3_128_digest(payload)))
        if self.contents.restored is not None and self._next is not None and sequence >= self._next:
            self._forget()  # the batches between are no longer kept: the saved index helps nobody
        if self._next is None:
            self._apply(sequence, payload, now)
        elif sequence == self._next - 1:
            if xxh3_128_digest(payload) != self._last:
                self._restarted(now)
            elif self.contents.restored is not None:
                self.contents.proved()
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
        self._vain += 1
        self.ask_at = now + min(0.125 * 2.0 ** min(self._vain, 9), LONGEST_RETRY)
        if self.contents.restored is not None:
            self._forget()
        elif self._unproved and self._waiting:
            self._restarted(now)
        if self._next is not None:
            self._trouble.setdefault(Trouble.SILENT, now)
        if self.wanted is None:
            self._drain(now)

    # ---- what else becomes of it

    def tick(self, now: float) -> None:
        """Once a second: time limits."""
        quiet = now - self._quiet_since > CHECK_SECONDS
        if quiet and self._replays and self._asked is None and self.wanted is None:
            self.wanted = max((self._next or 0) - 1, 0)
            self._checking = True
        if now - self._trouble.get(Trouble.AMBIGUOUS, now) > UNSTEADY_SECONDS:
            del self._trouble[Trouble.AMBIGUOUS]  # if it still holds, the next batches show it
        if now - self._trouble.get(Trouble.EXCESSIVE, now) > CALM_SECONDS:
            del self._trouble[Trouble.EXCESSIVE]
        self.contents.tick(now)

    def saved(self) -> Saved | None:
        """What a later process can go on with; None: nothing."""
        if not self._next or not self._replays or self.contents.restored is not None:
            return None
        return self.contents.saved(self._next - 1, self._last, self._source)

    def restore(self, saved: Saved) -> Iterator[None]:
        """Begin with what an earlier process knew, by and by, before the first replay is asked for.

        Nothing of it counts until the replay brings the batch that it ended with: the publisher might be another process.
        """
        if self._next is not None or self.batches or not self._replays:
            return
        yield from self.contents.restore(saved)
        self._source = saved.source
        self._last = saved.digest
        self._next = saved.sequence + 1
        self.wanted = saved.sequence

    # ---- the next batch, or not

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
        if self.wanted is not None:
            self._wait(sequence, payload)
        else:
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
        if self.contents.restored is not None:
            self._restarted(now)  # it does not know the batch that the saved index ends with
            return
        if self._next is None:
            self.contents.begin(whole=True)
            self._next = 0
        elif self._unproved or (self._next and not self._answered and asked == self._next - 1):
            self._restarted(now)  # it does not know what it has sent
            return
        self._drain(now)

    def _drain(self, now: float) -> None:
        """Take the batches that came during a replay. What is still missing is lost."""
        waiting, self._waiting = self._waiting, deque()
        self._waiting_bytes = 0
        for sequence, payload in waiting:
            if self._next is not None and sequence < self._next:
                continue  # replay has brought it
            if self._next is not None and sequence > self._next:
                self._lost(now)
            self._apply(sequence, payload, now)

    def _restarted(self, now: float) -> None:
        """Another process sends now: nothing that was known holds."""
        self.restarts += 1
        soon = bool(self._restarted_at) and now - self._restarted_at[-1] < UNSTEADY_SECONDS
        self._lately = self._lately + 1 if soon else 1
        if self._lately > STEADY:
            self.ask_at = now + min(2.0 ** min(self._lately - STEADY - 1, 9), LONGEST_PAUSE)
        self._restarted_at.append(now)
        self._forget()
        if len(self._restarted_at) == UNSTEADY and now - self._restarted_at[0] < UNSTEADY_SECONDS:
            self._trouble[Trouble.AMBIGUOUS] = now
        if self._replays:
            self._drop_waiting()  # some may be the old one's; the replay brings those that are not
            self.wanted = 0

    def _forget(self) -> None:
        """Nothing is known."""
        self.contents.forget()
        self._next = self._source = None
        self._last = b""
        self._unproved.clear()
        self._trouble.clear()
        if self.wanted:
            self.wanted = 0

    def _lost(self, now: float) -> None:
        self.gaps += 1
        self._unproved.clear()
        self.contents.lost(now)

    def _apply(self, sequence: int, payload: bytes, now: float) -> None:
        if self._next is None:
            self.contents.begin(whole=sequence == 0)
        self._next = sequence + 1
        self._last = xxh3_128_digest(payload)
        self.batches += 1
        try:
            events, source = wire.batch(payload)
        except wire.UNREADABLE:
            self.contents.unread()
            return
        if source is not None:
            if self._source is None:
                self._source = source
            elif self._source != source:
                self._trouble.setdefault(Trouble.AMBIGUOUS, now)
        self.contents.apply(events, now)
