"""The tokenizer's way through the product, on stand-ins that have a model's own token ids: from the agent to a router that
finds no such folder on its machine, and the engines' own word on it up to REST.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis

from controlplane.fleet import wire
from controlplane.fleet.wire import FleetSnapshot
from tests.flows.site import Site
from tests.frontend_api.tiny_model import write_model

TEXT = "The river rises in the hills and turns east before it meets the sea. " * 30


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """As the others', with a cache of its own."""
    folder = tmp_path_factory.mktemp("site")
    site = Site(folder)
    site.env["TANDEM_CACHE"] = str(folder / "cache")
    document = {
        "name": "demo",
        "model": str(write_model(folder / "model")),
        "runtime": "sim",
        "max_model_len": 4096,
        "block_size": 16,
        "pools": {"aggregated": {"replicas": 2}},
        "routing": {"mode": "kv"},
    }
    try:
        site.up()
        reply = site.api.put("/deployments/demo", json=document)
        assert reply.status_code == 201, reply.text
        site.until(lambda: site.ready(aggregated=2), "it is ready")
        yield site
    finally:
        site.down()


def exact_overlap(site: Site) -> bool:
    status, reply = site.ask(text=TEXT)
    headers = reply["headers"]
    found = status == 200 and headers["x-tandem-state"] == "exact" and headers["x-tandem-reason"] == "overlap"
    return found and int(headers["x-tandem-overlap"].split("/")[0]) >= reply["usage"]["prompt_tokens"] - 128


def notices(site: Site) -> list[str]:
    return list(site.deployment()["notices"])


def test_the_tokenizer_that_the_agent_tells_finds_a_prompt_again(site: Site) -> None:
    site.until(lambda: exact_overlap(site), "the same text is found where its KV lies")
    site.until(lambda: "Cache-aware routing is exact." in notices(site), "REST says so")
    (folder,) = {engine["observation"]["tokenizer_folder"] for engine in site.engines()}
    assert Path(folder).parent == site.folder / "cache" / "tokenizers"


def test_a_router_on_another_machine_gets_it_through_redis(site: Site) -> None:
    site.stop("router")
    with redis.Redis.from_url(site.redis.url) as client:
        site.until(lambda: list(client.scan_iter(wire.tokenizer_key("node-a", "*"))), "the agent offers it")
    shutil.move(site.folder / "cache" / "tokenizers", site.folder / "elsewhere")  # not on the router's machine
    site.start("router")
    site.until(lambda: exact_overlap(site), "it is exact all the same")
    (copy,) = (site.home / "tokenizers").iterdir()
    assert copy.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in copy.iterdir())


def test_an_engine_with_other_ids_is_told_up_to_rest(site: Site) -> None:
    with redis.Redis.from_url(site.redis.url) as client:
        data = client.get(wire.SNAPSHOT_KEY)
    assert isinstance(data, bytes)
    engine = wire.decode(data, FleetSnapshot).deployments[0].engines[0]
    httpx.post(
        engine.url + "/sim/faults",
        json={"faults": ["wrong-tokens"]},
        headers={"authorization": f"Bearer {engine.secret}"},
    ).raise_for_status()
    site.stop("router")
    site.start("router")  # it asks every engine anew
    wanted = f"({engine.name}: tokenization_mismatch)"
    site.until(lambda: any(wanted in notice for notice in notices(site)), wanted)
