"""The engine state table: states, edges with their owner, the limit of every waiting state.

The only writer of engine state is the reconcile loop; `advance` is the only way from one state to the next. The diagram
in ARCHITECTURE.md is generated from this table.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from controlplane.fleet.errors import IllegalTransition


class State(StrEnum):
    """Where one engine is. Each attempt walks from PENDING on."""

    PENDING = "pending"
    PLACED = "placed"
    INSTALLING = "installing"
    FETCHING = "fetching"
    STARTING = "starting"
    WARMING = "warming"
    READY = "ready"
    UNHEALTHY = "unhealthy"
    LOST = "lost"
    DRAINING = "draining"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


class Owner(StrEnum):
    """Who causes an edge."""

    LOOP = "loop"
    """The reconcile loop decided."""
    AGENT = "agent"
    """An agent's report showed it."""
    ROUTER = "router"
    """The outcomes of requests showed it."""
    CLOCK = "clock"
    """A limit passed, or a node fell silent."""
    USER = "user"
    """The intent no longer holds this engine."""


class Event(StrEnum):
    PLACE = "place"
    INSTALL = "install"
    FETCH = "fetch"
    START = "start"
    WARM = "warm"
    PROVE = "prove"
    """A completion, and for each new pair a transfer, came back: it may serve."""
    SICKEN = "sicken"
    BLAME = "blame"
    """It calls itself healthy, but requests, or all its KV transfers, fail because of it."""
    RECOVER = "recover"
    EXIT = "exit"
    HALT = "halt"
    """Its agent ended it as it was told to, and not because of the engine: no failure."""
    OVERRUN = "overrun"
    """The state's limit passed."""
    SILENCE = "silence"
    """Its node reports no more."""
    RETURN = "return"
    """Its node reports again and the process still runs."""
    REPLACE = "replace"
    """Another node can take its place."""
    DRAIN = "drain"
    DRAINED = "drained"
    GONE = "gone"
    RETRY = "retry"


class Edge(NamedTuple):
    source: State
    event: Event
    target: State
    owner: Owner


class Limit(NamedTuple):
    """How long a state may last. `seconds` is checked against the row's `since`; then `OVERRUN` happens."""

    seconds: float
    awaits: str
    """What is awaited, in words for the page."""


S, E, O = State, Event, Owner

BOOT = (S.PLACED, S.INSTALLING, S.FETCHING, S.STARTING, S.WARMING)
"""From assignment to proof: reports may skip any of these, and a runtime that must be repaired may go back."""

LIVE = (*BOOT, S.READY, S.UNHEALTHY, S.LOST)
"""States of an engine that the intent still wants and that holds its place on a node."""

SERVING = (S.READY,)
"""States in which the snapshot gives it new requests. Suspects stay in it too: LOST ones, whose process may well live, and
UNHEALTHY ones that only routers blame, who must be able to see them recover."""

HOLDS_NODE = (*LIVE, S.DRAINING, S.STOPPING)
"""States in which the engine is part of its node's plan or still occupies it."""

LIMITS: dict[State, Limit] = {
    S.PENDING: Limit(3600, "a node with room"),
    S.PLACED: Limit(60, "the agent on its node"),
    S.INSTALLING: Limit(3600, "the engine runtime to be installed"),
    S.FETCHING: Limit(4 * 3600, "the model to arrive on the node"),
    S.STARTING: Limit(900, "the engine's first answer"),
    S.WARMING: Limit(300, "a KV transfer with each partner engine"),
    S.UNHEALTHY: Limit(120, "the engine to answer again"),
    S.LOST: Limit(24 * 3600, "its node to report again, or another node with room"),
    S.DRAINING: Limit(300, "its last requests to finish"),
    S.STOPPING: Limit(90, "the process to end"),
    S.FAILED: Limit(300, "the next attempt"),
}
"""Every state but READY and STOPPED waits for something, and not for ever. FAILED's limit is the longest back-off."""


