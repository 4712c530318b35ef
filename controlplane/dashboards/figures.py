"""Geometry of the drawings: where lines run and how wide they are. Pure numbers, no markup, no colours.

The link between two lanes is drawn in a box 100 wide and 100 high that the page stretches; `static/js/links.js` then moves
the ends to the cards' true places. The lines into a decode engine are together as wide as the KV bytes it has pulled:
engines count bytes per decode engine and not per pair, so its lines share that width evenly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from math import sqrt
from typing import NamedTuple

THINNEST, WIDEST = 1.5, 14.0
WIDEST_LINE = 7.0
MOST_LINES = 64
"""Beyond this a drawing is a tangle: the widest are kept, and failed ones before all."""


class Proof(StrEnum):
    """What the newest real transfer of a pair showed."""

    WORKED = "worked"
    FAILED = "failed"
    UNTRIED = "untried"


class Line(NamedTuple):
    prefill: str
    decode: str
    proof: Proof
    bytes_moved: int | None
    width: float
    path: str
    """SVG path data in the 100 × 100 box."""

    @property
    def css(self) -> str:
        """Class names of the stroke: proof, and idle where nothing has moved yet."""
        if self.proof is not Proof.WORKED:
            return self.proof.value
        return "worked" if self.bytes_moved else "worked idle"


class Drawing(NamedTuple):
    lines: tuple[Line, ...]
    left_out: int
    """Pairs not drawn."""


def widths(numbers: Sequence[int | None], widest: float = WIDEST) -> tuple[float, ...]:
    """A width per number of bytes, by its square root between the thinnest and the widest; nothing or unknown is thinnest."""
    largest = max((n or 0 for n in numbers), default=0)
    if largest == 0:
        return tuple(THINNEST for _ in numbers)
    return tuple(round(THINNEST + (widest - THINNEST) * sqrt((n or 0) / largest), 2) for n in numbers)


def _line_width(whole: float, lines: int) -> float:
    return round(min(max(whole / lines, THINNEST), WIDEST_LINE), 2)


def curve(y1: float, y2: float) -> str:
    """A flowing line from the left edge at `y1` to the right edge at `y2`."""
    return f"M0 {y1:.1f}C50 {y1:.1f} 50 {y2:.1f} 100 {y2:.1f}"


def slot(index: int, of: int) -> float:
    """Height of the middle of one of `of` equal cards under each other."""
    return 100 * (index + 0.5) / max(of, 1)


def link(
    prefills: Sequence[str],
    decodes: Sequence[str],
    *,
    proofs: Mapping[tuple[str, str], bool],
    bytes_by_decode: Mapping[str, int | None],
    most: int = MOST_LINES,
) -> Drawing:
    """The lines between two lanes, in the order of the cards. `proofs` by (prefill id, decode id); absent: not tried."""
    whole = dict(zip(decodes, widths([bytes_by_decode.get(d) for d in decodes]), strict=True))
    working = {d: sum(proofs.get((p, d)) is True for p in prefills) for d in decodes}
    lines = []
    for i, prefill in enumerate(prefills):
        for j, decode in enumerate(decodes):
            worked = proofs.get((prefill, decode))
            proof = Proof.UNTRIED if worked is None else Proof.WORKED if worked else Proof.FAILED
            width = _line_width(whole[decode], working[decode]) if proof is Proof.WORKED else THINNEST
            path = curve(slot(i, len(prefills)), slot(j, len(decodes)))
            lines.append(Line(prefill, decode, proof, bytes_by_decode.get(decode), width, path))
    if len(lines) <= most:
        return Drawing(tuple(lines), 0)
    kept = sorted(lines, key=lambda line: (line.proof is not Proof.FAILED, -line.width))[:most]
    chosen = {(line.prefill, line.decode) for line in kept}
    return Drawing(tuple(x for x in lines if (x.prefill, x.decode) in chosen), len(lines) - most)


def verdict(proofs: Sequence[Proof]) -> tuple[str, str]:
    """What the pairs have proved, in words, with its tone."""
    if not proofs:
        return "No pair yet", "wait"
    worked = sum(p is Proof.WORKED for p in proofs)
    failed = sum(p is Proof.FAILED for p in proofs)
    total = len(proofs)
    if failed == total:
        return "The pair failed" if total == 1 else f"{_all(total)} pairs failed", "bad"
    if failed:
        return f"{failed} of {total} pairs failed", "warn"
    if worked == total:
        return "The pair is proved" if total == 1 else f"{_all(total)} pairs are proved", "link"
    if worked:
        return f"{worked} of {total} pairs proved so far", "wait"
    return "No pair proved yet", "wait"


def _all(total: int) -> str:
    return "Both" if total == 2 else f"All {total}"
