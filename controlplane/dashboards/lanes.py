"""A deployment as its page draws it: lanes of cards and the link between them, from rows that `queries` read. Pure, no markup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from controlplane.dashboards import figures, words
from controlplane.dashboards.cards import LIVE, Card, card, load_of
from controlplane.dashboards.figures import Drawing, Proof
from controlplane.dashboards.words import Quantity
from controlplane.deployments.queries import DeploymentRow, EngineRow, Transfers
from controlplane.fleet.lifecycle import State
from controlplane.fleet.model import EngineLoad, Role
from controlplane.fleet.spec import MAX_REPLICAS
from controlplane.fleet.status import Status
from controlplane.nodes.queries import NodeRow


@dataclass(frozen=True)
class Pair:
    prefill: str
    decode: str
    proof: Proof
    detail: str
    bytes_moved: int
    seconds: float

    @property
    def moved(self) -> Quantity:
        return words.moved(self.bytes_moved)

    @property
    def rate(self) -> Quantity:
        return words.rate(self.bytes_moved, self.seconds)


@dataclass(frozen=True)
class Link:
    drawing: Drawing
    pairs: tuple[Pair, ...]
    bytes_moved: int | None
    transfers: int | None
    rate: Quantity
    """Of transfers while they moved, in the last minute."""
    pace: str
    """What the rate is of, or why there is none."""
    failures: int | None
    verdict: str
    tone: str

    @property
    def moved(self) -> Quantity:
        return words.moved(self.bytes_moved)

    @property
    def css(self) -> str:
        """Class of the link drawn as one line: failed when no pair works, none when none was proved."""
        if self.tone == "bad":
            return "failed"
        return "works" if any(p.proof is Proof.WORKED for p in self.pairs) else "none"


@dataclass(frozen=True)
class Lane:
    role: Role
    title: str
    wanted: int
    ready: int
    cards: tuple[Card, ...]
    in_flight: int | None

    @property
    def less(self) -> int:
        return max(self.wanted - 1, 0)

    @property
    def more(self) -> int:
        return min(self.wanted + 1, MAX_REPLICAS)


@dataclass(frozen=True)
class Picture:
    lanes: tuple[Lane, ...]
    link: Link | None


def total(numbers: Sequence[int | None]) -> int | None:
    """Their sum; unknown when nothing is known of any."""
    known = [n for n in numbers if n is not None]
    return sum(known) if known else None


def requests_in_flight(engines: Sequence[EngineRow]) -> int | None:
    """Requests of whole deployments. A disaggregated one is counted at two engines, so prefill's count is left out."""
    if not engines:
        return 0
    return total([e.in_flight for e in engines if e.engine.role != Role.PREFILL])


def pairs(prefills: Sequence[EngineRow], decodes: Sequence[EngineRow]) -> tuple[Pair, ...]:
    """Every pair of the engines that hold a place, with the newest proof between just these two processes."""
    found = []
    for p in prefills:
        for d in decodes:
            proof = next(
                (
                    x
                    for x in (d.observation.pairs if d.observation else ())
                    if x.prefill == p.engine.pk and x.prefill_attempt == p.engine.attempt
                ),
                None,
            )
            if proof is None:
                found.append(Pair(p.engine.pk, d.engine.pk, Proof.UNTRIED, "Not tried yet.", 0, 0.0))
            else:
                how = Proof.WORKED if proof.ok else Proof.FAILED
                found.append(Pair(p.engine.pk, d.engine.pk, how, proof.detail, proof.bytes_moved, proof.seconds))
    return tuple(found)


def transfer_rate(loads: Sequence[EngineLoad], *, per_rank: bool) -> tuple[Quantity, str]:
    """How fast KV moved in the last minute, and what that is of. `per_rank`: engines have several, which transfer at the same time,
    so that their seconds add up as their bytes do."""
    recents = [load.recent for load in loads if load.recent is not None]
    if not recents:
        return words.UNKNOWN, "rate unknown"
    seconds = sum(recent.nixl_seconds for recent in recents)
    if not seconds:
        return words.UNKNOWN, "no transfers in the last minute"
    rate = words.rate(sum(recent.nixl_bytes for recent in recents), seconds)
    return rate, f"while moving{', per rank' if per_rank else ''}, last minute"


def link(
    prefills: Sequence[EngineRow], decodes: Sequence[EngineRow], moved: Transfers | None, *, per_rank: bool = False
) -> Link:
    """The wire between the two lanes. Engines that have no process (waiting, failed, stopped) take no part in it, but for what
    they have `moved`. `per_rank`: engines have several."""
    up = (*LIVE, State.STARTING)
    left = [r for r in prefills if r.state in up]
    right = [r for r in decodes if r.state in up]
    found = pairs(left, right)
    loads = {r.engine.pk: load_of(r) for r in right}
    drawing = figures.link(
        [r.engine.pk for r in left],
        [r.engine.pk for r in right],
        proofs={(p.prefill, p.decode): p.proof is Proof.WORKED for p in found if p.proof is not Proof.UNTRIED},
        bytes_by_decode={pk: load.nixl_bytes if load else None for pk, load in loads.items()},
    )
    rate, pace = transfer_rate([load for load in loads.values() if load], per_rank=per_rank)
    said, tone = figures.verdict([p.proof for p in found])
    return Link(
        drawing=drawing,
        pairs=found,
        bytes_moved=moved.bytes if moved else None,
        transfers=moved.transfers if moved else None,
        rate=rate,
        pace=pace,
        failures=moved.failures if moved else None,
        verdict=said,
        tone=tone,
    )


def picture(row: DeploymentRow, nodes: Mapping[str, NodeRow]) -> Picture:
    """The whole drawing of one deployment. `nodes` by name."""
    by_role: dict[Role, list[EngineRow]] = {role: [] for role in Role}
    for engine in row.engines:
        if engine.state is State.STOPPED:
            continue
        by_role[Role(engine.engine.role)].append(engine)
    # A pool that the intent no longer names is still shown while its engines end.
    roles = [role for role in Role if role in row.spec.pools or by_role[role]]
    lanes = tuple(
        Lane(
            role=role,
            title=role.value.capitalize(),
            wanted=row.condition.wanted.get(role, 0),
            ready=row.condition.ready.get(role, 0),
            cards=tuple(card(e, nodes.get(e.node_name or "")) for e in by_role[role]),
            in_flight=total([e.in_flight for e in by_role[role]]),
        )
        for role in roles
    )
    both = row.spec.disaggregated
    wire = None
    if both:
        per_rank = row.spec.pool(Role.DECODE).tensor_parallel > 1
        wire = link(by_role[Role.PREFILL], by_role[Role.DECODE], row.moved, per_rank=per_rank)
    return Picture(lanes, wire)


def since(row: DeploymentRow) -> datetime:
    """Since when the deployment is what it is: the newest change of an engine's state or, unless all is well, of the intent.

    Routing may change while all is well, and that makes nothing younger; nor does one more attempt of an engine that fails.
    """
    changes = [e.since if e.state is State.READY else e.failing_since or e.since for e in row.engines]
    if row.condition.status is not Status.READY or not changes:
        changes.append(row.deployment.updated_at)
    return max(changes)
