"""The one way to write an audit row."""

from __future__ import annotations

from typing import Any

from controlplane.access.models import AuditEntry
from controlplane.access.roles import Actor


def record(*, actor: Actor, action: str, target: str, **detail: Any) -> None:
    """Write who did what to which thing. Call it inside the transaction of the change; never pass a secret."""
    AuditEntry.objects.create(
        actor=actor.name, actor_kind=actor.kind, address=actor.address, action=action, target=target, detail=detail
    )


def entries(*, limit: int = 50, before: int | None = None) -> list[AuditEntry]:
    """The newest rows, or those older than the row `before`; newest first."""
    rows = AuditEntry.objects.order_by("-pk")
    return list(rows.filter(pk__lt=before)[:limit] if before else rows[:limit])


def last_change(target: str) -> AuditEntry | None:
    """The newest row about one thing."""
    return AuditEntry.objects.filter(target=target).order_by("-pk").first()


def was_done(*, action: str, target: str) -> bool:
    """Whether anybody ever did this to that thing."""
    return AuditEntry.objects.filter(action=action, target=target).exists()
