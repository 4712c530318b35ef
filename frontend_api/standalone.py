"""A fleet without a control plane: one snapshot from a file or from the command line. Pure but for reading the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from controlplane.fleet.errors import InvalidInput
from controlplane.fleet.model import Role
from controlplane.fleet.wire import FleetSnapshot, RoutingPolicy, SnapshotDeployment, SnapshotEngine, decode


def from_file(path: Path) -> FleetSnapshot:
    """A FleetSnapshot in JSON. Raises `InvalidInput` naming what is wrong in it."""
    try:
        snapshot = decode(path.read_bytes(), FleetSnapshot)
    except OSError as error:
        raise InvalidInput(f"--fleet {path}: {error.strerror}", field="fleet") from None
    except msgspec.MsgspecError as error:
        raise InvalidInput(f"--fleet {path}: {error}", field="fleet") from None
    for deployment in snapshot.deployments:
        for engine in deployment.engines:
            check_url(engine.url, f"--fleet {path}: engine {engine.id}")
    return snapshot


def from_urls(
    model: str,
    *,
    prefill: Sequence[str] = (),
    decode: Sequence[str] = (),
    aggregated: Sequence[str] = (),
    routing: RoutingPolicy | None = None,
    secret: str = "",
) -> FleetSnapshot:
    """One deployment of the engines at these URLs. Raises `InvalidInput` for roles that do not fit or a bad URL."""
    if bool(aggregated) == bool(prefill or decode):
        raise InvalidInput("Give --aggregated URL …, or --prefill URL … with --decode URL ….", field="aggregated")
    if not aggregated and not (prefill and decode):
        raise InvalidInput("Disaggregated serving needs both --prefill URL … and --decode URL ….", field="decode")
    engines = []
    for role, urls in ((Role.PREFILL, prefill), (Role.DECODE, decode), (Role.AGGREGATED, aggregated)):
        for index, url in enumerate(urls):
            check_url(url, f"--{role}")
            name = f"{role}-{index}"
            engines.append(SnapshotEngine(id=name, name=name, attempt=1, role=role, url=url.rstrip("/"), secret=secret))
    deployment = SnapshotDeployment(
        name="standalone",
        served_name=model,
        routing=routing or RoutingPolicy(),
        engines=tuple(engines),
        wants_prefill=bool(prefill),
    )
    return FleetSnapshot(version=1, deployments=(deployment,))


def check_url(url: str, where: str) -> None:
    """Raises `InvalidInput` unless it is http://HOST[:PORT]."""
    try:
        parts = urlsplit(url)
        fine = parts.scheme == "http" and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        fine = False
    if not fine or not url.isascii() or any(c.isspace() for c in url):
        raise InvalidInput(f"{where}: {url!r} is no engine URL; write http://HOST:PORT", field="url")
