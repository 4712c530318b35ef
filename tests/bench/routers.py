"""The routers that are measured, each started with the same engines behind it: ours in three ways, and whatever peers are there.

Every one gets two engines. A peer that does not come up is reported with its own words, never with a figure.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import httpx
import redis

from controlplane.fleet.model import Role
from controlplane.fleet.wire import (
    REQUESTS_STREAM,
    SNAPSHOT_KEY,
    Disaggregate,
    FleetSnapshot,
    RoutingMode,
    RoutingPolicy,
    SnapshotDeployment,
    SnapshotEngine,
    SnapshotKey,
    encode,
)
from tests.bench import model, peers
from tests.bench.events import BLOCK
from tests.bench.processes import Cores, NotStarted, await_true, listens, started
from tests.conftest import RedisServer, free_port

KEY = "tdm-bench"
START_SECONDS = 30.0
ENGINES = 2
PEER_MISSING = "not installed: python -m tests.bench.peers"


class Engine(NamedTuple):
    """A stub engine that runs."""

    url: str
    events: str = ""
    replay: str = ""


class Router(NamedTuple):
    """A router that runs."""

    name: str
    port: int
    pid: int
    """Of its first process; it and all that come from it are the router."""


class Bench:
    """What all routers of one run share: folder, cores, model, engines."""

    def __init__(self, folder: Path, cores: Cores, stack: ExitStack) -> None:
        self.folder = folder
        self.cores = cores
        self.stack = stack
        self.model = model.write(folder / "model")
        self.plain = [self.engine() for _ in range(ENGINES)]

    def log(self, name: str) -> Path:
        return self.folder / f"{name}-{time.monotonic_ns()}.log"

    def engine(self, *, holds: Path | None = None) -> Engine:
        """One more stub engine. `holds`: the prompts it has; it then publishes events."""
        port, events, replay = (free_port() for _ in range(3))
        more: Sequence[str | Path] = ()
        if holds is not None:
            more = ("--events", str(events), "--replay", str(replay), "--holds", holds, "--model", self.model)
        log = self.log("stub")
        process = self.stack.enter_context(
            started(sys.executable, "-m", "tests.bench.stub", str(port), *more, cores=self.cores.others, log=log)
        )
        await_true(lambda: listens(port), seconds=START_SECONDS, process=process, log=log, what="no stub engine")
        url = f"http://127.0.0.1:{port}"
        return Engine(url, *(f"tcp://127.0.0.1:{p}" for p in (events, replay))) if holds else Engine(url)

    def holds(self, sizes: Sequence[int]) -> Path:
        """The token ids of the prompts that are asked again and again, for stub engines to hold."""
        from frontend_api.formats.openai import ENDPOINTS
        from frontend_api.tokens.tokenizer import Tokenizer

        path = self.folder / "holds.json"
        if not path.exists():
            tokenizer = Tokenizer(self.model)
            found = []
            for size in sizes:
                for warmth in (model.Warmth.HOT, model.Warmth.SHARED):
                    body = model.body(size, warmth, stream=False).whole(0)
                    ids = tokenizer.token_ids(ENDPOINTS["/v1/chat/completions"], body)
                    assert ids is not None
                    found.append(list(ids))
            path.write_text(json.dumps(found))
        return path


Starter = Callable[[Bench], AbstractContextManager[Router]]


def _spec(engine: Engine, role: Role, number: int) -> SnapshotEngine:
    name = f"{role}-{number}"
    return SnapshotEngine(
        id=name, name=name, attempt=1, role=role, url=engine.url, secret="s",
        events=engine.events, replay=engine.replay, block_size=BLOCK,
    )  # fmt: skip


@contextmanager
def _tandem(
    bench: Bench, name: str, engines: tuple[SnapshotEngine, ...], policy: RoutingPolicy, tokenizer: str = ""
) -> Iterator[Router]:
    """Ours, following a Redis of its own: keys are asked and records written."""
    home = bench.folder / name.replace(" ", "-")
    home.mkdir()
    server = RedisServer(home)
    server.start()
    bench.stack.callback(server.stop)
    port = free_port()
    deployment = SnapshotDeployment(name="m", served_name="m", routing=policy, engines=engines, tokenizer=tokenizer)
    key = SnapshotKey(id="k", digest=sha256(KEY.encode()).hexdigest())
    client = redis.Redis.from_url(server.url)
    client.set(SNAPSHOT_KEY, encode(FleetSnapshot(version=1, deployments=(deployment,), keys=(key,))))
    log = bench.log("tandem")
    environment = {"REDIS_URL": server.url, "TANDEM_HOME": str(home)}
    command = (sys.executable, "-m", "frontend_api", "--port", str(port))
    with started(*command, cores=bench.cores.router, log=log, environment=environment) as process:

        def ready() -> bool:
            told = _explained(port)
            return told is not None and (policy.mode is not RoutingMode.KV or told.get("x-tandem-state") == "exact")

        await_true(ready, seconds=START_SECONDS, process=process, log=log, what=f"{name} is not ready")
        known = _stored(port)
        yield Router(name, port, process.pid)
        told = _explained(port)
        assert told is not None
        if any(e.role is Role.PREFILL for e in engines) != (told["x-tandem-prefill"] != "-"):
            raise SystemExit(f"{name} did not do what is said of it: {told}")
        if policy.mode is RoutingMode.KV and told["x-tandem-reason"] != "overlap":
            raise SystemExit(f"{name} did not choose by its index: {told}")
        if policy.mode is RoutingMode.KV:
            what = f"{name} has heard of no answer's KV"
            await_true(lambda: _stored(port) > known, seconds=10, process=process, log=log, what=what)
        await_true(
            lambda: bool(client.exists(REQUESTS_STREAM)),
            seconds=10,
            process=process,
            log=log,
            what=f"{name} has written records",
        )


def _explained(port: int) -> httpx.Headers | None:
    """How the router says it routed a hot prompt; None: it does not answer."""
    data = model.body(1_200, model.Warmth.HOT, stream=False).whole(0)
    headers = {"Authorization": f"Bearer {KEY}", "x-tandem-explain": "1", "content-type": "application/json"}
    try:
        reply = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", content=data, headers=headers, timeout=10)
    except httpx.HTTPError:
        return None
    return reply.headers if reply.status_code == 200 else None


def _stored(port: int) -> int:
    """KV blocks that the engines have told the router of so far."""
    told = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text
    return sum(map(int, re.findall(r'^tandem_router_kv_events_total{.*kind="stored".*} (\d+)$', told, re.MULTILINE)))


def tandem_least_load(bench: Bench) -> AbstractContextManager[Router]:
    engines = tuple(_spec(e, Role.AGGREGATED, n) for n, e in enumerate(bench.plain))
    return _tandem(bench, "tandem least-load", engines, RoutingPolicy())


def tandem_two_legs(bench: Bench) -> AbstractContextManager[Router]:
    engines = tuple(_spec(bench.plain[n], role, n) for n, role in enumerate((Role.PREFILL, Role.DECODE)))
    return _tandem(bench, "tandem two legs", engines, RoutingPolicy(disaggregate=Disaggregate.ALWAYS))


def tandem_kv(bench: Bench) -> AbstractContextManager[Router]:
    holds = bench.holds(SIZES)
    engines = tuple(_spec(bench.engine(holds=holds), Role.AGGREGATED, n) for n in range(ENGINES))
    return _tandem(bench, "tandem kv", engines, RoutingPolicy(mode=RoutingMode.KV), str(bench.model))


SIZES = (200, 1_200, 16_000, 128_000)
"""Bytes of the bodies."""


@contextmanager
def nginx(bench: Bench) -> Iterator[Router]:
    program = shutil.which("nginx") or "/usr/sbin/nginx"
    if not Path(program).exists():
        raise NotStarted("not installed")
    port = free_port()
    folder = bench.folder / "nginx"
    folder.mkdir()
    servers = "".join(f"server {e.url.removeprefix('http://')};" for e in bench.plain)
    (folder / "nginx.conf").write_text(
        f"worker_processes 1; daemon off; pid {folder}/pid; error_log {folder}/error.log;\n"
        "events { worker_connections 1024; }\n"
        f"http {{ access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;\n"
        f"fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;\n"
        f"client_body_buffer_size 256k; upstream engine {{ {servers} keepalive 64; }}\n"
        f"server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://engine; proxy_http_version 1.1;\n"
        'proxy_set_header Connection ""; proxy_buffering off; keepalive_requests 1000000; } } }\n'
    )
    log = bench.log("nginx")
    command = (program, "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log"))
    with started(*command, cores=bench.cores.router, log=log) as process:
        await_true(lambda: listens(port), seconds=START_SECONDS, process=process, log=log, what="no connection")
        yield Router("nginx", port, process.pid)


@contextmanager
def relay(bench: Bench) -> Iterator[Router]:
    """No router: what passing bytes on costs in Python."""
    port, log = free_port(), bench.log("relay")
    engines = [engine.url.rpartition(":")[2] for engine in bench.plain]
    command = (sys.executable, "-m", "tests.bench.relay", str(port), *engines)
    with started(*command, cores=bench.cores.router, log=log) as process:
        await_true(lambda: listens(port), seconds=START_SECONDS, process=process, log=log, what="no connection")
        yield Router("bare relay, in Python", port, process.pid)


def _vllm_router(policy: str) -> Starter:
    @contextmanager
    def start(bench: Bench) -> Iterator[Router]:
        python = peers.python("vllm-router")
        if python is None:
            raise NotStarted(PEER_MISSING)
        port, metrics = free_port(), free_port()
        engines = bench.plain
        more: list[str] = []
        if policy == "kv_aware":
            holds = bench.holds(SIZES)
            engines = [bench.engine(holds=holds) for _ in range(ENGINES)]
            more = ["--kv-event-model", "m", "--kv-event-block-size", str(BLOCK)]
            for engine in engines:
                more += ["--kv-event-source", f"{engine.url}={engine.events}"]
                more += ["--kv-event-replay-source", f"{engine.url}={engine.replay}"]
        log = bench.log("vllm-router")
        command = [
            str(python.with_name("vllm-router")), "--host", "127.0.0.1", "--port", str(port), "--policy", policy,
            "--prometheus-port", str(metrics), "--log-level", "error", "--worker-urls", *[e.url for e in engines], *more,
        ]  # fmt: skip
        with started(*command, cores=bench.cores.router, log=log, environment={"RUST_LOG": "error"}) as process:
            await_true(
                lambda: _answers(port),
                seconds=START_SECONDS,
                process=process,
                log=log,
                what="no answer from its engines",
            )
            yield Router(f"vllm-router {policy}", port, process.pid)

    return start


@contextmanager
def dynamo(bench: Bench) -> Iterator[Router]:
    """Its frontend in kv mode, before mock engines of its own: it speaks to no others without an engine's runtime."""
    python = peers.python("dynamo")
    if python is None:
        raise NotStarted(PEER_MISSING)
    port = free_port()
    folder = bench.folder / "dynamo"
    folder.mkdir()
    log, mock_log = bench.log("dynamo"), bench.log("mocker")
    environment = {"DYN_FILE_KV": str(folder), "DYN_LOG": "error", "HF_HUB_OFFLINE": "1"}
    frontend = [
        python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port),
        "--router-mode", "kv", "--discovery-backend", "file", "--kv-cache-block-size", str(BLOCK),
    ]  # fmt: skip
    mocker = [
        python, "-m", "dynamo.mocker", "--model-path", bench.model, "--model-name", "m", "--num-workers", str(ENGINES),
        "--discovery-backend", "file", "--speedup-ratio", "1000", "--block-size", str(BLOCK),
    ]  # fmt: skip
    with (
        started(*frontend, cores=bench.cores.router, log=log, environment=environment) as process,
        started(*mocker, cores=bench.cores.others, log=mock_log, environment=environment) as mock,
    ):

        def ready() -> bool:
            if mock.poll() is not None:
                raise NotStarted(f"its mock engines ended: {mock_log.read_text()[-300:]}")
            return _answers(port)

        await_true(ready, seconds=2 * START_SECONDS, process=process, log=log, what="no answer from its mock engines")
        yield Router("dynamo kv, own mock engines", port, process.pid)


def _answers(port: int) -> bool:
    data = model.body(1_200, model.Warmth.HOT, stream=False).whole(0)
    try:
        reply = httpx.post(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            content=data,
            headers={"content-type": "application/json"},
            timeout=10,
        )
    except httpx.HTTPError:
        return False
    return reply.status_code == 200


OURS: dict[str, Starter] = {
    "tandem least-load": tandem_least_load,
    "tandem two legs": tandem_two_legs,
    "tandem kv": tandem_kv,
}
PEERS: dict[str, Starter] = {
    "bare relay, in Python": relay,
    "nginx": nginx,
    "vllm-router round_robin": _vllm_router("round_robin"),
    "vllm-router cache_aware": _vllm_router("cache_aware"),
    "vllm-router kv_aware": _vllm_router("kv_aware"),
    "dynamo kv, own mock engines": dynamo,
}


def environment() -> None:
    """No noise from what is asked over HTTP here, and no way to it by a proxy; the peers inherit that."""
    import logging

    logging.getLogger("httpx").setLevel(logging.WARNING)
    os.environ.pop("REDIS_URL", None)
    os.environ.update(NO_PROXY="127.0.0.1", no_proxy="127.0.0.1")
