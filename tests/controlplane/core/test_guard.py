"""What a node can do to the Redis that all share, with its own login on a real server; and when its access ends."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from controlplane.access.models import AuditEntry
from controlplane.access.roles import SYSTEM
from controlplane.deployments import guard, loop
from controlplane.deployments.models import Event
from controlplane.fleet import wire
from controlplane.fleet.errors import Forbidden, Unavailable
from controlplane.fleet.wire import FleetSnapshot
from controlplane.nodes import queries, services
from controlplane.nodes.allowance import BASE_BYTES, ENGINE_BYTES, MIB, Verdict, judge
from controlplane.nodes.models import Node
from controlplane.publish import Footprint, InMemoryPublisher, RedisPublisher, using
from controlplane.up import redis_server as embedded
from tests.conftest import RedisServer
from tests.controlplane.core.scripted import START, Fleet

LOG = "log:e:"


@pytest.mark.parametrize(
    ("footprint", "said"),
    [
        (Footprint({"plan": MIB, "report": 4 * MIB, "node.x": 5_000, "_kombu.binding.node.x": 200}, 12, MIB), ""),
        (Footprint({f"log:e:{n}": 10 * MIB for n in range(20)}, 12, MIB), ""),
        (Footprint({"tokenizer:" + "a" * 64: 33 * MIB}), ""),
        (Footprint({"report": 100 * MIB}), "100 MiB in Redis under one key, where 8 MiB"),
        (Footprint({"anything": 2 * MIB}), "where 1 MiB"),
        (Footprint({"tokenizer:x": 2 * MIB}), "where 1 MiB"),
        (Footprint({"log:e:1": 33 * MIB}), "where 32 MiB"),
        (Footprint({}, 101), "101 connections"),
        (Footprint({str(n): 80 for n in range(50_001)}), "50,000 keys"),
        (Footprint({f"log:e:{n}": 30 * MIB for n in range(30)}), "its allowance"),
        (Footprint({}, 50, 2 * BASE_BYTES + MIB), "its allowance"),
    ],
)
def test_what_ends_a_nodes_access(footprint: Footprint, said: str) -> None:
    verdict = judge(footprint, engines=0, current=())
    assert said in verdict.cut if said else verdict == Verdict()


def test_an_honest_nodes_old_logs_go_and_its_access_stays() -> None:
    logs = {f"log:e:{n}": 10 * MIB for n in range(40)}
    current = {"log:e:38", "log:e:39"}
    verdict = judge(Footprint(logs), engines=2, current=current)
    assert verdict.cut == ""
    assert not current & set(verdict.drop)
    assert sum(logs[key] for key in logs.keys() - set(verdict.drop)) <= BASE_BYTES + 2 * ENGINE_BYTES
    assert len(verdict.drop) == 12


def test_a_log_of_many_engines_on_one_node_is_no_misuse() -> None:
    """Sixty-four engines whose logs are as large as they can be."""
    logs = {f"log:e{n}:1": 12 * MIB for n in range(64)}
    assert judge(Footprint(logs), engines=64, current=set(logs)) == Verdict()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    found = RedisServer(tmp_path)
    found.start()
    yield found
    found.stop()


def user(server: RedisServer, name: str) -> redis.Redis:
    return redis.Redis.from_url(f"redis://{wire.acl_user(name)}:{name}@127.0.0.1:{server.port}/0")


@pytest.mark.django_db
def test_a_node_that_fills_redis_is_cut_off_while_redis_is_full(server: RedisServer) -> None:
    """With the settings of the embedded one: another node's report and the keys are safe, and a snapshot passes again."""
    publisher = RedisPublisher(server.url)
    admin = redis.Redis.from_url(server.url)
    admin.config_set("maxmemory", 64 * MIB)
    admin.config_set("maxmemory-policy", "noeviction")
    for name in ("bad", "good"):
        Node.objects.create(name=name, redis_digest=hashlib.sha256(name.encode()).hexdigest())
    publisher.ensure_node_users(dict(Node.objects.values_list("name", "redis_digest")))
    publisher.publish_snapshot(FleetSnapshot(version=1))
    user(server, "good").set(wire.report_key("good"), "{}")
    bad = user(server, "bad")

    def fill() -> None:
        for n in range(100):
            bad.set(f"{wire.node_prefix('bad')}x{n}", "x" * (4 * MIB))

    with pytest.raises(redis.exceptions.OutOfMemoryError):
        fill()
    admin.config_set("maxmemory", 32 * MIB)  # now not even a small one fits
    with pytest.raises(Unavailable):
        publisher.publish_snapshot(FleetSnapshot(version=2))
    with using(publisher):
        guard.Guard(publisher).step()
    publisher.publish_snapshot(FleetSnapshot(version=2))
    with pytest.raises(redis.exceptions.RedisError):
        bad.get(wire.plan_key("bad"))
    assert admin.keys(wire.node_prefix("bad") + "*") == []
    assert admin.get(wire.report_key("good")) == b"{}"
    row = Node.objects.get(name="bad")
    assert (row.redis_digest, "under one key" in row.cut_off) == ("", True)
    assert AuditEntry.objects.filter(action="node.cut_off", target="bad").count() == 1
    assert Event.objects.filter(node_name="bad", kind="cut-off").count() == 1
    publisher.ensure_node_user("bad", "0" * 64)  # a step that began before has brought it back
    loop._let_agents_in(publisher, Node.objects.all())
    assert [name.decode() for name in admin.execute_command("ACL", "USERS")] == ["default", "node.good"]


