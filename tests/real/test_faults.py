"""Real engines whose transfers break after they worked, that hang while they call themselves healthy, or that compute what they
should have fetched: requests are answered, each says so, and what works again is used again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from controlplane.fleet.model import Role
from controlplane.fleet.wire import FleetSnapshot, RoutingPolicy, SnapshotDeployment, SnapshotEngine
from tests.real.broken_path import BrokenPath, broken_path, drop_params, refuse_transfers
from tests.real.conftest import Site, router
from tests.real.engines import KEY, MODEL
from tests.real.test_answers import chat, long_text

PROMPT = 150
"""Tokens: more than one KV block."""


def engine(name: str, role: Role, url: str) -> SnapshotEngine:
    return SnapshotEngine(id=name, name=name, attempt=1, role=role, url=url, secret=KEY, block_size=128)


@contextmanager
def serving(folder: Path, *engines: SnapshotEngine) -> Iterator[Client]:
    wants_prefill = any(e.role is Role.PREFILL for e in engines)
    deployment = SnapshotDeployment(
        name=MODEL, served_name=MODEL, routing=RoutingPolicy(), engines=engines, wants_prefill=wants_prefill
    )
    with router(FleetSnapshot(version=1, deployments=(deployment,)), folder) as (url, _):
        yield Client(url)


class Client:
    """Asks the router, and what it decided."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, tokens: int = PROMPT) -> dict:
        """The decision on a prompt that nobody has seen, after its answer."""
        body = chat(long_text(tokens), max_tokens=2)
        reply = httpx.post(self.url + "/v1/chat/completions", json=body, timeout=120, trust_env=False)
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["message"]["content"]
        return self.decision(reply.headers["x-request-id"])

    def decision(self, request: str) -> dict:
        found = httpx.get(self.url + "/debug/decisions?limit=20", trust_env=False).json()["decisions"]
        return next(one for one in found if one["id"] == request)

    def until(self, right: Callable[[dict], bool], seconds: float = 90) -> dict:
        """Asks until a decision is right."""
        deadline = time.monotonic() + seconds
        while not right(decision := self.ask()):
            assert time.monotonic() < deadline, decision
            time.sleep(0.5)
        return decision


@pytest.fixture
def path(site: Site) -> Iterator[BrokenPath]:
    """A way to the decode engine that can break."""
    with broken_path(site.decode.url) as path:
        yield path


def test_the_only_decode_engine_answers_alone_while_its_transfers_fail(
    site: Site, path: BrokenPath, tmp_path: Path
) -> None:
    prefill, decode = engine("p", Role.PREFILL, site.prefill.url), engine("d", Role.DECODE, path.url)
    with serving(tmp_path, prefill, decode) as client:
        assert not client.ask()["fallback"]
        path.change = refuse_transfers
        first = client.ask()
        assert first["fallback"]
        assert first["fallback_cause"]
        client.until(lambda d: d["fallback"] and d["prefill"] is None)  # the pair is out: nothing is prefilled for it
        path.change = None
        client.until(lambda d: not d["fallback"] and d["prefill"] == "p")


def test_of_two_decode_engines_the_one_whose_transfers_fail_is_left_out_and_comes_back(
    site: Site, path: BrokenPath, tmp_path: Path
) -> None:
    """Both names are one process: only the way to it is broken for one of them."""
    prefill = engine("p", Role.PREFILL, site.prefill.url)
    broken, whole = engine("broken", Role.DECODE, path.url), engine("whole", Role.DECODE, site.decode.url)
    with serving(tmp_path, prefill, broken, whole) as client:
        client.until(lambda d: d["decode"] == "broken" and not d["fallback"])
        path.change = refuse_transfers
        client.until(lambda d: any("broken" in one for one in d["tried"]))  # its request went on to another way
        assert [client.ask()["decode"] for _ in range(3)] == ["whole"] * 3
        path.change = None
        client.until(lambda d: d["decode"] == "broken" and d["prefill"] == "p" and not d["fallback"])


def test_an_engine_that_computes_what_it_should_have_fetched_is_a_fallback(
    site: Site, path: BrokenPath, tmp_path: Path
) -> None:
    prefill, decode = engine("p", Role.PREFILL, site.prefill.url), engine("d", Role.DECODE, path.url)
    with serving(tmp_path, prefill, decode) as client:
        assert not client.ask()["fallback"]
        path.change = drop_params
        decision = client.until(lambda d: d["fallback"])
        assert "comput" in decision["fallback_cause"]


def test_an_engine_that_hangs_and_calls_itself_healthy_is_left_out_and_comes_back(site: Site, tmp_path: Path) -> None:
    hanging, well = (
        engine("hanging", Role.AGGREGATED, site.decode.url),
        engine("well", Role.AGGREGATED, site.aggregated.url),
    )
    cores = [p for p in site.decode.processes() if "EngineCore" in p.name() or "EngineCore" in " ".join(p.cmdline())]
    assert cores
    with serving(tmp_path, hanging, well) as client:
        client.until(lambda d: d["decode"] == "hanging")
        with frozen(cores):
            assert httpx.get(site.decode.url + "/health", timeout=10, trust_env=False).status_code == 200
            client.until(lambda d: d["decode"] == "well")
            assert [client.ask()["decode"] for _ in range(3)] == ["well"] * 3
        client.until(lambda d: d["decode"] == "hanging")


@contextmanager
def frozen(processes: list[psutil.Process]) -> Iterator[None]:
    for process in processes:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            os.kill(process.pid, signal.SIGCONT)
