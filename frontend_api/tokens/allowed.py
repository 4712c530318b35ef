"""The filters, tests and methods that chat templates use, each within bounds. There are no others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2.runtime import Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context

from frontend_api.tokens.metering import FILTERS as OWN
from frontend_api.tokens.metering import MOST_BITS, each
from frontend_api.tokens.rendering import Rendering, TooMuch

_MOST_NUMBER = 10_000
"""An argument of a filter or method: widths, precisions, counts."""
_MOST_TEXT = 1_000
"""The same in characters, where an argument's length counts for each character of a text."""
_LONG_FORMAT = re.compile(r"[0-9]{3}|\*")
_WIDTH = 100
_FILTERS_OF_NOTHING = ("d", "default", "first", "last", "length", "count", "abs")
"""They read no more than one item."""
_FILTERS_OF_ITEMS = (
    "list", "map", "select", "selectattr", "reject", "rejectattr", "batch", "slice", "reverse", "items",
)  # fmt: skip
"""They go over the items, and read none of them whole."""
_FILTERS_OF_WHOLES = (
    "join", "string", "sort", "unique", "min", "max", "groupby", "dictsort", "sum", "replace", "trim", "lower", "upper",
    "title", "capitalize", "indent", "int", "float", "round", "safe", "e", "escape", "format", "attr",
)  # fmt: skip
_TESTS_OF_NOTHING = (
    "defined", "undefined", "none", "string", "number", "mapping", "iterable", "sequence", "boolean", "true", "false", "integer",
    "float", "odd", "even", "divisibleby", "sameas", "callable", "filter", "test",
)  # fmt: skip
_TESTS_OF_WHOLES = (
    "eq", "==", "equalto", "ne", "!=", "gt", ">", "greaterthan", "ge", ">=", "lt", "<", "lessthan", "le", "<=", "in", "lower",
    "upper",
)  # fmt: skip
_LONG_ARGUMENTS = ("replace", "join", "format")
"""Filters whose arguments may be texts of any length; of the others they name attributes, tests and characters."""
_PLAIN = ImmutableSandboxedEnvironment()


def take_format(context: Rendering, text: str, sign: str, values: Any) -> None:
    """Take room for a text into which values are put, each as often as it has the sign."""
    if _LONG_FORMAT.search(text):
        raise TooMuch
    count = text.count(sign)
    context.take(len(text) + count * _WIDTH)
    context.weigh(values, count if isinstance(values, Mapping) or sign == "{" else 1)


def check_arguments(context: Rendering, values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and not -_MOST_NUMBER <= value <= _MOST_NUMBER:
            raise TooMuch
        context.weigh(value)


def _filter(name: str, whole: bool) -> Callable[..., Any]:
    @pass_context
    def run(context: Rendering, value: Any, *args: Any, **kwargs: Any) -> Any:
        check_arguments(context, args)
        check_arguments(context, kwargs.values())
        if name not in _LONG_ARGUMENTS:
            _short((*args, *kwargs.values()))
        if not isinstance(value, str | list | tuple | Mapping | int | float | Undefined | None):
            value = list(each(context, value)) if isinstance(value, Iterable) else value
        if whole:
            context.weigh(value)
        elif isinstance(value, str | list | tuple | Mapping):
            context.take(len(value))
        _foresee(context, name, value, args, kwargs)
        result = _PLAIN.call_filter(name, value, args, kwargs, context)
        take_for(context, result)
        return result

    return run


def _foresee(context: Rendering, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Take room for what comes of texts that are put between or in place of others."""
    if name == "replace":
        old, new = (*args, *(kwargs[key] for key in ("old", "new") if key in kwargs))[:2]
        context.take(6 * _replaced(str(value), str(old), str(new)))
    elif name == "join":
        between = args[0] if args else kwargs.get("d", "")
        context.take(len(str(between)) * (len(value) if hasattr(value, "__len__") else 1))
    elif name == "indent":
        width = args[0] if args else kwargs.get("width", 4)
        context.take((len(width) if isinstance(width, str) else int(width)) * (str(value).count("\n") + 1))
    elif name == "format":
        take_format(context, str(value), "%", kwargs or args)
    elif name == "sum" and (len(args) > 1 or "start" in kwargs):
        raise TooMuch


def _replaced(text: str, old: str, new: str) -> int:
    """Characters of a text in which one is replaced by another."""
    return len(text) + text.count(old) * len(new)


def _short(texts: Iterable[Any]) -> None:
    if any(isinstance(text, str) and len(text) > _MOST_TEXT for text in texts):
        raise TooMuch


def take_for(context: Rendering, result: Any) -> None:
    if isinstance(result, str):
        context.take(len(result))
    elif isinstance(result, list | tuple | dict):
        context.take(16 * len(result))
    elif isinstance(result, int) and result.bit_length() > MOST_BITS:
        raise TooMuch


def _test(name: str) -> Callable[..., Any]:
    @pass_context
    def run(context: Rendering, value: Any, *args: Any) -> bool:
        check_arguments(context, args)
        context.weigh(value)
        return bool(_PLAIN.call_test(name, value, args, None, context))

    return run


_OF_TEXTS = frozenset(
    ("startswith", "endswith", "strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "replace", "join", "lower", "upper",
     "title", "capitalize", "find", "rfind", "index", "rindex", "count", "removeprefix", "removesuffix", "partition", "rpartition",
     "isdigit", "isalpha", "isalnum", "isspace", "isupper", "islower", "isnumeric", "isdecimal")
)  # fmt: skip
_OF_LISTS = frozenset(("index", "count", "copy"))
_OF_DICTS = frozenset(("get", "items", "keys", "values", "copy"))


def check_method(context: Rendering, owner: Any, name: str, args: tuple[Any, ...]) -> None:
    """Whether a method of a value may be called, and room for it."""
    if isinstance(owner, str) and name in _OF_TEXTS:
        context.weigh(owner)
        check_arguments(context, args)
        if name in ("strip", "lstrip", "rstrip"):
            _short(args)
        elif name == "replace":
            context.take(6 * _replaced(owner, str(args[0]), str(args[1])))
        elif name == "join":
            items = args[0]
            if not isinstance(items, list | tuple):
                raise TooMuch
            context.take(len(owner) * len(items))
    elif isinstance(owner, list | tuple) and name in _OF_LISTS:
        context.weigh(owner)
        check_arguments(context, args)
    elif not (isinstance(owner, dict) and name in _OF_DICTS):
        raise TooMuch


def filters() -> dict[str, Any]:
    """By name."""
    found: dict[str, Any] = {name: _PLAIN.filters[name] for name in _FILTERS_OF_NOTHING} | OWN
    found |= {name: _filter(name, whole=False) for name in _FILTERS_OF_ITEMS}
    return found | {name: _filter(name, whole=True) for name in _FILTERS_OF_WHOLES}


def tests() -> dict[str, Any]:
    """By name."""
    return {name: _PLAIN.tests[name] for name in _TESTS_OF_NOTHING} | {name: _test(name) for name in _TESTS_OF_WHOLES}
