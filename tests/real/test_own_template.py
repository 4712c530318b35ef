"""A real engine with a chat template of its own: a router that reads the model's is told so by its own check, and one that
gets what the agent makes of model and options has the engine's ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from controlplane.fleet.model import Role
from controlplane.fleet.wire import (
    FleetSnapshot,
    RoutingMode,
    RoutingPolicy,
    SnapshotDeployment,
    SnapshotEngine,
)
from tests.real.conftest import router
from tests.real.engines import ADDRESS, BLOCK_SIZE, KEY, MODEL, RealEngine
from tests.real.prompt_cases import KNOWN
from workers import tokenizer_folder
from workers.runtimes import EngineRuntime

SOME = KNOWN[::3]
"""Every kind; that all have the ids of vLLM is shown without an engine, in `test_tokens`."""
TEXT = "The river rises in the hills and turns east before it meets the sea. " * 12 + "What is this about?"


@pytest.fixture(scope="module")
def engine(own_template_engine: RealEngine) -> Iterator[RealEngine]:
    own_template_engine.await_ready()
    yield own_template_engine
    own_template_engine.stop()


def snapshot(engine: RealEngine, tokenizer: Path) -> FleetSnapshot:
    spec = SnapshotEngine(
        id="a0", name="aggregated-0", attempt=1, role=Role.AGGREGATED, url=engine.url, secret=KEY,
        events=f"tcp://{ADDRESS}:{engine.ports.events}", replay=f"tcp://{ADDRESS}:{engine.ports.replay}",
    )  # fmt: skip
    deployment = SnapshotDeployment(
        name=MODEL,
        served_name=MODEL,
        routing=RoutingPolicy(mode=RoutingMode.KV),
        engines=(spec,),
        tokenizer=str(tokenizer),
    )
    return FleetSnapshot(version=1, deployments=(deployment,))


def await_metrics(url: str, holds: Callable[[str], bool]) -> str:
    deadline = time.monotonic() + 60
    while True:
        text = httpx.get(url + "/metrics", timeout=10, trust_env=False).text
        if holds(text):
            return text
        assert time.monotonic() < deadline, text
        time.sleep(0.2)


def test_the_models_own_template_is_found_wrong(engine: RealEngine, model_path: Path, tmp_path: Path) -> None:
    with router(snapshot(engine, model_path), tmp_path) as (url, _):
        text = await_metrics(url, lambda text: 'outcome="mismatch"} 1' in text)
        assert f'tandem_router_kv_state{{deployment="{MODEL}",state="degraded"}} 1' in text
        assert f'kv_trouble{{deployment="{MODEL}",engine="a0",why="tokenization_mismatch"}} 1' in text
    log = (tmp_path / "router.log").read_text()
    assert log.count("the router's token ids are not the engine's: ") == 1
    assert "ids for a chat, where the engine has" in log
    assert "ids for a text," not in log, "only its chats are other"


def test_what_the_agent_makes_of_the_options_is_the_engines(
    engine: RealEngine, runtime: EngineRuntime, model_path: Path, tmp_path: Path
) -> None:
    arguments = engine.assignment.spec.extra_args
    read = tokenizer_folder.ensure(
        model_path, arguments, runtime=runtime, cache=tmp_path, progress=lambda sentence, done: None
    )
    assert read.digest
    with router(snapshot(engine, read.folder), tmp_path) as (url, _):
        text = await_metrics(url, lambda text: 'outcome="same"} 1' in text)
        assert f'tandem_router_kv_state{{deployment="{MODEL}",state="exact"}} 1' in text
        body = {"model": MODEL, "messages": [{"role": "user", "content": TEXT}], "max_tokens": 1}

        def ask() -> httpx.Response:
            reply = httpx.post(
                url + "/v1/chat/completions", json=body, headers={"x-tandem-explain": "1"}, timeout=120, trust_env=False
            )
            assert reply.status_code == 200, reply.text
            return reply

        prompt_tokens = ask().json()["usage"]["prompt_tokens"]
        await_metrics(url, lambda text: f'tandem_router_kv_blocks{{deployment="{MODEL}"}} 0' not in text)
        assert prompt_tokens > BLOCK_SIZE
        assert ask().headers["x-tandem-overlap"] == f"{prompt_tokens // BLOCK_SIZE * BLOCK_SIZE}/{prompt_tokens}"
        answered = [status_of(url, path, fields, stream=bool(at % 2)) for at, (path, fields) in enumerate(SOME)]
        assert answered.count(200) > len(SOME) * 0.8
        text = await_metrics(url, lambda text: True)
        assert f'tandem_router_kv_state{{deployment="{MODEL}",state="exact"}} 1' in text
        assert 'outcome="miscount"' not in text, "the engine counts as many prompt tokens in every kind of request"


def status_of(url: str, path: str, fields: dict[str, Any], *, stream: bool) -> int:
    """Of a request that the router has tokens for."""
    most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {**fields, "model": MODEL, "stream": stream, most: 2}
    reply = httpx.post(url + path, json=body, headers={"x-tandem-explain": "1"}, timeout=120, trust_env=False)
    assert reply.status_code != 200 or reply.headers["x-tandem-overlap"] != "unknown", fields
    return reply.status_code
