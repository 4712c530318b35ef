"""Takes the agents' reports in: the only writer of what is known of a node. Called inside the reconcile loop's transaction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any

import msgspec

from controlplane.fleet.model import GpuFacts, NodeFacts
from controlplane.fleet.wire import NodeReport
from controlplane.nodes import clock
from controlplane.nodes.models import Gpu, Node

_NODE_FIELDS = ("facts", "address", "agent", "report_sequence", "applied_generation", "last_report_at",
                "clock_offset")  # fmt: skip
_GPU_FIELDS = ("uuid", "name", "memory_bytes", "memory_free_bytes", "foreign")


def facts_of(node: Node) -> NodeFacts | None:
    """What the node's newest report said of its machine; None before the first, or when another version wrote it."""
    if not node.facts:
        return None
    try:
        return msgspec.convert(node.facts, NodeFacts)
    except msgspec.ValidationError:
        return None


class Age(StrEnum):
    """What a report is beside those of its node that were taken in."""

    NEW = "new"
    """The next of the agent process that reports, or the node's first: a sign of life since the last step."""
    KNOWN = "known"
    """Taken in before: no sign of life."""
    LATE = "late"
    """Older than one that was taken in."""
    STRANGE = "strange"
    """Of another agent process than the last. It may be of a new one, or an old one from before Redis was restored: when
    it counts up, its next one is `NEW`."""


def age(node: Node, report: NodeReport) -> Age:
    """How new the report is, by its agent process and sequence alone: no clock of the node counts."""
    if report.agent != node.agent:
        return Age.STRANGE if node.agent else Age.NEW
    if report.sequence == node.report_sequence:
        return Age.KNOWN
    return Age.NEW if report.sequence > node.report_sequence else Age.LATE


def record(
    nodes: Sequence[Node], reports: Mapping[str, NodeReport], *, heard: datetime | None, now: datetime | None = None
) -> list[Node]:
    """Write the new ones among these reports. `heard`: when they came, at the earliest; None: not known at all. `now`: where
    they came just now. Returns the nodes that changed."""
    ages = {node.name: age(node, reports[node.name]) for node in nodes if node.name in reports}
    _meet([node for node in nodes if ages.get(node.name) is Age.STRANGE], reports)
    fresh = [node for node in nodes if ages.get(node.name) is Age.NEW]
    if not fresh:
        return []
    there = set(Node.objects.select_for_update().filter(pk__in=[n.pk for n in fresh]).values_list("pk", flat=True))
    fresh = [node for node in fresh if node.pk in there]  # one that was just removed is not made again
    gpus: list[Node] = []
    for node in fresh:
        report = reports[node.name]
        known = facts_of(node)
        if known is None or known.gpus != report.facts.gpus:
            gpus.append(node)
        node.facts = msgspec.to_builtins(report.facts)
        node.address = node.address or report.facts.address
        node.agent, node.report_sequence = report.agent, report.sequence
        node.applied_generation = report.plan_generation
        node.last_report_at = latest(node.last_report_at, heard)
        node.clock_offset = None if now is None else clock.offset(report.sent_at, now.timestamp())
    # An upsert, not `bulk_update`: for 200 nodes its CASE expressions take Django a quarter of a second, this a tenth of it.
    Node.objects.bulk_create(fresh, update_conflicts=True, unique_fields=["id"], update_fields=_NODE_FIELDS)
    for node in gpus:
        _record_gpus(node, reports[node.name].facts.gpus)
    return fresh


def latest(*moments: datetime | None) -> datetime | None:
    """The latest of those that are known."""
    return max((moment for moment in moments if moment is not None), default=None)


def _meet(nodes: Sequence[Node], reports: Mapping[str, NodeReport]) -> None:
    """Remember the agent process whose next report will count."""
    for node in nodes:
        node.agent, node.report_sequence = reports[node.name].agent, reports[node.name].sequence
    if nodes:
        Node.objects.bulk_update(nodes, ["agent", "report_sequence"])


def note_refusals(nodes: Iterable[Node], reports: Mapping[str, NodeReport], refused: Mapping[str, str]) -> list[Node]:
    """Note in the nodes, not in their rows yet, whose reports cannot be read, and why. Returns those where that changed."""
    changed = []
    for node in nodes:
        error = refused.get(node.name, "" if node.name in reports else node.report_error)
        if error != node.report_error:
            node.report_error = error
            changed.append(node)
    return changed


def _record_gpus(node: Node, found: Sequence[GpuFacts]) -> None:
    Gpu.objects.filter(node=node).exclude(index__in=[gpu.index for gpu in found]).delete()
    rows = []
    for gpu in found:
        fields: dict[str, Any] = msgspec.to_builtins(gpu)
        rows.append(Gpu(node=node, index=gpu.index, **{name: fields[name] for name in _GPU_FIELDS}))
    Gpu.objects.bulk_create(rows, update_conflicts=True, unique_fields=["node", "index"], update_fields=_GPU_FIELDS)
