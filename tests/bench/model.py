"""What the bench asks: texts of common words, a model's folder whose tokenizer knows those words, and the bodies made of them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.frontend_api.tiny_model import CHATML, SPECIAL

_SYLLABLES = (
    "ba be bi bo da de di do ga ge ka ki ko la le li lo ma me mi mo na ne ni no pa re ri ro sa se si ta te ti to"
)
VOCABULARY = 8_000
KINDS = 2_500
"""Different words: as in a text of some length, and most of them a token each."""


@cache
def words() -> tuple[str, ...]:
    draw = random.Random(3)
    return tuple("".join(draw.choices(_SYLLABLES.split(), k=draw.choice((1, 2, 2, 3)))) for _ in range(KINDS))


def text(size: int, seed: int) -> str:
    """Just `size` characters."""
    draw = random.Random(seed)
    parts: list[str] = []
    length = 0
    while length < size:
        parts.append(draw.choice(words()))
        length += len(parts[-1]) + 1
    return " ".join(parts)[:size]


def write(folder: Path) -> Path:
    """A model's folder as far as routers read it: tokenizer, chat template, configuration."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text(20_000, seed) for seed in range(20)), trainer)
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in SPECIAL])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 131_072,
        "vocab_size": tokenizer.get_vocab_size(),
        "bos_token_id": 0,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"bos_token_id": 0, "eos_token_id": 2}')
    named = {
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "chat_template": CHATML,
        "model_max_length": 131_072,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


class Warmth(StrEnum):
    """What of a prompt was seen before."""

    HOT = "hot"
    """All of it: the same bytes again and again."""
    WARM = "warm"
    """Its whole prompt, in a body that is new."""
    SHARED = "shared"
    """Its system prompt, three quarters of it; the rest is new with each request."""
    COLD = "cold"
    """Nothing."""


class Body(NamedTuple):
    """A chat body with a place for a number that makes it new."""

    before: bytes
    after: bytes
    """All of it, where the body is always the same."""

    def whole(self, number: int) -> bytes:
        return b"%b%09d%b" % (self.before, number, self.after) if self.before else self.after


def body(size: int, warmth: Warmth, *, stream: bool) -> Body:
    """A body of `size` bytes."""
    place = "@" * 9

    def made(*contents: str, seed: str = "1" * 9) -> bytes:
        roles = ("system", "user")[-len(contents) :]
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        fields = {"model": "m", "messages": messages, "max_tokens": 32 if stream else 16, "stream": stream}
        return json.dumps(fields, separators=(",", ":"))[:-1].encode() + b',"seed":%b}' % seed.encode()

    if warmth is Warmth.COLD:
        before, after = made(place + text(size - len(made(place)), 3)).split(place.encode())
        return Body(before, after)
    left = size - len(made("", ""))
    known, new = left * 3 // 4, left - left * 3 // 4
    if warmth is Warmth.HOT:
        return Body(b"", made(text(known, 1), text(new, 2)))
    if warmth is Warmth.WARM:
        before, after = made(text(known, 1), text(new, 2), seed=place).split(place.encode())
        return Body(before, after)
    before, after = made(text(known, 1), place + text(new - len(place), 2)).split(place.encode())
    return Body(before, after)


def numbers() -> Iterator[int]:
    """Never the same twice in one run."""
    return iter(range(100_000_000, 1_000_000_000))
