"""How large the numbers and texts of a message may be, as types: msgspec holds them wherever a message is decoded. Pure.

A number out of bounds, or a name that is none, makes the whole message unreadable: nothing half right is taken in. A sentence
for people is cut instead (`sentence`), by whoever makes the noun that holds it, so that a long one costs nothing but its end.
Every bound fits the database's columns and leaves room for what honest machines say.
"""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

Count = Annotated[int, Meta(ge=0, le=1 << 53)]
"""Bytes, tokens, things: what 64-bit columns and a double hold exactly."""
MOST_GENERATIONS = 1 << 53
Generation = Annotated[int, Meta(ge=0, le=1 << 62)]
"""Of a plan. One that a report names is followed up to `MOST_GENERATIONS`, so that there is always a higher one."""
Whole = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
"""What a 32-bit column holds: process ids, attempts."""
ExitCode = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
Port = Annotated[int, Meta(ge=0, le=65_535)]
Cores = Annotated[int, Meta(ge=0, le=1 << 16)]
GpuIndex = Annotated[int, Meta(ge=0, le=1_023)]
MOST_TOKENS = 1 << 40
Tokens = Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
BlockSize = Annotated[int, Meta(ge=1, le=1 << 24)]
MOST_RANKS = 64
Ranks = Annotated[int, Meta(ge=1, le=MOST_RANKS)]
"""Each costs every router process a connection."""
Share = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(ge=0, le=1e10)]
"""A duration, or a time since 1970 (until the year 2286)."""

Name = Annotated[str, Meta(max_length=128, pattern=r"\A[ -~]*\Z")]
"""An id, an address, a version: printable ASCII."""
ShortName = Annotated[str, Meta(max_length=64, pattern=r"\A[ -~]*\Z")]
Digest = Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")]
Folder = Annotated[str, Meta(max_length=4_096, pattern=r"\A[^\x00-\x1f]*\Z")]

SENTENCE = 500
"""Characters of a sentence that are kept."""
ARGUMENT, COMMAND = 1_000, 8_000
"""Characters of one argument, and of a whole command, that are kept to be shown."""

_UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""What no column of PostgreSQL, no JSON and no page should get: controls, line separators, halves of surrogate pairs."""


def sentence(text: str, longest: int = SENTENCE) -> str:
    """The text on one line, without control characters, cut to so many characters with an ellipsis at its end."""
    if len(text) > longest:
        text = text[: longest - 1] + "…"
    return text if text.isprintable() else _UNFIT.sub(" ", text)


def cut_sentences(noun: Struct, *fields: str, longest: int = SENTENCE) -> None:
    """For a noun's `__post_init__`: makes sentences of these fields."""
    for field in fields:
        text = getattr(noun, field)
        if (kept := sentence(text, longest)) is not text:
            force_setattr(noun, field, kept)


def shown_command(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """A command as it is shown: long arguments, and a long rest, are cut."""
    if sum(map(len, arguments)) + len(arguments) <= ARGUMENT and all(map(str.isprintable, arguments)):
        return arguments
    kept, room = [], COMMAND
    for argument in arguments:
        kept.append(sentence(argument, ARGUMENT))
        room -= len(kept[-1]) + 1
        if room < 0:
            return (*kept[:-1], "…")
    return tuple(kept)
