"""A deployment as the page shows it: cards, lanes and the link, made from rows that `queries` read. Pure, no markup.

Every number keeps where it comes from; what nobody has told is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from controlplane.dashboards import figures, looks, words
from controlplane.dashboards.figures import Drawing, Proof
from controlplane.dashboards.looks import Look
from controlplane.dashboards.words import Quantity
from controlplane.deployments.queries import DeploymentRow, EngineRow
from controlplane.fleet.lifecycle import LIMITS, State
from controlplane.fleet.model import EngineLoad, GpuFacts, Role
from controlplane.fleet.spec import MAX_REPLICAS
from controlplane.fleet.status import Status
from controlplane.nodes.queries import NodeRow

ENGINE_COUNTERS = "engine counters, since the engine started"
LIVE = (State.READY, State.UNHEALTHY, State.LOST, State.DRAINING, State.WARMING)


@dataclass(frozen=True)
class Figure:
    label: str
    quantity: Quantity
    source: str
    """Where the number comes from and over which time: shown on hover and to screen readers."""
    fraction: float | None = None
    """0..1 for a meter."""
    since: datetime | None = None
    """The number is an age that goes on growing from here."""


@dataclass(frozen=True)
class Card:
    id: str
    name: str
    role: Role
    look: Look
    since: datetime
    sentence: str
    place: str
    """Node and GPUs."""
    node: str
    figures: tuple[Figure, ...]
    facts: tuple[tuple[str, str], ...]
    progress: float | None
    trouble: str
    attempt: int
    ending: str
    """`exit code 1`, `signal 9`, or empty."""
    command: str


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


def load_of(row: EngineRow) -> EngineLoad | None:
    """The engine's newest counters, if its agent has told any."""
    return row.observation.load if row.observation else None


def total(numbers: Sequence[int | None]) -> int | None:
    """Their sum; unknown when nothing is known of any."""
    known = [n for n in numbers if n is not None]
    return sum(known) if known else None


def place(row: EngineRow, gpus: Sequence[GpuFacts]) -> str:
    """`gpu-a · H200:0,1` or `gpu-a · CPU`; empty while it has no node."""
    if not row.node_name:
        return ""
    indexes = list(row.engine.gpus)
    if not indexes:
        return f"{row.node_name} · {'stand-in' if row.engine.runtime == 'sim' else 'CPU'}"
    names = {g.index: g.name.removeprefix("NVIDIA ") for g in gpus}
    return f"{row.node_name} · {names.get(indexes[0], 'GPU')}:{','.join(map(str, indexes))}"


def sentence(row: EngineRow) -> str:
    """What it does or waits for; the state's limit says what is awaited where nobody has said more."""
    if row.observation and row.observation.detail and row.state in (State.INSTALLING, State.FETCHING, State.STARTING):
        return row.observation.detail
    if row.reason:
        return row.reason
    limit = LIMITS.get(row.state)
    return f"Awaits {limit.awaits}, {words.age(limit.seconds)} at most." if limit else ""


def ending(exit_code: int | None) -> str:
    """How a process ended, in words; a negative code is the signal that ended it."""
    if exit_code is None:
        return ""
    return f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"


def card(row: EngineRow, node: NodeRow | None) -> Card:
    """One engine's card."""
    seen = row.observation
    node_facts = node.facts if node else None
    failed = row.state is State.FAILED
    text = sentence(row)
    return Card(
        id=row.engine.pk,
        name=row.name,
        role=Role(row.engine.role),
        look=looks.ENGINE[row.state],
        since=row.since,
        sentence="" if failed else text,
        place=place(row, node_facts.gpus if node_facts else ()),
        node=row.node_name or "",
        figures=_figures(row, node),
        facts=_facts(row),
        progress=seen.progress if seen and row.state in (State.INSTALLING, State.FETCHING, State.STARTING) else None,
        trouble=text if failed else "",
        attempt=row.engine.attempt,
        ending=ending(seen.exit_code) if seen else "",
        command=" ".join(_shell_word(word) for word in seen.command) if seen else "",
    )


