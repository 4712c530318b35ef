"""A prompt's token ids: in the stand-in's own words, or with the tokenizer and chat template of a model's folder
(`--tokenizer`), read as the engine reads them. Then a router that reads the same folder must find the same ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Encoding, Tokenizer

from workers.sim.http import ApiError, invalid
from workers.sim.requests import Json
from workers.sim.settings import Settings
from workers.sim.text import VOCABULARY, content_text, decode, encode, pieces, render_chat


def ids(text: str, settings: Settings, *, special: bool) -> list[int]:
    """The ids of a text; `special`: with the model's own tokens (as BOS) around it."""
    return _load(settings.tokenizer).encode(text, special).ids if settings.tokenizer else encode(text)


def text_of(tokens: Sequence[int], settings: Settings) -> str:
    """The text of ids; of those in the stand-in's own words, as far as it can be told."""
    return _load(settings.tokenizer).decode(tokens) if settings.tokenizer else decode(tokens)


def strings(text: str, settings: Settings, *, special: bool) -> list[str]:
    """The same tokens as texts."""
    return _load(settings.tokenizer).encode(text, special).tokens if settings.tokenizer else pieces(text)


def chat_text(
    messages: Sequence[Json],
    tools: Sequence[Json] | None,
    settings: Settings,
    *,
    generate: bool = True,
    resume: bool = False,
) -> str:
    """A chat as text. `generate`: with the beginning of the answer; `resume`: its last message is not ended.

    Raises `ApiError` where the model has no template, or one that refuses the chat.
    """
    if not settings.tokenizer:
        return render_chat(messages, tools, generate=generate)
    return _load(settings.tokenizer).render(messages, tools, generate=generate, resume=resume)


def vocabulary(settings: Settings) -> int:
    """Number of ids."""
    return _load(settings.tokenizer).size if settings.tokenizer else VOCABULARY


class _Model:
    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.size = self._tokenizer.get_vocab_size()
        config = json.loads(_text(folder / "tokenizer_config.json") or "{}")
        named = {name: value for name, value in config.items() if name.endswith("_token") and value}
        self._names = {name: value["content"] if isinstance(value, dict) else value for name, value in named.items()}
        source = _text(folder / "chat_template.jinja") or config.get("chat_template")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        self._template = environment.from_string(source) if isinstance(source, str) else None

    def encode(self, text: str, special: bool) -> Encoding:
        return self._tokenizer.encode(text, add_special_tokens=special)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def render(self, messages: Sequence[Json], tools: Sequence[Json] | None, *, generate: bool, resume: bool) -> str:
        if self._template is None:
            raise invalid("As of transformers v4.44, default chat template is no longer allowed")
        shown = [_shown(message) for message in messages]
        try:
            text = self._template.render(
                self._names,
                messages=shown,
                tools=None if tools is None else [_tool(tool) for tool in tools],
                add_generation_prompt=generate,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise invalid(str(error)) from None
        if resume:
            last = str(shown[-1]["content"]).strip()
            text = text[: text.rindex(last) + len(last)]
        return text


@lru_cache
def _load(folder: str) -> _Model:
    return _Model(Path(folder))


def _text(path: Path) -> str | None:
    return path.read_text() if path.is_file() else None


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(reason: str) -> None:
    raise jinja2.TemplateError(reason)


def _shown(message: Json) -> Json:
    shown = {**message, "content": content_text(message.get("content"))}
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        shown["tool_calls"] = [_call(call) for call in calls]
    return shown


def _call(call: Mapping[str, Mapping[str, str]]) -> Json:
    function = dict(call["function"])
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except ValueError:  # as vLLM does: history that is broken once must not break every later turn
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}


def _tool(tool: Json) -> Json:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise ApiError("1 validation error:\n  Field required", kind="Bad Request", param="body.tools")
    known = {name: function.get(name) for name in ("name", "description", "parameters")}
    return {"type": "function", "function": known}
