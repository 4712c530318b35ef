"""Numbers and times in words. Pure. What is not known is written "unknown", never 0 and never a dash.

Bytes that move or are stored by engines are decimal (GB = 10⁹, as rates are); memory and disks are binary (GiB = 2³⁰).
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple


class Quantity(NamedTuple):
    value: str
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.value} {self.unit}".strip()


UNKNOWN = Quantity("unknown")
_DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_STEPS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def _scaled(number: float, base: int, units: tuple[str, ...]) -> Quantity:
    step = 0
    while step < len(units) - 1 and abs(number) >= base:
        number /= base
        step += 1
    if step == 0:
        return Quantity(f"{number:.0f}", units[0])
    digits = 2 if abs(number) < 10 else 1 if abs(number) < 100 else 0
    return Quantity(f"{number:.{digits}f}", units[step])


def moved(number: float | None) -> Quantity:
    """Bytes as decimal units: 1,240,000,000 → 1.24 GB."""
    return UNKNOWN if number is None else _scaled(number, 1000, _DECIMAL)


def memory(number: float | None) -> Quantity:
    """Bytes as binary units: 17,179,869,184 → 16.0 GiB."""
    return UNKNOWN if number is None else _scaled(number, 1024, _BINARY)


def rate(number: float | None, seconds: float | None) -> Quantity:
    """Bytes over seconds as a decimal rate; unknown when nothing was timed."""
    if number is None or not seconds:
        return UNKNOWN
    quantity = _scaled(number / seconds, 1000, _DECIMAL)
    return Quantity(quantity.value, quantity.unit + "/s")


def count(number: int | None) -> Quantity:
    """A count with thin separators: 12,400."""
    return UNKNOWN if number is None else Quantity(f"{number:,}")


def share(part: float | None, whole: float | None) -> Quantity:
    """Part of a whole in percent; unknown where the whole is nothing yet."""
    if part is None or not whole:
        return UNKNOWN
    return Quantity(f"{100 * part / whole:.0f}", "%")


def age(seconds: float | None) -> str:
    """A length of time in its largest fitting unit: 0.4 s, 48 s, 6 min, 6 h, 2 d. `static/js/ages.js` writes the same."""
    if seconds is None:
        return "unknown"
    seconds = max(seconds, 0.0)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    for size, unit in _STEPS:
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{seconds:.0f} s"


def left(seconds: float) -> str:
    """Time that is left, in whole seconds: 16 s, 4 min 05 s. `static/js/ages.js` writes the same."""
    whole = max(ceil(seconds), 0)
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60:02d} s"
