"""Whether a chat template loops over a message's content, so that the engine hands it a list of parts and not one text.

The engine guesses it from the template's syntax tree, and the two forms can render differently; this is the same guess
(vLLM 0.32, `renderers/hf.py`: `_detect_content_format`), oddities included. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes


class _Unclear(Exception):
    """The tree has a form in which vLLM's own search fails; it then takes content as one text."""


def takes_parts(tree: nodes.Template) -> bool:
    """True where some loop goes over the parts of a message's content."""
    try:
        return _loops_over_content(tree)
    except _Unclear:
        return False


def _is_access(node: nodes.Node, variable: str, key: str | None = None) -> bool:
    """`variable`, or `variable.key` where a key is given, also through filters, tests and slices."""
    if isinstance(node, nodes.Filter | nodes.Test):
        return node.node is not None and _is_access(node.node, variable, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _is_access(node.node, variable, key)
    if key is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == variable
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == key and _is_name(node.node, variable)
    return isinstance(node, nodes.Getattr) and node.attr == key and _is_name(node.node, variable)


def _is_name(node: nodes.Node, variable: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == variable


def _target(node: nodes.Node) -> str:
    if not isinstance(node, nodes.Name):
        raise _Unclear
    return node.name


def _message_lists(tree: nodes.Template) -> list[str]:
    """`messages`, and every variable that such a list is assigned to."""
    found = ["messages"]
    for name in found:  # grows while it is read
        for assign in tree.find_all(nodes.Assign):
            if _is_access(assign.node, name) and (target := _target(assign.target)) not in found:
                found.append(target)
    return found


def _messages(tree: nodes.Template) -> list[str]:
    """The variables of loops over messages."""
    lists = _message_lists(tree)
    return [
        _target(loop.target) for loop in tree.find_all(nodes.For) if any(_is_access(loop.iter, name) for name in lists)
    ]


def _content_parameters(tree: nodes.Template, macro: nodes.Macro, messages: list[str]) -> set[str]:
    """The parameters of a macro that some call gives a message's content."""
    names = [argument.name for argument in macro.args]
    found: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        given: Iterator[tuple[str, nodes.Expr]] = zip(names, call.args, strict=False)
        found |= {name for name, value in given if _is_content(value, messages)}
        found |= {k.key for k in call.kwargs if k.key in names and _is_content(k.value, messages)}
    return found


def _is_content(node: nodes.Node, messages: list[str]) -> bool:
    return any(_is_access(node, message, "content") for message in messages)


def _loops_over_content(tree: nodes.Template) -> bool:
    messages = _messages(tree)
    in_macros: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        parameters = _content_parameters(tree, macro, messages)
        for loop in macro.find_all(nodes.For):
            known = in_macros.setdefault(id(loop), set())
            if parameters:
                known.clear()
                known.update(parameters)
    for loop in tree.find_all(nodes.For):
        named = loop.iter.name if isinstance(loop.iter, nodes.Name) else None
        inside = in_macros.get(id(loop))
        if _is_content(loop.iter, messages) or (named == "content" if inside is None else named in inside):
            _target(loop.target)
            return True
    return False
