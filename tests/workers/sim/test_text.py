"""Tokens and answers are pure functions: of the text, and of the KV."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.sim.text import VOCABULARY, WORDS, Answer, encode, pack, pieces, render_chat


@given(st.text())
def test_pieces_are_the_whole_text(text: str) -> None:
    assert "".join(pieces(text)) == text
    assert len(encode(text)) == len(pieces(text))
    assert all(0 <= token < VOCABULARY for token in encode(text))


def test_words_are_all_different() -> None:
    assert len(set(WORDS)) == len(WORDS)
    assert all(len(encode(" " + word)) == 1 for word in WORDS)


@given(st.binary(), st.integers(0, 300))
def test_an_answer_read_again_is_the_same_tokens(kv: bytes, length: int) -> None:
    """So a second turn that quotes the first finds its KV."""
    answer = Answer([kv])
    spoken = [answer.token(n) for n in range(length)]
    assert encode("".join(text for _, text in spoken)) == [token for token, _ in spoken]


@given(st.lists(st.integers(0, VOCABULARY - 1), min_size=1), st.integers(1, 20))
def test_how_kv_is_cut_into_blocks_does_not_matter(tokens: list[int], size: int) -> None:
    blocks = [pack(tokens[at : at + size]) for at in range(0, len(tokens), size)]
    whole, cut = Answer([pack(tokens)]), Answer(blocks)
    assert [whole.token(n) for n in range(40)] == [cut.token(n) for n in range(40)]
    assert whole.natural_length == cut.natural_length
    assert [whole.logprob(n) for n in range(40)] == [cut.logprob(n) for n in range(40)]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=50), st.integers(0, 49))
def test_one_other_token_gives_another_answer(tokens: list[int], at: int) -> None:
    other = list(tokens)
    other[at % len(tokens)] += 1
    first, second = Answer([pack(tokens)]), Answer([pack(other)])
    assert [first.token(n) for n in range(8)] != [second.token(n) for n in range(8)]


def test_chat_template() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image_url", "image_url": {}}]},
    ]
    assert render_chat(messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not render_chat(messages, generate=False).endswith("assistant\n")
    assert '"name":"f"' in render_chat(messages, [{"function": {"name": "f"}}])
