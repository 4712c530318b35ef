"""A fleet without a control plane: one snapshot from a file or from the command line. Pure but for reading the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from controlplane.fleet.errors import InvalidInput
from controlplane.fleet.model import Role
from controlplane.fleet.spec import check_routing
from controlplane.fleet.wire import (
    FleetSnapshot,
    RoutingMode,
    RoutingPolicy,
    SnapshotDeployment,
    SnapshotEngine,
    decode,
)
from frontend_api.routing import intake


def from_file(path: Path) -> FleetSnapshot:
    """A FleetSnapshot in JSON. Raises `InvalidInput` naming what is wrong in it."""
    try:
        snapshot = decode(path.read_bytes(), FleetSnapshot)
    except OSError as error:
        raise InvalidInput(f"--fleet {path}: {error.strerror}", field="fleet") from None
    except msgspec.MsgspecError as error:
        raise InvalidInput(f"--fleet {path}: {error}", field="fleet") from None
    served: set[str] = set()
    for deployment in snapshot.deployments:
        if deployment.served_name in served:
            raise InvalidInput(f"--fleet {path}: two deployments serve {deployment.served_name}.", field="fleet")
        served.add(deployment.served_name)
        check_routing(deployment.routing, f"--fleet {path}: deployment {deployment.name}: routing.{{}}".format)
        for engine in deployment.engines:
            check_url(engine.url, f"--fleet {path}: engine {engine.id}")
        _, trouble = intake.engines(deployment)
        if trouble:
            raise InvalidInput(f"--fleet {path}: {trouble[0]}", field="fleet")
    return snapshot


def from_urls(
    model: str,
    *,
    prefill: Sequence[str] = (),
    decode: Sequence[str] = (),
    aggregated: Sequence[str] = (),
    routing: RoutingPolicy | None = None,
    tokenizer: str = "",
    kv_events: Sequence[str] = (),
) -> FleetSnapshot:
    """One deployment of the engines at these URLs. `tokenizer`: a model's folder. `kv_events`:
    `URL=tcp://…[,replay=tcp://…][,ranks=N]` per engine. Raises `InvalidInput` for what is no URL or does not fit together."""
    routing = routing or RoutingPolicy()
    if bool(aggregated) == bool(prefill or decode):
        raise InvalidInput("Give --aggregated URL …, or --prefill URL … with --decode URL ….", field="aggregated")
    if not aggregated and not (prefill and decode):
        raise InvalidInput("Disaggregated serving needs both --prefill URL … and --decode URL ….", field="decode")
    if routing.mode in (RoutingMode.KV, RoutingMode.KV_APPROXIMATE) and not tokenizer:
        raise InvalidInput(
            f"--mode {routing.mode} needs the model's tokens: add --tokenizer FOLDER.", field="tokenizer"
        )
    if routing.mode is RoutingMode.KV and not kv_events:
        raise InvalidInput(
            "--mode kv lives on the engines' events: add --kv-events URL=tcp://HOST:PORT,replay=tcp://HOST:PORT for each, "
            "or choose --mode kv-approximate.",
            field="kv_events",
        )
    if kv_events and routing.mode is not RoutingMode.KV:
        raise InvalidInput(f"--mode {routing.mode} follows no --kv-events: add --mode kv.", field="kv_events")
    publishers: dict[str, _Publisher] = {}
    for text in kv_events:
        url, publisher = _publisher(text)
        if url in publishers:
            raise InvalidInput(f"--kv-events: {url} is given twice.", field="kv_events")
        publishers[url] = publisher
    engines: list[SnapshotEngine] = []
    for role, urls in ((Role.PREFILL, prefill), (Role.DECODE, decode), (Role.AGGREGATED, aggregated)):
        for index, url in enumerate(urls):
            check_url(url, f"--{role}")
            name = f"{role}-{index}"
            url = url.rstrip("/")
            if any(url == engine.url for engine in engines):
                raise InvalidInput(f"--{role}: {url} is given twice.", field=str(role))
            events, replay, ranks = publishers.pop(url, _Publisher())
            engines.append(
                SnapshotEngine(
                    id=name, name=name, attempt=1, role=role, url=url, events=events, replay=replay, ranks=ranks
                )
            )
    if publishers:
        raise InvalidInput(f"--kv-events: {next(iter(publishers))} is none of the engines given.", field="kv_events")
    deployment = SnapshotDeployment(
        name="standalone",
        served_name=model,
        routing=routing,
        engines=tuple(engines),
        wants_prefill=bool(prefill),
        tokenizer=tokenizer,
    )
    return FleetSnapshot(version=1, deployments=(deployment,))


class _Publisher(NamedTuple):
    events: str = ""
    replay: str = ""
    ranks: int = 1


def _publisher(text: str) -> tuple[str, _Publisher]:
    """`URL=tcp://…[,replay=tcp://…][,ranks=N]` as (URL, publisher)."""
    url, _, rest = text.partition("=")
    events, *options = rest.split(",")
    told = dict(option.partition("=")[::2] for option in options)
    replay, ranks = told.pop("replay", None), told.pop("ranks", "1")
    addresses = (events,) if replay is None else (events, replay)
    if (
        told
        or not all(map(_is_publisher, addresses))
        or not (ranks.isdecimal() and 1 <= int(ranks) <= intake.MOST_RANKS)
    ):
        raise InvalidInput(
            f"--kv-events: {text!r} is not understood; write URL=tcp://HOST:PORT[,replay=tcp://HOST:PORT][,ranks=N]",
            field="kv_events",
        )
    return url.rstrip("/"), _Publisher(events, replay or "", int(ranks))


def _is_publisher(address: str) -> bool:
    try:
        parts = urlsplit(address)
        return (
            parts.scheme == "tcp"
            and bool(parts.hostname)
            and bool(parts.port)
            and not parts.path
            and "*" not in address
        )
    except ValueError:
        return False


def check_url(url: str, where: str) -> None:
    """Raises `InvalidInput` unless it is http://HOST[:PORT]."""
    try:
        parts = urlsplit(url)
        port, rest = parts.port, (parts.path.strip("/"), parts.query, parts.fragment, parts.username)
        fine = parts.scheme == "http" and bool(parts.hostname) and port != 0 and not any(rest)
    except ValueError:
        fine = False
    if not fine or not url.isascii() or any(c.isspace() for c in url):
        raise InvalidInput(f"{where}: {url!r} is not the URL of an engine; write http://HOST:PORT", field="url")
