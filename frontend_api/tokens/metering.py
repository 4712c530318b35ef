"""Puts functions of its own in the place of those parts of a template that could grow or go on without end: sums, texts put
together, loops, slices, comparisons, outputs, calls of macros. What no chat template needs is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from time import perf_counter
from typing import Any, NoReturn

import jinja2
import jinja2.nodes as nodes
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer

from frontend_api.tokens.rendering import Rendering, TooMuch

MOST_BITS = 4_096
"""Of a number."""


class Refused(jinja2.TemplateError):
    """The template has a part that is not rendered here."""


@pass_context
def each(context: Rendering, items: Iterable[Any], room: int = 0) -> Iterator[Any]:
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


FILTERS = {
    "_each": each, "_spend": _spend, "_add": _add, "_concat": _concat, "_weighed": _weighed, "_searched": _searched,
    "_sliced": _sliced, "_added": _added, "_written": _written, "tojson": _to_json,
}  # fmt: skip


class Metering(NodeTransformer):
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
        if isinstance(node.value, int) and node.value.bit_length() > MOST_BITS:
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
