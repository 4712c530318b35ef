"""What a router takes in of a snapshot: each entry is judged by itself, whoever made it. Pure.

An engine's address and figures come from the reports of its node, which may be taken over or broken. The control plane judges them
and so does the router: neither relies on the other. An engine that cannot be used is left out, and one whose figures of its KV
cannot be is used without them; its deployment and all others go on, and right values in a later snapshot heal it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import ip_address
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from controlplane.fleet.wire import (
    FleetSnapshot,
    RoutingPolicy,
    SnapshotDeployment,
    SnapshotEngine,
    SnapshotKey,
)
from frontend_api.kv.knowledge import Trouble

MOST_ENGINES = 1_024
"""Of a deployment."""
MOST_RANKS = 256
"""Of an engine: each takes several sockets."""
MOST_BLOCK_SIZE = 1 << 16
MOST_BLOCKS = 1 << 32
MOST_TOKENS = 1 << 32

_NAME = re.compile(r"[!-~](?:[ -~]{0,198}[!-~])?")
_SECRET = re.compile(r"[!-~]{0,1024}")
_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,253}")
_DIGEST = re.compile(r"[!-~]{1,200}:[0-9a-f]{64}")
_T = TypeVar("_T", bound=Struct)


class _Deployment(Struct):
    """`SnapshotDeployment` with what is judged by itself left unread."""

    name: str
    served_name: str
    routing: Raw = Raw(b"{}")
    engines: tuple[Raw, ...] = ()
    broken_pairs: tuple[tuple[str, str], ...] = ()
    wants_prefill: bool = True
    status: str = ""
    tokenizer: str = ""
    tokenizer_key: str = ""


class _Snapshot(Struct):
    version: int
    made_at: float = 0.0
    deployments: tuple[Raw, ...] = ()
    keys: tuple[Raw, ...] = ()


def read(data: bytes) -> tuple[FleetSnapshot, list[str]]:
    """A snapshot from its JSON, and a sentence for each entry that could not be read. Raises `msgspec.MsgspecError` where it is no
    snapshot at all."""
    whole = msgspec.json.decode(data, type=_Snapshot)
    trouble: list[str] = []
    deployments = [found for raw in whole.deployments if (found := _read_deployment(raw, trouble)) is not None]
    keys = _read_all(whole.keys, SnapshotKey, "An API key", trouble)
    return FleetSnapshot(whole.version, whole.made_at, tuple(deployments), keys), trouble


def _read_deployment(raw: Raw, trouble: list[str]) -> SnapshotDeployment | None:
    found = _read_all((raw,), _Deployment, "A deployment", trouble)
    if not found:
        return None
    (entry,) = found
    routing = _read_all((entry.routing,), RoutingPolicy, f"{entry.name}: the routing (the defaults hold)", trouble)
    engines = _read_all(entry.engines, SnapshotEngine, f"{entry.name}: an engine", trouble)
    fields = {name: getattr(entry, name) for name in _Deployment.__struct_fields__}
    return SnapshotDeployment(**{**fields, "routing": routing[0] if routing else RoutingPolicy(), "engines": engines})


def _read_all(raws: Iterable[Raw], kind: type[_T], what: str, trouble: list[str]) -> tuple[_T, ...]:
    found = []
    for raw in raws:
        try:
            found.append(msgspec.json.decode(raw, type=kind))
        except (msgspec.MsgspecError, RecursionError) as error:  # it quotes no value
            trouble.append(f"{what} cannot be read: {error}"[:300])
    return tuple(found)


class Taken:
    """An engine as the router may use it."""

    __slots__ = ("refused", "spec")

    def __init__(self, spec: SnapshotEngine, refused: str = "") -> None:
        self.spec = spec
        self.refused = refused
        """Why its KV is not followed; empty: it is, where it tells of it."""


def engines(entry: SnapshotDeployment) -> tuple[list[Taken], list[str]]:
    """The engines of a deployment that can be used, and a sentence for each that cannot or not fully."""
    taken: list[Taken] = []
    trouble: list[str] = []
    for spec in entry.engines[:MOST_ENGINES]:
        if (why := _unusable(spec)) is not None:
            trouble.append(f"{entry.name}: engine {spec.id[:80]!r} is left out: {why}.")
        elif (why := _impossible(spec)) is None:
            taken.append(Taken(spec))
        else:
            trouble.append(f"{entry.name}: the KV of engine {spec.id!r} is not followed: {why}.")
            length = spec.max_model_len if _is_number(spec.max_model_len, MOST_TOKENS) else None
            plain = replace(spec, block_size=None, kv_blocks=None, max_model_len=length, events="", replay="", ranks=1)
            taken.append(Taken(plain, Trouble.CLAIMS))
    if len(entry.engines) > MOST_ENGINES:
        trouble.append(f"{entry.name}: of {len(entry.engines)} engines only {MOST_ENGINES} are used.")
    return taken, trouble


def crowd_out(taken: Iterable[Taken], ranks: int) -> list[str]:
    """Leave KV events to the engines with the fewest ranks, up to so many ranks in all; a sentence for each of the others."""
    trouble = []
    for engine in sorted((one for one in taken if one.spec.events), key=lambda one: one.spec.ranks):
        ranks -= engine.spec.ranks
        if ranks < 0:
            trouble.append(
                f"The events of engine {engine.spec.id!r} are not followed: there are too many ranks in all."
            )
            engine.spec = replace(engine.spec, events="", replay="", ranks=1)
            engine.refused = Trouble.CROWDED
    return trouble


def tokenizer_key(key: str) -> str:
    """The key, if it ends in a digest: a folder is named by that."""
    return key if _DIGEST.fullmatch(key) else ""


def _unusable(spec: SnapshotEngine) -> str | None:
    if not _NAME.fullmatch(spec.id) or not _NAME.fullmatch(spec.name):
        return "its id or name is not plain text of at most 200 characters"
    if not 0 <= spec.attempt < 1 << 53:
        return "its attempt is not a possible number"
    if not _SECRET.fullmatch(spec.secret):
        return "its secret has characters that no header may have"
    if not _is_address(spec.url, "http"):
        return "its url is not an http://HOST:PORT that an engine can have"
    return None


def _impossible(spec: SnapshotEngine) -> str | None:
    for name, most in (("block_size", MOST_BLOCK_SIZE), ("kv_blocks", MOST_BLOCKS), ("max_model_len", MOST_TOKENS)):
        if not _is_number(getattr(spec, name), most):
            return f"{name} is not between 1 and {most}"
    if not 1 <= spec.ranks <= MOST_RANKS:
        return f"ranks is not between 1 and {MOST_RANKS}"
    for name, address in (("events", spec.events), ("replay", spec.replay)):
        if address and not _is_address(address, "tcp", spec.ranks):
            return f"{name} is not a tcp://HOST:PORT that an engine can have"
    return None


def _is_number(value: int | None, most: int) -> bool:
    return value is None or 1 <= value <= most


def _is_address(url: str, scheme: str, ports: int = 1) -> bool:
    """Whether it is `scheme://HOST:PORT` and no more, `ports` ports from there on are ports, and the host is none that only leads
    somewhere else: link-local ones have the secrets of clouds, multicast ones are everybody's."""
    try:
        parts = urlsplit(url)
        port = parts.port or (80 if scheme == "http" else 0)
        host = parts.hostname or ""
    except ValueError:
        return False
    if url != f"{scheme}://{parts.netloc}" or "@" in parts.netloc or not _HOST.fullmatch(host):
        return False
    if not 1 <= port <= 65_536 - ports:
        return False
    try:
        address: Any = ip_address(host.partition("%")[0])
    except ValueError:
        return True
    address = getattr(address, "ipv4_mapped", None) or address
    return not (address.is_link_local or address.is_multicast)
