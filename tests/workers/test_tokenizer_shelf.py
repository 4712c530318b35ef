"""Tokenizers offered through a real Redis, by a node's own user; and taken by a router's store on another machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from controlplane.fleet import tokenizer_files, wire
from tests.workers.test_redis_user import denied, join
from workers import tokenizer_shelf
from workers.mailbox import connect
from workers.tokenizer_folder import read_files
from workers.tokenizer_shelf import TokenizerShelf


@pytest.fixture
def admin(redis_url: str) -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(redis_url)
    client.execute_command("ACL", "LOG", "RESET")
    yield client
    client.execute_command("ACL", "DELUSER", wire.acl_user("x"))


@pytest.fixture
def node(admin: redis.Redis) -> redis.Redis:
    return connect(join(admin, "x"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text("{}" * 1000)
    (tmp_path / ".complete").touch()
    return tmp_path


def test_it_is_offered_kept_and_put_there_again(
    node: redis.Redis, admin: redis.Redis, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_shelf, "KEEP_LOOKS", 1)
    digest = tokenizer_files.digest(read_files(folder))
    key = wire.tokenizer_key("x", digest)
    wanted = {digest: folder}
    shelf = TokenizerShelf("x", node, lambda: wanted)
    shelf.one_step()
    data = admin.get(key)
    assert isinstance(data, bytes)
    assert tokenizer_files.unpack(data, digest) == {"tokenizer.json": b"{}" * 1000}
    admin.expire(key, 10)
    shelf.one_step()
    assert int(admin.ttl(key)) > wire.TOKENIZER_TTL - 60  # type: ignore[arg-type]
    admin.delete(key)
    shelf.one_step()
    assert admin.exists(key)
    wanted.clear()
    admin.expire(key, 10)
    shelf.one_step()
    assert denied(admin) == []
    assert int(admin.ttl(key)) <= 10, "nobody needs it any more"  # type: ignore[arg-type]


def test_files_that_changed_meanwhile_are_not_offered_under_their_old_name(
    node: redis.Redis, admin: redis.Redis, folder: Path
) -> None:
    digest = tokenizer_files.digest(read_files(folder))
    (folder / "tokenizer.json").write_text("other")
    TokenizerShelf("x", node, lambda: {digest: folder}).one_step()
    assert not admin.exists(wire.tokenizer_key("x", digest))


def test_while_redis_is_away_it_is_tried_again(folder: Path) -> None:
    class Away:
        asked = 0

        def expire(self, key: str, seconds: int) -> bool:
            self.asked += 1
            raise redis.ConnectionError

    away = Away()
    shelf = TokenizerShelf("x", away, lambda: {"d": folder})  # type: ignore[arg-type]
    shelf.one_step()
    shelf.one_step()
    assert away.asked == 2
