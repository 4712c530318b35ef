"""Counted things in words, for every sentence that is made anywhere."""

from __future__ import annotations


def plural(number: int, noun: str, many: str = "") -> str:
    """`1 engine`, `2 engines`; `many`: where an s is not enough: `2 processes`, `2 engines are`."""
    return f"{number:,} {noun if number == 1 else many or noun + 's'}"
