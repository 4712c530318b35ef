"""What a `tokenizer.json` may ask for: those of real models are taken, what could run away is not."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend_api.formats.openai import ENDPOINTS
from frontend_api.tokens import bounds, model_folder
from frontend_api.tokens.bounds import Unbounded
from frontend_api.tokens.model_folder import TokenizerUnusable
from frontend_api.tokens.patterns import is_linear
from frontend_api.tokens.segments import alternation
from frontend_api.tokens.tokenizer import Tokenizer
from tests.frontend_api.tiny_model import write_model

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = GPT4.replace(r"\p{N}{1,3}", r"\p{N}")
OLD_GPT4 = GPT4.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])")
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MISTRAL = GPT4O.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
FROM_MODELS = [
    GPT2,
    GPT4,
    QWEN,
    OLD_GPT4,
    GPT4O,
    MISTRAL,
    DEEPSEEK,
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[0-9][0-9][0-9]",
    r"\s?\p{L}+",
]
ENDLESS = [
    r"(a+)+b", r"(a|a)*b", r"(a*)*", r"a*a*a*b", r"a+b", r"(?:a+)+", r"(a)\1", r"(?=a+b)", r"(?<=a+)b", r"\s*[\r\n]+", r"a*", "", "a|",
    r"(?:x|a{0,200}){0,200}b", r"a{0,200}a{0,200}a{0,200}b", r"a?" * 20 + "b", r"(?>a+)b", r"^a", r"\p{L}+\p{L}", r"[a", r"(a", r"a{1,99999}",
    r"(?i)a", r"(?:a|[b]+)*", r"\g<0>", GPT4O.split("|", 8)[-1].replace(r"\s+(?!\S)|\s+", r"x"),
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+", "a" * 5_000,
]  # fmt: skip


@pytest.mark.parametrize("pattern", FROM_MODELS)
def test_patterns_of_real_models_are_taken(pattern: str) -> None:
    assert is_linear(pattern)


@pytest.mark.parametrize("pattern", ENDLESS)
def test_patterns_that_are_not_sure_to_end_are_not(pattern: str) -> None:
    assert not is_linear(pattern)


@given(st.text(alphabet="ab()[]|*+?{}0123\\psS^$:=!,-", max_size=60))
def test_any_text_is_judged(pattern: str) -> None:
    assert is_linear(pattern) in (True, False)


def written(tmp_path: Path, **parts: Any) -> Path:
    """A tokenizer with other parts."""
    folder = write_model(tmp_path / "model")
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **parts}))
    return path


def replacing(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
USUAL: list[dict[str, Any]] = [
    {},
    {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split(QWEN), BYTES]}},
    {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTES]}},
    {"normalizer": {"type": "NFC"}, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split(DEEPSEEK), BYTES]}},
    {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "▁"}, replacing({"String": " "}, "▁")],
        }
    },
    {"normalizer": replacing({"String": " "}, "▁"), "pre_tokenizer": None},
]


@pytest.mark.parametrize("parts", USUAL)
def test_tokenizers_of_real_models_are_taken(tmp_path: Path, parts: dict[str, Any]) -> None:
    assert Tokenizer(written(tmp_path, **parts).parent)


MODEL = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"pre_tokenizer": split("(a+)+b")}, "pattern is not sure to end"),
    ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES, split("a*a*a*b")]}}, "pattern is not sure to end"),
    ({"pre_tokenizer": {"type": "Odd"}}, "type 'Odd' is not known"),
    ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 200}}, "more than 100 parts"),
    ({"normalizer": replacing({"Regex": "."}, "x" * 1_000)}, "many times longer"),
    ({"normalizer": {"type": "Sequence", "normalizers": [replacing({"String": "a"}, "aa")] * 40}}, "many times longer"),
    ({"normalizer": replacing({"String": ""}, "x")}, "between all characters"),
    ({"normalizer": replacing({"Regex": "(a+)+b"}, "x")}, "pattern is not sure to end"),
    ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "type 'Precompiled' is not known"),
    ({"normalizer": {"type": "Prepend", "prepend": "x" * 999}}, "more than 64 characters before texts"),
    ({"model": {**MODEL, "continuing_subword_prefix": "x" * 999}}, "before or behind words"),
    ({"model": {**MODEL, "end_of_word_suffix": "x" * 999}}, "before or behind words"),
    ({"model": {**MODEL, "dropout": 0.5}}, "by chance"),
    ({"model": {**MODEL, "type": "Odd"}}, "type 'Odd' is not known"),
    ({"model": {**MODEL, "type": "WordPiece", "max_input_chars_per_word": 1 << 40}}, "words of more than 1000"),
    ({"added_tokens": [{"id": 9, "content": "x" * 1_001}]}, "one of more than 1000 characters"),
    ({"added_tokens": [{"id": n, "content": f"<{n}>"} for n in range(20_001)]}, "adds more than 20000 tokens"),
    ({"post_processor": {"type": "TemplateProcessing", "single": [{}] * 999}}, "tokens around texts"),
    ({"post_processor": {"type": "TemplateProcessing", "single": [], "special_tokens": {"a": {"ids": [1] * 999}}}}, "more than 64 ids"),
    ({"model": 7}, "not understood"),
]  # fmt: skip


@pytest.mark.parametrize(("parts", "why"), HOSTILE)
def test_a_tokenizer_that_could_run_away_is_not_taken_and_it_is_said_why(
    tmp_path: Path, parts: dict[str, Any], why: str
) -> None:
    with pytest.raises(TokenizerUnusable, match=why):
        Tokenizer(written(tmp_path, **parts).parent)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"added_tokens_decoder": {str(n): {"content": f"<{n}>"} for n in range(2_000)}}, "too many tokens"),
        ({"extra_special_tokens": ["x" * 2_000]}, "too long ones"),
    ],
)
def test_nor_is_one_whose_configuration_adds_too_much(tmp_path: Path, config: dict[str, Any], why: str) -> None:
    with pytest.raises(TokenizerUnusable, match=why):
        Tokenizer(write_model(tmp_path / "model", **config))


def test_nor_a_configuration_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_folder, "MOST_BYTES", 20)
    with pytest.raises(TokenizerUnusable, match="more than 20 bytes"):
        Tokenizer(write_model(tmp_path / "model"))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path / "model")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(TokenizerUnusable):
        Tokenizer(folder)


MARKS = st.lists(st.text(alphabet="<ab|.", min_size=1, max_size=6), min_size=1, max_size=12)


@given(MARKS, st.text(alphabet="<ab|.c", max_size=40))
def test_the_longest_of_many_tokens_is_found_as_by_trying_each(marks: list[str], text: str) -> None:
    each = "|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True))
    assert re.findall(alternation(marks), text) == re.findall(each, text)


def test_tokens_of_which_each_begins_the_next_are_no_trouble(tmp_path: Path) -> None:
    tokens = [{"content": "<" * n, "special": True} for n in range(1, 300)]
    folder = write_model(tmp_path / "model", additional_special_tokens=tokens)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "<" * 4_000}]}).encode()
    assert Tokenizer(folder).token_ids(ENDPOINTS["/v1/chat/completions"], body)


def test_a_file_that_is_too_long_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MOST_BYTES", 100)
    with pytest.raises(Unbounded, match="more than 100 bytes"):
        bounds.check(written(tmp_path))
