"""Every read of nodes. No writes, no calls to nodes: a dead node is shown as dead, and slows nothing down."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.db.models import Count, Q, QuerySet
from django.utils import timezone

from controlplane.fleet.errors import NotFound
from controlplane.fleet.lifecycle import HOLDS_NODE
from controlplane.fleet.model import NodeFacts
from controlplane.nodes import clock
from controlplane.nodes.models import Node
from controlplane.nodes.presence import Presence, presence
from controlplane.nodes.reports import facts_of


@dataclass(frozen=True)
class NodeRow:
    node: Node
    facts: NodeFacts | None
    status: Presence
    age_seconds: float | None
    """Since its last new report came, by the server's clock."""
    engines: int
    """That hold a place on it."""
    barred: str
    """Why it takes no new engines, beside being cordoned: as `node <name> …`; empty: nothing bars it."""

    @property
    def clock(self) -> str:
        """How far its clock is off, as a sentence; empty: it is about right."""
        return clock.sentence(self.node.clock_offset)


def barred(node: Node, facts: NodeFacts | None) -> str:
    """Why nothing new is placed on the node, whoever cordoned it or not: it could not be used there. Empty: nothing bars it."""
    if node.cut_off:
        return f"{node.cut_off}, and lost its access"
    if node.report_error:
        return "sends reports that cannot be read"
    if facts is not None and node.address and facts.address != node.address:
        return f"joined with {node.address} and is at {facts.address} now"
    return ""


def silent_seconds(node: Node, now: datetime) -> float | None:
    """Since its last new report came; None: there never was one."""
    return None if node.last_report_at is None else max(0.0, (now - node.last_report_at).total_seconds())


def node_rows() -> list[NodeRow]:
    """All nodes, by name."""
    return [_row(node) for node in _nodes()]


def node_row(name: str) -> NodeRow:
    """Raises `NotFound`."""
    node = _nodes().filter(name=name).first()
    if node is None:
        raise NotFound(f"there is no node {name}")
    return _row(node)


def _nodes() -> QuerySet[Node]:
    holds = Q(engines__state__in=[state.value for state in HOLDS_NODE])
    return Node.objects.annotate(engines_held=Count("engines", filter=holds)).order_by("name")


def _row(node: Node) -> NodeRow:
    age = silent_seconds(node, timezone.now())
    held: int = getattr(node, "engines_held")  # noqa: B009  (an annotation, unknown to the type)
    facts = facts_of(node)
    return NodeRow(node, facts, presence(age), age, held, barred(node, facts))
