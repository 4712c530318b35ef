"""The prompt of a request as the very token ids that its engine will compute: what exact routing is built on.

A `Tokenizer` is a model's folder: `tokenizer.json`, its configuration and its chat template. It gives the engine's ids or
none, never others; what decides that is in `prompts`. That the engine reads the folder in the same way is not taken on
trust (`transformers` builds some tokenizer classes anew, whatever their `tokenizer.json` says): `tokens.check` compares with
the answers of the engine's `/tokenize`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import tokenizers
from xxhash import xxh3_128_digest

from frontend_api.formats.openai import Endpoint, Shape
from frontend_api.tokens import messages_prompt, model_folder, prompts, responses_prompt
from frontend_api.tokens.chat_messages import Unknown
from frontend_api.tokens.kept import Kept
from frontend_api.tokens.model_folder import TokenizerUnusable
from frontend_api.tokens.prompts import Body, Prompt
from frontend_api.tokens.segments import Ids, Segments

__all__ = ["Slow", "Tokenizer", "TokenizerUnusable"]
CACHE_BYTES = 64 << 20
"""Texts and ids kept per model, unless said otherwise: three quarters of segments, the rest of whole prompts."""
AT_ONCE_CHARACTERS = 4_096
"""Text that is tokenised at once although it is not cached: about a millisecond."""
MOST_BYTES = 8 << 20
"""Of a body that is tokenised at all: about two million tokens. It takes up to 120 bytes of memory for each byte."""
AT_ONCE_BYTES = 256 << 10
"""A larger body is not even read at once."""
MARKS = 8
TOO_MUCH = "its chat template takes too much time or room"


_UNKNOWABLE = (Unknown, ValueError, TypeError, RecursionError)
"""Also half a surrogate pair, numbers of thousands of digits, and objects nested too deep: the engine fails on them too."""


class Slow(NamedTuple):
    """Work too long for an event loop. `ids` may run in any thread, and lets others run while it tokenises."""

    ids: Callable[[], Ids[int] | None]


class Tokenizer:
    """The engine's ids for a request's prompt."""

    def __init__(self, folder: Path, *, cache_bytes: int = CACHE_BYTES) -> None:
        """Reads the folder: about a second for a large vocabulary. Raises `TokenizerUnusable`."""
        self._tokenizer, self._templates = model_folder.read(folder)
        self._segments = Segments(self._tokenizer, cache_bytes - cache_bytes // 4)
        self._asked: Kept[tuple[str, bytes]] = Kept(cache_bytes // 4)
        """Ids of whole prompts, by path and digest of what they are made of: who asks the same again needs no template."""
        self._timeless = not any(t.names("strftime_now") for t in self._templates or ())
        self._around = _around(self._tokenizer)
        self._readers = self._make_readers()
        self.marks = _marks(self._tokenizer)
        """Some of its added tokens."""

    @property
    def caches_segments(self) -> bool:
        """False: this tokenizer sees across its added tokens, and every prompt is tokenised whole."""
        return self._segments.cuts

    @property
    def cached_bytes(self) -> int:
        return self._segments.bytes + self._asked.bytes

    @property
    def given_up(self) -> str:
        """Why no more ids will come; empty: they may."""
        templates = self._templates or ()
        return TOO_MUCH if any(template.given_up for template in templates) else ""

    def token_ids(self, endpoint: Endpoint, body: bytes) -> Ids[int] | None:
        """The ids of the request's one prompt, however long that takes; None: they cannot be known here."""
        try:
            prompt = self._prompt(endpoint.shape, body)
            return prompt if isinstance(prompt, array) else self._encode(*prompt)
        except _UNKNOWABLE:
            return None

    def at_once(self, endpoint: Endpoint, body: bytes) -> Ids[int] | Slow | None:
        """As `token_ids` where that takes an event loop about a millisecond at most, else the work to be done elsewhere. None also
        for what is too long for any model."""
        if len(body) > MOST_BYTES:
            return None
        if len(body) > AT_ONCE_BYTES:
            return Slow(lambda: self.token_ids(endpoint, body))
        try:
            key = endpoint.path, xxh3_128_digest(prompts.made_of(body))
            ids = self._asked.get(key)
            if ids is not None:
                return ids
            prompt = self._prompt(endpoint.shape, body)
            if isinstance(prompt, array):
                return prompt
            if self._segments.unknown(prompt[0]) <= AT_ONCE_CHARACTERS:
                return self._remember(key, self._encode(*prompt))
        except _UNKNOWABLE:
            return None
        pieces, special = prompt
        return Slow(lambda: self._slowly(key, pieces, special))

    def _remember(self, key: tuple[str, bytes], ids: Ids[int]) -> Ids[int]:
        if self._timeless:
            self._asked.put(key, ids)
        return ids

    def _make_readers(self) -> dict[Shape, Callable[[Body], Prompt]]:
        readers: dict[Shape, Callable[[Body], Prompt]] = {Shape.TEXT: prompts.completion}
        if (templates := self._templates) is not None:
            readers[Shape.CHAT] = lambda fields: prompts.chat(fields, templates)
            readers[Shape.RESPONSES] = lambda fields: responses_prompt.responses(fields, templates)
            readers[Shape.MESSAGES] = lambda fields: messages_prompt.messages(fields, templates)
        return readers

    def _prompt(self, shape: Shape, body: bytes) -> Ids[int] | tuple[list[str], bool]:
        read = self._readers.get(shape)
        if read is None:
            raise Unknown(shape)
        prompt = read(prompts.read_body(body))
        if prompt.ids is not None:
            return array("I", prompt.ids)
        return self._segments.cut(prompt.text), prompt.special_tokens

    def _slowly(self, key: tuple[str, bytes], pieces: list[str], special: bool) -> Ids[int] | None:
        try:
            return self._remember(key, self._encode(pieces, special))
        except _UNKNOWABLE:
            return None

    def _encode(self, pieces: list[str], special: bool) -> Ids[int]:
        if not special:
            return self._segments.ids(pieces)
        if self._around is None:
            return self._segments.encode("".join(pieces), special=True)
        before, after = self._around
        return before + self._segments.ids(pieces) + after


def _marks(tokenizer: tokenizers.Tokenizer) -> tuple[str, ...]:
    """The first and the last added tokens: those that texts know, and those that chats do."""
    marks = [token.content for _, token in sorted(tokenizer.get_added_tokens_decoder().items())]
    return tuple(marks if len(marks) <= 2 * MARKS else marks[:MARKS] + marks[-MARKS:])


def _around(tokenizer: tokenizers.Tokenizer) -> tuple[Ids[int], Ids[int]] | None:
    """The ids that the tokenizer puts before and after every text; None: it does something else."""
    found = set()
    for text in ("a", "two words", "3"):
        bare = tokenizer.encode(text, add_special_tokens=False).ids
        full = tokenizer.encode(text, add_special_tokens=True).ids
        at = next((i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare), None)
        if at is None or not bare:
            return None
        found.add((tuple(full[:at]), tuple(full[at + len(bare) :])))
    if len(found) > 1:
        return None
    ((before, after),) = found
    return array("I", before), array("I", after)
