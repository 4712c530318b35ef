"""The whole product with real engines: deployed, asked, one engine killed and replaced. Runs before the shared engines start
(`conftest.py` sees to it): more than three real engines do not fit beside each other.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.flows.site import Site
from workers.process import members

START_SECONDS = 600
"""Two engines on two busy cores, the runtime and the model being there."""


@pytest.fixture(scope="module")
def tandem(
    runtime: object, model_path: object, tmp_path_factory: pytest.TempPathFactory, start_ahead: Callable[..., None]
) -> Iterator[Site]:
    start_ahead("runtime_host")  # beside one program after the other
    site = Site(tmp_path_factory.mktemp("site"), runtime="cpu")
    try:
        site.up()
        site.deploy(prefill=1, decode=1, timeout=START_SECONDS)
        yield site
    finally:
        site.down()


def capital(site: Site) -> dict[str, Any]:
    status, reply = site.ask(text="What is the capital of France?")
    assert status == 200, reply
    assert "Paris" in reply["choices"][0]["message"]["content"]
    return reply


def test_ready_engines_have_proved_a_transfer_and_answer_disaggregated(tandem: Site) -> None:
    prefill, decode = (tandem.engines(role=role)[0] for role in ("prefill", "decode"))
    (proof,) = decode["observation"]["pairs"]
    assert proof["ok"]
    assert proof["prefill"] == prefill["id"]
    assert proof["bytes_moved"] > 0
    reply = capital(tandem)
    assert reply["headers"]["x-tandem-prefill"] == prefill["id"]
    assert reply["headers"]["x-tandem-decode"] == decode["id"]


def test_the_same_prefix_goes_where_its_kv_lies(tandem: Site) -> None:
    assert (
        tandem.api.patch("/deployments/demo", json={"routing": {"mode": "kv", "disaggregate": "always"}}).status_code
        == 200
    )
    text = "The river rises in the hills and turns east before it meets the sea. " * 12 + "What is this text about?"

    def known() -> dict[str, str]:
        headers: dict[str, str] = tandem.ask(text=text)[1]["headers"]
        return headers if headers.get("x-tandem-state") == "exact" and headers["x-tandem-reason"] == "overlap" else {}

    headers = tandem.until(known, "the router has a tokenizer, all events, and finds the prompt again", 60)
    assert int(headers["x-tandem-overlap"].split("/")[0]) >= 128, "a block of the prompt was there already"
    tandem.until(lambda: "Cache-aware routing is exact." in tandem.deployment()["notices"], "REST says so")


def test_a_killed_decode_engine_is_replaced_and_the_next_request_served(
    tandem: Site, start_ahead: Callable[..., None]
) -> None:
    start_ahead("own_template_engine")  # beside another one, which starts on one core
    victim = tandem.engines(role="decode")[0]
    prefill = tandem.engines(role="prefill")[0]
    lying = left_by(tandem.home / "agents" / "node-a" / "engines" / victim["id"] / str(victim["attempt"]))
    assert len(lying) > 5
    os.kill(victim["pid"], signal.SIGKILL)
    tandem.until(
        lambda: tandem.ready(prefill=1, decode=1) and tandem.engines(role="decode")[0]["attempt"] > victim["attempt"],
        "the decode engine is replaced",
        START_SECONDS,
    )
    tandem.until(lambda: tandem.ask()[0] == 200, "the router serves again")
    capital(tandem)
    assert tandem.engines(role="prefill")[0]["pid"] == prefill["pid"], "its partner was left alone"
    assert [path for path in lying if path.exists()] == []


def left_by(folder: Path) -> list[Path]:
    """What vLLM by itself would leave on the node: sockets and a file, and its shared memory."""
    shared = {
        Path(region.path)
        for pid in members(folder)
        for region in psutil.Process(pid).memory_maps()
        if region.path.startswith("/dev/shm/psm_")
    }
    assert len(shared) == 2
    return [*shared, *(folder / "tmp").resolve().iterdir()]
