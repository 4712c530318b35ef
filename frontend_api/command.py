"""The command line of the router: options, the one listening socket, and the processes on it. See --help."""

from __future__ import annotations

import argparse
import errno
import logging
import resource
import socket
import sys
from enum import StrEnum
from pathlib import Path

from controlplane.fleet import addresses, config
from controlplane.fleet.errors import InvalidInput
from controlplane.fleet.spec import check_routing
from controlplane.fleet.wire import Affinity, Disaggregate, OnPrefillFailure, RoutingMode, RoutingPolicy
from frontend_api import standalone
from frontend_api.http import vanished
from frontend_api.http.reading import Limits
from frontend_api.processes.process import Options
from frontend_api.processes.supervise import Supervisor

OPEN_FILES = 65_536


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m frontend_api",
        description="The router: an OpenAI-compatible endpoint in front of prefill, decode and aggregated engines. "
        "Without --fleet or --model it follows the control plane through REDIS_URL.",
    )
    p.add_argument("--host", help="address to listen on (default: TANDEM_BIND, 127.0.0.1)")
    p.add_argument("--port", type=int, help="port to listen on (default: TANDEM_OPENAI_PORT, 8080)")
    p.add_argument("--processes", type=int, help="processes that share the port (default: TANDEM_ROUTERS, 1)")
    p.add_argument("--no-auth", action="store_true", help="need no API key")
    p.add_argument(
        "--cors-origins",
        metavar="ORIGINS",
        help="web pages that may use it: `*`, `none`, or origins with commas between (default: TANDEM_CORS_ORIGINS, *)",
    )
    alone = p.add_argument_group("without a control plane")
    alone.add_argument("--fleet", type=Path, metavar="FILE", help="a FleetSnapshot in JSON (see ARCHITECTURE.md)")
    alone.add_argument("--model", metavar="NAME", help="served name of the engines given by URL (needs --no-auth)")
    for role, what in (
        ("aggregated", "engines that do both"),
        ("prefill", "prefill engines"),
        ("decode", "decode engines"),
    ):
        alone.add_argument(f"--{role}", nargs="+", action="extend", default=[], metavar="URL", help=what)
    alone.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="the model's folder (kv, kv-approximate)")
    alone.add_argument(
        "--kv-events",
        nargs="+",
        action="extend",
        default=[],
        metavar="URL=tcp://HOST:PORT[,replay=tcp://HOST:PORT][,ranks=N]",
        help="where the engine at URL publishes its KV events (kv)",
    )
    _add_routing(p.add_argument_group("routing, without a control plane"))
    limits = p.add_argument_group("limits")
    limits.add_argument("--max-body-mb", type=int, default=64, help="largest request body in MiB (64)")
    limits.add_argument("--drain-seconds", type=float, default=60.0, help="how long SIGTERM waits for replies (60)")
    limits.add_argument(
        "--kv-index-blocks",
        type=int,
        metavar="N",
        help="(engine, block) entries of a deployment's KV index (default: TANDEM_KV_INDEX_BLOCKS, 4000000)",
    )
    limits.add_argument(
        "--limit-wait-ms",
        type=int,
        default=250,
        help="longest wait of a limited key's request for the count in Redis; then this process counts alone (250)",
    )
    return p


def _add_routing(group: argparse._ArgumentGroup) -> None:
    """One option for each field of `RoutingPolicy`, with its default."""
    usual = RoutingPolicy()
    for name, kind, says in (
        ("mode", RoutingMode, "order of engines"),
        ("on_prefill_failure", OnPrefillFailure, "what to do when the prefill leg gives no usable KV"),
        ("disaggregate", Disaggregate, "auto: where it is cheaper, as far as known; always: whatever it costs"),
        ("local_below_tokens", int, "with fewer prompt tokens to compute, decode computes them itself (kv modes)"),
        ("affinity", Affinity, "what keeps a session together: x-session-id; user: that, else the body's user"),
        ("temperature", float, "0: the cheapest engine; above, chance spreads requests over dearer ones (kv modes)"),
        ("max_in_flight", int, "requests at one engine; more wait in the router"),
        ("queue_limit", int, "requests that wait in one process while all engines are full"),
        ("queue_seconds", float, "longest wait of one"),
        ("silence_seconds", float, "longest wait for an engine's first byte; without a stream, for the whole answer"),
        ("gap_seconds", float, "longest silence inside a stream"),
    ):
        default = getattr(usual, name)
        choices = list(type(default)) if isinstance(default, StrEnum) else None
        shown = "no limit" if default is None else f"{default:g}" if isinstance(default, float) else default
        group.add_argument(_flag(name), type=kind, choices=choices, default=default, help=f"{says} ({shown})")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _routing(arguments: argparse.Namespace) -> RoutingPolicy:
    """Raises `InvalidInput` naming the option that is out of bounds."""
    policy = RoutingPolicy(**{name: getattr(arguments, name) for name in RoutingPolicy.__struct_fields__})
    check_routing(policy, _flag)
    return policy


def _given_for_a_model(arguments: argparse.Namespace) -> bool:
    """Whether there are options that a fleet file or the control plane would leave without effect."""
    engines = arguments.prefill, arguments.decode, arguments.aggregated, arguments.kv_events, arguments.tokenizer
    return any(engines) or _routing(arguments) != RoutingPolicy()


