"""The deployment form and its YAML: two writings of one document, turned into each other. Pure; checking is `fleet.spec`'s.

Fields are named as in the document (`pools.prefill.replicas`), so that an error finds its field by name.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from contextlib import suppress
from itertools import count
from typing import Any, Final

import msgspec
import yaml

from controlplane.fleet import spec
from controlplane.fleet.errors import InvalidInput, Problems
from controlplane.fleet.model import Role
from controlplane.fleet.wire import RoutingPolicy

LONGEST_YAML = 100_000
"""Characters. A document is some dozens of lines."""
SHAPES: Final = {"disaggregated": (Role.PREFILL, Role.DECODE), "aggregated": (Role.AGGREGATED,)}
_TEXT = ("name", "model", "served_name", "runtime", "dtype")
_NUMBERS = ("max_model_len", "block_size")
_POOL_NUMBERS = ("replicas", "tensor_parallel", "kv_cache_bytes", "max_num_batched_tokens")
_ROUTING_WORDS = ("mode", "on_prefill_failure", "disaggregate", "affinity")
_ROUTING_NUMBERS: Final[Mapping[str, type[int] | type[float]]] = {
    "local_below_tokens": int,
    "temperature": float,
    "max_in_flight": int,
    "queue_limit": int,
    "queue_seconds": float,
    "silence_seconds": float,
    "gap_seconds": float,
}
_ROUTING = (*_ROUTING_WORDS, *_ROUTING_NUMBERS)

FIELDS: Final = frozenset(
    {*_TEXT, *_NUMBERS, *(f"routing.{key}" for key in _ROUTING)}
    | {f"pools.{role}.{key}" for role in Role for key in (*_POOL_NUMBERS, "memory_fraction", "extra_args")}
)
"""Everything that has a field of its own."""

DEFAULTS: Final[Mapping[str, str]] = {
    "shape": "disaggregated",
    "runtime": "auto",
    "dtype": "auto",
    **{
        f"routing.{key}": f"{value:g}" if isinstance(value, float) else str(value)
        for key, value in msgspec.structs.asdict(RoutingPolicy()).items()
        if value is not None
    },
    **{f"pools.{role}.replicas": "1" for role in Role},
    **{f"pools.{role}.tensor_parallel": "1" for role in Role},
}


def _number(field: str, text: str, kind: type[int] | type[float]) -> int | float:
    try:
        return kind(text.replace(",", "").replace("_", ""))
    except ValueError:
        raise InvalidInput(f"{field}: enter a {'whole ' if kind is int else ''}number", field=field) from None


def document_of(values: Mapping[str, str]) -> dict[str, Any]:
    """The document that a filled-in form means; empty and default fields are left out.

    Raises `InvalidInput` where a text is no number or a quote is not closed: with these problems and all others that
    `fleet.spec` finds in the document.
    """
    found = Problems()
    given = {key: text.strip() for key, text in values.items() if text.strip()}
    document: dict[str, Any] = {k: given[k] for k in _TEXT if k in given and given[k] != DEFAULTS.get(k)}
    for key in _NUMBERS:
        if key in given:
            with found.part():
                document[key] = _number(key, given[key], int)
    routing = _routing({k: given.get(f"routing.{k}", "") for k in _ROUTING}, "routing.", found)
    usual = msgspec.structs.asdict(RoutingPolicy())
    if routing := {k: value for k, value in routing.items() if value not in (None, usual[k])}:
        document["routing"] = routing
    roles = SHAPES.get(given.get("shape", "disaggregated"), SHAPES["disaggregated"])
    document["pools"] = {role.value: _pool(f"pools.{role}", given, found) for role in roles}
    if found:
        with found.part():
            spec.parse(document)
    found.raise_any()
    return document


def routing_of(values: Mapping[str, str], at: str = "") -> dict[str, Any]:
    """The fields of the routing policy among the values; an empty number is None: the default. `at`: what stands before
    their names on the page.

    Raises `InvalidInput` with each field whose text is no number, or one out of bounds.
    """
    found = Problems()
    policy = _routing(values, at, found)
    with found.part(), suppress(msgspec.ValidationError):  # a word that is no choice: `fleet.spec` tells it on saving
        given = {key: value for key, value in policy.items() if value is not None}
        spec.check_routing(msgspec.convert(given, RoutingPolicy), f"{at}{{}}".format)
    found.raise_any()
    return policy


def _routing(values: Mapping[str, str], at: str, found: Problems) -> dict[str, Any]:
    policy: dict[str, Any] = {k: values[k] for k in _ROUTING_WORDS if values.get(k)}
    for key, kind in _ROUTING_NUMBERS.items():
        if key in values:
            text = values[key].strip()
            with found.part():
                policy[key] = _number(at + key, text, kind) if text else None
    return policy


def _pool(at: str, given: Mapping[str, str], found: Problems) -> dict[str, Any]:
    pool: dict[str, Any] = {"replicas": 1}
    for key in (*_POOL_NUMBERS, "memory_fraction"):
        text = given.get(f"{at}.{key}")
        if text and (key == "replicas" or text != DEFAULTS.get(f"{at}.{key}")):
            with found.part():
                pool[key] = _number(f"{at}.{key}", text, float if key == "memory_fraction" else int)
    if text := given.get(f"{at}.extra_args"):
        with found.part():
            pool["extra_args"] = _arguments(f"{at}.extra_args", text)
    return pool


def _arguments(field: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InvalidInput(f"{field}: {error}", field=field) from None


def values_of(document: Mapping[str, Any]) -> dict[str, str]:
    """The form's fields for a document. Whatever has no field of its own is ignored: `fleet.spec` refuses it on saving."""
    values = dict(DEFAULTS)
    for key in (*_TEXT, *_NUMBERS):
        if document.get(key) is not None:
            values[key] = str(document[key])
    routing = document.get("routing")
    if isinstance(routing, Mapping):
        values |= {f"routing.{k}": str(routing[k]) for k in _ROUTING if routing.get(k) is not None}
    pools = document.get("pools")
    if not isinstance(pools, Mapping):
        return values
    values["shape"] = "aggregated" if Role.AGGREGATED in pools else "disaggregated"
    for role, pool in pools.items():
        if not isinstance(pool, Mapping):
            continue
        at = f"pools.{role}"
        values |= {f"{at}.{k}": str(pool[k]) for k in (*_POOL_NUMBERS, "memory_fraction") if pool.get(k) is not None}
        if isinstance(pool.get("extra_args"), list | tuple):
            values[f"{at}.extra_args"] = shlex.join(str(x) for x in pool["extra_args"])
    return values


