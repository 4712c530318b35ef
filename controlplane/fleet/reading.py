"""Reading a plain mapping (YAML, JSON, a form) into a struct, telling all that is wrong at once and in people's words. Pure.

msgspec decodes; it would stop at the first slip and name Python's types.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Struct

from controlplane.fleet.errors import Problems


def read(value: Any, struct: type[Struct], at: str, found: Problems, needed: Mapping[str, str]) -> dict[str, Any]:
    """The fields of the struct that the mapping gives and that are of their kind; what is not goes to `found`.

    A field that is itself a mapping by names is given as it is. `at`: the dotted name of the mapping itself. `needed`: what to say where a field without a default is missing.
    """
    if not isinstance(value, Mapping):
        found.add("write a mapping of fields, for example `replicas: 1`" if at else "write a mapping of fields", at)
        return {}
    fields = {field.name: field for field in msgspec.structs.fields(struct)}
    for name in value:
        if name not in fields:
            found.add(f"there is no such field; the fields are: {', '.join(fields)}", dotted(at, str(name)))
    given: dict[str, Any] = {}
    for name, field in fields.items():
        if name not in value:
            if field.required:
                found.add(needed.get(name, "is needed"), dotted(at, name))
            continue
        if typing.get_origin(field.type) is dict:
            given[name] = value[name]
            continue
        inner = _struct_of(field.type)
        if inner is not None:
            with suppress(TypeError):  # what it cannot do without was not given: told already
                given[name] = inner(**read(value[name], inner, dotted(at, name), found, needed))
            continue
        try:
            given[name] = msgspec.convert(value[name], field.type)
        except msgspec.ValidationError:
            found.add(_wanted(field.type, value[name], optional=not field.required), dotted(at, name))
    return given


def dotted(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name


def _struct_of(kind: Any) -> type[Struct] | None:
    return kind if isinstance(kind, type) and issubclass(kind, Struct) else None


def _wanted(kind: Any, value: Any, *, optional: bool) -> str:
    """What to write instead of a value of another kind."""
    kinds = [k for k in typing.get_args(kind) if k is not type(None)] if isinstance(kind, types.UnionType) else [kind]
    first = kinds[0]
    if isinstance(first, type) and issubclass(first, StrEnum):
        return f"{repr(value)[:60]} is none of {', '.join(first)}"
    if typing.get_origin(first) is tuple:
        return "write a list of texts; put numbers in quotes, like ['--seed', '7']"
    said = {int: "enter a whole number", float: "enter a number", str: "enter text"}.get(first, "this cannot be read")
    return f"{said}, or leave it out" if optional else said
