"""How much one inference key may use, and how long it waits: the numbers, their bounds, and how people write them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from controlplane.fleet.errors import InvalidInput, Problems


class Limits(NamedTuple):
    """None: unlimited; of the seconds: as the deployment says. Use is counted by the routers, over all of them together."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Prompt and output together."""
    concurrency: int | None = None
    """Requests at a time."""
    priority: int = 0
    """Of two requests that wait for an engine the one with the higher is served first."""
    silence_seconds: int | None = None
    """The longest wait for an engine's first byte: of an answer that is no stream, for all of it."""
    gap_seconds: int | None = None
    """The longest silence inside a stream."""


UNLIMITED = Limits()
BOUNDS = {
    "requests_per_minute": (1, 1_000_000),
    "tokens_per_minute": (1, 1_000_000_000),
    "concurrency": (1, 100_000),
    "priority": (-10, 10),
    "silence_seconds": (1, 86_400),
    "gap_seconds": (1, 86_400),
}


def changed(limits: Limits, changes: Mapping[str, int | None]) -> Limits:
    """The limits with some of them set anew (None: unlimited; for the priority: 0). Raises `InvalidInput` with every bad
    field."""
    found = Problems()
    for field, value in changes.items():
        low, high = BOUNDS[field]
        if value is not None and not low <= value <= high:
            without = "" if field == "priority" else ", or leave it empty for no limit"
            found.add(f"enter a whole number from {low} to {high}{without}", field)
    found.raise_any()
    wanted = {**limits._asdict(), **changes}
    return Limits(**{**wanted, "priority": wanted["priority"] or 0})


def parse_limit(text: str, field: str, *, unlimited: str = "leave it empty") -> int | None:
    """A number as people write it; `none` or nothing: unlimited. Raises `InvalidInput` naming the field. `unlimited`: what
    its sentence tells those to do who want no limit."""
    text = text.strip().lower()
    if text in ("", "none", "unlimited"):
        return None
    digits = text.replace("_", "").replace(",", "").removeprefix("-")
    if not digits.isascii() or not digits.isdigit() or len(digits) > 12:
        raise InvalidInput(f"{field}: enter a whole number, or {unlimited}", field=field)
    return -int(digits) if text.startswith("-") else int(digits)
