"""Token ids of texts, a segment at a time, so that a system prompt or a history seen before is not tokenised again.

A segment begins at an added token (as `<|im_start|>`) and ends before the next. A tokenizer first looks for its added tokens
in the raw text and treats what lies between them piece by piece; so the ids of a text are those of its segments, one after
the other. Where a tokenizer's tokens would make that untrue, or samples show it untrue, whole texts are encoded.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable
from typing import Any

from tokenizers import AddedToken, Tokenizer

from frontend_api.tokens.kept import Kept

Ids = array
"""Of type code I: one token id each."""
Cut = Callable[[str], list[str]]


class Segments:
    """A tokenizer's ids by segment, cached by content. May be used by several threads."""

    def __init__(self, tokenizer: Tokenizer, capacity: int) -> None:
        """`capacity`: bytes of cached texts and ids, at most."""
        self._tokenizer = tokenizer
        self._known: Kept[str] = Kept(capacity)
        cut = _cutter(tokenizer)
        self.cuts = cut is not None and self._is_exact(cut)
        """Segments are cached; else nothing is."""
        self.cut = cut if cut is not None and self.cuts else _whole
        """Splits a text where that changes no id."""

    @property
    def bytes(self) -> int:
        return self._known.bytes

    def unknown(self, segments: Iterable[str]) -> int:
        """Characters of the segments whose ids are not cached."""
        known = self._known
        return sum(len(segment) for segment in segments if segment not in known)

    def ids(self, segments: Iterable[str]) -> Ids[int]:
        """The ids of the segments in a row. Raises `UnicodeError` for text that is no UTF-8 (half a surrogate pair)."""
        joined = array("I")
        for segment in segments:
            found = self._known.get(segment)
            if found is None:
                found = self.encode(segment)
                if self.cuts:
                    self._known.put(segment, found)
            joined += found
        return joined

    def encode(self, text: str, *, special: bool = False) -> Ids[int]:
        """The ids of a text, without the cache. Other threads run meanwhile. `special`: with the model's own tokens around it.

        Raises `ValueError` where the tokenizer's own patterns fail on it.
        """
        try:
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        except Exception:
            raise
        except BaseException as error:  # the library panics: no `Exception`, and it would end the process
            if type(error).__name__ != "PanicException":
                raise
            raise ValueError("the tokenizer fails on this text") from None
        return array("I", encoding.ids)

    def _is_exact(self, cut: Cut) -> bool:
        marks = [token.content for token in _added(self._tokenizer)][:_MARKS_TRIED]
        texts = (sample.format(a, b) for sample in _SAMPLES for a, b in zip(marks, marks[1:] + marks[:1], strict=True))
        return all(sum(map(self.encode, cut(text)), array("I")) == self.encode(text) for text in texts)


_SAMPLES = (
    "{0}system\nYou help.{1}\n{0}user\n Hi there , 42 times{1}\n{0}assistant\n",
    "before {0} between{1}{0}\n\n after  ",
    "e\u0301{0}\u0301x {1}\u00a0y\t{0}世界{1}",
)
_MARKS_TRIED = 32


def _whole(text: str) -> list[str]:
    return [text]


def _added(tokenizer: Tokenizer) -> list[AddedToken]:
    """The added tokens that are looked for in the raw text, longest first, as they are matched."""
    tokens = [token for token in tokenizer.get_added_tokens_decoder().values() if not token.normalized]
    return sorted(tokens, key=lambda token: len(token.content), reverse=True)


def alternation(texts: Iterable[str]) -> str:
    """A pattern that finds the longest of these texts, however many they are, without trying one after the other."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return _branches(tree)


def _branches(node: dict[str, Any]) -> str:
    parts = []
    for char, below in node.items():
        if char:
            begun = char
            while len(below) == 1 and "" not in below:
                ((char, below),) = below.items()
                begun += char
            parts.append(re.escape(begun) + (_branches(below) if below.keys() != {""} else ""))
    joined = parts[0] if len(parts) == 1 and "" not in node else f"(?:{'|'.join(parts)})"
    return joined + "?" if "" in node else joined


def _cutter(tokenizer: Tokenizer) -> Cut | None:
    """Cuts before added tokens; None: they could then be found, or not found, differently."""
    tokens = _added(tokenizer)
    if tokenizer.encode_special_tokens or not tokens or any(token.single_word for token in tokens):
        return None
    try:
        find = re.compile(alternation(token.content for token in tokens if token.content)).finditer
    except RecursionError:  # each is the next one's beginning
        return None
    kept = {token.content for token in tokens if not token.lstrip and not token.content[:1].isspace()}

    def cut(text: str) -> list[str]:
        pieces = []
        begin = 0
        for match in find(text):
            at = match.start()
            if at > begin and match[0] in kept:
                pieces.append(text[begin:at])
                begin = at
        pieces.append(text[begin:])
        return pieces

    return cut
