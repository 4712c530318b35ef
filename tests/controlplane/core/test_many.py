"""Many nodes in few queries, many writers without a lock error, and two controllers at once."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, connections
from django.test.utils import CaptureQueriesContext

from controlplane.deployments import loop, services
from controlplane.deployments.models import Attempt, Engine, Event
from controlplane.fleet.model import Role
from controlplane.nodes.models import Node
from controlplane.publish import InMemoryPublisher
from tests.controlplane.core.scripted import OPERATOR, Agent, Fleet, facts

ROOT = Path(__file__).resolve().parents[3]


def test_two_hundred_nodes_need_few_queries_a_step(fleet: Fleet) -> None:
    names = [f"n{i:03}" for i in range(200)]
    Node.objects.bulk_create([Node(name=name) for name in names])
    for name in names:
        fleet.agents[name] = Agent(fleet, name, facts())
    for index in range(4):
        fleet.deploy(f"d{index}", pools={"prefill": {"replicas": 75}, "decode": {"replicas": 75}})
    fleet.run(5)
    assert Engine.objects.filter(state="ready").count() == 600
    with CaptureQueriesContext(
        connection,
    ) as captured:
        fleet.step()
    assert len(captured) < 60, "reads are fixed, writes go in batches"
    services.scale(actor=OPERATOR, name="d0", role=Role.DECODE, replicas=76)
    with CaptureQueriesContext(connection) as captured:
        fleet.step()
    assert len(captured) < 60


WRITER = """
import django, sys
django.setup()
from controlplane.access.roles import SYSTEM
from controlplane.deployments import services, tasks
from controlplane.fleet.model import Role
from controlplane import publish
tasks.wake = lambda: None
name, rounds = sys.argv[1], int(sys.argv[2])
with publish.using(publish.InMemoryPublisher()):
    services.create(actor=SYSTEM, document={"name": name, "model": "package:x", "pools": {"aggregated": {}}})
    for count in range(rounds):
        services.scale(actor=SYSTEM, name=name, role=Role.AGGREGATED, replicas=count % 7)
        services.scale(actor=SYSTEM, name=name, role=Role.AGGREGATED, replicas=9)
"""
STEPPER = """
import django, sys
django.setup()
from django.utils import timezone
from controlplane import publish
from controlplane.deployments import loop
from controlplane.deployments.models import Engine
publisher = publish.InMemoryPublisher()
taken = sum(loop.one_step(timezone.now(), publisher) for _ in range(int(sys.argv[1])))
print(taken)
"""


def test_several_processes_write_at_once_and_none_finds_the_database_locked(tmp_path: Path) -> None:
    """The default database: SQLite in a file, as web, controller and commands share it."""
    env = {
        **os.environ,
        "TANDEM_HOME": str(tmp_path),
        "DATABASE_URL": "",
        "DJANGO_SETTINGS_MODULE": "controlplane.settings",
    }

    def start(*arguments: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True)

    migrate = start("manage.py", "migrate", "-v0", "--skip-checks")
    assert migrate.communicate(timeout=120)[1] == ""
    writers = [start("-c", WRITER, f"d{i}", "30") for i in range(4)]
    steppers = [start("-c", STEPPER, "25") for _ in range(2)]
    for process in (*writers, *steppers):
        _, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        assert "locked" not in err
    with closing(sqlite3.connect(tmp_path / "tandem.sqlite3")) as stored:
        generations = stored.execute("SELECT generation FROM deployments_deployment").fetchall()
        (changes,) = stored.execute("SELECT count(*) FROM access_auditentry").fetchone()
        (mode,) = stored.execute("PRAGMA journal_mode").fetchone()
    assert len(generations) == len(writers)
    assert changes == sum(generation for (generation,) in generations), "no change was lost"
    assert mode == "wal"


@pytest.mark.django_db(transaction=True)
def test_two_controllers_at_once_do_each_thing_once(publisher: InMemoryPublisher) -> None:
    fleet = Fleet(publisher)
    fleet.join("a")
    fleet.deploy(pools={"prefill": {"replicas": 3}, "decode": {"replicas": 3}})
    errors: list[BaseException] = []

    def step(now: Any) -> None:
        try:
            loop.one_step(now, publisher)
        except BaseException as error:
            errors.append(error)
        finally:
            connections.close_all()

    def at_once(work: Callable[[Any], None]) -> None:
        threads = [threading.Thread(target=work, args=(fleet.now,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    for _ in range(8):
        fleet.now += timedelta(seconds=1)
        fleet.agents["a"].beat()
        at_once(step)
    assert errors == []
    assert Engine.objects.count() == 6
    assert set(Engine.objects.values_list("state", flat=True)) == {"ready"}
    assert Attempt.objects.count() == 6
    for engine in Engine.objects.all():
        kinds = list(Event.objects.filter(engine_id=engine.id).order_by("id").values_list("kind", flat=True))
        assert kinds[:4] == ["created", "place", "start", "warm"]
        assert len(kinds) == len(set(kinds)) == 5
    versions = [s.version for s in publisher.snapshots]
    assert versions == sorted(set(versions))
