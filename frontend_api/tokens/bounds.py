"""What a `tokenizer.json` may ask for: only what takes time and room in proportion to the text. Pure but for reading the file.

The file comes from an engine's node. The library that runs it cannot be interrupted, so what could run away is not let in: patterns
that backtrack (`patterns`), normalizers that make texts many times longer, parts that no language model's tokenizer has.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from frontend_api.tokens.patterns import is_linear

MOST_BYTES = 48 << 20
"""Of the file; the largest known takes 34 MB."""
MOST_ADDED = 20_000
"""Tokens beside the vocabulary."""
MOST_TOKEN = 1_000
"""Characters of one."""
MOST_GROWTH = 16
"""How many times longer a normalizer may make a text."""
MOST_AFFIX = 64
"""Characters that are put before or behind each word or part of one."""
MOST_AROUND = 64
"""Tokens that are put around each text."""
_NORMALIZERS = frozenset(
    (
        "NFC",
        "NFD",
        "NFKC",
        "NFKD",
        "Lowercase",
        "Strip",
        "StripAccents",
        "Prepend",
        "Replace",
        "BertNormalizer",
        "ByteLevel",
        "Nmt",
    )
)
_PRE_TOKENIZERS = frozenset(
    ("ByteLevel", "Split", "Digits", "Metaspace", "Whitespace", "WhitespaceSplit", "Punctuation", "BertPreTokenizer",
     "CharDelimiterSplit", "UnicodeScripts")
)  # fmt: skip
_POST_PROCESSORS = frozenset(("ByteLevel", "TemplateProcessing", "BertProcessing", "RobertaProcessing"))
_MODELS = frozenset(("BPE", "WordPiece", "WordLevel", "Unigram"))


class Unbounded(Exception):
    """The tokenizer may take more than the text warrants; the text says why."""


class _Model(Struct):
    type: str = "BPE"
    dropout: float | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    max_input_chars_per_word: int = 100


class _Token(Struct):
    content: str


class _File(Struct):
    model: _Model
    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: Any = None
    added_tokens: list[_Token] = []


def read(path: Path, most: int) -> bytes:
    """A file's bytes. Raises `Unbounded` for more of them, and `OSError`, also for what is no file: a pipe would be read for ever."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        told = os.fstat(file.fileno())
        if not stat.S_ISREG(told.st_mode):
            raise OSError(f"{path.name} is no file")
        if told.st_size > most:
            raise Unbounded(f"{path.name} has more than {most} bytes")
        return file.read(most)


def check(path: Path) -> None:
    """Raises `Unbounded`; `OSError` where the file cannot be read."""
    data = read(path, MOST_BYTES)
    try:
        found = msgspec.json.decode(data, type=_File)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise Unbounded(f"it is not understood: {error}"[:200]) from None
    _check_model(found.model)
    if len(found.added_tokens) > MOST_ADDED or any(len(token.content) > MOST_TOKEN for token in found.added_tokens):
        raise Unbounded(f"it adds more than {MOST_ADDED} tokens, or one of more than {MOST_TOKEN} characters")
    growth = 1.0
    for part in _parts(found.normalizer, "normalizers"):
        growth *= _growth(part)
    if growth > MOST_GROWTH:
        raise Unbounded("its normalizers make texts many times longer")
    for part in _parts(found.pre_tokenizer, "pretokenizers"):
        _check_kind(part, _PRE_TOKENIZERS)
        _check_pattern(part.get("pattern"))
    for part in _parts(found.post_processor, "processors"):
        _check_kind(part, _POST_PROCESSORS)
        _check_around(part)


def _check_model(model: _Model) -> None:
    if model.type not in _MODELS:
        raise Unbounded(f"a model of the type {model.type[:40]!r} is not known here")
    if model.dropout:
        raise Unbounded("it drops merges by chance")
    if any(len(affix or "") > MOST_AFFIX for affix in (model.continuing_subword_prefix, model.end_of_word_suffix)):
        raise Unbounded(f"it puts more than {MOST_AFFIX} characters before or behind words")
    if model.max_input_chars_per_word > MOST_TOKEN:
        raise Unbounded(f"it looks for tokens in words of more than {MOST_TOKEN} characters")


def _parts(value: Any, names: str) -> Iterator[Mapping[str, Any]]:
    """A part, or those of a sequence of parts."""
    waiting, seen = [value], 0
    while waiting:
        part = waiting.pop()
        seen += 1
        if seen > 100:
            raise Unbounded("it has more than 100 parts")
        if part is None:
            continue
        if not isinstance(part, dict):
            raise Unbounded("one of its parts is not an object")
        if part.get("type") == "Sequence":
            inner = part.get(names)
            if not isinstance(inner, list):
                raise Unbounded("one of its sequences has no parts")
            waiting.extend(inner)
        else:
            yield part


def _check_kind(part: Mapping[str, Any], known: frozenset[str]) -> None:
    if part.get("type") not in known:
        raise Unbounded(f"a part of the type {str(part.get('type'))[:40]!r} is not known here")


def _check_pattern(pattern: Any) -> None:
    if isinstance(pattern, dict) and (text := pattern.get("Regex")) is not None:
        if not isinstance(text, str) or not is_linear(text):
            raise Unbounded(f"its pattern is not sure to end: {str(text)[:100]}")
    elif isinstance(pattern, dict) and not isinstance(pattern.get("String"), str):
        raise Unbounded("one of its patterns is of no known kind")


def _growth(part: Mapping[str, Any]) -> float:
    _check_kind(part, _NORMALIZERS)
    if part["type"] == "Prepend":
        if len(str(part.get("prepend"))) > MOST_AFFIX:
            raise Unbounded(f"it puts more than {MOST_AFFIX} characters before texts")
    elif part["type"] == "Replace":
        pattern, content = part.get("pattern"), str(part.get("content"))
        _check_pattern(pattern)
        text = pattern.get("String") if isinstance(pattern, dict) else None
        if text == "":
            raise Unbounded("it puts something between all characters")
        return max(1.0, len(content) / (len(text) if text else 1))
    return 1.0


def _check_around(part: Mapping[str, Any]) -> None:
    single, special = part.get("single"), part.get("special_tokens")
    if isinstance(single, list) and len(single) > MOST_AROUND:
        raise Unbounded(f"it puts more than {MOST_AROUND} tokens around texts")
    for token in special.values() if isinstance(special, dict) else ():
        ids = token.get("ids") if isinstance(token, dict) else None
        if isinstance(ids, list) and len(ids) > MOST_AROUND:
            raise Unbounded(f"one of its special tokens has more than {MOST_AROUND} ids")
