"""The Redis form against a real server, and both forms against the same promises."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from controlplane.fleet import wire
from controlplane.fleet.errors import Unavailable
from controlplane.fleet.wire import FleetSnapshot, NodePlan, NodeReport, RouterStatus
from controlplane.publish import InMemoryPublisher, Publisher, RedisPublisher, broker_url
from tests.conftest import RedisServer
from tests.controlplane.core.scripted import facts


@pytest.fixture
def client(redis_url: str) -> redis.Redis:
    return redis.Redis.from_url(redis_url, decode_responses=True)


@pytest.fixture
def real(redis_url: str) -> RedisPublisher:
    return RedisPublisher(redis_url)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.stop()


def report(node: str, sequence: int = 1) -> NodeReport:
    return NodeReport(node, "agent", sequence, 0, facts())


@pytest.fixture(params=["redis", "memory"])
def either(request: pytest.FixtureRequest) -> Publisher:
    return request.getfixturevalue("real") if request.param == "redis" else InMemoryPublisher()


def test_both_forms_start_empty_and_keep_the_newest_snapshot(either: Publisher) -> None:
    assert either.snapshot_version() is None
    assert either.read_reports(["a", "b"]) == ({}, {})
    assert either.read_reports([]) == ({}, {})
    assert either.read_snapshot() is None
    assert either.router_statuses() == []
    either.publish_snapshot(FleetSnapshot(version=7))
    either.publish_snapshot(FleetSnapshot(version=8))
    assert either.snapshot_version() == 8
    assert either.read_snapshot() == FleetSnapshot(version=8)


def test_logs_are_read_from_the_end_and_followed_from_there(either: Publisher, client: redis.Redis) -> None:
    key = wire.log_key("a", "e", 1)

    def write(*lines: str) -> None:
        if isinstance(either, InMemoryPublisher):
            either.logs.setdefault(key, []).extend(lines)
        else:
            for line in lines:
                client.xadd(key, {"line": line})

    assert either.tail_log(key, 10) == ([], "0-0", [])
    write("one", "two", "three")
    tail = either.tail_log(key, 2)
    assert tail.lines == ["two", "three"]
    assert either.follow_log(key, tail.cursor, 0.01) == ([], tail.cursor, [])
    write("fo\u00fcr")
    assert either.follow_log(key, tail.cursor, 5).lines == ["fo\u00fcr"]
    whole = either.follow_log(key, "0-0", 0.01)
    assert whole.lines == ["one", "two", "three", "fo\u00fcr"]
    assert whole.times == sorted(whole.times)
    assert whole.times[1:3] == tail.times


def test_reports_that_cannot_be_read_are_told_apart(real: RedisPublisher, client: redis.Redis) -> None:
    """Whatever a node stored: no more of it than a report may have is fetched, and the others' reports come all the same."""
    stored = {
        "a": wire.encode(report("a", 4)),
        "b": '{"node": 3}',
        "c": "not json",
        "d": wire.encode(report("a")),
        "e": wire.encode(report("e", 1 << 70)),
        "f": '{"x":' + "[" * 100_000,
        "g": " " * (wire.REPORT_BYTES + 1),
    }
    for name, text in stored.items():
        client.set(wire.report_key(name), text)
    client.lpush(wire.report_key("h"), "x")
    reports, refused = real.read_reports("abcdefgh")
    assert {name: r.sequence for name, r in reports.items()} == {"a": 4}
    assert {name: why.split(":")[0] for name, why in refused.items()} == {
        "b": "node",
        "c": "JSON is malformed",
        "d": "node",
        "e": "sequence",
        "f": "nested too deep",
        "g": "it is longer than 4 MiB",
        "h": "its key holds something else than text",
    }


def test_a_node_that_joins_anew_cuts_whoever_was_connected_as_it(real: RedisPublisher, client: redis.Redis) -> None:
    former = hashlib.sha256(b"former").hexdigest()
    real.ensure_node_user("x", former)
    old = redis.Redis.from_url(real.node_url("x", "former", "127.0.0.1"), protocol=2)
    real.send_plan(NodePlan("x", 3))
    assert old.get(wire.plan_key("x"))
    real.forget_node("x")
    real.ensure_node_user("x", hashlib.sha256(b"new").hexdigest())
    real.send_plan(NodePlan("x", 4))
    with pytest.raises(redis.exceptions.ConnectionError):
        old.get(wire.plan_key("x"))
    new = redis.Redis.from_url(real.node_url("x", "new", "127.0.0.1"), protocol=2)
    assert new.get(wire.plan_key("x"))
    real.forget_node("x")


@pytest.mark.parametrize(
    "members", [[], [b"x"], [b"\xff\xfe", b"a\x06\x16b\x06\x16../../tandem:snapshot"], [str(n) for n in range(5_000)]]
)
def test_whatever_a_node_makes_of_its_queues_keys_its_plan_is_stored(
    real: RedisPublisher, client: redis.Redis, members: list[str | bytes]
) -> None:
    prefix = wire.node_prefix("n1")
    for key in (wire.queue_name("n1"), "_kombu.binding." + wire.queue_name("n1")):
        client.flushall()
        if members:
            client.sadd(prefix + key, *members)
        else:
            client.set(prefix + key, "x")
        real.send_plan(NodePlan("n1", 3))
        assert wire.decode(client.get(wire.plan_key("n1")), NodePlan) == NodePlan("n1", 3)
        assert all(name.startswith(prefix) for name in client.scan_iter())