def _edges() -> tuple[Edge, ...]:
    edges = [
        Edge(S.PENDING, E.PLACE, S.PLACED, O.LOOP),
        Edge(S.PENDING, E.DRAIN, S.STOPPED, O.USER),
        Edge(S.PENDING, E.OVERRUN, S.FAILED, O.CLOCK),
        Edge(S.WARMING, E.PROVE, S.READY, O.LOOP),
        Edge(S.READY, E.SICKEN, S.UNHEALTHY, O.AGENT),
        Edge(S.READY, E.BLAME, S.UNHEALTHY, O.ROUTER),
        Edge(S.READY, E.EXIT, S.FAILED, O.AGENT),
        Edge(S.READY, E.DRAIN, S.DRAINING, O.USER),
        Edge(S.READY, E.SILENCE, S.LOST, O.CLOCK),
        Edge(S.UNHEALTHY, E.RECOVER, S.READY, O.AGENT),
        Edge(S.UNHEALTHY, E.EXIT, S.FAILED, O.AGENT),
        Edge(S.UNHEALTHY, E.DRAIN, S.DRAINING, O.USER),
        Edge(S.UNHEALTHY, E.SILENCE, S.LOST, O.CLOCK),
        Edge(S.UNHEALTHY, E.OVERRUN, S.FAILED, O.CLOCK),
        Edge(S.LOST, E.RETURN, S.WARMING, O.AGENT),
        Edge(S.LOST, E.EXIT, S.FAILED, O.AGENT),
        Edge(S.LOST, E.REPLACE, S.FAILED, O.LOOP),
        Edge(S.LOST, E.OVERRUN, S.FAILED, O.CLOCK),
        Edge(S.LOST, E.DRAIN, S.STOPPING, O.USER),
        Edge(S.DRAINING, E.DRAINED, S.STOPPING, O.LOOP),
        Edge(S.DRAINING, E.OVERRUN, S.STOPPING, O.CLOCK),
        Edge(S.DRAINING, E.EXIT, S.STOPPED, O.AGENT),
        Edge(S.STOPPING, E.GONE, S.STOPPED, O.AGENT),
        Edge(S.STOPPING, E.OVERRUN, S.STOPPED, O.CLOCK),
        Edge(S.FAILED, E.RETRY, S.PENDING, O.LOOP),
        Edge(S.FAILED, E.DRAIN, S.STOPPED, O.USER),
    ]
    edges += [Edge(source, E.HALT, S.PENDING, O.AGENT) for source in (S.READY, S.UNHEALTHY, S.LOST)]
    seen = {E.INSTALL: S.INSTALLING, E.FETCH: S.FETCHING, E.START: S.STARTING, E.WARM: S.WARMING}
    # A node whose records were lost starts the same attempt anew: what was ready is no longer.
    anew = (E.INSTALL, E.FETCH, E.START)
    edges += [Edge(source, event, seen[event], O.AGENT) for source in (S.READY, S.UNHEALTHY) for event in anew]
    for source in BOOT:
        edges += [Edge(source, event, target, O.AGENT) for event, target in seen.items() if target is not source]
        edges += [
            Edge(source, E.EXIT, S.FAILED, O.AGENT),
            Edge(source, E.HALT, S.PENDING, O.AGENT),
            Edge(source, E.OVERRUN, S.FAILED, O.CLOCK),
            Edge(source, E.SILENCE, S.LOST, O.CLOCK),
            Edge(source, E.DRAIN, S.STOPPING, O.USER),
        ]
    return tuple(edges)


EDGES = _edges()
_TABLE = {(edge.source, edge.event): edge for edge in EDGES}


def allowed(state: State, event: Event) -> bool:
    """Whether the table knows this event in this state."""
    return (state, event) in _TABLE


def advance(state: State, event: Event) -> State:
    """The state after an event.

    Raises `IllegalTransition` when the table has no such edge; nothing is changed then.
    """
    edge = _TABLE.get((state, event))
    if edge is None:
        raise IllegalTransition(f"an engine that is {state} cannot take the event {event}")
    return edge.target


def backoff_seconds(failures: int) -> float:
    """Wait before the next attempt after so many failures in a row: 2, 4, 8 … seconds, at most FAILED's limit."""
    return min(2.0 ** min(max(failures, 1), 20), LIMITS[S.FAILED].seconds)


def mermaid() -> str:
    """The table as a Mermaid state diagram: the text between the markers in ARCHITECTURE.md."""
    lines = ["stateDiagram-v2", "    [*] --> pending"]
    grouped: dict[tuple[State, State], list[str]] = {}
    for edge in EDGES:
        grouped.setdefault((edge.source, edge.target), []).append(f"{edge.event} ({edge.owner})")
    for (source, target), labels in grouped.items():
        lines.append(f"    {source} --> {target}: {', '.join(labels)}")
    lines.append("    stopped --> [*]")
    return "\n".join(lines)
