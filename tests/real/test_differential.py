"""A request to a real engine through the router gives the bytes that the engine itself gives: ids and times aside."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from controlplane.fleet.wire import FleetSnapshot, RoutingPolicy, SnapshotDeployment, SnapshotEngine, encode
from tests.conftest import free_port
from tests.contract.exchange import EXPIRED
from tests.contract.pair import EnginePair
from tests.frontend_api import differential as d
from tests.real.conftest import Site, await_router
from tests.real.engines import ADDRESS, KEY, MODEL

FEW = 3
"""Tokens of an answer: each takes a tenth of a second."""
WHOLE = (
    "chat", "turns", "stop", "log probabilities", "three answers", "json", "unknown fields", "text", "two prompts",
    "text with log probabilities", "response", "message", "no tool",
)  # fmt: skip
STREAMED = (
    "chat", "stop", "log probabilities", "three answers", "text", "two prompts, two answers", "response", "message",
)  # fmt: skip


def asked(path: str, body: dict[str, Any], **more: Any) -> tuple[str, dict[str, Any]]:
    limit = "max_output_tokens" if path == d.RESPONSES else "max_tokens"
    return path, body | {"model": MODEL, limit: min(body.get(limit) or FEW, FEW)} | more


ALL = d.ANSWERED | d.WITH_TOOLS
ASKED = {
    **{name: asked(*ALL[name]) for name in WHOLE},
    **{f"{name}, streamed": asked(*ALL[name], stream=True) for name in STREAMED},
    **{name: asked(*case) for name, case in d.STREAMS.items()},
}


@pytest.fixture(scope="module")
def alone(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A router in front of the aggregated engine."""
    folder = tmp_path_factory.mktemp("alone")
    fleet, log, port = folder / "fleet.json", folder / "log", free_port()
    fleet.touch(mode=0o600)
    role = site.aggregated.role
    engine = SnapshotEngine(id=role, name=role, attempt=1, role=role, url=site.aggregated.url, secret=KEY)
    deployment = SnapshotDeployment(name=MODEL, served_name=MODEL, routing=RoutingPolicy(), engines=(engine,))
    fleet.write_bytes(encode(FleetSnapshot(version=1, deployments=(deployment,))))
    argv = [
        sys.executable,
        "-m",
        "frontend_api",
        "--fleet",
        str(fleet),
        "--no-auth",
        "--port",
        str(port),
        "--host",
        ADDRESS,
    ]
    with log.open("wb") as file:
        router = subprocess.Popen(argv, stdout=file, stderr=file)
    try:
        await_router(f"http://{ADDRESS}:{port}", router, log)
        yield f"http://{ADDRESS}:{port}"
    finally:
        router.terminate()
        router.wait(30)


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with httpx.Client(headers={"authorization": f"Bearer {KEY}"}, timeout=120, trust_env=False) as client:
        yield client


TRIES = 4


@pytest.mark.parametrize("name", ASKED)
def test_answers(site: Site, alone: str, client: httpx.Client, name: str) -> None:
    """Tried again, as the engine itself is not quite steady: it joins two tokens in one event when it is behind."""
    path, body = ASKED[name]
    for _ in range(TRIES):
        direct, through = (d.by_choice(d.ask(client, url, path, body, "same")) for url in (site.aggregated.url, alone))
        assert direct.status == 200, direct
        if through == direct:
            return
    assert through == direct


@pytest.mark.parametrize("name", d.REFUSED)
def test_refusals(site: Site, alone: str, client: httpx.Client, name: str) -> None:
    path, body = d.REFUSED[name]
    assert isinstance(body, dict)
    body = body | {"model": MODEL}
    direct = d.ask(client, site.aggregated.url, path, body, "same")
    assert 400 <= direct.status < 500, direct
    expected = d.in_the_endpoints_shape(path, direct)
    assert d.ask(client, alone, path, body, "same") == expected
    assert d.ask(client, site.router_url, path, body, "same") == expected


@pytest.mark.parametrize("name", ["more than the model's length", "more at least than at most"])
def test_what_decode_refuses_keeps_no_kv(site: Site, pair: EnginePair, client: httpx.Client, name: str) -> None:
    """Prefill took it; decode tells prefill that it did not, long before the lease ends. An idle engine may put that off, or
    what its gauge says of it, until its next step: both get something to do."""
    assert d.ask(client, site.router_url, d.CHAT, d.chat(model=MODEL), "met").status == 200
    before = pair.metrics(pair.prefill_url)
    path, body = d.REFUSED[name]
    assert isinstance(body, dict)
    assert d.ask(client, site.router_url, path, body | {"model": MODEL}, "refused").status == 400

    def free(samples: dict[str, float]) -> bool:
        pair.nudge()
        return samples["vllm:kv_cache_usage_perc"] == 0

    after = pair.settled(pair.prefill_url, free, 15)
    assert after["vllm:prompt_tokens_total"] > before["vllm:prompt_tokens_total"]
    assert after[EXPIRED] == before[EXPIRED]
