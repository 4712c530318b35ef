"""`python -m tests.bench.run [--out FILE]`: CPU per request of the router (keys and records on) and of nginx if installed.

CPU is what the scheduler says the process ran (/proc/PID/schedstat), so the load on the rest of the machine shows in
latency and rate, hardly in CPU. Everything is bounded: about half a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path

import httpx
import psutil
import redis

from controlplane.fleet.model import Role
from controlplane.fleet.wire import (
    REQUESTS_STREAM,
    SNAPSHOT_KEY,
    FleetSnapshot,
    RoutingPolicy,
    SnapshotDeployment,
    SnapshotEngine,
    SnapshotKey,
    encode,
)
from tests.bench import load
from tests.conftest import RedisServer, free_port

KEY = "tdm-bench"
CONNECTIONS = 32
BODY = 1_200
ROOT = Path(__file__).parents[2]


@contextmanager
def _process(*command: str, environment: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **(environment or {})}, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)


def _await_port(port: int) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _await_ready(port: int) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            httpx.get(f"http://127.0.0.1:{port}/ready", timeout=5).raise_for_status()
            return
        except httpx.HTTPError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


@contextmanager
def _router(engines: tuple[SnapshotEngine, ...], redis_server: RedisServer, home: Path) -> Iterator[tuple[int, int]]:
    """A router with one key, following Redis. Yields its port and the pid that serves."""
    port = free_port()
    deployment = SnapshotDeployment(name="m", served_name="m", routing=RoutingPolicy(), engines=engines)
    key = SnapshotKey(id="k", digest=sha256(KEY.encode()).hexdigest())
    client = redis.Redis.from_url(redis_server.url)
    client.set(SNAPSHOT_KEY, encode(FleetSnapshot(version=1, deployments=(deployment,), keys=(key,))))
    environment = {"REDIS_URL": redis_server.url, "TANDEM_HOME": str(home)}
    with _process(sys.executable, "-m", "frontend_api", "--port", str(port), environment=environment) as parent:
        _await_ready(port)
        (child,) = psutil.Process(parent.pid).children()
        yield port, child.pid
        time.sleep(0.5)
        if client.xlen(REQUESTS_STREAM) == 0:
            raise SystemExit("the router wrote no records")


@contextmanager
def _nginx(upstream: int, folder: Path) -> Iterator[tuple[int, int]]:
    port = free_port()
    (folder / "nginx.conf").write_text(
        f"worker_processes 1; daemon off; pid {folder}/pid; error_log {folder}/error.log;\n"
        "events { worker_connections 1024; }\n"
        f"http {{ access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;\n"
        f"fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;\n"
        f"upstream engine {{ server 127.0.0.1:{upstream}; keepalive 64; }}\n"
        f"server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://engine; proxy_http_version 1.1;\n"
        'proxy_set_header Connection ""; proxy_buffering off; keepalive_requests 1000000; } } }\n'
    )
    with _process("nginx", "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")) as parent:
        _await_port(port)
        workers = [c for c in psutil.Process(parent.pid).children() if c.name() == "nginx"]
        yield port, workers[0].pid


def _cpu_seconds(pid: int) -> float:
    """Time all threads of a process have run."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def _measure(name: str, port: int, pid: int, *, stream: bool, count: int) -> dict[str, object]:
    load.run(port, count=200 if not stream else 64, connections=CONNECTIONS, size=BODY, stream=stream, key=KEY)
    before = _cpu_seconds(pid)
    result = load.run(port, count=count, connections=CONNECTIONS, size=BODY, stream=stream, key=KEY)
    cpu = (_cpu_seconds(pid) - before) / result.requests * 1e6
    alone = load.run(port, count=200 if not stream else 10, connections=1, size=BODY, stream=stream, key=KEY)
    return {
        "router": name,
        "load": "33-chunk stream" if stream else "unary 1.2 kB",
        "cpu_us": round(cpu, 1),
        "per_second": round(result.rate),
        "alone_p50_ms": round(alone.p50_ms, 3),
        "alone_p99_ms": round(alone.p99_ms, 3),
        "errors": result.errors + alone.errors,
        "rss_mib": round(psutil.Process(pid).memory_info().rss / 2**20, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    parser.add_argument("--unary", type=int, default=8_000, help="unary requests per figure")
    parser.add_argument("--streams", type=int, default=800, help="streams per figure")
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-bench-")))
        stack.callback(shutil.rmtree, os.environ["TANDEM_HOME"], ignore_errors=True)
        ports = [free_port() for _ in range(2)]
        for port in ports:
            stack.enter_context(_process(sys.executable, "-m", "tests.bench.stub", str(port)))
            _await_port(port)
        redis_server = RedisServer(folder)
        redis_server.start()
        stack.callback(redis_server.stop)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        aggregated = (SnapshotEngine(id="a", name="a", attempt=1, role=Role.AGGREGATED, url=urls[0], secret="s"),)
        pair = (
            SnapshotEngine(id="p", name="p", attempt=1, role=Role.PREFILL, url=urls[0], secret="s"),
            SnapshotEngine(id="d", name="d", attempt=1, role=Role.DECODE, url=urls[1], secret="s"),
        )

        def both(name: str, port: int, pid: int) -> None:
            for stream, count in ((False, arguments.unary), (True, arguments.streams)):
                rows.append(_measure(name, port, pid, stream=stream, count=count))

        for name, engines in (("tandem, aggregated", aggregated), ("tandem, disaggregated", pair)):
            with _router(engines, redis_server, folder / name) as (port, pid):
                both(name, port, pid)
        if shutil.which("nginx"):
            with _nginx(ports[0], folder) as (port, pid):
                both("nginx", port, pid)
    report = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "connections": CONNECTIONS,
        "rows": rows,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"{report['machine']}; {CONNECTIONS} connections; latency with 1 connection")
    columns = list(rows[0])
    print("  ".join(f"{c:>{22 if c == 'router' else 15}}" for c in columns))
    for row in rows:
        print("  ".join(f"{row[c]!s:>{22 if c == 'router' else 15}}" for c in columns))
    if any(row["errors"] for row in rows):
        raise SystemExit("some requests failed: the figures mean nothing")


if __name__ == "__main__":
    main()