def _shell_word(word: str) -> str:
    plain = word and all(c.isalnum() or c in "-_=./:,@%+" for c in word)
    return word if plain else "'" + word.replace("'", "'\\''") + "'"


def _figures(row: EngineRow, node: NodeRow | None) -> tuple[Figure, ...]:
    if row.state not in LIVE:
        return ()
    load = load_of(row)
    usage = load.kv_usage if load else None
    age = node.age_seconds if node else None
    reported = node.node.last_report_at if node else None
    if row.engine.role == Role.DECODE:
        third = Figure("KV received", words.moved(load.nixl_bytes if load else None), "NIXL " + ENGINE_COUNTERS)
    else:
        prompts = load.prompt_tokens_local + load.prompt_tokens_cached if load else None
        hits = words.share(load.prompt_tokens_cached if load else None, prompts)
        third = Figure("hit rate", hits, "cached ÷ cached and computed prompt tokens, " + ENGINE_COUNTERS)
    return (
        Figure("in flight", words.count(row.in_flight), "routers, now"),
        Figure("KV used", words.share(usage, 1), "engine metrics, now", usage),
        third,
        Figure("last report", Quantity(words.age(age)), "node report, received by the control plane", since=reported),
    )


def _facts(row: EngineRow) -> tuple[tuple[str, str], ...]:
    seen, load = row.observation, load_of(row)
    facts: list[tuple[str, str]] = [("engine", row.engine.pk), ("attempt", str(row.engine.attempt))]
    if row.engine.runtime:
        facts.append(("runtime", f"{row.engine.runtime} {seen.version if seen else ''}".strip()))
    if seen and seen.ports:
        facts.append(("address", f"{seen.address}:{seen.ports.http}"))
    if seen and seen.block_size:
        facts.append(("KV block", f"{seen.block_size} tokens"))
    if seen and seen.max_model_len:
        facts.append(("longest prompt + answer", f"{seen.max_model_len:,} tokens"))
    if seen:
        facts.append(("KV events", {True: "on", False: "off", None: "unknown"}[seen.kv_events]))
    if load:
        facts += [
            ("prompt tokens computed here", f"{load.prompt_tokens_local:,}"),
            ("prompt tokens from cache", f"{load.prompt_tokens_cached:,}"),
            ("prompt tokens transferred in", f"{load.prompt_tokens_transferred:,}"),
            ("tokens written", f"{load.generated_tokens:,}"),
            ("running · waiting", f"{load.running:,} · {load.waiting:,}"),
        ]
        if load.kv_expired:
            facts.append(("KV leases expired", f"{load.kv_expired:,}"))
    return tuple(facts)


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


def link(prefills: Sequence[EngineRow], decodes: Sequence[EngineRow]) -> Link:
    """The wire between the two lanes. Engines that have no process (waiting, failed, stopped) take no part in it."""
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
    known = [load for load in loads.values() if load]
    moved = sum(x.nixl_bytes for x in known) if known else None
    seconds = sum(x.nixl_seconds for x in known)
    said, tone = figures.verdict([p.proof for p in found])
    return Link(
        drawing=drawing,
        pairs=found,
        bytes_moved=moved,
        transfers=sum(x.nixl_transfers for x in known) if known else None,
        rate=words.rate(moved, seconds),
        failures=sum(x.nixl_failures for x in known) if known else None,
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
    return Picture(lanes, link(by_role[Role.PREFILL], by_role[Role.DECODE]) if both else None)


def since(row: DeploymentRow) -> datetime:
    """Since when the deployment is what it is: the newest change of an engine's state or, unless all is well, of the intent.

    Routing may change while all is well, and that makes nothing younger.
    """
    changes = [e.since for e in row.engines]
    if row.condition.status is not Status.READY or not changes:
        changes.append(row.deployment.updated_at)
    return max(changes)
