"""The known experiment on two real engines, with prefixes short enough for a CPU: the engines' own counts say that repeats go
where their KV lies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from controlplane.cli import prefix_report
from controlplane.fleet.model import Role
from controlplane.fleet.wire import (
    FleetSnapshot,
    RoutingMode,
    RoutingPolicy,
    SnapshotDeployment,
    SnapshotEngine,
    encode,
)
from tests.conftest import free_port
from tests.real.conftest import Site, await_router
from tests.real.engines import ADDRESS, BLOCK_SIZE, KEY, MODEL


@pytest.fixture
def url(site: Site, model_path: Path, tmp_path: Path) -> Iterator[str]:
    """A router in kv mode in front of two of the engines, each of which reads and answers."""
    engines = tuple(
        SnapshotEngine(
            id=e.role,
            name=e.role,
            attempt=1,
            role=Role.AGGREGATED,
            url=e.url,
            secret=KEY,
            events=f"tcp://{ADDRESS}:{e.ports.events}",
            replay=f"tcp://{ADDRESS}:{e.ports.replay}",
        )
        for e in (site.aggregated, site.prefill)
    )
    policy = RoutingPolicy(mode=RoutingMode.KV)
    deployment = SnapshotDeployment(MODEL, MODEL, policy, engines, tokenizer=str(model_path))
    fleet = tmp_path / "fleet.json"
    fleet.touch(mode=0o600)
    fleet.write_bytes(encode(FleetSnapshot(version=1, deployments=(deployment,))))
    url, log = f"http://{ADDRESS}:{free_port()}", tmp_path / "log"
    argv = [sys.executable, "-m", "frontend_api", "--fleet", str(fleet), "--no-auth", "--host", ADDRESS]
    with log.open("wb") as to:
        router = subprocess.Popen([*argv, "--port", url.rpartition(":")[2]], env=os.environ, stdout=to, stderr=to)
    try:
        await_router(url, router, log)
        yield url
    finally:
        router.terminate()
        router.wait(30)


def test_every_prefix_is_found_again(url: str) -> None:
    """Two blocks of 128 tokens of each prefix can be found again."""
    words = ("--prefixes", "6", "--words", "270", "--repeats", "3", "--tail-words", "12")
    command = [sys.executable, "-m", "controlplane.cli", "bench", "prefixes", "--url", url, *words]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    prefix_report.show(msgspec.convert(report, prefix_report.Report))
    shots = [shot for row in report["rows"] for shot in row["shots"]]
    assert {shot["prompt_tokens"] > 2 * BLOCK_SIZE for shot in shots} == {True}
    assert set(report["readers"]) == {"aggregated", "prefill"}
    assert report["hits"]["of"] == 12
    assert report["hits"]["by_engine"] >= 11
    assert report["hits"]["by_router"] >= 11
    text = httpx.get(url + "/metrics", trust_env=False).text
    assert f'tandem_router_tokens_total{{deployment="{MODEL}",kind="cached"}}' in text
    decisions = httpx.get(url + "/debug/decisions?limit=100", trust_env=False).json()["decisions"]
    assert len(decisions) == 19, "the experiment's requests, and the one that looked who is there"
    for decision in decisions[:-1]:
        assert {candidate["engine"] for candidate in decision["candidates"]} == {"aggregated", "prefill"}
        if decision["overlap_tokens"]:
            assert decision["cached_tokens"] >= BLOCK_SIZE
