"""A jinja2 sandbox in which no template takes more than its time and its room, whatever it says.

A template comes from its engine's node, and threads cannot be ended: so nothing that a template can do may take long by itself,
and between two such things the clock is looked at. Three rules make that so:

* **Nothing is computed at compile time**, and what could grow without end is computed by functions of this module: `+`, `~`, `*`,
  `**`, `%`, filters, methods, outputs. Each takes what it makes from the rendering's room first.
* **Each turn of a loop and each call looks at the clock** (the thread's own CPU time, so that a busy machine costs nothing).
* **Values cannot be nested so that reading them takes longer than making them**: before a value is compared, sorted or written it is
  weighed; tuples, whose hash would be computed anew each time, are not built of other values.

What no template needs is refused when it is compiled: recursive loops, includes, autoescaping.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from time import perf_counter, thread_time
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes as nodes
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

SOURCE_CHARACTERS = 128 << 10
"""Of a template; the longest known have a quarter of it."""
ROOM = 8 << 20
ROOM_PER_CHARACTER = 32
ROOM_PER_ITEM = 64 << 10
"""Characters that a rendering may make, copy or look through: so many, and so many for each of the conversation's, and for each
message, tool and document."""
SECONDS = 0.05
SECONDS_PER_ITEM = 0.0001
"""CPU time of a rendering."""
_MOST_NUMBER = 10_000
"""An argument of a filter or method: widths, precisions, counts."""
_MOST_TEXT = 1_000
"""The same in characters, where an argument's length counts for each character of a text."""
_MOST_BITS = 4_096
_LONG_FORMAT = re.compile(r"[0-9]{3}|\*")
_WIDTH = 100


UNCOMPILED = (RecursionError, MemoryError, SyntaxError, OverflowError, ValueError)


class TooMuch(Exception):
    """The template takes more time or room than any conversation needs."""


class Refused(jinja2.TemplateError):
    """The template has a part that is not rendered here."""


class Rendering(Context):
    """One rendering, and what it may still take."""

    def allow(self, messages: list[dict[str, Any]], others: int) -> None:
        """`others`: tools and documents."""
        items = len(messages) + others
        self._messages: list[dict[str, Any]] | None = messages
        self.room = ROOM + ROOM_PER_ITEM * items
        self._seconds = SECONDS + SECONDS_PER_ITEM * items
        self._began_at = 0.0
        self.until = perf_counter() + self._seconds

    def take(self, room: int) -> None:
        self.room -= room
        if self.room < 0:
            self.want()

    def want(self) -> None:
        """The room is used up: what the conversation's characters give is reckoned only now, as few need it."""
        messages, self._messages = self._messages, None
        self.room += ROOM_PER_CHARACTER * sum(_long(message["content"]) for message in messages or ())
        if self.room < 0:
            raise TooMuch

    def look(self) -> None:
        """The time is over by the clock on the wall: raises unless it was spent elsewhere. The thread's own is asked for the first
        time now, so the first time is forgiven."""
        now = thread_time()
        left = self._seconds - (now - self._began_at) if self._began_at else self._seconds
        self._began_at = self._began_at or now
        if left <= 0:
            raise TooMuch
        self.until = perf_counter() + left

    def weigh(self, value: Any, times: int = 1) -> None:
        """Take room for reading all of a value, as often as it holds a part. `times`: that it is read."""
        kind = type(value)
        if kind is str:
            self.take((len(value) >> 3) * times if times == 1 else len(value) * times)
            return
        if value is None or kind is int or kind is bool or isinstance(value, Undefined):
            return
        waiting = [value]
        while waiting:
            value = waiting.pop()
            if isinstance(value, str):
                self.take((len(value) + 1) * times)
            elif isinstance(value, list | tuple | KeysView | ValuesView | ItemsView):
                self.take((len(value) + 1) * times)
                waiting.extend(value)
            elif isinstance(value, Mapping):
                self.take((2 * len(value) + 1) * times)
                waiting.extend(value)
                waiting.extend(value.values())
            elif isinstance(value, Namespace):  # its attributes are written with it
                waiting.append(object.__getattribute__(value, "_Namespace__attrs"))
            else:
                self.take(8 * times)
            if perf_counter() > self.until:
                self.look()

    def text(self, value: Any) -> str:
        self.weigh(value)
        return str(value)


