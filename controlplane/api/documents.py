"""Bodies as JSON or YAML, bounded in size and depth; the YAML form of a deployment.

YAML here is data only: no tags, no anchors (an alias can make a small text enormous), no key twice.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from typing import Any, NoReturn

import yaml
from rest_framework.exceptions import APIException, ParseError
from rest_framework.parsers import BaseParser
from rest_framework.renderers import BaseRenderer

MAX_BYTES = 1 << 16
"""Of a body. A document is a few hundred bytes; PyYAML takes seconds for a megabyte."""
MAX_DEPTH = 20


class TooLarge(APIException):
    status_code = 413


def _bounded(stream: Any) -> str:
    data: bytes = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise TooLarge(f"the body is longer than {MAX_BYTES} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise ParseError("the body is not UTF-8 text") from None


def _mapping(value: Any, kind: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        found = "is empty" if value is None else "is a list" if isinstance(value, list) else "is a single value"
        raise ParseError(f"the body {found}; send one {kind} mapping")
    try:
        json.dumps(value, ensure_ascii=False, skipkeys=True, default=str).encode()
    except UnicodeEncodeError:  # such a text can neither be stored nor shown again
        raise ParseError(
            "the body escapes half a surrogate pair (\\ud800 to \\udfff): write the character itself"
        ) from None
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


class JSONParser(BaseParser):
    media_type = "application/json"

    def parse(self, stream: Any, media_type: str | None = None, parser_context: Any = None) -> Mapping[str, Any]:
        """The body as a mapping. Raises `ParseError` saying where it is not JSON."""
        try:
            value = json.loads(_bounded(stream), parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise ParseError(f"the body is not valid JSON: {error}") from None
        return _mapping(value, "JSON")


class _Loader(yaml.SafeLoader):
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            at = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.constructor.ConstructorError(None, None, "aliases are not taken", at)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise yaml.constructor.ConstructorError(None, None, f"more than {MAX_DEPTH} levels", None)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class YAMLParser(BaseParser):
    media_type = "application/yaml"

    def parse(self, stream: Any, media_type: str | None = None, parser_context: Any = None) -> Mapping[str, Any]:
        """The body as a mapping. Raises `ParseError` saying where it is not YAML, or not one document."""
        try:
            value = yaml.load(_bounded(stream), Loader=_Loader)  # noqa: S506 - a SafeLoader, made stricter
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise ParseError(f"the body is not valid YAML: {' '.join(str(error).split())}") from None
        return _mapping(value, "YAML")


class YAMLRenderer(BaseRenderer):
    media_type = "application/yaml"
    format = "yaml"
    charset = "utf-8"

    def render(self, data: Any, accepted_media_type: str | None = None, renderer_context: Any = None) -> bytes:
        return yaml.safe_dump(data, sort_keys=False, allow_unicode=True).encode()
