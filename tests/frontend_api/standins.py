"""Stand-in engines and routers as processes of their own, started once for all tests that ask for `urls`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from tests.conftest import free_port

ROOT = Path(__file__).parents[2]
ROLES = ("prefill", "decode", "aggregated")
ROUTERS = {"pair": ("prefill", "decode"), "alone": ("aggregated",)}
"""Name -> roles of the engines behind it."""


@contextmanager
def _process(arguments: list[str], log: Path) -> Iterator[None]:
    with log.open("wb") as file:
        command = [sys.executable, "-m", *arguments]
        environment = {**os.environ, "VLLM_API_KEY": ""}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
    try:
        yield
    finally:
        process.terminate()
        process.wait(20)


def _engine(role: str, port: int) -> list[str]:
    side = [] if role == "aggregated" else ["--side-channel-port", str(free_port())]
    return [
        "workers.sim", "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m", "--role", role, *side,
        "--prefill-tokens-per-second", "100000", "--itl-ms", "1", "--block-size", "16",
    ]  # fmt: skip


def _await_ok(url: str) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            if httpx.get(url + "/health").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline, f"{url} did not come up"
        time.sleep(0.02)


@contextmanager
def engines(wanted: dict[str, tuple[str, int]], folder: Path) -> Iterator[dict[str, str]]:
    """Engines of their own, by name: role and port. Gives their URLs."""
    with ExitStack() as stack:
        for name, (role, port) in wanted.items():
            stack.enter_context(_process(_engine(role, port), folder / name))
        found = {name: f"http://127.0.0.1:{port}" for name, (_, port) in wanted.items()}
        for url in found.values():
            _await_ok(url)
        yield found


@contextmanager
def running(folder: Path) -> Iterator[dict[str, str]]:
    """A router in front of a pair, another in front of one aggregated engine, and the engines: their URLs."""
    ports = {name: free_port() for name in (*ROLES, *ROUTERS)}
    found = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    with ExitStack() as stack:
        for role in ROLES:
            stack.enter_context(_process(_engine(role, ports[role]), folder / role))
        for name, roles in ROUTERS.items():
            arguments = ["frontend_api", "--port", str(ports[name]), "--no-auth", "--model", "m"]
            for role in roles:
                arguments += [f"--{role}", found[role]]
            stack.enter_context(_process(arguments, folder / name))
        for url in found.values():
            _await_ok(url)
        yield found


def metric(url: str, name: str, label: str = "") -> float:
    """The sum of an engine's series whose line begins so and has that label."""
    text = httpx.get(url + "/metrics").text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name) and label in line)
