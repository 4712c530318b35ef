"""One router process: everything put together on one event loop, from the listening socket to the drain."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import secrets
import signal
import socket
from functools import partial
from pathlib import Path
from time import monotonic, time

from msgspec import Struct

from controlplane.fleet.wire import FleetSnapshot
from frontend_api.exchange import FINISH_SECONDS, FREE_SECONDS
from frontend_api.gate import Router
from frontend_api.http.cors import Origins
from frontend_api.http.reading import Limits
from frontend_api.http.server import Server
from frontend_api.http.upstream import Upstreams
from frontend_api.kv.evidence import Evidence, TokenSource
from frontend_api.kv.index import LIMIT
from frontend_api.kv.listen import Follower, Unusable
from frontend_api.kv.room import RoomReader
from frontend_api.kv.save import SavedIndex
from frontend_api.limits.counter import RedisCounter
from frontend_api.limits.reserve import PATIENCE, KeyLimits
from frontend_api.observe.decisions import Decisions
from frontend_api.observe.shared import Slots
from frontend_api.observe.telemetry import Telemetry
from frontend_api.probing import Prober
from frontend_api.processes import listeners
from frontend_api.processes.handout import Entrance
from frontend_api.routing.gossip import Gossip
from frontend_api.routing.loads import Loads, Table
from frontend_api.routing.view import View
from frontend_api.tokens.check import TokenCheck
from frontend_api.tokens.store import TokenizerStore

log = logging.getLogger(__name__)

FILES_PER_RANK = 16
"""Of the files that may be open: whoever follows a rank's events opens about six, and clients and engines need theirs."""
FIRST_SECONDS = 2.0
"""How long a process without any snapshot waits for Redis before it serves."""


class Options(Struct, frozen=True):
    """How a router process runs."""

    fleet: FleetSnapshot | None = None
    """A fixed fleet; None: the control plane's, from Redis."""
    redis_url: str = ""
    copy: Path = Path("snapshot.json")
    """Where the last snapshot is kept for a start without Redis."""
    auth: bool = True
    cors_origins: str = "*"
    """See `http.cors.Origins`."""
    limits: Limits = Limits()
    drain_seconds: float = 60.0
    index_blocks: int = LIMIT
    """(engine, block) entries of the KV index of one deployment."""
    limit_wait_seconds: float = PATIENCE
    """Longest wait of a limited key's request for the count in Redis."""


