"""How many tokens a request may cost, estimated before it is served. What it has used in the end `Account.used` says. Pure."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from msgspec import Raw, Struct

from controlplane.fleet.errors import InvalidInput
from frontend_api.formats.openai import Endpoint, Shape

USUAL_OUTPUT = 256
"""Tokens reserved for an answer whose length the client left open."""
COMPLETION_OUTPUT = 16
"""The same for /v1/completions: the engine's own default there."""
BYTES_PER_TOKEN = 4
MOST = 1 << 40
"""Tokens of one request, whatever it asks for: sums of them stay within what counters hold."""


class Estimate(NamedTuple):
    """What a request may cost, in tokens."""

    prompt: int
    output: int
    sure: int
    """Of both, what is known to be asked for and not guessed."""

    def within(self, budget: int | None) -> int:
        """What is reserved. A guess never takes more than the whole budget: who asked for little must be able to pass."""
        total = self.prompt + self.output
        return total if budget is None else max(min(total, budget), self.sure)


NOTHING = Estimate(0, 0, 0)
_FREE = ("/tokenize", "/detokenize", "/tokenizer_info", "/v1/messages/count_tokens")
"""They make tokens of text, or text of tokens, and compute nothing with them."""


class _Lengths(Struct):
    max_tokens: Raw = Raw(b"")
    max_completion_tokens: Raw = Raw(b"")
    max_output_tokens: Raw = Raw(b"")
    n: Raw = Raw(b"")
    prompt: Raw = Raw(b"")


_lengths = msgspec.json.Decoder(_Lengths)
_list = msgspec.json.Decoder(list[Raw])


def estimate(endpoint: Endpoint, body: bytes, tokens: int | None, budget: int | None) -> Estimate:
    """Before a request is served. `tokens`: of its prompt, if known. `budget`: the key's tokens per minute.

    Raises `InvalidInput` for a body that is nested too deep.
    """
    if endpoint.path in _FREE:
        return NOTHING
    prompt = tokens if tokens is not None else -(-len(body) // BYTES_PER_TOKEN)
    if not endpoint.generates:
        return Estimate(prompt, 0, 0)
    try:
        fields = _lengths.decode(body)  # `openai.read_request` took it before
    except RecursionError:  # with a stack that was a little lower
        raise InvalidInput("The body is nested too deep.") from None
    asked = _length(endpoint, fields)
    sequences = _number(fields.n) or 1
    if endpoint.shape is Shape.TEXT:
        sequences *= _prompts(fields.prompt)
    usual = COMPLETION_OUTPUT if endpoint.shape is Shape.TEXT else USUAL_OUTPUT
    if asked is None and budget is not None:
        usual = max(1, min(usual, budget // 4))
    output, sure = min((asked or usual) * sequences, MOST), min((asked or 0) * sequences, MOST)
    return Estimate(prompt, output, (tokens or 0) + sure)


def guess(endpoint: Endpoint, size: int, tokens: int | None, limit: int | None) -> Estimate:
    """The same of a request of which only this is at hand: the bytes of its body, the tokens of its prompt if known, and how long
    its answer may be, if it says so."""
    if endpoint.path in _FREE:
        return NOTHING
    prompt = tokens if tokens is not None else -(-size // BYTES_PER_TOKEN)
    if not endpoint.generates:
        return Estimate(prompt, 0, 0)
    usual = COMPLETION_OUTPUT if endpoint.shape is Shape.TEXT else USUAL_OUTPUT
    return Estimate(prompt, min(limit or usual, MOST), (tokens or 0) + min(limit or 0, MOST))


def _length(endpoint: Endpoint, fields: _Lengths) -> int | None:
    if endpoint.shape is Shape.RESPONSES:
        return _number(fields.max_output_tokens)
    wins = _number(fields.max_completion_tokens) if endpoint.shape is Shape.CHAT else None
    return wins or _number(fields.max_tokens)


def _number(value: Raw) -> int | None:
    """Engines take `"12"` and `12.0` as well."""
    try:
        number = float(bytes(value).strip(b'"'))
    except ValueError:
        return None
    return int(min(number, MOST)) if number >= 1 else None


def _prompts(prompt: Raw) -> int:
    text = bytes(prompt)
    if text[:1] != b"[" or text[1:64].lstrip()[:1].isdigit():  # millions of token ids need not be counted
        return 1
    items = _list.decode(text)
    first = bytes(items[0])[:1] if items else b""
    return len(items) if first in (b'"', b"[") else 1
