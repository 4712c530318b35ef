"""When a warmed-up engine may serve, and which engine is at fault where KV transfers fail: pure rules over what the engines
of a deployment have proved.

A KV transfer is a property of a pair. An engine that answers completions alone may still be unable to hand over KV, so it
waits in WARMING until each partner that is up has been tried and at least one transfer worked. Where none works, a decode
engine that is not at fault serves alone: it computes prompts itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from controlplane.fleet.model import Role
from controlplane.fleet.plural import plural

NO_TRANSFER = "Serving alone: no KV transfer works, so this engine computes every prompt."
"""Of a decode engine that serves though none of its pairs works."""


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


def at_fault(tried: Proofs) -> set[Incarnation]:
    """The engines whose own fault it must be that transfers fail, by those that were tried between engines that answer.

    Where all of an engine's transfers fail, it is at fault if each of its partners either works with another engine, or has no
    other engine while this one has: never both sides of a pair, and nobody where one pair is all there is.
    """
    partners: dict[Incarnation, set[Incarnation]] = {}
    works: set[Incarnation] = set()
    for (prefill, decode), ok in tried.items():
        partners.setdefault(prefill, set()).add(decode)
        partners.setdefault(decode, set()).add(prefill)
        if ok:
            works |= {prefill, decode}

    def explains(who: Incarnation, partner: Incarnation) -> bool:
        return partner in works or (len(partners[partner]) == 1 and len(partners[who]) > 1)

    return {who for who, others in partners.items() if who not in works and all(explains(who, p) for p in others)}


def may_serve(
    who: Incarnation,
    role: Role,
    *,
    up: Iterable[Incarnation],
    coming: bool,
    proofs: Proofs,
    accused: Collection[Incarnation] = (),
) -> Verdict:
    """Whether an engine that answered a completion may take traffic.

    `up`: partners (the other role, same deployment) that answered a completion themselves. `coming`: a partner is on its
    way up (placed … starting); False when every other partner is failed, lost, or not wanted. `accused`: engines that are at
    fault; they do not count as partners, and do not serve alone.
    """
    if role is Role.AGGREGATED:
        return Verdict(True, "Serving.")
    other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    partners = [partner for partner in up if partner not in accused]
    if not partners:
        if coming:
            return Verdict(False, f"It answers. Waiting for a {other} engine, to test a KV transfer with it.")
        if role is Role.DECODE:
            return Verdict(True, "Serving alone: no prefill engine is running, so this engine computes every prompt.")
        return Verdict(False, "It answers. No decode engine is running that could take its KV.")
    results = {p: proofs.get((who, p) if role is Role.PREFILL else (p, who)) for p in partners}
    untried = sum(result is None for result in results.values())
    worked = sum(result is True for result in results.values())
    if untried:
        return Verdict(
            False, f"It answers. KV transfers work with {worked} of {plural(len(results), f'{other} engine')} so far."
        )
    if not worked and role is Role.DECODE and who not in accused:
        return Verdict(True, NO_TRANSFER)
    if not worked:
        return Verdict(False, f"It answers, but the KV transfer with every {other} engine failed.")
    broken = len(results) - worked
    if broken:
        return Verdict(
            True, f"Serving. The KV transfer with {broken} of {plural(len(results), f'{other} engine')} failed."
        )
    return Verdict(True, "Serving.")
