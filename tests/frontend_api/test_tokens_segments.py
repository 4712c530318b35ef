"""Ids by segment are the ids of the whole text, for every kind of tokenizer; where they would not be, there are no segments."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from frontend_api.tokens.segments import Segments
from tests.frontend_api.tiny_model import TEXTS, tiny_tokenizer


def metaspace(scheme: str) -> Tokenizer:
    """As of Llama 2 and its kin: a blank is a letter, and the text's beginning is treated as one, once or always."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<|a|>", "<|b|>"], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def normalising() -> Tokenizer:
    tokenizer = tiny_tokenizer()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase(), normalizers.Prepend("_")])
    return tokenizer


def with_tokens(*tokens: AddedToken) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        tokenizer = tiny_tokenizer()
        tokenizer.add_tokens(list(tokens))
        return tokenizer

    return make


def unsplit() -> Tokenizer:
    tokenizer = tiny_tokenizer()
    tokenizer.encode_special_tokens = True
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": tiny_tokenizer,
    "prefix space once": lambda: metaspace("first"),
    "prefix space always": lambda: metaspace("always"),
    "normalising": normalising,
    "eats blanks before": with_tokens(AddedToken("<|a|>", lstrip=True, normalized=False)),
    "eats blanks after": with_tokens(AddedToken("<|a|>", rstrip=True, normalized=False)),
    "begins with a blank": with_tokens(AddedToken(" <|a|>", normalized=False), AddedToken("<|a|>", normalized=False)),
    "one in the other": with_tokens(*(AddedToken(t, normalized=False) for t in ("<|a|><|b|>", "<|a|>", "|>"))),
    "found after normalising": with_tokens(AddedToken("<|a|>", normalized=True)),
    "whole words": with_tokens(AddedToken("a", single_word=True, normalized=False)),
    "marks as text": unsplit,
}
UNCUT = {"whole words", "marks as text"}
PIECES = st.sampled_from(
    ["<|im_start|>", "<|im_end|>", "<|a|>", "<|b|>", " <|a|>", "<think>", "<s>", "<|", "|>", " ", "  ", "\n", "\t", "a", "A", "é",
     "e\u0301", "\u0301", "river", " the", "3.14", "'s", "🙂", "\u00a0", "_", ""]
)  # fmt: skip
WRITING = st.lists(PIECES | st.text(max_size=6), max_size=12).map("".join)
SEGMENTS = {name: Segments(make(), 20_000) for name, make in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
@given(texts=st.lists(WRITING, min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_ids_by_segment_are_the_whole_texts(kind: str, texts: list[str]) -> None:
    segments = SEGMENTS[kind]
    for text in texts:
        pieces = segments.cut(text)
        assert "".join(pieces) == text
        assert segments.ids(pieces) == segments.encode(text)
        assert segments.bytes <= 20_000


@pytest.mark.parametrize("kind", KINDS)
def test_where_segments_cannot_be_exact_there_are_none(kind: str) -> None:
    segments = SEGMENTS[kind]
    text = "<|im_start|>user\na<|im_end|><|a|> b<|b|>"
    assert segments.cuts == (kind not in UNCUT)
    assert (len(segments.cut(text)) > 1) == segments.cuts


def test_a_segment_is_tokenised_once() -> None:
    segments = Segments(tiny_tokenizer(), 1 << 20)
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>"
    first, second = (segments.cut(f"{system}\n<|im_start|>user\n{number}<|im_end|>\n") for number in (1, 2))
    segments.ids(first)
    assert segments.unknown(second) == len("<|im_start|>user\n2")
    segments.ids(second)
    assert segments.unknown(second) == 0


def test_threads_share_the_cache() -> None:
    segments = Segments(tiny_tokenizer(), 5_000)
    texts = [f"<s>{number % 7}" + "river " * (number % 11) + "<|im_end|>" for number in range(300)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda text: segments.ids(segments.cut(text)), texts))
    assert found == [segments.encode(text) for text in texts]
    assert 0 < segments.bytes <= 5_000


def test_the_segment_used_longest_ago_goes_first() -> None:
    segments = Segments(tiny_tokenizer(), 1_000)
    old, kept = "<s>" + "o" * 40, "<s>" + "k" * 40
    segments.ids([old, kept])
    for number in range(3):
        segments.ids([kept, f"<s>{number}" + "x" * 39])
    assert segments.unknown([kept]) == 0
    assert segments.unknown([old]) == len(old)
