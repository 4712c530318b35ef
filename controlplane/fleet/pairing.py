"""When a warmed-up engine may serve: pure rule over what its deployment's engines have proved.

A KV transfer is a property of a pair. An engine that answers completions alone may still be unable to hand over KV, so it
waits in WARMING until each partner that is up has been tried and at least one transfer worked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from controlplane.fleet.model import Role


class Incarnation(NamedTuple):
    """One process: engine id and attempt."""

    engine: str
    attempt: int


class Verdict(NamedTuple):
    ready: bool
    reason: str
    """A sentence for the engine's card."""


Proofs = Mapping[tuple[Incarnation, Incarnation], bool]
"""(prefill, decode) -> whether a real transfer between just these two processes worked. Absent: not tried yet."""


def may_serve(who: Incarnation, role: Role, *, up: Iterable[Incarnation], coming: bool, proofs: Proofs) -> Verdict:
    """Whether an engine that answered a completion may take traffic.

    `up`: partners (the other role, same deployment) that answered a completion themselves. `coming`: a partner is on its
    way up (placed … starting); False when every other partner is failed, lost, or not wanted.
    """
    if role is Role.AGGREGATED:
        return Verdict(True, "Serving.")
    other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    partners = list(up)
    if not partners:
        if coming:
            return Verdict(False, f"Answers; waits for a {other} engine to prove a KV transfer with.")
        if role is Role.DECODE:
            return Verdict(True, "Serving alone: no prefill engine is up, so every prompt is computed here.")
        return Verdict(False, "Answers; no decode engine is up to hand KV to.")
    results = {p: proofs.get((who, p) if role is Role.PREFILL else (p, who)) for p in partners}
    untried = sum(result is None for result in results.values())
    worked = sum(result is True for result in results.values())
    if untried:
        return Verdict(False, f"Answers; KV transfer proved with {worked} of {len(results)} {other} engines.")
    if not worked:
        return Verdict(False, f"Answers, but the KV transfer with every {other} engine failed.")
    broken = len(results) - worked
    if broken:
        return Verdict(True, f"Serving; the KV transfer with {broken} of {len(results)} {other} engines failed.")
    return Verdict(True, "Serving.")
