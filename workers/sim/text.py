"""Deterministic text: tokens of a prompt, and the answer that a KV cache gives.

The answer is a pure function of the tokens that the KV cache *holds*. Right KV gives the same text through
prefill→decode as on one aggregated engine; another prompt's KV gives visibly different words.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import msgspec

VOCABULARY = 49_152
EOS = 2
"""`<|im_end|>`: ends an answer and has no text."""
_SPECIAL = {"<|im_start|>": 1, "<|im_end|>": EOS}
_FIRST_WORD = 256
_FIRST_PIECE = 5_000
_PIECE = re.compile(r"<\|im_(?:start|end)\|>| ?[^\W_]{1,6}|\s|[^\s]", re.DOTALL)
_CONSONANTS = "bdfghjklmnprstvz"
_VOWELS = "aeio"

Message = Mapping[str, object]


def _syllable(bits: int) -> str:
    return _CONSONANTS[bits >> 2 & 15] + _VOWELS[bits & 3]


WORDS = tuple(_syllable(n >> 6) + _syllable(n & 63) for n in range(4096))
"""The words of answers: each is one token, also when a later prompt quotes it."""
_WORD_ID = {word: _FIRST_WORD + n for n, word in enumerate(WORDS)}


@lru_cache(maxsize=65_536)
def _piece_id(piece: str) -> int:
    if (special := _SPECIAL.get(piece)) is not None:
        return special
    if (word := _WORD_ID.get(piece.lstrip(" "))) is not None:
        return word
    return _FIRST_PIECE + zlib.crc32(piece.encode("utf-8", "surrogatepass")) % (VOCABULARY - _FIRST_PIECE)


def encode(text: str) -> list[int]:
    """Token ids of a text: words in pieces of up to six letters, each other character alone."""
    return [_piece_id(piece) for piece in _PIECE.findall(text)]


def decode(tokens: Iterable[int]) -> str:
    """The text of token ids, where one can be told from its id: an answer's words, and the marks of chats."""
    return "".join(_TEXTS.get(token, "\N{REPLACEMENT CHARACTER}") for token in tokens)


_TEXTS = {number: text for text, number in _SPECIAL.items()} | {number: " " + word for word, number in _WORD_ID.items()}
FULL_STOP = _piece_id(".")


def pieces(text: str) -> list[str]:
    """The same cut as `encode`, as strings."""
    return _PIECE.findall(text)


def content_text(content: object) -> str:
    """The text of a message's content: a string, or a list of parts of which the text ones count."""
    if isinstance(content, str):
        return content
    if isinstance(content, Iterable):
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        return "\n".join(part for part in parts if isinstance(part, str))
    return ""


def render_chat(messages: Iterable[Message], tools: object = None, *, generate: bool = True) -> str:
    """ChatML, as SmolLM2's template writes it. Tools become part of the system text, as templates do."""
    lines = []
    if tools:
        lines.append(f"<|im_start|>system\n{msgspec.json.encode(tools).decode()}<|im_end|>\n")
    for message in messages:
        body = content_text(message.get("content"))
        if calls := message.get("tool_calls"):
            body += msgspec.json.encode(calls).decode()
        lines.append(f"<|im_start|>{message.get('role', 'user')}\n{body}<|im_end|>\n")
    if generate:
        lines.append("<|im_start|>assistant\n")
    return "".join(lines)


def pack(tokens: Sequence[int]) -> bytes:
    """Tokens as the bytes that stand for their KV."""
    return array("Q", tokens).tobytes()


class Answer:
    """The endless answer that one KV cache gives; word `n` depends on the cache and on `n` alone."""

    def __init__(self, kv: Iterable[bytes], variant: int = 0) -> None:
        digest = hashlib.blake2b(digest_size=16)
        for content in kv:
            digest.update(content)
        if variant:
            digest.update(variant.to_bytes(4, "big"))
        self._seed = digest.digest()
        self._words: list[int] = []
        self.natural_length = 8 + self._seed[0] % 17
        """Words before the full stop, when nothing else ends the answer."""

    def _number(self, index: int) -> int:
        while index >= len(self._words):
            page = len(self._words).to_bytes(8, "big")
            block = hashlib.blake2b(self._seed + page).digest()
            self._words += [block[i] << 8 | block[i + 1] for i in range(0, len(block), 2)]
        return self._words[index]

    def token(self, index: int) -> tuple[int, str]:
        """Token id and text of output position `index`, before any end."""
        number = self._number(index)
        word = WORDS[number & 4095]
        return _WORD_ID[word], word if index == 0 else " " + word

    def logprob(self, index: int) -> float:
        """A plausible log probability of that token: between -1 and 0, the same for the same KV."""
        return -(self._number(index) >> 6) / 1024.0

    def alternatives(self, index: int, count: int) -> list[tuple[str, float]]:
        """Less likely tokens for the same position, best first."""
        number = self._number(index)
        first = self.logprob(index)
        lead = "" if index == 0 else " "
        return [(lead + WORDS[(number + 1 + 37 * n) & 4095], first - 0.5 * (n + 1)) for n in range(count)]
