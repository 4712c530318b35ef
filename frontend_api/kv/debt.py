"""What an engine owes: events that tell of a prompt it has computed. Pure.

Batches in good order prove nothing if they are another engine's, or if blocks are not hashed as the router knows. So one
prompt at a time is taken as a sample, from before it is sent: its last block but one must be told of. Not the last: vLLM keeps
that to itself while tokens that it has guessed (MTP) may change the prompt's end.
"""

from __future__ import annotations

from collections.abc import Sequence

OWED_SECONDS = 10.0
"""From a computed prompt to the events that must tell of it; and from others that come then to the verdict. What is only late
comes soon after them."""
HELD_SECONDS = 600.0
"""For which it is held against an engine that others came instead."""
SENT_SECONDS = 60.0
"""After which another sample is taken, if nobody says that this one was computed."""


def owed(lacking: Sequence[int]) -> int | None:
    """Own hash of the block that is to be told of, of those that an engine has to compute; None: they are too few."""
    return lacking[-2] if len(lacking) > 1 else None


class Debt:
    """Of one engine, whose ranks share it: any of them may compute a prompt. Times are monotonic."""

    __slots__ = ("_failed_at", "_others_at", "_sent_at", "_since", "own")

    def __init__(self) -> None:
        self.own: int | None = None
        """Own hash of the block that is to be told of; None: nothing is owed."""
        self._sent_at = 0.0
        self._since: float | None = None
        self._others_at: float | None = None
        self._failed_at: float | None = None

    def sent(self, own: int, now: float) -> None:
        """A prompt with this block is on its way, which the engine does not have yet, as far as it has told."""
        if self.own is None or (self._since is None and now - self._sent_at > SENT_SECONDS):
            self.own, self._sent_at, self._since = own, now, None

    def computed(self, own: int, now: float) -> None:
        if own == self.own and self._since is None:
            self._since = now

    def mute(self, now: float) -> None:
        """It has computed a prompt, and has never told of any block."""
        if self._since is None:
            self._since = now

    def dropped(self, own: int) -> None:
        """It will not be computed, or was refused."""
        if own == self.own and self._since is None:
            self.own = None

    def paid(self) -> None:
        """It was told of, or nobody can say whether it was."""
        self.own = self._since = self._others_at = None

    def unpaid(self, now: float) -> None:
        """Something else was told."""
        if self.overdue(now):
            if self._others_at is None:
                self._others_at = now
            elif now - self._others_at > OWED_SECONDS:  # it came instead
                self.paid()
                self._failed_at = now

    def forgive(self) -> None:
        """It is another process now, or what it owes was reckoned wrongly."""
        self.paid()
        self._failed_at = None

    def overdue(self, now: float) -> bool:
        return self._since is not None and now - self._since > OWED_SECONDS

    def failed(self, now: float) -> bool:
        """It does not tell of what it computes."""
        lately = self._failed_at is not None and now - self._failed_at <= HELD_SECONDS
        return lately or self.overdue(now)
