"""A model's own chat template, rendered as the engine renders it: the same jinja2 environment, the same variables.

Templates come from a model's folder and are not trusted: the sandbox gives them no attribute of Python's and no file, and bounds
what they take (`sandbox`). What the engine would refuse raises `Unrenderable`; nothing is repaired here. Written after `transformers` 5.19
(`utils/chat_template_utils.py`) and vLLM 0.32 (`renderers/hf.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser

from frontend_api.tokens.content_format import takes_parts
from frontend_api.tokens.sandbox import UNCOMPILED, Refused, Sandbox, TooMuch, render

_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
Message = dict[str, Any]


class Unrenderable(Exception):
    """The engine refuses this conversation, or renders it in a way that is not known here."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the model wrote, for training; its text is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: jinja2.runtime.Macro) -> str:
        return caller()


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    if len(form) > 200:
        raise TooMuch
    return datetime.now().strftime(form)


_EXTENSIONS: list[type[jinja2.ext.Extension]] = [_Generation, jinja2.ext.loopcontrols]
MOST_STRIKES = 3.0
"""Renderings that took too much, after which a template is given up …"""
FORGIVEN = 0.05
"""… less so many for each that did not."""


class ChatTemplate:
    """One compiled template."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        parts: bool | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """`parts`: whether its content is a list of parts; None: as the template looks. `defaults`: variables that a request
        may set otherwise. Raises `jinja2.TemplateError` for a template that does not compile."""
        self.source = source
        self.strikes = 0.0
        try:
            self._compile(special_tokens, parts, defaults or {})
        except UNCOMPILED as error:
            raise Refused(f"it cannot be compiled: {type(error).__name__}") from None

    def _compile(self, special_tokens: Mapping[str, str], parts: bool | None, defaults: Mapping[str, Any]) -> None:
        source = self.source
        environment = Sandbox(_EXTENSIONS, {"raise_exception": _raise, "strftime_now": _now})
        self._template = environment.load(source)
        self._always = {**dict(self._template.globals), **special_tokens}
        tree = environment.parse(source)
        self.takes_parts = takes_parts(tree) if parts is None else parts
        """Its content is a list of parts; else it is one text."""
        self._variables = jinja2.meta.find_undeclared_variables(Sandbox(_EXTENSIONS, {}).parse(source))
        self._always |= {name: value for name, value in defaults.items() if name in self._variables}
        self._knows_developer = '"developer"' in source or "'developer'" in source
        self.system_first = self._wants_system_first()
        """It fails on a system message after the first: vLLM then merges them for `/v1/messages`."""

    def render(
        self,
        conversation: list[Message],
        *,
        tools: list[dict[str, Any]] | None,
        documents: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt's text. Variables that the template does not name are left out, as the engine does.

        Raises `Unrenderable`.
        """
        if not conversation or (add_generation_prompt and continue_final_message):
            raise Unrenderable("no messages, or both a generation prompt and a message to continue")
        if not self._knows_developer and any(message["role"] == "developer" for message in conversation):
            conversation = _system_first(_developer_as_system(conversation))
        final = ""
        if continue_final_message:
            conversation, final = _tagged(conversation)
        variables = {
            **self._always,
            **{name: value for name, value in variables.items() if name in self._variables},
            "messages": conversation,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        if self.given_up:
            raise Unrenderable("the template was given up")
        try:
            text = render(self._template, variables, conversation)
        except TooMuch:
            self.strikes += 1
            raise Unrenderable("the template takes too much time or room") from None
        except Exception as error:  # whatever a template trips over, the engine refuses the request
            raise Unrenderable(str(error)) from None
        if self.strikes:
            self.strikes = max(0.0, self.strikes - FORGIVEN)
        return _cut_at_tag(text, final, self.source) if continue_final_message else text

    @property
    def given_up(self) -> bool:
        """It took too much time or room again and again."""
        return self.strikes >= MOST_STRIKES

    def names(self, variable: str) -> bool:
        """Whether the template reads this variable."""
        return variable in self._variables

    def _wants_system_first(self) -> bool:
        environment = Sandbox([jinja2.ext.loopcontrols], {})
        messages = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
        try:
            variables = {**environment.globals, "messages": messages, "add_generation_prompt": False}
            render(environment.load(self.source), variables, messages)
        except jinja2.TemplateError:
            return True
        except Exception:  # vLLM does not start on such a template
            return True
        return False


def _developer_as_system(conversation: list[Message]) -> list[Message]:
    return [
        {**{name: value for name, value in message.items() if name != "tools"}, "role": "system"}
        if message["role"] == "developer"
        else message
        for message in conversation
    ]


def _system_first(conversation: list[Message]) -> list[Message]:
    """All system messages as one at the beginning; untouched where the only one is there already."""
    texts: list[str] = []
    moved = False
    for at, message in enumerate(conversation):
        if message["role"] == "system":
            moved = moved or at > 0 or bool(texts)
            content = message["content"]
            if isinstance(content, list):
                content = "\n".join(part["text"] for part in content)
            if content:
                texts.append(content)
    if not moved:
        return conversation
    others = [message for message in conversation if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _tagged(conversation: list[Message]) -> tuple[list[Message], str]:
    """The conversation with a mark at the end of its last text, and that text."""
    conversation = deepcopy(conversation)
    last = conversation[-1]
    content = last["content"]
    if isinstance(content, list):
        part = next((part for part in reversed(content) if "text" in part), None)
        if part is None:
            raise Unrenderable("the last message has no text to continue")
        final = part["text"]
        part["text"] = final + _TAG
    else:
        final = content
        last["content"] = final + _TAG
    return conversation, final


def _cut_at_tag(text: str, final: str, source: str) -> str:
    mark = _TAG.strip()
    if "content" not in source or final.strip() not in text or mark not in text:
        raise Unrenderable("the template drops the message to continue")
    at = text.rindex(mark)
    return text[:at] if text.startswith(_TAG, at) else text[:at].rstrip()
