"""A node's Redis user on a real Valkey: its Celery worker lives within `wire.acl_rules`, and nothing else opens."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator

import pytest
import redis
from celery import Celery

from controlplane.fleet import wire
from controlplane.fleet.errors import InvalidInput
from workers.app import WakeWorker, make_app

PASSWORD = "of-node-x"


def join(admin: redis.Redis, node: str) -> str:
    """Makes the node's Redis user as the control plane does; returns the node's URL."""
    digest = hashlib.sha256(PASSWORD.encode()).hexdigest()
    admin.execute_command("ACL", "SETUSER", wire.acl_user(node), "reset", "on", f"#{digest}", *wire.acl_rules(node))
    server = admin.get_connection_kwargs()
    return f"redis://{wire.acl_user(node)}:{PASSWORD}@{server['host']}:{server['port']}/0"


@pytest.fixture
def admin(redis_url: str) -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(redis_url)
    client.execute_command("ACL", "LOG", "RESET")
    yield client
    client.execute_command("ACL", "DELUSER", wire.acl_user("x"))


def denied(admin: redis.Redis) -> list[str]:
    """What the server refused, as `object`; redis-py's library name (whose refusal it ignores) left out."""
    entries = admin.acl_log()
    return [entry["object"] for entry in entries if entry["object"] != "client|setinfo"]


def test_a_worker_lives_and_stops_within_the_rules(
    admin: redis.Redis, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What is not done when it stops is let go: a wake-up is worth nothing later, and kombu would dump it into a file. (One test:
    Celery keeps the workers of a process apart badly.)"""
    woken, asked, busy, done = (threading.Event() for _ in range(4))

    def wake() -> None:
        if woken.is_set():
            busy.set()
            done.wait(20)
        woken.set()

    worker = WakeWorker("x", join(admin, "x"), wake, asked.set)
    worker.start()
    controller: Celery = make_app("x", redis_url)
    try:
        controller.send_task(wire.APPLY_PLAN_TASK, expires=wire.PLAN_TASK_EXPIRES)
        controller.send_task(wire.REPORT_NOW_TASK, args=[1], kwargs={"of": "a newer version"})
        assert woken.wait(20)
        assert asked.wait(20)
        for _ in range(4):
            controller.send_task(wire.APPLY_PLAN_TASK)
        assert busy.wait(20)
    finally:
        stopper = threading.Thread(target=worker.stop)
        stopper.start()
        done.set()
        stopper.join()
    assert denied(admin) == []
    assert not any("RESTORE" in record.message or "DUMP" in record.message for record in caplog.records)
    with controller.connection() as connection, connection.channel() as channel:
        assert not channel.do_restore
    strangers = [key for key in admin.scan_iter() if not key.startswith(wire.node_prefix("x").encode())]
    assert strangers == []


FOREIGN: list[tuple[str, Callable[[redis.Redis], object]]] = [
    ("another node's plan", lambda r: r.get(wire.plan_key("y"))),
    ("a node whose name begins alike", lambda r: r.get(wire.plan_key("xy"))),
    ("the snapshot with every secret", lambda r: r.get(wire.SNAPSHOT_KEY)),
    ("writing another node's report", lambda r: r.set(wire.report_key("y"), "{}")),
    ("all keys by name", lambda r: r.keys("*")),
    ("all keys by cursor", lambda r: r.scan(0)),
    ("a random key", lambda r: r.randomkey()),
    ("emptying the database", lambda r: r.flushdb()),
    ("the server's settings", lambda r: r.config_get("requirepass")),
    ("the users", lambda r: r.acl_list()),
    ("other clients", lambda r: r.client_list()),
    ("what others ask", lambda r: r.execute_command("MONITOR")),
    ("a foreign channel", lambda r: r.publish("tandem:snapshot", "1")),
    ("a router's status", lambda r: r.set(wire.router_key("r1"), "{}")),
    ("what keys have used", lambda r: r.get("tandem:limits:x")),
    ("the control plane's queue", lambda r: r.execute_command("LPUSH", "tandem:control:control", "{}")),
    ("what browsers are told", lambda r: r.execute_command("PUBLISH", "tandem:loads", "{}")),
    ("listening to others", lambda r: r.execute_command("SUBSCRIBE", "tandem:loads")),
    ("a script", lambda r: r.eval("while true do end", 0)),
    ("a script that is kept", lambda r: r.script_load("while true do end")),
    ("a function", lambda r: r.execute_command("FUNCTION", "LIST")),
    ("an expression over many keys", lambda r: r.sort(wire.report_key("x"))),
    ("a whole set at once", lambda r: r.smembers(wire.node_prefix("x") + "set")),
    ("a value grown bit by bit", lambda r: r.execute_command("APPEND", wire.report_key("x"), "x")),
    ("a value with a hole", lambda r: r.execute_command("SETRANGE", wire.report_key("x"), 1 << 28, "x")),
    ("a copy of a key", lambda r: r.copy(wire.report_key("x"), wire.report_key("x") + "2")),
    ("how to stop the server", lambda r: r.execute_command("DEBUG", "SLEEP", "1")),
    ("the other databases", lambda r: r.execute_command("SWAPDB", 0, 1)),
    ("ending the server", lambda r: r.execute_command("SHUTDOWN", "NOSAVE")),
    ("a replica of it", lambda r: r.execute_command("REPLICAOF", "127.0.0.1", "1")),
    ("what memory holds", lambda r: r.execute_command("MEMORY", "USAGE", wire.report_key("x"))),
    ("cutting others off", lambda r: r.execute_command("CLIENT", "KILL", "TYPE", "normal")),
    ("a module", lambda r: r.execute_command("MODULE", "LOAD", "/tmp/x.so")),
    ("its own rights", lambda r: r.execute_command("ACL", "SETUSER", wire.acl_user("x"), "allkeys")),
]


@pytest.mark.parametrize("attempt", [pytest.param(do, id=name) for name, do in FOREIGN])
def test_everything_else_is_refused(admin: redis.Redis, attempt: Callable[[redis.Redis], object]) -> None:
    client = redis.Redis.from_url(join(admin, "x"))
    client.set(wire.report_key("x"), "{}")
    assert client.get(wire.report_key("x")) == b"{}"
    with pytest.raises(redis.exceptions.ResponseError, match=r"(?i)no permission|not allowed"):
        attempt(client)


@pytest.mark.parametrize("name", ["", "*", "x*", "x:log", "[a-z]", "X", "a b", "-x", "x..y", "x" * 64, "노드", "x\n"])
def test_names_that_would_widen_the_pattern_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="name"):
        wire.acl_rules(name)


@pytest.mark.parametrize(
    ("hostname", "name"),
    [
        ("GPU-Box_1", "gpu-box-1"),
        ("a.example.org", "a.example.org"),
        ("노드", "node"),
        ("서버-7", "7"),
        ("x..y", "x.y"),
    ],
)
def test_every_host_name_gives_a_node_name(hostname: str, name: str) -> None:
    assert wire.node_name_of_host(hostname) == name
    assert wire.checked_node_name(name) == name
