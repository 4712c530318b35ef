"""Tokenizers of engines on other machines: fetched once, kept privately, and never other files than named."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from threading import Barrier, Thread

import pytest

from controlplane.fleet import tokenizer_files
from controlplane.fleet.model import Role
from controlplane.fleet.wire import RoutingMode, RoutingPolicy, SnapshotEngine, tokenizer_key
from frontend_api.kv import listen
from frontend_api.kv.evidence import State
from frontend_api.kv.listen import Follower
from frontend_api.tokens import store
from frontend_api.tokens.store import Absent, TokenizerStore
from frontend_api.tokens.tokenizer import Tokenizer
from tests.frontend_api.conftest import MakeSite, until
from tests.frontend_api.tiny_model import write_model

FILES = {"tokenizer.json": b"{}", "additional_chat_templates/tool_use.jinja": b"x"}
DIGEST = tokenizer_files.digest(FILES)
KEY = tokenizer_key("far", DIGEST)


class Redis:
    def __init__(self, **values: bytes) -> None:
        self.values: dict[str, bytes] = dict(values)
        self.away = False
        self.asked = 0

    def __call__(self, key: str) -> bytes | None:
        self.asked += 1
        if self.away:
            raise OSError("Redis does not answer")
        return self.values.get(key)


def offering(files: dict[str, bytes] = FILES) -> Redis:
    redis = Redis()
    redis.values[tokenizer_key("far", tokenizer_files.digest(files))] = tokenizer_files.pack(files)
    return redis


def test_a_folder_on_this_machine_is_used_as_it_is(tmp_path: Path) -> None:
    redis = offering()
    assert TokenizerStore(tmp_path / "home", redis).folder(str(tmp_path), KEY) == tmp_path
    assert TokenizerStore(tmp_path / "home", None).folder(str(tmp_path), "") == tmp_path
    assert redis.asked == 0
    assert not (tmp_path / "home").exists()


def test_others_are_fetched_once_and_kept_for_a_start_without_redis(tmp_path: Path) -> None:
    redis = offering()
    folder = TokenizerStore(tmp_path / "home", redis).folder("/of/another/machine", KEY)
    assert folder == tmp_path / "home" / DIGEST
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    assert {path.name: path.stat().st_mode & 0o777 for path in (folder.parent, folder, folder / "tokenizer.json")} == {
        "home": 0o700, DIGEST: 0o700, "tokenizer.json": 0o600
    }  # fmt: skip
    redis.away = True
    assert TokenizerStore(tmp_path / "home", redis).folder("/of/another/machine", KEY) == folder
    assert redis.asked == 1
    assert os.listdir(tmp_path / "home") == [DIGEST]


WRONG: dict[str, Callable[[Redis], object]] = {
    "is not there": lambda redis: redis.values.clear(),
    "Redis is away": lambda redis: setattr(redis, "away", True),
    "other files": lambda redis: redis.values.update({KEY: tokenizer_files.pack({"config.json": b"{}"})}),
    "no files": lambda redis: redis.values.update({KEY: b"x"}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_absent_and_leaves_nothing_behind(tmp_path: Path, wrong: str) -> None:
    redis = offering()
    WRONG[wrong](redis)
    with pytest.raises(Absent, match="tokenizer"):
        TokenizerStore(tmp_path / "home", redis).folder("/of/another/machine", KEY)
    assert not (tmp_path / "home").exists() or os.listdir(tmp_path / "home") == []


@pytest.mark.parametrize("fetch", [None, Redis()])
def test_without_an_offer_there_is_none(tmp_path: Path, fetch: Redis | None) -> None:
    with pytest.raises(Absent, match="no folder /of/another/machine on this machine"):
        TokenizerStore(tmp_path, fetch).folder("/of/another/machine", "")
    with pytest.raises(Absent):
        TokenizerStore(tmp_path, fetch).folder("/of/another/machine", KEY)


def test_processes_that_fetch_at_once_share_one_copy(tmp_path: Path) -> None:
    together, found, redis = Barrier(4), [], offering()

    def fetch(key: str) -> bytes | None:
        together.wait(10)
        return redis(key)

    def take() -> None:
        found.append(TokenizerStore(tmp_path, fetch).folder("", KEY))

    threads = [Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == [tmp_path / DIGEST] * 4
    assert os.listdir(tmp_path) == [DIGEST]


def test_old_copies_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "KEEP", 2)
    digests = []
    for number in range(4):
        files = {"config.json": str(number).encode()}
        digests.append(tokenizer_files.digest(files))
        folder = TokenizerStore(tmp_path, offering(files)).folder("", tokenizer_key("far", digests[-1]))
        os.utime(folder, (number, number))
    assert sorted(os.listdir(tmp_path)) == sorted(digests[-2:])


async def test_a_router_is_blind_until_the_tokenizer_comes(
    make_site: MakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "RETRY_SECONDS", 0.05)
    model = write_model(tmp_path / "model")
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    key, redis = tokenizer_key("far", tokenizer_files.digest(files)), Redis()
    store = TokenizerStore(tmp_path / "home", redis)
    site = await make_site()
    site.add(SnapshotEngine(id="a0", name="a0", attempt=1, role=Role.AGGREGATED, url="http://127.0.0.1:9"))
    policy = RoutingPolicy(mode=RoutingMode.KV_APPROXIMATE)
    site.publish(policy=policy, tokenizer="/of/another/machine", tokenizer_key=key)
    follower = asyncio.create_task(Follower(site.evidence, lambda *where: Tokenizer(store.folder(*where))).run())
    try:
        cache = site.cache
        await until(lambda: redis.asked > 2)
        assert cache.standing() == (State.BLIND, {"*": "the engines' machine has not offered their tokenizer yet"})
        redis.values[key] = tokenizer_files.pack(files)
        await until(lambda: cache.tokens is not None)
        assert cache.standing().state is State.APPROXIMATE
        tokens = cache.tokens
        site.publish(policy=policy, tokenizer="/of/a/third/machine", tokenizer_key=key.replace("far", "third"))
        site.evidence.tick(0.0)
        assert cache.tokens is tokens, "the same files from elsewhere change nothing"
        site.publish(policy=policy, tokenizer=str(model), tokenizer_key="")
        site.evidence.tick(0.0)
        assert cache.tokens is None
        await until(lambda: cache.tokens is not None)
    finally:
        follower.cancel()
        await asyncio.gather(follower, return_exceptions=True)
