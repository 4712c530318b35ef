"""A smallest JSON value that fits a JSON schema: what a forced tool call or a JSON answer says."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

_PIECE = 6


def example(schema: object) -> object:
    """A value of the schema's type. Unknown or missing schemas give an empty object."""
    if not isinstance(schema, Mapping):
        return {}
    if isinstance(options := schema.get("enum"), list) and options:
        return options[0]
    if "const" in schema:
        return schema["const"]
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(options := schema.get(key), list) and options:
            return example(options[0])
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = kind[0] if kind else None
    match kind:
        case "string":
            return "text"
        case "integer":
            return 1
        case "number":
            return 1.0
        case "boolean":
            return True
        case "null":
            return None
        case "array":
            return [example(schema.get("items"))] if schema.get("minItems") else []
    properties = schema.get("properties")
    return {name: example(part) for name, part in properties.items()} if isinstance(properties, Mapping) else {}


def script(schema: object) -> tuple[str, ...]:
    """The value's JSON text in pieces of a token each."""
    text = msgspec.json.encode(example(schema)).decode()
    return tuple(text[at : at + _PIECE] for at in range(0, len(text), _PIECE))
