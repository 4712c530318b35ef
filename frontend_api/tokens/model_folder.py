"""A model's folder, read as the engine's own loader reads it: its tokenizer and its chat templates.

Written after `transformers` 5.19 (`tokenization_utils_base.py`, `tokenization_utils_tokenizers.py`). A folder that the engine
would read by code of its own is refused, never guessed at.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import tokenizers
from tokenizers import AddedToken

from controlplane.fleet import tokenizer_files
from frontend_api.tokens import bounds
from frontend_api.tokens.chat_template import ChatTemplate
from frontend_api.tokens.prompts import NOT_DEFAULTS, Templates


class TokenizerUnusable(Exception):
    """No exact ids can be had from this folder; the text says why."""


class Model(NamedTuple):
    """What a folder holds."""

    tokenizer: tokenizers.Tokenizer
    templates: Templates | None
    """None: it has none, and the engine refuses chats."""


def read(folder: Path) -> Model:
    """Raises `TokenizerUnusable`."""
    _refuse_other_renderers(folder)
    config = _json(folder / "tokenizer_config.json")
    tokenizer = _load(folder, config)
    names = _special_tokens(folder, config)
    _add_missing(tokenizer, config, names)
    return Model(tokenizer, _templates(folder, config, names))


_OTHER_RENDERERS = ("gpt_oss", "kimi_k3", "inkling", "deepseek_v32", "deepseek_v4", "cohere")


def _refuse_other_renderers(folder: Path) -> None:
    """vLLM renders some models by code of its own instead of a template."""
    kind = str(_json(folder / "config.json").get("model_type", ""))
    if kind.startswith(_OTHER_RENDERERS) or (folder / "tekken.json").exists() or any(folder.glob("tokenizer.model.v*")):
        raise TokenizerUnusable(f"{folder.name}: the engine renders {kind or 'this model'} by code of its own")


MOST_BYTES = 16 << 20
"""Of a file beside the tokenizer's own."""
MOST_TEMPLATES = 32
"""Files with further templates that are looked at."""
MOST_MISSING = 1_000
"""Tokens that the configuration names and the tokenizer does not have."""


def _read(path: Path) -> bytes:
    """Raises `OSError`; `TokenizerUnusable` for more than `MOST_BYTES`."""
    try:
        return bounds.read(path, MOST_BYTES)
    except bounds.Unbounded as error:
        raise TokenizerUnusable(str(error)) from None


def _text(path: Path) -> str:
    try:
        return _read(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerUnusable(f"{path.name} cannot be read: {error}") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerUnusable(f"{path.name} cannot be read: {error}") from None
    return value if isinstance(value, dict) else {}


def _load(folder: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TokenizerUnusable(f"{folder} has no tokenizer.json")
    try:
        bounds.check(path)
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except bounds.Unbounded as error:
        raise TokenizerUnusable(f"tokenizer.json is not used: {error}") from None
    except Exception as error:  # the library raises no narrower type
        raise TokenizerUnusable(f"tokenizer.json cannot be read: {error}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = config.get("split_special_tokens") is True
    return tokenizer


def _content(token: object) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The tokens that templates may name, as `bos_token`."""
    given = dict(config)
    if "added_tokens_decoder" not in config:
        given |= _json(folder / "special_tokens_map.json")
    more = given.get("extra_special_tokens")
    if isinstance(more, dict):
        given |= more
    named = {name: _content(token) for name, token in given.items() if name.endswith("_token")}
    return {name: text for name, text in named.items() if text is not None}


def _add_missing(tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Adds the tokens that the configuration names and `tokenizer.json` does not, as `transformers` does."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    most = len(known) + MOST_MISSING
    listed = config.get("added_tokens_decoder") or {}
    wanted = [token for _, token in sorted(listed.items(), key=lambda entry: int(entry[0]))]
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    wanted += [*names.values(), *(more if isinstance(more, list) else ())]
    for token in wanted:
        text = _content(token)
        if text is None or text in known:
            continue
        known.add(text)
        if len(known) > most or len(text) > bounds.MOST_TOKEN:
            raise TokenizerUnusable(
                "tokenizer_config.json: it names too many tokens that tokenizer.json lacks, or too long ones"
            )
        if isinstance(token, dict):
            fields = ("single_word", "lstrip", "rstrip", "normalized", "special")
            tokenizer.add_tokens([AddedToken(text, **{k: token[k] for k in fields if k in token})])
        else:
            tokenizer.add_tokens([AddedToken(text, special=True)])


def _templates(folder: Path, config: Mapping[str, Any], names: Mapping[str, str]) -> Templates | None:
    if (folder / "chat_template.json").exists():
        raise TokenizerUnusable("chat_template.json: a processor's template is not supported")
    sources: dict[str, str] = {}
    given = config.get("chat_template")
    if isinstance(given, str):
        sources["default"] = given
    elif isinstance(given, list):
        sources = {entry["name"]: entry["template"] for entry in given}
    files = {
        path.stem: _text(path)
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))[:MOST_TEMPLATES]
    }
    if (main := folder / "chat_template.jinja").exists():
        files["default"] = _text(main)
    sources = files or sources
    if "default" not in sources:
        return None
    told = _json(folder / tokenizer_files.OPTIONS)
    defaults = told.get("chat_template_kwargs") or {}
    if not isinstance(defaults, dict) or not NOT_DEFAULTS.isdisjoint(defaults):
        raise TokenizerUnusable("the engine's default chat template kwargs are not followed here")
    parts = {"openai": True, "string": False}.get(str(told.get("content_format")))
    try:
        plain = ChatTemplate(sources["default"], names, parts, defaults)
        with_tools = ChatTemplate(sources["tool_use"], names, parts, defaults) if "tool_use" in sources else plain
        return Templates(plain, with_tools)
    except jinja2.TemplateError as error:
        raise TokenizerUnusable(f"the chat template does not compile: {error}") from None
