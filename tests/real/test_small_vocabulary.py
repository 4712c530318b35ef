"""A model with a few hundred tokens serves like any other: what proves its engines and their pair asks only for what it has.
Runs before the shared engines start: more than three real engines do not fit beside each other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from controlplane.fleet.model import Peer, Role
from tests.real.conftest import started
from tests.real.engines import KEY, MODEL, RealEngine
from workers.probe import EngineClient, prove_pair
from workers.runtimes import EngineRuntime


@pytest.fixture(scope="module")
def clients(
    runtime: EngineRuntime, runtime_script: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EngineClient, EngineClient]]:
    """A prefill and a decode engine with the tiny model."""
    folder = tmp_path_factory.mktemp("tiny")
    assert int(runtime_script(str(Path(__file__).with_name("tiny_model.py")), str(folder / "model"))) < 300
    engines = [
        RealEngine(role, runtime, folder / "model", folder, max_model_len=512) for role in (Role.PREFILL, Role.DECODE)
    ]
    with started(*engines), ExitStack() as stack:
        for engine in engines:
            engine.await_ready()
        prefill, decode = (stack.enter_context(EngineClient(engine.url, KEY)) for engine in engines)
        yield prefill, decode


def test_its_pair_is_proved(clients: tuple[EngineClient, EngineClient]) -> None:
    prefill, decode = clients
    identity = decode.identity()
    proof = prove_pair(
        decode, prefill, Peer("prefill", 1, prefill.url, KEY), model=MODEL, block_size=identity.block_size,
        max_model_len=identity.max_model_len, chance=random.Random(),
    )  # fmt: skip
    assert proof.ok, proof.detail
    assert proof.bytes_moved > 0