# ---- what takes the place of a template's own parts


@pass_context
def _each(context: Rendering, items: Iterable[Any], room: int = 0) -> Iterator[Any]:
    """The items of a loop. `room`: of the text that each turn may write."""
    for item in items:
        if perf_counter() > context.until:
            context.look()
        context.room -= room
        if context.room < 0:
            context.want()
        yield item


@pass_context
def _spend(context: Rendering, room: int) -> None:
    if perf_counter() > context.until:
        context.look()
    context.take(room)


@pass_context
def _add(context: Rendering, items: list[Any], escapes: bool = False) -> Any:
    """`escapes`: some texts may be marked as safe, and escape what they are added to."""
    if not escapes:
        try:
            context.room -= sum(map(len, items))
            if context.room < 0:
                context.want()
            return "".join(items)
        except TypeError:  # not all are texts
            pass
    total = items[0]
    for item in items[1:]:
        if isinstance(total, tuple):
            raise TooMuch
        for one in (total, item):
            if isinstance(one, str | list):
                context.take(6 * len(one))  # it may be escaped
        total = total + item
    return total


@pass_context
def _added(context: Rendering, items: list[Any], escapes: bool = False) -> str:
    """The same, to be written."""
    total = _add(context, items, escapes)
    return total if type(total) is str else context.text(total)


@pass_context
def _concat(context: Rendering, items: list[Any]) -> str:
    texts = [item if type(item) is str else context.text(item) for item in items]
    context.take(sum(map(len, texts)))
    return "".join(texts)


@pass_context
def _weighed(context: Rendering, value: Any) -> Any:
    context.weigh(value)
    return value


@pass_context
def _searched(context: Rendering, value: Any) -> Any:
    """What is looked for in it may be compared with each of its items."""
    if not isinstance(value, Mapping):
        context.weigh(value)
    return value