def test_router_statuses_are_those_that_live(real: RedisPublisher, client: redis.Redis) -> None:
    client.set(wire.router_key("r1"), wire.encode(RouterStatus("r1", 3, {"e": 2})))
    client.set(wire.router_key("r2"), wire.encode(RouterStatus("r2", 4)), px=1)
    client.set("tandem:other", "x")
    while client.exists(wire.router_key("r2")):
        time.sleep(0.001)
    assert real.router_statuses() == [RouterStatus("r1", 3, {"e": 2})]


def test_a_snapshot_is_stored_before_its_version_is_told(real: RedisPublisher, client: redis.Redis) -> None:
    listener = client.pubsub(ignore_subscribe_messages=True)
    listener.subscribe(wire.SNAPSHOT_KEY)
    listener.get_message(timeout=5)
    real.publish_snapshot(FleetSnapshot(version=5, made_at=1.5))
    message = None
    while message is None:
        message = listener.get_message(timeout=5)
    assert message["data"] == "5"
    assert wire.decode(client.get(wire.SNAPSHOT_KEY), FleetSnapshot) == FleetSnapshot(version=5, made_at=1.5)


def test_a_plan_wakes_the_node_over_a_queue_under_its_own_prefix(real: RedisPublisher, client: redis.Redis) -> None:
    real.send_plan(NodePlan("n1", 3))
    assert wire.decode(client.get(wire.plan_key("n1")), NodePlan) == NodePlan("n1", 3)
    queue = wire.node_prefix("n1") + wire.queue_name("n1")
    message = json.loads(client.lindex(queue, 0))
    assert message["headers"]["task"] == wire.APPLY_PLAN_TASK
    assert message["headers"]["expires"] is not None
    assert message["content-type"] == "application/json"
    assert 0 < client.ttl(queue) <= wire.PLAN_TASK_EXPIRES, "a dead node's queue goes by itself"
    assert [key for key in client.scan_iter() if not key.startswith(wire.node_prefix("n1"))] == []


def test_a_node_user_sees_its_own_keys_and_no_others(real: RedisPublisher, redis_url: str) -> None:
    real.ensure_node_user("n1", hashlib.sha256(b"pass").hexdigest())
    mine = redis.Redis.from_url(real.node_url("n1", "pass", "127.0.0.1"))
    assert mine.set(wire.report_key("n1"), b"x")
    for forbidden in (wire.report_key("n2"), wire.SNAPSHOT_KEY):
        with pytest.raises(redis.exceptions.NoPermissionError):
            mine.get(forbidden)
    real.forget_node("n1")
    with pytest.raises((redis.AuthenticationError, redis.ConnectionError)):
        redis.Redis.from_url(real.node_url("n1", "pass", "127.0.0.1")).ping()


def test_users_that_a_restart_forgot_are_made_again(own_server: RedisServer) -> None:
    publisher = RedisPublisher(own_server.url)
    digests = {"n1": hashlib.sha256(b"pass").hexdigest()}
    publisher.ensure_node_users(digests)
    own_server.stop()
    with pytest.raises(Unavailable):
        publisher.ensure_node_users(digests)
    own_server.start()
    publisher.ensure_node_users(digests)
    assert redis.Redis.from_url(publisher.node_url("n1", "pass", "127.0.0.1")).ping()


def test_every_call_says_unavailable_when_redis_is_away(own_server: RedisServer) -> None:
    publisher = RedisPublisher(own_server.url)
    own_server.stop()
    for call in (
        lambda: publisher.read_reports(["a"]),
        publisher.router_statuses,
        publisher.snapshot_version,
        lambda: publisher.send_plan(NodePlan("a", 1)),
        lambda: publisher.publish_snapshot(FleetSnapshot(version=1)),
        lambda: publisher.ensure_node_user("a", "0" * 64),
        lambda: publisher.forget_node("a"),
        lambda: publisher.tail_log("k", 1),
        lambda: publisher.follow_log("k", "0-0", 0.1),
    ):
        with pytest.raises(Unavailable):
            call()


@pytest.mark.parametrize(
    ("url", "host", "expected"),
    [
        ("redis://:s@127.0.0.1:7000/0", "10.0.0.1", "redis://node.n1:p@10.0.0.1:7000/0"),
        ("redis://:s@127.0.0.1:7000/0", "fd00::1", "redis://node.n1:p@[fd00::1]:7000/0"),
        ("redis://:s@redis.internal/1", "10.0.0.1", "redis://node.n1:p@redis.internal:6379/1"),
        ("unix://:s@/run/redis.sock?db=0", "127.0.0.1", "unix://node.n1:p@/run/redis.sock?db=0"),
    ],
)
def test_an_agents_url_holds_its_own_password_and_a_host_it_reaches(url: str, host: str, expected: str) -> None:
    assert RedisPublisher(url).node_url("n1", "p", host) == expected


def test_a_unix_socket_is_of_no_use_to_another_machine() -> None:
    with pytest.raises(Unavailable, match="REDIS_URL"):
        RedisPublisher("unix:///run/redis.sock").node_url("n1", "p", "10.0.0.1")


def test_kombu_has_its_own_word_for_a_unix_socket() -> None:
    assert broker_url("unix://:s@/run/x.sock") == "redis+socket://:s@/run/x.sock"
    assert broker_url("redis://h:1/0") == "redis://h:1/0"
