"""`python -m workers.sim`: starts one stand-in engine and ends it cleanly on SIGTERM or SIGINT.

Binds the given host and nothing else. Exit code 2: a wrong argument; 98: a port is taken; 0: it was told to end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn
import uvloop
import zmq

from controlplane.fleet import program
from controlplane.fleet.model import Role
from workers.sim.app import App
from workers.sim.engine import Engine
from workers.sim.events import EventPublisher
from workers.sim.faults import FAULTS, Faults, UnknownFault
from workers.sim.settings import Settings
from workers.sim.transfer import SideChannel

PORT_TAKEN = 98
"""EADDRINUSE, as an exit code."""


class PortTaken(Exception):
    """Says which port of which address, and what it was for."""


def parse_arguments(argv: Sequence[str], api_key: str = "") -> Settings:
    """The settings of one engine. Ends the process with code 2 and a sentence when they make no sense."""
    defaults = Settings()
    parser = argparse.ArgumentParser(prog="python -m workers.sim", description="A stand-in for one vLLM engine.")
    add = parser.add_argument
    add("--host", default=defaults.host, help="the one address to listen on")
    add("--port", type=int, default=defaults.port, help="OpenAI-compatible HTTP")
    add("--served-model-name", default=defaults.served_model_name)
    add("--tokenizer", default="", metavar="FOLDER", help="a model's folder: have its token ids and its chat template")
    add("--role", type=Role, choices=list(Role), default=defaults.role)
    add("--side-channel-port", type=int, default=0, help="KV hand-over; needed unless aggregated")
    add("--events-port", type=int, default=0, help="KV events; 0: off")
    add("--replay-port", type=int, default=0, help="KV event replay; 0: none")
    add(
        "--max-model-len",
        type=int,
        help=f"prompt plus answer, in tokens; default: {defaults.max_model_len}, if it fits",
    )
    add("--max-num-batched-tokens", type=int, default=defaults.max_num_batched_tokens, help="prefill chunk")
    add("--max-num-seqs", type=int, default=defaults.max_num_seqs)
    add("--block-size", type=int, default=defaults.block_size, help="tokens per KV block")
    add("--kv-blocks", type=int, default=defaults.kv_blocks)
    add("--prefill-tokens-per-second", type=float, default=defaults.prefill_tokens_per_second)
    add("--itl-ms", type=float, default=defaults.itl_seconds * 1000)
    add("--transfer-bytes-per-second", type=float, default=defaults.transfer_bytes_per_second)
    add("--kv-bytes-per-token", type=int, default=defaults.kv_bytes_per_token)
    add("--lease-seconds", type=float, default=defaults.lease_seconds)
    add("--startup-seconds", type=float, default=defaults.startup_seconds)
    add(
        "--fault",
        action="append",
        default=[],
        metavar="NAME",
        help=f"{', '.join(FAULTS)}, crash-after-N, transfer-fails-from-PORT",
    )
    given = parser.parse_args(argv)
    if given.role is not Role.AGGREGATED and not given.side_channel_port:
        parser.error(f"--side-channel-port is needed for a {given.role} engine")
    if given.max_model_len is None:
        given.max_model_len = max(1, min(defaults.max_model_len, given.kv_blocks * given.block_size))
    if given.tokenizer and not (Path(given.tokenizer) / "tokenizer.json").is_file():
        parser.error(f"--tokenizer {given.tokenizer}: there is no tokenizer.json")
    if not given.host:
        parser.error("--host must name one address: a stand-in never listens on all of them")
    for name in ("port", "side_channel_port", "events_port", "replay_port"):
        if not 0 <= getattr(given, name) <= 65_535:
            parser.error(f"--{name.replace('_', '-')} must be from 0 to 65535")
    for name in (
        "itl_ms",
        "lease_seconds",
        "startup_seconds",
        "prefill_tokens_per_second",
        "transfer_bytes_per_second",
    ):
        if not 0 <= getattr(given, name) < 1e15:
            parser.error(f"--{name.replace('_', '-')} must be a number of at least 0")
    if given.kv_blocks > 1 << 31:
        parser.error("--kv-blocks must be at most 2147483648")
    for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "block_size", "kv_blocks"):
        if getattr(given, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if given.prefill_tokens_per_second <= 0 or given.transfer_bytes_per_second <= 0:
        parser.error("rates must be greater than 0")
    if given.kv_blocks * given.block_size < given.max_model_len:
        parser.error(
            f"--max-model-len {given.max_model_len} does not fit into {given.kv_blocks} KV blocks of "
            f"{given.block_size} tokens: raise --kv-blocks or lower --max-model-len"
        )
    values = vars(given)
    itl_ms, faults = values.pop("itl_ms"), values.pop("fault")
    try:
        Faults(faults)
    except UnknownFault as error:
        parser.error(str(error))
    return Settings(**values, itl_seconds=itl_ms / 1000, faults=tuple(faults), api_key=api_key)


class Listener:
    """A bound socket; nobody can connect before `listen`.

    Raises `PortTaken`.
    """

    def __init__(self, host: str, port: int, what: str) -> None:
        self._name = f"{what} port {port} on {host}"
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._take(lambda: self._socket.bind((host, port)))

    def listen(self) -> socket.socket:
        """The socket, listening. Raises `PortTaken`: who bound the same port meanwhile may have been quicker.

        Not left to the server that takes the socket: uvloop drops that error, and serves nobody.
        """
        self._take(lambda: self._socket.listen(2048))
        return self._socket

    def _take(self, act: Callable[[], None]) -> None:
        try:
            act()
        except OSError as error:
            self._socket.close()
            raise PortTaken(f"{self._name} cannot be had: {error.strerror}") from None


async def serve(settings: Settings) -> None:
    """Runs one engine until it is told to end.

    Raises `PortTaken`.
    """
    http = Listener(settings.host, settings.port, "HTTP")
    faults = Faults(settings.faults)
    publisher = None
    if settings.events_port and "events-off" not in faults:
        try:
            publisher = EventPublisher(
                settings.host, settings.events_port, settings.replay_port, settings.block_size, faults
            )
        except zmq.ZMQError as error:
            ports = f"{settings.events_port} or {settings.replay_port}"
            raise PortTaken(f"KV event port {ports} on {settings.host} cannot be had: {error}") from None
    engine = Engine(settings, faults, publisher)
    side_channel = None
    if leases := engine.leases:
        side_channel = SideChannel(
            engine.engine_id,
            settings.block_size,
            read=leases.read,
            done=leases.done,
            heartbeat=leases.extend,
        )
        await side_channel.start(Listener(settings.host, settings.side_channel_port, "side channel").listen())
    await asyncio.sleep(settings.startup_seconds)
    app = App(settings, engine, faults, publisher)
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="critical",
        server_header=True,
        timeout_graceful_shutdown=0,
    )
    listening = http.listen()
    loop = asyncio.create_task(engine.run())
    print(
        f"stand-in engine {settings.served_model_name} ({settings.role}) serves http://{settings.host}:{settings.port}"
    )
    sys.stdout.flush()
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn takes these over, and raises the signal again when it has ended: by then it is done with.
        signal.signal(number, lambda *_: None)
    await uvicorn.Server(config).serve(sockets=[listening])
    loop.cancel()
    await engine.close()
    if side_channel:
        await side_channel.close()
    if publisher:
        await publisher.close()


def main() -> int:
    program.begin("workers.sim")
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    settings = parse_arguments(sys.argv[1:], os.environ.get("VLLM_API_KEY", ""))
    try:
        uvloop.run(serve(settings))
    except PortTaken as error:
        print(f"{error}", file=sys.stderr)
        return PORT_TAKEN
    return 0


if __name__ == "__main__":
    sys.exit(main())
