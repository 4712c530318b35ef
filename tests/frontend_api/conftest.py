"""A router in this process, on uvloop as in production, in front of scripted engines."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from hashlib import sha256
from typing import Any

import pytest
import pytest_asyncio
import uvloop

from controlplane.fleet.model import Role
from controlplane.fleet.wire import (
    FleetSnapshot,
    RequestRecord,
    RoutingPolicy,
    Scope,
    SnapshotDeployment,
    SnapshotEngine,
    SnapshotKey,
)
from frontend_api.gate import Router
from frontend_api.http.reading import Limits
from frontend_api.http.server import Server
from frontend_api.http.upstream import Upstreams
from frontend_api.kv.evidence import Cache, Evidence
from frontend_api.observe.telemetry import Telemetry
from frontend_api.routing.loads import Loads, Table
from frontend_api.routing.view import View
from tests.frontend_api import standins
from tests.frontend_api.scripted import Answer, ScriptedEngine, answer_well

KEY = "tdm-inference"
KEYS = (
    SnapshotKey(id="k-all", digest=sha256(KEY.encode()).hexdigest()),
    SnapshotKey(id="k-other", digest=sha256(b"tdm-other").hexdigest(), models=("other",)),
    SnapshotKey(id="k-old", digest=sha256(b"tdm-old").hexdigest(), expires_at=1.0),
    SnapshotKey(id="k-manage", digest=sha256(b"tdm-manage").hexdigest(), scope=Scope.MANAGE),
)


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Callable[[], Any]]:
    return {"uvloop": uvloop.new_event_loop}


class Keeper(Telemetry):
    """Telemetry that keeps its records for the test."""

    def __init__(self) -> None:
        super().__init__("test", 0.0)
        self.records: list[RequestRecord] = []

    def record(self, record: RequestRecord, *stages: Any) -> None:
        super().record(record, *stages)
        self.records.append(record)


class Site:
    """A router and its engines."""

    def __init__(
        self, *, auth: bool = False, limits: Limits | None = None, table: Table | None = None, index: int = 0
    ) -> None:
        self.view = View()
        self.upstreams = Upstreams()
        self.telemetry = Keeper()
        self.evidence = Evidence(self.view)
        loads = Loads(table, index)
        self.router = Router(self.view, self.upstreams, self.telemetry, evidence=self.evidence, loads=loads, auth=auth)
        self.server = self.router.server = Server(self.router, limits or Limits())
        self.engines: dict[str, ScriptedEngine] = {}
        self._specs: dict[str, SnapshotEngine] = {}
        self._version = 0
        self.port = 0

    async def start(self) -> None:
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        self.port = sock.getsockname()[1]
        await self.server.listen(sock)
        self.router.waiting.listen()

    async def stop(self) -> None:
        self.server.stop_accepting()
        self.server.cut_all()
        self.router.waiting.close()
        self.upstreams.close()
        for engine in self.engines.values():
            await engine.stop()

    async def engine(self, name: str, role: Role, answer: Answer = answer_well, **spec: Any) -> ScriptedEngine:
        engine = self.engines[name] = await ScriptedEngine(answer).start()
        self.add(
            SnapshotEngine(id=name, name=name, attempt=1, role=role, url=engine.url, secret=f"secret-{name}", **spec)
        )
        return engine

    def add(self, spec: SnapshotEngine) -> None:
        """An engine that runs elsewhere."""
        self._specs[spec.id] = spec

    def publish(self, *, policy: RoutingPolicy | None = None, without: tuple[str, ...] = (), **more: Any) -> None:
        """Give the view a snapshot of all engines so far."""
        self._version += 1
        engines = tuple(spec for name, spec in sorted(self._specs.items()) if name not in without)
        deployment = SnapshotDeployment(
            name="dep",
            served_name="m",
            routing=policy or RoutingPolicy(),
            engines=engines,
            status="It is said why.",
            **{"tokenizer": "a-folder", **more},
        )
        snapshot = FleetSnapshot(version=self._version, made_at=1.7e9, deployments=(deployment,), keys=KEYS)
        for engine in self.view.take(snapshot):
            self.upstreams.forget(engine)

    @property
    def cache(self) -> Cache:
        """Of the one deployment."""
        cache = self.evidence.of(self.view.deployments["m"])
        assert cache is not None
        return cache

    @property
    def in_flight(self) -> dict[str, int]:
        return {engine.id: engine.in_flight for engine in self.view.engines() if engine.in_flight}

    @property
    def record(self) -> RequestRecord:
        """The one record."""
        (record,) = self.telemetry.records
        return record

    async def settled(self) -> None:
        """No request is in motion."""
        await until(lambda: not self.router.exchanges)
        assert self.in_flight == {}


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


MakeSite = Callable[..., Awaitable[Site]]


@pytest_asyncio.fixture
async def make_site() -> AsyncIterator[MakeSite]:
    sites: list[Site] = []

    async def make(**options: Any) -> Site:
        site = Site(**options)
        sites.append(site)
        await site.start()
        return site

    yield make
    for site in sites:
        await site.stop()


@pytest_asyncio.fixture
async def pair(make_site: MakeSite) -> Site:
    """One prefill and one decode engine that answer well; no keys asked."""
    site = await make_site()
    await site.engine("p", Role.PREFILL)
    await site.engine("d", Role.DECODE)
    site.publish()
    return site


@pytest_asyncio.fixture
async def alone(make_site: MakeSite) -> Site:
    """One aggregated engine that answers well; no keys asked."""
    site = await make_site()
    await site.engine("a", Role.AGGREGATED)
    site.publish()
    return site


@pytest.fixture(scope="session")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Routers `pair` and `alone` in front of stand-ins, and `prefill`, `decode`, `aggregated` themselves."""
    with standins.running(tmp_path_factory.mktemp("standins")) as found:
        yield found
