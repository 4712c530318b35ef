"""A jinja2 sandbox in which no template takes more than its time and its room, whatever it says.

A template comes from its engine's node, and threads cannot be ended: so nothing that a template can do may take long by itself,
and between two such things the clock is looked at. Three rules make that so:

* **Nothing is computed at compile time**, and what could grow without end is computed by functions of ours (`metering`, `allowed`):
  `+`, `~`, `*`, `**`, `%`, filters, methods, outputs. Each takes what it makes from the rendering's room first (`rendering`).
* **Each turn of a loop and each call looks at the clock** (the thread's own CPU time, so that a busy machine costs nothing).
* **Values cannot be nested so that reading them takes longer than making them**: before a value is compared, sorted or written it is
  weighed; tuples, whose hash would be computed anew each time, are not built of other values.

What no template needs is refused when it is compiled: recursive loops, includes, autoescaping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

import jinja2
import jinja2.ext
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace

from frontend_api.tokens import allowed
from frontend_api.tokens.metering import MOST_BITS, Metering, Refused
from frontend_api.tokens.rendering import Rendering, TooMuch

__all__ = ["UNCOMPILED", "Refused", "Sandbox", "TooMuch", "render"]
SOURCE_CHARACTERS = 128 << 10
"""Of a template; the longest known have a quarter of it."""
UNCOMPILED = (RecursionError, MemoryError, SyntaxError, OverflowError, ValueError)
"""Of Python's own compiler."""
_OF_DICT = frozenset(dir(dict))
_OF_JINJA = {"_loop_vars", "_block_vars"}
"""Arguments that compiled templates give every function, for those that ask for them."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Where templates are compiled. `names`: further functions that they may call."""

    context_class = Rendering
    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self, extensions: list[type[jinja2.ext.Extension]], names: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False)
        self.filters, self.tests = allowed.filters(), allowed.tests()
        self.globals = {"range": safe_range, "dict": _dict, "namespace": Namespace, **names}
        self._callable = frozenset(map(id, self.globals.values()))

    def load(self, source: str) -> jinja2.Template:
        """Raises `jinja2.TemplateError`, and one of `UNCOMPILED` for what is nested too deep."""
        if len(source) > SOURCE_CHARACTERS:
            raise Refused(f"it is longer than {SOURCE_CHARACTERS} characters")
        tree = self.parse(source)
        return self.from_string(Metering(self, tree).visit(tree))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Finds `message.role` without first failing to find an attribute of that name."""
        if type(obj) is dict and attribute in obj and attribute not in _OF_DICT:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and (value.__name__ != "format" or ":" in value.__self__):  # widths
            raise TooMuch
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        assert isinstance(context, Rendering)
        for one in (left, right):
            if isinstance(one, tuple) and not (operator == "%" and isinstance(left, str)):
                raise TooMuch
        if operator == "%" and isinstance(left, str):
            allowed.take_format(context, left, "%", right)
        elif operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, str | list) and isinstance(other, int):
                    context.take(len(one) * max(other, 0))
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MOST_BITS:
                raise TooMuch
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        context = __context
        assert isinstance(context, Rendering)
        if perf_counter() > context.until:
            context.look()
        kind = type(__obj)
        if kind is Macro or kind is BlockReference or id(__obj) in __self._callable or isinstance(__obj, Undefined):
            return super().call(context, __obj, *args, **kwargs)
        owner = getattr(__obj, "__self__", None)
        if kind is FunctionType and __obj.__name__ == "format":  # what the sandbox makes of it
            given = (*args, *(kwargs[name] for name in kwargs.keys() - _OF_JINJA))
            allowed.take_format(context, __obj.__wrapped__.__self__, "{", given)
        elif isinstance(owner, LoopContext):
            allowed.check_arguments(context, args)
        elif isinstance(owner, jinja2.ext.Extension):
            pass
        elif (kind is BuiltinMethodType or kind is MethodType) and kwargs.keys() <= _OF_JINJA:
            allowed.check_method(context, owner, __obj.__name__, args)
        else:
            raise TooMuch
        result = super().call(context, __obj, *args, **kwargs)
        allowed.take_for(context, result)
        return result


def _dict(**values: Any) -> dict[str, Any]:
    return values


def render(template: jinja2.Template, variables: dict[str, Any], messages: list[dict[str, Any]]) -> str:
    """The text of a prompt. Raises `TooMuch`, and whatever the template raises."""
    context = Rendering(template.environment, variables, template.name, template.blocks)
    context.allow(messages, len(variables.get("tools") or ()) + len(variables.get("documents") or ()))
    return "".join(template.root_render_func(context))