@pass_context
def _sliced(context: Rendering, value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        context.take(len(value))
    return value


@pass_context
def _written(context: Rendering, value: Any) -> str:
    if type(value) is not str:
        value = context.text(value)
    context.take(len(value))
    return value


@pass_context
def _to_json(
    context: Rendering,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    context.weigh(value)
    if any(isinstance(part, str) and len(part) > 16 for part in (indent, *(separators or ()))) or (
        isinstance(indent, int) and indent > 16
    ):
        raise TooMuch
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_OWN = {
    "_each": _each, "_spend": _spend, "_add": _add, "_concat": _concat, "_weighed": _weighed, "_searched": _searched,
    "_sliced": _sliced, "_added": _added, "_written": _written, "tojson": _to_json,
}  # fmt: skip


class _Metering(NodeTransformer):
    """Puts them there."""

    def __init__(self, environment: jinja2.Environment, tree: nodes.Template) -> None:
        self._environment = environment
        names = {node.name for node in tree.find_all(nodes.Filter)} | {
            node.value for node in tree.find_all(nodes.Const)
        }
        self._escapes = not names.isdisjoint(("safe", "e", "escape"))

    def _through(self, name: str, node: nodes.Node, *arguments: int) -> nodes.Filter:
        """The node's value through one of our filters."""
        made = nodes.Filter(node, name, [nodes.Const(a) for a in arguments], [], None, None)
        made.set_environment(self._environment).set_lineno(node.lineno)
        return made

    def _spending(self, node: Any) -> Any:
        room = _text_in(node)
        self.generic_visit(node)
        statement = nodes.ExprStmt(self._through("_spend", nodes.Const(room, lineno=node.lineno)))
        node.body.insert(0, statement.set_environment(self._environment).set_lineno(node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = _spending

    def visit_For(self, node: nodes.For) -> nodes.For:
        if node.recursive:
            raise Refused("a recursive loop is not followed")
        room = _text_in(node)
        self.generic_visit(node)
        node.iter = self._through("_each", node.iter, room)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        written: list[nodes.Expr] = []
        for child in node.nodes:
            if isinstance(child, nodes.Filter) and child.name == "_add":
                child.name = "_added"
            elif not isinstance(child, nodes.TemplateData | nodes.Const) and not (
                isinstance(child, nodes.Filter) and child.name == "_concat"
            ):
                child = self._through("_written", child)
            written.append(child)
        node.nodes = written
        return node

    def visit_Add(self, node: nodes.Add) -> nodes.Filter:
        items: list[nodes.Expr] = []
        left: nodes.Expr = node
        while isinstance(left, nodes.Add):
            items.append(self.visit(left.right))
            left = left.left
        items.append(self.visit(left))
        listed = nodes.List(items[::-1]).set_environment(self._environment).set_lineno(node.lineno)
        return self._through("_add", listed, self._escapes)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        listed = nodes.List(node.nodes).set_environment(self._environment).set_lineno(node.lineno)
        return self._through("_concat", listed)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = self._through("_sliced", node.node)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        plain = any(_is_small(side) for side in sides)
        self.generic_visit(node)
        for operand in node.ops:
            if operand.op in ("in", "notin"):
                if not _is_small(operand.expr):
                    operand.expr = self._through("_searched", operand.expr)
            elif not plain or len(node.ops) > 1:
                operand.expr = self._through("_weighed", operand.expr)
        if len(node.ops) > 1 or (not plain and node.ops[0].op not in ("in", "notin")):
            node.expr = self._through("_weighed", node.expr)
        return node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Tuple:
        if node.ctx == "load" and not all(isinstance(item, nodes.Const) for item in node.items):
            raise Refused("a tuple of values is not followed")
        self.generic_visit(node)
        return node

    def visit_Mod(self, node: nodes.Mod) -> nodes.Mod:
        right = node.right
        if isinstance(right, nodes.Tuple):  # of a format, which reads it and leaves it
            right.items = [self.visit(item) for item in right.items]
            node.left = self.visit(node.left)
        else:
            self.generic_visit(node)
        return node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Dict:
        if not all(isinstance(pair.key, nodes.Const) for pair in node.items):
            raise Refused("a key that is computed is not followed")
        self.generic_visit(node)
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Const:
        if isinstance(node.value, int) and node.value.bit_length() > _MOST_BITS:
            raise Refused("a number of thousands of digits is not followed")
        return node

    def visit_Name(self, node: nodes.Name) -> nodes.Name:
        if node.name == "varargs":
            raise Refused("varargs are not followed")
        return node

    def _refuse(self, node: nodes.Node) -> NoReturn:
        raise Refused(f"{type(node).__name__} is not followed")

    visit_Include = visit_Import = visit_FromImport = visit_Extends = _refuse
    visit_ScopedEvalContextModifier = visit_EvalContextModifier = _refuse


def _text_in(node: nodes.Node) -> int:
    """Characters of a template's own that running through it may write."""
    texts = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
    return texts + sum(len(const.value) for const in node.find_all(nodes.Const) if isinstance(const.value, str))


def _is_small(node: nodes.Node) -> bool:
    """Comparing with it takes no longer than it is long itself."""
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(isinstance(item, nodes.Const) for item in node.items)
    return isinstance(node, nodes.Const)


# ---- filters, tests and methods: those that chat templates use, each within bounds

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


def _format(context: Rendering, text: str, sign: str, values: Any) -> None:
    """Take room for a text into which values are put, each as often as it has the sign."""
    if _LONG_FORMAT.search(text):
        raise TooMuch
    count = text.count(sign)
    context.take(len(text) + count * _WIDTH)
    context.weigh(values, count if isinstance(values, Mapping) or sign == "{" else 1)


def _check_arguments(context: Rendering, values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and not -_MOST_NUMBER <= value <= _MOST_NUMBER:
            raise TooMuch
        context.weigh(value)


def _filter(name: str, whole: bool) -> Callable[..., Any]:
    @pass_context
    def run(context: Rendering, value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_arguments(context, args)
        _check_arguments(context, kwargs.values())
        if name not in _LONG_ARGUMENTS:
            _short((*args, *kwargs.values()))
        if not isinstance(value, str | list | tuple | Mapping | int | float | Undefined | None):
            value = list(_each(context, value)) if isinstance(value, Iterable) else value
        if whole:
            context.weigh(value)
        elif isinstance(value, str | list | tuple | Mapping):
            context.take(len(value))
        _foresee(context, name, value, args, kwargs)
        result = _PLAIN.call_filter(name, value, args, kwargs, context)
        _take_for(context, result)
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
        _format(context, str(value), "%", kwargs or args)
    elif name == "sum" and (len(args) > 1 or "start" in kwargs):
        raise TooMuch


def _replaced(text: str, old: str, new: str) -> int:
    """Characters of a text in which one is replaced by another."""
    return len(text) + text.count(old) * len(new)


def _short(texts: Iterable[Any]) -> None:
    if any(isinstance(text, str) and len(text) > _MOST_TEXT for text in texts):
        raise TooMuch


def _take_for(context: Rendering, result: Any) -> None:
    if isinstance(result, str):
        context.take(len(result))
    elif isinstance(result, list | tuple | dict):
        context.take(16 * len(result))
    elif isinstance(result, int) and result.bit_length() > _MOST_BITS:
        raise TooMuch


def _test(name: str) -> Callable[..., Any]:
    @pass_context
    def run(context: Rendering, value: Any, *args: Any) -> bool:
        _check_arguments(context, args)
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


def _method(context: Rendering, owner: Any, name: str, args: tuple[Any, ...]) -> None:
    """Whether a method of a value may be called, and room for it."""
    if isinstance(owner, str) and name in _OF_TEXTS:
        context.weigh(owner)
        _check_arguments(context, args)
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
        _check_arguments(context, args)
    elif not (isinstance(owner, dict) and name in _OF_DICTS):
        raise TooMuch


_OF_DICT = frozenset(dir(dict))
_OF_JINJA = {"_loop_vars", "_block_vars"}
"""Arguments that compiled templates give every function, for those that ask for them."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Where templates are compiled. `names`: further functions that they may call."""

    context_class = Rendering
    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self, extensions: list[type[jinja2.ext.Extension]], names: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False)
        every, tests = self.filters, self.tests
        self.filters = {name: every[name] for name in _FILTERS_OF_NOTHING} | _OWN
        self.filters |= {name: _filter(name, whole=False) for name in _FILTERS_OF_ITEMS}
        self.filters |= {name: _filter(name, whole=True) for name in _FILTERS_OF_WHOLES}
        self.tests = {name: tests[name] for name in _TESTS_OF_NOTHING} | {
            name: _test(name) for name in _TESTS_OF_WHOLES
        }
        self.globals = {"range": safe_range, "dict": _dict, "namespace": Namespace, **names}
        self._callable = frozenset(map(id, self.globals.values()))

    def load(self, source: str) -> jinja2.Template:
        """Raises `jinja2.TemplateError`, and one of `UNCOMPILED` for what is nested too deep."""
        if len(source) > SOURCE_CHARACTERS:
            raise Refused(f"it is longer than {SOURCE_CHARACTERS} characters")
        tree = self.parse(source)
        return self.from_string(_Metering(self, tree).visit(tree))

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
            _format(context, left, "%", right)
        elif operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, str | list) and isinstance(other, int):
                    context.take(len(one) * max(other, 0))
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MOST_BITS:
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
            _format(context, __obj.__wrapped__.__self__, "{", given)
        elif isinstance(owner, LoopContext):
            _check_arguments(context, args)
        elif isinstance(owner, jinja2.ext.Extension):
            pass
        elif (kind is BuiltinMethodType or kind is MethodType) and kwargs.keys() <= _OF_JINJA:
            _method(context, owner, __obj.__name__, args)
        else:
            raise TooMuch
        result = super().call(context, __obj, *args, **kwargs)
        _take_for(context, result)
        return result


def _dict(**values: Any) -> dict[str, Any]:
    return values


def render(template: jinja2.Template, variables: dict[str, Any], messages: list[dict[str, Any]]) -> str:
    """The text of a prompt. Raises `TooMuch`, and whatever the template raises."""
    context = Rendering(template.environment, variables, template.name, template.blocks)
    context.allow(messages, len(variables.get("tools") or ()) + len(variables.get("documents") or ()))
    return "".join(template.root_render_func(context))


def _long(content: Any) -> int:
    if isinstance(content, str):
        return len(content)
    return sum(len(part.get("text") or "") for part in content or ())
