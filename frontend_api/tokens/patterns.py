"""Whether a tokenizer's pattern is sure to be matched in time proportional to the text. Pure.

Patterns come from an engine's node, and the library that runs them can neither be interrupted nor told to stop; a pattern that
backtracks takes for ever on the right text. Taken for sure is an alternation of which each part is a row of single characters
(classes, escapes, short groups of literals) where nothing behind the first one that repeats without end must match: what has
begun to repeat then cannot fail, and is never tried again in another way. Parts of well-known tokenizers that are fast for other
reasons are listed.
"""

from __future__ import annotations

import re

MOST_CHARACTERS = 4_096
_LETTERS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SMALL_LETTERS = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_KNOWN = {
    r"\s+(?!\S)": "",  # GPT-2 and all that follow it: fails once in a run of blanks
    **dict.fromkeys((r"\s*[\r\n]+", r"\s*[\r\n]", r"\s*[\r\n/]+"), r"\s+"),  # GPT-4, Llama 3, Qwen
    f"{_LETTERS}*{_SMALL_LETTERS}+{_ENDINGS}": f"{_LETTERS}+{_SMALL_LETTERS}*{_ENDINGS}",  # GPT-4o
    f"{_LETTERS}*{_SMALL_LETTERS}+": f"{_LETTERS}+{_SMALL_LETTERS}*",  # Mistral
}
"""Parts of well-known tokenizers, and of each the part that must be there too: it takes whole what the first looked through in vain."""
_INSIDE = re.compile(r"[^()\\*+?{}.^$]{1,200}")
"""Of a group: short literals, as `'s|'t|'[rR][eE]`."""
_LOOK = re.compile(r"\(\?[=!](?:\\[sSdDwWbB]|\[[^\[\]]{1,64}\])\)")
_ATOM = re.compile(
    r"\\[pP]\{\^?[A-Za-z_=]{1,40}\}|\\[sSdDwWhHnrtvf]|\\x[0-9A-Fa-f]{2}|\\[uU][0-9A-Fa-f]{4}|\\[^A-Za-z0-9]|[^\\()\[\]*+?{}|^$]"
)
_REPEATS = re.compile(r"(\?|\*|\+|\{([0-9]{1,4})(,?)([0-9]{0,4})\})([+?]?)")
_SMALL = 256
"""Repetitions that end."""
_FEW = 1_024
"""Ways in which what ends can be tried."""


def is_linear(pattern: str) -> bool:
    """Whether it is sure to be."""
    if len(pattern) > MOST_CHARACTERS:
        return False
    parts = _parts(pattern)
    return all(_KNOWN.get(part) in ("", *parts) or _is_plain(part) for part in parts)


def _parts(pattern: str) -> list[str]:
    """What stands between the `|` that are in no group and no class."""
    parts, begin, depth, classes, at = [], 0, 0, 0, 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 1
        elif char == "[":
            classes += 1
        elif char == "]" and classes:
            classes -= 1
        elif not classes and char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and not classes and not depth:
            parts.append(pattern[begin:at])
            begin = at + 1
        at += 1
    return [*parts, pattern[begin:]]


def _is_plain(part: str) -> bool:
    at, ways, endless, must = 0, 1.0, False, False
    while at < len(part):
        if part[at] == "[":
            end = _end_of_class(part, at)
        elif (look := _LOOK.match(part, at)) is not None:
            if endless:
                return False
            at = look.end()
            continue
        else:
            end = _end_of_group(part, at) if part[at] == "(" else _end_of_atom(part, at)
        if end < 0:
            return False
        least, most = 1, 1.0
        if (repeats := _REPEATS.match(part, end)) is not None:
            least, most = _bounds(repeats)
            end = repeats.end()
        if endless and least > 0:
            return False
        must = must or least > 0
        if most > _SMALL:
            endless = True
        else:
            ways *= most - least + 1
        at = end
    return must and ways <= _FEW


def _end_of_class(part: str, at: int) -> int:
    """Behind a character class; -1: it does not end."""
    depth = 0
    while at < len(part):
        char = part[at]
        if char == "\\":
            at += 1
        elif char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    return -1


def _end_of_group(part: str, at: int) -> int:
    """Behind a group of short literals; -1: it is another one."""
    begin = at + 1 + next((len(kind) for kind in ("?:", "?i:") if part.startswith(kind, at + 1)), 0)
    end = part.find(")", begin)
    return end + 1 if end > 0 and _INSIDE.fullmatch(part, begin, end) is not None else -1


def _end_of_atom(part: str, at: int) -> int:
    found = _ATOM.match(part, at)
    return found.end() if found is not None else -1


def _bounds(repeats: re.Match[str]) -> tuple[int, float]:
    sign, low, comma, high = repeats[1], repeats[2], repeats[3], repeats[4]
    if low is None:
        return (1 if sign == "+" else 0), (1.0 if sign == "?" else float("inf"))
    return int(low), float(high) if high else (float("inf") if comma else float(low))
