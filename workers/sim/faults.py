"""Named faults: what can be made to go wrong in a stand-in engine, at start (`--fault`) or later (`POST /sim/faults`).

Each name is one silent or loud failure that real engines have shown; the product's rules and tests provoke them here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

FAULTS = {
    "events-off": "KV events are off: `/kv_event_sources` says so (start only)",
    "events-connect": "the event publisher connects instead of binding: only replay has the data (start only)",
    "no-events": "nothing is published, although `/kv_event_sources` looks fine",
    "events-gap": "every second batch is lost on the way, though it can be replayed",
    "wrong-block-size": "events name twice the true block size",
    "wrong-tokens": "`/tokenize` answers with the ids of another vocabulary",
    "no-tokenize": "there is no `/tokenize`",
    "missing-params": "prefill answers without `kv_transfer_params`",
    "expire-now": "leases end at once",
    "slow-transfer": "transfers take a hundred times as long",
    "transfer-fails": "this engine's pulls fail: the request ends with status 500",
    "transfer-hangs": "this engine's pulls never end",
    "transfer-cut": "a request with KV to fetch: its connection is closed before the answer",
    "transfer-refused": "a request with KV to fetch is answered 400",
    "computes-itself": "KV to fetch is left alone: the prompt is computed here, status 200",
    "wrong-kv": "readers get another prompt's KV: status 200, other text",
    "empty-stream": "status 200 and not one token",
    "truncated-stream": "the connection breaks after three tokens",
    "in-band-error": "an error event after three tokens, inside a stream of status 200",
    "stalled-stream": "three tokens, then nothing",
    "hang": "requests are taken and never answered",
    "http-500": "every completion is answered 500",
    "cut": "every completion's connection is closed before the answer",
    "unhealthy": "`/health` answers 503",
}
"""Name -> what happens. Besides: `crash-after-N`, the process dies at its Nth completion request; `transfer-fails-from-PORT`, pulls
from the engine with that side channel fail."""

_CRASH = re.compile(r"crash-after-([1-9]\d{0,6})")
_FROM = re.compile(r"transfer-fails-from-\d{1,5}")
_START_ONLY = frozenset({"events-off", "events-connect"})


class UnknownFault(ValueError):
    """Says which name is unknown and what the names are."""


class Faults:
    """The faults that hold now."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names: set[str] = set()
        self._crash_after: int | None = None
        self.set(names, starting=True)

    def set(self, names: Iterable[str], *, starting: bool = False) -> None:
        """Replaces the faults that hold; those decided at the start stay as they are.

        Raises `UnknownFault`, changing nothing.
        """
        wanted, crash = set(), None
        for name in names:
            if match := _CRASH.fullmatch(name):
                crash = int(match[1])
            elif name not in FAULTS and not _FROM.fullmatch(name):
                known = ", ".join((*sorted(FAULTS), "crash-after-N", "transfer-fails-from-PORT"))
                raise UnknownFault(f"unknown fault {name!r}; known: {known}")
            elif name in _START_ONLY and not starting and name not in self._names:
                raise UnknownFault(f"{name!r} can only be given at start, with --fault")
            else:
                wanted.add(name)
        kept = set() if starting else self._names & _START_ONLY
        self._names, self._crash_after = wanted | kept, crash

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def names(self) -> list[str]:
        crash = [] if self._crash_after is None else [f"crash-after-{self._crash_after}"]
        return sorted(self._names) + crash

    def crash_due(self) -> bool:
        """Counts one completion request; True when the process shall die at this one."""
        if self._crash_after is None:
            return False
        self._crash_after -= 1
        return self._crash_after == 0
