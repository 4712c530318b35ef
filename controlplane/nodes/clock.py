"""How far a node's clock is from the control plane's: shown to people, and used for nothing. Pure."""

from __future__ import annotations

WORTH_SAYING = 10.0
"""Seconds. A report is looked at some seconds after it was sent, so that less than this says nothing."""


def offset(sent_at: float, came_at: float) -> float | None:
    """Seconds by which the node's clock is ahead, about; negative: behind; None: it did not tell its time."""
    return round(sent_at - came_at, 1) if sent_at else None


def sentence(seconds: float | None) -> str:
    """Empty where the clock is about right, or nothing is known."""
    if seconds is None or abs(seconds) < WORTH_SAYING:
        return ""
    where = "ahead of" if seconds > 0 else "behind"
    return f"Its clock is about {_about(abs(seconds))} {where} the control plane's."


def _about(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
