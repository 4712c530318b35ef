"""What happened to nodes, for the event history: an admin is told of what a node's reports, or its joining, mean."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from django.utils import timezone

from controlplane.access.roles import SYSTEM
from controlplane.deployments.models import Event
from controlplane.nodes.models import Node
from controlplane.nodes.services import Joined

REPORT_REFUSED, REPORT_READ = "report-refused", "report-read"
QUIET_FOR = timedelta(minutes=10)
"""A node whose reports come and go out of bounds is told of once in this time."""


def tell(node: str, kind: str, message: str, *, actor: str = SYSTEM.name) -> None:
    """An event of a node."""
    Event.objects.create(node_name=node, kind=kind, message=message, actor=actor)


def tell_joined(joined: Joined) -> None:
    """A node has joined, perhaps under a name that another had."""
    if joined.took_over:
        sentence = (
            f"{joined.name} is another machine now, at {joined.address}. The former one's access is taken away; engines that it ran "
            "are started anew, with new secrets."
        )
        tell(joined.name, "taken-over", sentence, actor=joined.allowed_by)
    else:
        tell(joined.name, "joined", f"{joined.name} joined, at {joined.address}.", actor=joined.allowed_by)


def tell_cut_off(name: str, why: str) -> None:
    """A node's access has been taken away."""
    tell(
        name,
        "cut-off",
        f"{name} {why}: its access is taken away. If you trust it, let it join again with a token made for it.",
    )


def tell_refusals(nodes: Iterable[Node]) -> None:
    """Of nodes whose reports cannot be read since now, for another reason, or can be read again."""
    for node in nodes:
        kind = REPORT_REFUSED if node.report_error else REPORT_READ
        if Event.objects.filter(node_name=node.name, kind=kind, at__gt=timezone.now() - QUIET_FOR).exists():
            continue
        if node.report_error:
            tell(node.name, kind, f"{node.name} sends reports that cannot be read: {node.report_error}.")
        else:
            tell(node.name, kind, f"{node.name}'s reports can be read again.")
