"""How people write the end of a key's life: a span (`30d`, `12h`) or a moment (ISO 8601); and spans alone. Pure but for the
clock."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from controlplane.fleet.errors import InvalidInput

_SPAN = re.compile(r"([1-9]\d{0,4})([hd])")


def parse_expiry(text: str, *, now: datetime | None = None) -> datetime | None:
    """The moment meant, in UTC unless the text says otherwise; None for an empty text. Raises `InvalidInput`."""
    if not text:
        return None
    if span := _SPAN.fullmatch(text):
        unit = timedelta(hours=1) if span[2] == "h" else timedelta(days=1)
        return (now or datetime.now(UTC)) + int(span[1]) * unit
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInput(
            "expires_at: write a span such as 30d or 12h, or a time such as 2030-01-31T12:00Z",
            field="expires_at",
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


_OVERLAP = re.compile(r"(\d{1,5})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def parse_overlap(text: str) -> int:
    """Seconds for which a rotated key's old secret still works: `24h`, `30m`, `7d`, `0`. Raises `InvalidInput`."""
    if text == "0":
        return 0
    if (span := _OVERLAP.fullmatch(text)) is None:
        raise InvalidInput("overlap: write a span such as 24h, 30m, 7d or 0", field="overlap")
    return int(span[1]) * _SECONDS[span[2]]
