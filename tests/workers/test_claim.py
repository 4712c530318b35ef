"""One identity, one agent: of two machines with one state folder the first goes on, and the second is told."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest
import redis

from controlplane.fleet import wire
from controlplane.fleet.errors import Conflict
from controlplane.fleet.model import Role
from tests.workers import test_redis_user
from tests.workers.conftest import Node, assignment, until
from tests.workers.test_agent import running, up
from workers import agent as agent_module
from workers.claim import CLAIM_SECONDS, Claim, Claimant
from workers.mailbox import LoginRefused, RedisMailbox, connect


@pytest.fixture
def client(redis_url: str) -> redis.Redis:
    """As node x's own Redis user."""
    admin = redis.Redis.from_url(redis_url)
    admin.flushall()
    return connect(test_redis_user.join(admin, "x"))


def claimant(client: redis.Redis, folder: Path) -> Claimant:
    folder.mkdir(exist_ok=True)
    lock = folder / "agent.lock"
    lock.touch()
    return Claimant("x", client, lock=lock)


def test_the_first_keeps_the_claim_until_it_releases_it_or_is_gone(
    client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    first, second = claimant(client, tmp_path / "a"), claimant(client, tmp_path / "b")
    assert first.renew() is None
    assert second.renew() == first._mine
    assert first.renew() is None
    assert 0 < redis.Redis.from_url(redis_url).ttl("tandem:node:x:agent") <= CLAIM_SECONDS  # type: ignore[operator]
    second.release()
    assert second.renew() == first._mine, "nobody releases another's claim"
    first.release()
    assert second.renew() is None
    assert first.renew() == second._mine


def test_the_next_agent_of_the_same_folder_takes_over_at_once(client: redis.Redis, tmp_path: Path) -> None:
    assert claimant(client, tmp_path / "a").renew() is None
    assert claimant(client, tmp_path / "a").renew() is None


def of_another_machine(client: redis.Redis) -> Claim:
    other = Claim("a1", "another-boot:1:2", "gpu-7")
    client.set("tandem:node:x:agent", msgspec.json.encode(other))
    return other


def test_the_agent_of_a_copied_disk_is_told_ends_what_it_left_and_harms_nobody(
    client: redis.Redis, tmp_path: Path, node: Node
) -> None:
    (seen,) = up(node, assignment("d", Role.DECODE))
    reports = len(node.mailbox.reports)
    other = of_another_machine(client)
    late = node.new_agent(recover=False)
    late._claimant = claimant(client, tmp_path / "a")
    waits: list[float] = []
    with pytest.raises(Conflict, match="Another agent is node x already, on gpu-7: this state folder is a copy"):
        late.await_claim(waits.append)
    assert CLAIM_SECONDS < sum(waits) < 30
    assert not running(seen.pid), "its own engine, on its own machine"
    assert len(node.mailbox.reports) == reports, "the other's reports are the node's"
    assert late._claimant.renew() == other


def test_an_agent_that_finds_another_in_its_place_stops_and_says_so(
    client: redis.Redis, tmp_path: Path, node: Node
) -> None:
    node.agent._claimant = claimant(client, tmp_path / "a")
    node.agent.await_claim(lambda _: pytest.fail("nobody has the claim"))
    (seen,) = up(node, assignment("d", Role.DECODE))
    of_another_machine(client)
    loop = threading.Thread(target=node.agent.run, args=(threading.Event(),))
    loop.start()
    until(lambda: not loop.is_alive())
    assert "Another agent is node x already, on gpu-7" in node.agent.unfit
    assert running(seen.pid), "ending it is the program's, not the loop's"


def test_without_redis_the_agent_goes_on(tmp_path: Path, node: Node) -> None:
    node.agent._claimant = claimant(connect("redis://127.0.0.1:1/0"), tmp_path / "a")
    node.agent.await_claim(lambda _: pytest.fail("there is nothing to wait for"))
    up(node, assignment("d", Role.DECODE))


def test_an_agent_whose_machine_is_the_node_no_more_ends(
    client: redis.Redis, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its login is refused: that alone ends nothing, as Redis forgets its users when it restarts."""
    monkeypatch.setattr(agent_module, "ASK_STANDING_EVERY", 0.1)
    over = [""]
    node.agent._why_over = lambda: over[0]
    (seen,) = up(node, assignment("d", Role.DECODE))
    reports = len(node.mailbox.reports)

    def refuse() -> None:
        raise LoginRefused("Redis refuses this node's login.")

    monkeypatch.setattr(node.mailbox, "read_plan", refuse)
    loop = threading.Thread(target=node.agent.run, args=(threading.Event(),))
    loop.start()
    until(lambda: len(node.mailbox.reports) > reports)
    assert not node.agent.unfit
    assert running(seen.pid)
    over[0] = "Node x was removed."
    until(lambda: not loop.is_alive())
    assert node.agent.unfit.startswith("Node x was removed. This machine's access and engines have ended.")


def test_redis_refusing_a_login_is_told_apart_from_redis_being_away(client: redis.Redis, redis_url: str) -> None:
    mailbox = RedisMailbox("x", client)
    assert mailbox.read_plan() is None
    admin = redis.Redis.from_url(redis_url)
    admin.execute_command("ACL", "DELUSER", wire.acl_user("x"))
    with pytest.raises(LoginRefused, match="Redis refuses this node's login"):
        until(lambda: mailbox.read_plan() is not None)