def copy_of(document: Mapping[str, Any], taken: Collection[str]) -> dict[str, Any]:
    """The document under a name that is free, and a served name of its own."""
    stem = str(document["name"])[:34].rstrip("-")
    name = next(name for n in count(1) if (name := f"{stem}-copy{n if n > 1 else ''}") not in taken)
    return {**document, "name": name, "served_name": name}


def fits(document: Mapping[str, Any]) -> bool:
    """Whether the form has a field for everything that the document says: else only its YAML shows it whole."""
    return spec.parse(document_of(values_of(document))) == spec.parse(document)


def yaml_of(document: Mapping[str, Any]) -> str:
    """The document as YAML: keys in their own order, no aliases."""
    return yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True, width=100)


def parse_yaml(text: str) -> dict[str, Any]:
    """A document written as YAML.

    Raises `InvalidInput` (field `yaml`) naming line and column of a slip, or what was found instead of a mapping.
    """
    if len(text) > LONGEST_YAML:
        raise InvalidInput(f"yaml: a document has at most {LONGEST_YAML:,} characters", field="yaml")
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise InvalidInput(
            f"yaml: {where}{getattr(error, 'problem', None) or 'this is not YAML'}", field="yaml"
        ) from None
    except RecursionError:
        raise InvalidInput("yaml: this is nested too deeply", field="yaml") from None
    except ValueError as error:  # a number or a date that is none: 2026-13-45
        raise InvalidInput(f"yaml: {error}", field="yaml") from None
    if not isinstance(document, dict):
        raise InvalidInput("yaml: write a mapping of fields, for example `name: smollm2`", field="yaml")
    return {str(key): value for key, value in document.items()}
