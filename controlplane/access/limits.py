"""How much one inference key may use: the four numbers, their bounds, and how people write them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from controlplane.fleet.errors import InvalidInput


class Limits(NamedTuple):
    """None: unlimited. Counted by the routers, over all of them together."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Prompt and output together."""
    concurrency: int | None = None
    """Requests at a time."""
    priority: int = 0
    """Of two requests that wait for an engine the one with the higher is served first."""


UNLIMITED = Limits()
BOUNDS = {
    "requests_per_minute": (1, 1_000_000),
    "tokens_per_minute": (1, 1_000_000_000),
    "concurrency": (1, 100_000),
    "priority": (-10, 10),
}


def changed(limits: Limits, changes: Mapping[str, int | None]) -> Limits:
    """The limits with some of them set anew (None: unlimited; for the priority: 0). Raises `InvalidInput` naming the field."""
    for field, value in changes.items():
        low, high = BOUNDS[field]
        if value is not None and not low <= value <= high:
            without = "" if field == "priority" else ", or none for unlimited"
            raise InvalidInput(f"{field}: choose a whole number from {low} to {high}{without}", field=field)
    requests, tokens, concurrency, priority = (changes.get(f, before) for f, before in limits._asdict().items())
    return Limits(requests, tokens, concurrency, priority or 0)


def parse_limit(text: str, field: str) -> int | None:
    """A number as people write it; `none` or nothing: unlimited. Raises `InvalidInput` naming the field."""
    text = text.strip().lower()
    if text in ("", "none", "unlimited"):
        return None
    digits = text.replace("_", "").replace(",", "").removeprefix("-")
    if not digits.isascii() or not digits.isdigit() or len(digits) > 12:
        raise InvalidInput(f"{field}: {text!r} is neither a whole number nor none", field=field)
    return -int(digits) if text.startswith("-") else int(digits)
