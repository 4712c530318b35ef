"""What a flow asks for, step by step, and the outcome of each that it is told.

What every request has is no tuple: compiled code makes such a class in a tenth of the time.
"""

from __future__ import annotations

from typing import NamedTuple

from frontend_api.http.upstream import Broken
from frontend_api.kv.evidence import Prompt
from frontend_api.routing.view import Deployment, Engine


class Prefill:
    """Have the prompt computed and its KV kept; the outcome is `Prefilled`, `Replied` or `Lost`."""

    __slots__ = ("engine", "fresh", "keep")

    def __init__(self, engine: Engine, fresh: bool, keep: bool = True) -> None:
        self.engine = engine
        self.fresh = fresh
        """On a new connection only."""
        self.keep = keep
        """False: no KV is wanted, only whether the engine takes such a request."""


class Decode:
    """Have the answer written, with KV that has been kept if there are `params`; the outcome is `Began`, `Replied` or `Lost`."""

    __slots__ = ("engine", "fresh", "params")

    def __init__(self, engine: Engine, params: bytes | None, fresh: bool) -> None:
        self.engine = engine
        self.params = params
        self.fresh = fresh


class Probe(NamedTuple):
    """See whether an engine takes a connection; the outcome is `Lost` or None."""

    engine: Engine


class Wait(NamedTuple):
    """Wait until there may be room; the outcome is `Room` or `NoRoom`."""

    alone: bool
    """For an answering engine only."""


Step = Prefill | Decode | Probe | Wait | None
"""None: nothing to start; the outcome is `Ended`, of the stream that has begun."""


class Prefilled:
    """The KV is kept."""

    __slots__ = ("at", "params")

    def __init__(self, params: bytes | None, at: float) -> None:
        self.params = params
        """What finds it; None: the engine told nothing."""
        self.at = at
        """Monotonic time of receipt."""


class Began:
    """A good answer is on its way to the client: its first bytes, or all of it."""

    __slots__ = ("token", "whole")

    def __init__(self, whole: bool = False, token: bool = True) -> None:
        self.whole = whole
        self.token = token
        """It has begun with a token: the prompt is computed. A stream of responses is announced before."""


class Ended:
    """The relay of a begun answer is over, well or not; the client has seen it."""

    __slots__ = ("error", "seconds", "steps", "whole")

    def __init__(self, steps: int = 0, seconds: float = 0.0, whole: bool = True, error: bool = False) -> None:
        self.steps = steps
        """Tokens that came after the first …"""
        self.seconds = seconds
        """… and the time they took."""
        self.whole = whole
        """False: the engine broke off."""
        self.error = error
        """The engine ended it by an error."""


class Replied(NamedTuple):
    """An engine answered with an error status; the client has seen nothing."""

    status: int
    body: bytes
    retry_after: float | None = None
    """Seconds that it asks for."""


class Lost(NamedTuple):
    """A leg broke before the client had a byte."""

    kind: Broken
    sent: bool


class Room(NamedTuple):
    """One that waits may choose anew."""

    deployment: Deployment | None
    """As it is now; None: it is gone."""
    prompt: Prompt | None
    """With what the engines have of it now."""


class NoRoom(NamedTuple):
    """One that should wait, or has waited, may not (any more)."""

    message: str


Outcome = Prefilled | Began | Ended | Replied | Lost | Room | NoRoom | None