def options(arguments: argparse.Namespace, settings: config.Config) -> Options:
    """The options of one process. Raises `InvalidInput` for arguments that name or the password is wrong."""
    fleet = None
    if arguments.fleet and arguments.model:
        raise InvalidInput("Give --fleet FILE or --model NAME, not both.", field="fleet")
    if not arguments.model and _given_for_a_model(arguments):
        raise InvalidInput(
            "Name the model that engines and routing are given for: --model NAME. Fleet files and the control plane say both "
            "themselves.",
            field="model",
        )
    if arguments.fleet:
        fleet = standalone.from_file(arguments.fleet)
        if not arguments.no_auth and not fleet.keys:
            raise InvalidInput("The fleet file has no keys: add some, or give --no-auth.", field="keys")
    elif arguments.model:
        if not arguments.no_auth:
            raise InvalidInput("Engines given by URL come without keys: add --no-auth.", field="no_auth")
        if arguments.tokenizer and not arguments.tokenizer.is_dir():
            raise InvalidInput(f"--tokenizer {arguments.tokenizer}: there is no such folder.", field="tokenizer")
        fleet = standalone.from_urls(
            arguments.model,
            prefill=arguments.prefill,
            decode=arguments.decode,
            aggregated=arguments.aggregated,
            routing=_routing(arguments),
            tokenizer=str(arguments.tokenizer.resolve()) if arguments.tokenizer else "",
            kv_events=arguments.kv_events,
        )
    elif not settings.redis_url:
        raise InvalidInput("Set REDIS_URL (the control plane's Redis), or give --fleet FILE or --model NAME.")
    if not 1 <= arguments.max_body_mb <= 4096:
        raise InvalidInput("--max-body-mb: choose 1 to 4096", field="max_body_mb")
    if not 5 <= arguments.limit_wait_ms <= 10_000:
        raise InvalidInput("--limit-wait-ms: choose 5 to 10000", field="limit_wait_ms")
    if not 0 <= arguments.drain_seconds <= 86_400:
        raise InvalidInput("--drain-seconds: choose 0 to 86400", field="drain_seconds")
    index_blocks = arguments.kv_index_blocks if arguments.kv_index_blocks is not None else settings.kv_index_blocks
    if not 1_000 <= index_blocks <= 1 << 40:
        raise InvalidInput("--kv-index-blocks: choose 1000 or more, up to 2^40", field="kv_index_blocks")
    return Options(
        fleet=fleet,
        redis_url="" if fleet else settings.redis_url,
        copy=settings.home_path() / "router" / "snapshot.json",
        auth=not arguments.no_auth,
        cors_origins=_origins(arguments, settings),
        limits=Limits(body_bytes=arguments.max_body_mb << 20),
        drain_seconds=arguments.drain_seconds,
        index_blocks=index_blocks,
        limit_wait_seconds=arguments.limit_wait_ms / 1000,
    )


def _origins(arguments: argparse.Namespace, settings: config.Config) -> str:
    """Raises `InvalidInput`."""
    given: str | None = arguments.cors_origins
    if given is None:
        return settings.cors_origins
    try:
        return addresses.origins(given)
    except InvalidInput as error:
        raise InvalidInput(f"--cors-origins: {error.message}", field="cors_origins") from None


def _open_more_files() -> None:
    """A connection is a file, and what a login shell may open is soon used up. Nothing here uses `select`, which needs the bound."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def bind(host: str, port: int) -> socket.socket:
    """The one listening socket. Raises `InvalidInput` with one clear sentence when it cannot be had."""
    if not 0 <= port <= 65_535:  # the resolver would take the rest of a division
        raise InvalidInput("--port: choose 1 to 65535, or 0 for any that is free", field="port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        vanished.end_after(vanished.CLIENT_SECONDS, sock)
        sock.bind(address)
        sock.listen(2048)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
            raise InvalidInput(
                f"{host} is not an address of this machine: choose another with --host or TANDEM_BIND.", field="host"
            ) from None
        if error.errno == errno.EACCES:
            raise InvalidInput(
                f"Port {port} is for root alone: choose one above 1023 with --port or TANDEM_OPENAI_PORT.", field="port"
            ) from None
        raise InvalidInput(
            f"Port {port} of {host} cannot be used ({error.strerror or error}): end what listens there, "
            "or choose another with --port or TANDEM_OPENAI_PORT.",
            field="port",
        ) from None
    sock.setblocking(False)
    return sock


def main(argv: list[str] | None = None, *, compiled: bool = False) -> int:
    arguments = parser().parse_args(argv)
    try:
        settings = config.load()
        logging.basicConfig(
            level=settings.log_level.upper(),
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
            stream=sys.stderr,
        )
        chosen = options(arguments, settings)
        processes = arguments.processes or settings.routers
        if not 1 <= processes <= 64:
            raise InvalidInput("--processes: choose 1 to 64", field="processes")
        host = arguments.host or settings.bind
        _open_more_files()
        sock = bind(host, arguments.port if arguments.port is not None else settings.openai_port)
    except InvalidInput as error:
        print(f"frontend_api: {error.message}", file=sys.stderr)
        return 1
    address = sock.getsockname()
    as_what = f"{processes} process{'es' if processes > 1 else ''}{', compiled' if compiled else ''}"
    print(f"Router: http://{addresses.bracketed(host)}:{address[1]}/v1 ({as_what})", flush=True)
    return Supervisor(chosen, sock, processes).run()