async def run(
    options: Options,
    door: socket.socket | Entrance,
    *,
    parent_gone: int | None = None,
    slots: Slots | None = None,
    loads: Table | None = None,
    index: int = 0,
) -> None:
    """Serve on a bound socket, or what the parent accepts, until SIGTERM or SIGINT, then drain.

    `parent_gone`: a descriptor that becomes readable when the parent process is gone. `slots`, `loads`, `index`: where this
    process and its siblings show each other their figures and loads.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if parent_gone is not None:
        loop.add_reader(parent_gone, stop.set)
    view = View(ranks=max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // FILES_PER_RANK))
    evidence = Evidence(view, options.index_blocks)
    saved = SavedIndex(evidence, options.copy.parent / "kv")
    upstreams = Upstreams()
    telemetry = Telemetry(
        f"{socket.gethostname()}-{os.getpid()}",
        time(),
        keep_records=bool(options.redis_url),
        slots=slots,
        index=index,
    )
    client = listeners.connect(options.redis_url) if options.fleet is None and options.redis_url else None
    limits = KeyLimits(
        RedisCounter(client, secrets.token_hex(8)) if client is not None else None,
        processes=slots.count if slots is not None else 1,
        patience=options.limit_wait_seconds,
        refused=telemetry.count_limited,
        fell_back=telemetry.count_limit_fallback,
    )
    decisions = Decisions(slots.decisions if slots is not None else None, index)
    router = Router(
        view,
        upstreams,
        telemetry,
        evidence=evidence,
        decisions=decisions,
        loads=Loads(loads, index),
        limits=limits,
        origins=Origins(options.cors_origins),
        auth=options.auth,
    )
    server = router.server = Server(router, options.limits)
    tasks = [loop.create_task(listeners.run_probes(view)), loop.create_task(_sweeps(server, router))]
    tasks.append(loop.create_task(Follower(evidence, partial(_tokenizer, _tokenizers(options)), saved).run()))
    if index == 0:  # the others know the same
        tasks.append(loop.create_task(saved.run()))
        tasks.append(loop.create_task(RoomReader(view, router.loads, upstreams).run()))
    tasks.append(loop.create_task(Prober(upstreams, router.outcomes).run()))
    tasks.append(loop.create_task(TokenCheck(evidence, upstreams, telemetry.count_token_check).run()))
    if slots is not None and slots.count > 1:
        tasks.append(loop.create_task(decisions.run()))
    reporter = None
    if options.fleet is not None:
        view.take(options.fleet)
    elif client is not None:
        listener = listeners.SnapshotListener(view, upstreams, client, options.copy)
        if not listener.load_copy():
            await listener.read_first(FIRST_SECONDS)
        gossip = Gossip(telemetry.router, router.loads, router.waiting, client)
        reporter = listeners.Reporter(telemetry, view, evidence, router.outcomes, client)
        tasks += [
            loop.create_task(listener.run()),
            loop.create_task(reporter.run_flush()),
            loop.create_task(reporter.run_report()),
            loop.create_task(gossip.run_telling()),
            loop.create_task(gossip.run_hearing()),
            loop.create_task(limits.run()),
        ]
    for task in tasks:
        task.add_done_callback(_ended)
    router.waiting.listen()
    if isinstance(door, Entrance):
        server.admit(door)
    else:
        await server.listen(door)
    await stop.wait()
    if parent_gone is not None:
        loop.remove_reader(parent_gone)
    saving = loop.create_task(saved.save()) if index == 0 else None  # at once: the drain may be cut short
    await drain(server, options.drain_seconds)
    await _free_kv(router)
    if saving is not None:
        await saving
        await saved.save()  # what has come meanwhile
    for task in tasks:
        task.remove_done_callback(_ended)
    await listeners.end(tasks)
    if reporter is not None and client is not None:
        await limits.end()
        await reporter.end()
        await client.aclose()
    router.share_figures()  # what was counted since the last time
    upstreams.close()


def _tokenizers(options: Options) -> TokenizerStore:
    fetch = listeners.fetcher(options.redis_url) if options.redis_url else None
    return TokenizerStore(options.copy.parent.parent / "tokenizers", fetch)


def _tokenizer(store: TokenizerStore, folder: str, key: str) -> TokenSource:
    """The exact token ids of a model. Raises `Unusable` or `Absent`."""
    # imported here: only cache-aware routing needs the memory
    from frontend_api.tokens.model_folder import TokenizerUnusable
    from frontend_api.tokens.tokenizer import Tokenizer

    try:
        return Tokenizer(store.folder(folder, key))
    except TokenizerUnusable as error:
        raise Unusable(error) from None


async def drain(server: Server, seconds: float) -> None:
    """No new connections; wait until the others have their replies, then cut what is left."""
    server.stop_accepting()
    deadline = monotonic() + seconds
    log.info("Draining %d connections.", len(server.connections))
    while (server.connections or server.arriving) and monotonic() < deadline:  # noqa: ASYNC110 - the hot path sets no event
        await asyncio.sleep(0.05)
    if server.connections:
        log.warning("%d connections are cut at the drain limit of %g s.", len(server.connections), seconds)
        server.cut_all()


async def _free_kv(router: Router) -> None:
    """Wait for what clients have left behind just now."""
    deadline = monotonic() + FINISH_SECONDS + FREE_SECONDS
    while router.exchanges and monotonic() < deadline:  # noqa: ASYNC110 - as in `drain`
        await asyncio.sleep(0.05)


async def _sweeps(server: Server, router: Router) -> None:
    while True:
        await asyncio.sleep(1.0)
        now = monotonic()
        server.sweep(now)
        router.sweep(now)
        router.upstreams.sweep(now)
        router.share_figures()


def _ended(task: asyncio.Task[None]) -> None:
    """A background loop must not end: without it the router would serve on blindly. Ends the process; its parent restarts it."""
    if not task.cancelled():
        log.critical("A background task of the router failed.", exc_info=task.exception())
        os.kill(os.getpid(), signal.SIGTERM)
