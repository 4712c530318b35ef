"""One engine as its card shows it: state, place, sentence, figures, facts, command line. Pure, no markup.

Every number keeps where it comes from; what nobody has told is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from controlplane.dashboards import looks, words
from controlplane.dashboards.looks import Look
from controlplane.dashboards.words import Quantity
from controlplane.deployments.queries import EngineRow
from controlplane.fleet.lifecycle import LIMITS, State
from controlplane.fleet.model import EngineLoad, GpuFacts, Role
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
    """Why the newest attempt failed."""
    before: str
    """Why the attempt before failed, of an engine that is being tried again."""
    failures: int
    """Failed attempts in a row."""
    attempt: int
    retry_at: datetime | None
    """When it is tried again."""
    ending: str
    """`exit code 1`, `signal 9`; empty where the sentence says it already, or nothing is known."""
    command: str


def load_of(row: EngineRow) -> EngineLoad | None:
    """The engine's newest counters, if its agent has told any."""
    return row.observation.load if row.observation else None


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
    return f"Waiting for {limit.awaits}, at most {words.age(limit.seconds)}." if limit else ""


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
        before="" if failed or row.state is State.READY else row.last_failure,
        failures=row.engine.failures,
        retry_at=row.retry_at,
        attempt=row.engine.attempt,
        ending="" if not seen or seen.stopped or (how := ending(seen.exit_code)) in text else how,
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
        third = Figure("hit rate", _hits(load), "cached ÷ cached and computed prompt tokens, last minute")
    return (
        Figure("in flight", words.count(row.in_flight), "routers, now"),
        Figure("KV used", words.share(usage, 1), "engine metrics, now", usage),
        third,
        Figure("last report", Quantity(words.age(age)), "node report, received by the control plane", since=reported),
    )


def _hits(load: EngineLoad | None) -> Quantity:
    recent = load.recent if load else None
    if recent is None:
        return words.UNKNOWN
    prompts = recent.prompt_tokens_local + recent.prompt_tokens_cached
    return words.share(recent.prompt_tokens_cached, prompts) if prompts else Quantity("no prompts")


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
