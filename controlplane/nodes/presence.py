"""How long ago a node was heard of, and what that means. Pure. Only the server's receive time counts, never a node's clock."""

from __future__ import annotations

from enum import StrEnum

SILENT_AFTER = 15.0
"""Seconds without a new report: its engines are suspects from then on."""
LOST_AFTER = 60.0
"""Seconds without a new report: its engines may be placed anew elsewhere."""


class Presence(StrEnum):
    REPORTING = "reporting"
    SILENT = "silent"
    LOST = "lost"
    NEVER = "never reported"


def presence(silent_seconds: float | None) -> Presence:
    """What so many seconds without a report mean; None: there never was one."""
    if silent_seconds is None:
        return Presence.NEVER
    if silent_seconds <= SILENT_AFTER:
        return Presence.REPORTING
    return Presence.SILENT if silent_seconds <= LOST_AFTER else Presence.LOST