@pytest.mark.parametrize("kind", ["string", "stream", "set", "queue"])
def test_all_that_a_node_can_store_is_measured(server: RedisServer, kind: str) -> None:
    """Also what it hides among small things, where sampling would not look."""
    publisher = RedisPublisher(server.url)
    publisher.ensure_node_user("bad", hashlib.sha256(b"bad").hexdigest())
    bad, key = user(server, "bad"), wire.node_prefix("bad") + "log:e:1"
    bad.ping()
    if kind == "string":
        bad.set(key, "x" * (40 * MIB))
    elif kind == "set":
        bad.sadd(key, *range(3_000), *("x" * (20 * MIB) + str(n) for n in range(2)))
    elif kind == "stream":
        for n in range(40):
            bad.xadd(key, {"line": "x" * (4 * MIB if 20 <= n < 30 else 4_096)})
    else:
        redis.Redis.from_url(server.url).rpush(key, *["x" * MIB] * 40)
    footprint = publisher.footprints()["bad"]
    assert sum(footprint.keys.values()) >= 38 * MIB
    assert footprint.connections == 1
    assert judge(footprint, engines=0, current=()).cut
    for read in (lambda: publisher.tail_log(key, 10), lambda: publisher.follow_log(key, "0-0", 0.01)):
        with pytest.raises(Unavailable, match="more than 32 MiB"):
            read()


def test_log_lines_of_a_node_that_keeps_to_no_rule_are_short_and_command_no_terminal(server: RedisServer) -> None:
    publisher, key = RedisPublisher(server.url), wire.log_key("bad", "e", 1)
    redis.Redis.from_url(server.url).xadd(key, {"line": "\x1b]0;owned\x07" + "x" * MIB})
    (line,) = publisher.tail_log(key, 10).lines
    assert len(line.encode()) < 5_000
    assert "\x1b" not in line


def test_the_embedded_redis_is_bounded_and_loses_nothing(tmp_path: Path) -> None:
    text = embedded.configuration(embedded.EmbeddedRedis(Path("/r"), "r", ("127.0.0.1",), 1, "p"), tmp_path)
    assert "maxmemory-policy noeviction" in text
    assert [embedded.memory_bytes(gib << 30) >> 30 for gib in (1, 8, 16, 1024)] == [1, 2, 4, 8]
    assert embedded.memory_bytes(1 << 30) > 2 * BASE_BYTES, "one node alone does not fill it"


@pytest.mark.django_db
def test_a_node_that_was_cut_off_comes_back_by_a_token_made_for_it(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.deploy_ready()
    fleet.publisher.stored["a"] = Footprint({"report": 100 * MIB})
    assert guard.look(fleet.publisher) == ["a"]
    fleet.agents["a"].silent = True
    fleet.step()
    assert "a" not in fleet.publisher.users
    assert "lost its access" in queries.node_row("a").barred
    Node.objects.update(last_report_at=START)
    with pytest.raises(Forbidden):
        services.join(token=services.create_join_token(actor=SYSTEM), name="a", redis_host="h")
    joined = services.join(token=services.create_join_token(actor=SYSTEM, node="a"), name="a", redis_host="h")
    assert joined.took_over
    assert Node.objects.get().cut_off == ""


def test_a_guard_measures_rarely_while_redis_has_room() -> None:
    publisher = InMemoryPublisher()
    watch = guard.Guard(publisher)
    measured = []
    publisher.footprints = lambda: measured.append(1) or {}  # type: ignore[method-assign,func-returns-value]
    for _ in range(5):
        watch.step()
    assert len(measured) == 1
    publisher.memory = lambda: (600, 1_000)  # type: ignore[method-assign]
    watch.step()
    assert len(measured) == 2
