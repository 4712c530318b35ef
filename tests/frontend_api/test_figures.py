"""What `/metrics` says, read by Prometheus' own parser."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio
from prometheus_client.parser import text_string_to_metric_families as parse

from controlplane.fleet.model import Role
from controlplane.fleet.wire import (
    FleetSnapshot,
    RequestRecord,
    Result,
    RoutingMode,
    SnapshotDeployment,
    SnapshotEngine,
)
from controlplane.fleet.wire import RoutingPolicy as Policy
from frontend_api.kv.evidence import Evidence
from frontend_api.observe import figures, telemetry
from frontend_api.observe.shared import Slots
from frontend_api.observe.telemetry import Telemetry
from frontend_api.processes import listeners
from frontend_api.processes.listeners import Reporter
from frontend_api.routing.outcomes import Outcomes
from frontend_api.routing.view import View
from tests.frontend_api.client import PROMPT, Client, ask
from tests.frontend_api.conftest import Site
from tests.frontend_api.scripted import ROLE, STREAM_HEAD, Heard, chunk, framed

CHAT = "/v1/chat/completions"
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: bytes) -> Samples:
    """Every sample, by name without `tandem_router_` and labels; fails for a series that comes twice or has no HELP."""
    found: Samples = {}
    for family in parse(text.decode()):
        assert family.documentation.endswith((".", ")")), family.name
        assert family.type in ("counter", "gauge", "histogram")
        for sample in family.samples:
            key = sample.name.removeprefix("tandem_router_"), frozenset(sample.labels.items())
            assert key not in found
            found[key] = sample.value
    return found


def of(found: Samples, name: str, **labels: str) -> float | None:
    return found.get((name, frozenset(labels.items())))


def snapshot(*names: str, engines: int = 1) -> FleetSnapshot:
    deployments = []
    for name in names:
        members = tuple(
            SnapshotEngine(id=f"{name}-{n}", name="a", attempt=1, role=Role.AGGREGATED, url=f"http://127.0.0.1:{n + 1}")
            for n in range(engines)
        )
        deployments.append(SnapshotDeployment(name=name, served_name=f"m-{name}", routing=Policy(), engines=members))
    return FleetSnapshot(version=1, deployments=tuple(deployments))


def record(deployment: str = "d", **more: object) -> RequestRecord:
    values = {"id": "1", "at": 1.0, "endpoint": "/v1/x", "status": 200, "result": Result.OK, "stream": True}
    return RequestRecord(deployment=deployment, **values | more)  # type: ignore[arg-type]


class Process:
    """One router process as far as it counts."""

    def __init__(self, slots: Slots | None = None, index: int = 0, *, fleet: FleetSnapshot | None = None) -> None:
        self.view = View()
        self.evidence = Evidence(self.view)
        self.telemetry = Telemetry(f"r{index}", 0.0, slots=slots, index=index)
        self.view.take(fleet or snapshot("d"))

    def share(self) -> None:
        self.telemetry.share(self.view, self.evidence, clients=1, upstream=2)

    def read(self) -> Samples:
        return samples(self.telemetry.text(self.view, self.evidence, clients=1, upstream=2))


async def test_a_served_router_is_understood_by_prometheus(pair: Site) -> None:
    await ask(pair.port, CHAT, {**PROMPT, "stream": True})
    await ask(pair.port, CHAT, PROMPT)
    await ask(pair.port, CHAT, {**PROMPT, "model": "none"})
    await pair.settled()
    reply = await ask(pair.port, "/metrics")
    found = samples(reply.body)
    assert of(found, "requests_total", deployment="dep", endpoint=CHAT, result="ok") == 2
    assert of(found, "requests_total", deployment="", endpoint=CHAT, result="refused") == 1
    assert of(found, "streams_total", deployment="dep", result="ok") == 1
    assert of(found, "ttft_seconds_count", deployment="dep") == 1, "the whole answer has no first token"
    assert of(found, "itl_seconds_count", deployment="dep") == 1
    assert of(found, "e2e_seconds_count", deployment="dep") == 2
    assert of(found, "prefill_seconds_count", deployment="dep") == 2
    assert of(found, "tokens_total", deployment="dep", kind="cached") == 4
    stages = [of(found, "overhead_microseconds_sum", stage=stage) for stage in ("read", "tokenise", "choose", "send")]
    whole = of(found, "overhead_microseconds_sum", stage="all")
    assert whole is not None
    assert all(stage is not None and stage >= 0 for stage in stages)
    assert abs(sum(stage or 0 for stage in stages) - whole) < 1e-3 * whole
    assert of(found, "in_flight", engine="p", role="prefill") == 0
    assert of(found, "records_dropped_total") == 0
    declared = {*figures.COUNTERS, *figures.GAUGES, *figures.HISTOGRAMS}
    told = {line.split()[2] for line in reply.body.decode().splitlines() if line.startswith("# HELP")}
    assert told == {f"tandem_router_{name}" for name in declared}


async def test_a_client_that_left_is_no_success_and_keeps_its_first_word(pair: Site) -> None:
    pair.engines["d"].answer = never_ending
    async with Client(pair.port) as client:
        client.post(CHAT, {**PROMPT, "stream": True})
        await client.head()
        while b"t0" not in await client.chunk():
            pass
    await pair.settled()
    found = samples((await ask(pair.port, "/metrics")).body)
    assert of(found, "streams_total", deployment="dep", result="aborted") == 1
    assert of(found, "ttft_seconds_count", deployment="dep") == 1
    assert of(found, "requests_total", deployment="dep", endpoint=CHAT, result="ok") is None


async def never_ending(heard: Heard, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD + framed(ROLE) + framed(chunk("t0")))
    await asyncio.Event().wait()


def test_names_that_need_quoting_come_back_as_they_were() -> None:
    odd = 'a"b\\c\nd'
    process = Process(fleet=snapshot(odd))
    process.telemetry.record(record(odd, ttft=0.3))
    found = process.read()
    assert of(found, "requests_total", deployment=odd, endpoint="/v1/x", result="ok") == 1
    assert of(found, "ttft_seconds_bucket", deployment=odd, le="0.25") == 0
    assert of(found, "ttft_seconds_bucket", deployment=odd, le="0.5") == 1


def test_times_beyond_every_other_bound_are_told_apart() -> None:
    """dyn-D1: buckets that end at 2 s make every p99 two seconds."""
    process = Process()
    for seconds in (3.0, 40.0, 250.0, 10_000.0):
        process.telemetry.record(record(ttft=seconds, itl_mean=seconds, longest_gap=seconds))
    found = process.read()
    for name, top in (("ttft_seconds", "3600.0"), ("itl_seconds", "300.0"), ("longest_gap_seconds", "300.0")):
        assert of(found, f"{name}_bucket", deployment="d", le="5.0") == 1
        assert of(found, f"{name}_bucket", deployment="d", le=top) == 3
        assert of(found, f"{name}_bucket", deployment="d", le="+Inf") == 4
        assert of(found, f"{name}_sum", deployment="d") == 10_293


def test_series_of_what_is_gone_vanish() -> None:
    """peer-M2."""
    process = Process(fleet=snapshot("d", "gone", engines=2))
    for name in ("d", "gone"):
        process.telemetry.record(record(name, ttft=0.1, reason="overlap", prompt_tokens=5))
    assert of(process.read(), "tokens_total", deployment="gone", kind="prompt") == 5
    process.view.take(snapshot("d"))
    process.telemetry.record(record("gone", ttft=0.1))  # it was still in motion
    found = process.read()
    assert not [key for key in found if ("deployment", "gone") in key[1]]
    assert not [key for key in found if ("engine", "gone-0") in key[1] or ("engine", "d-1") in key[1]]
    assert of(found, "ttft_seconds_count", deployment="d") == 1


def test_several_processes_count_once() -> None:
    """peer-M3: requests add up; what all of them see alike is told once."""
    slots = Slots(3)
    processes = [Process(slots, index) for index in range(3)]
    for number, process in enumerate(processes):
        for _ in range(number + 1):
            process.telemetry.record(record(ttft=0.1, overhead_us=50.0), (20.0, 0.0, 0.0, 30.0))
        process.telemetry._kv_events["d", "batches"] += 100 + number
        process.share()
    for process in processes:
        found = process.read()
        assert of(found, "requests_total", deployment="d", endpoint="/v1/x", result="ok") == 6
        assert of(found, "ttft_seconds_count", deployment="d") == 6
        assert of(found, "overhead_microseconds_sum", stage="read") == 120
        assert of(found, "kv_events_total", deployment="d", kind="batches") == 102
        assert of(found, "engine_down", engine="d-0") == 0
        assert of(found, "client_connections") == 3
        assert {of(found, "snapshot_version", process=str(n)) for n in range(3)} == {1}


def test_a_process_that_takes_anothers_place_goes_on_from_its_figures() -> None:
    slots = Slots(1)
    first = Process(slots)
    first.telemetry.record(record(ttft=0.1))
    first.share()
    second = Process(slots)
    second.view.version = -1  # it has no snapshot yet, and forgets nobody
    second.view.deployments = {}
    second.telemetry.record(record(ttft=0.2))
    assert of(second.read(), "ttft_seconds_count", deployment="d") == 2


def test_a_mode_that_changes_loses_no_event() -> None:
    process = Process()
    aware, plain = (
        FleetSnapshot(1, deployments=(SnapshotDeployment("d", "m", Policy(mode)),))
        for mode in (RoutingMode.KV, RoutingMode.LEAST_LOAD)
    )
    for times in (3, 2):
        process.view.take(aware)
        process.evidence.tick(0.0)
        process.evidence.caches["m"].index.counts["stored"] += times
        process.share()
        process.view.take(plain)
        process.evidence.tick(0.0)
        process.share()
    assert of(process.read(), "kv_events_total", deployment="d", kind="stored") == 5


async def test_redis_that_never_answers_makes_nobody_wait(alone: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are dropped and counted; each request leaves one, wherever it ends."""
    monkeypatch.setattr(telemetry, "QUEUE", 4)
    asked = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read(-1)

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = redis.asyncio.Redis.from_url(f"redis://127.0.0.1:{port}", socket_timeout=60)
    told = alone.telemetry
    reporter = Reporter(told, alone.view, alone.evidence, Outcomes(), client)
    await ask(alone.port, CHAT, PROMPT)
    flushing = asyncio.create_task(reporter.run_flush())
    await asked.wait()
    for _ in range(10):
        assert (await ask(alone.port, CHAT, PROMPT)).status == 200
    await alone.settled()
    found = samples((await ask(alone.port, "/metrics")).body)
    assert of(found, "records_waiting") == 4
    assert of(found, "records_dropped_total") == 7
    assert of(found, "records_written_total") == 0
    assert of(found, "requests_total", deployment="dep", endpoint=CHAT, result="ok") == 11
    await listeners.end([flushing])
    assert told.dropped == 7
    server.close()
    await client.aclose()
