"""Nodes: joining, cordon, removal, and what their reports say."""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from controlplane.access.models import AuditEntry
from controlplane.access.roles import SYSTEM, Actor, Role
from controlplane.fleet.errors import Conflict, Forbidden, InvalidInput, NotFound, Unavailable
from controlplane.fleet.model import ForeignProcess, Runtime
from controlplane.fleet.wire import NodeReport
from controlplane.nodes import queries, reports, services
from controlplane.nodes.models import Gpu, JoinToken, Node
from controlplane.nodes.presence import Presence, presence
from controlplane.publish import InMemoryPublisher
from tests.controlplane.core.scripted import OPERATOR, Fleet, facts

pytestmark = pytest.mark.django_db
VIEWER = Actor("vera", Role.VIEWER)


def token() -> str:
    return services.create_join_token(actor=SYSTEM)


def join(name: str = "a", text: str | None = None) -> services.Joined:
    return services.join(token=text or token(), name=name, redis_host="10.0.0.1")


def test_a_token_lets_one_agent_in_once(publisher: InMemoryPublisher) -> None:
    text = token()
    joined = join("gpu-1", text)
    password = joined.redis_url.split(":")[2].split("@")[0]
    assert joined.redis_url == f"redis://node.gpu-1:{password}@10.0.0.1:6379/0"
    digest = hashlib.sha256(password.encode()).hexdigest()
    assert publisher.users == {"gpu-1": digest}
    assert Node.objects.get().redis_digest == digest
    assert JoinToken.objects.get().used_by == "gpu-1"
    with pytest.raises(Forbidden):
        join("gpu-2", text)
    assert list(Node.objects.values_list("name", flat=True)) == ["gpu-1"]


def test_neither_token_nor_password_is_stored_or_audited() -> None:
    text = token()
    joined = join("a", text)
    password = joined.redis_url.split(":")[2].split("@")[0]
    stored = [str(list(model.objects.values())) for model in (JoinToken, Node, AuditEntry)]
    assert not any(text in rows or password in rows for rows in stored)


def test_unknown_and_expired_tokens_are_refused_alike() -> None:
    expired = token()
    JoinToken.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
    messages = set()
    for text in (expired, "tdj-nonsense", ""):
        with pytest.raises(Forbidden) as caught:
            services.join(token=text, name="a", redis_host="h")
        messages.add(caught.value.message)
    assert len(messages) == 1


def test_a_failed_join_leaves_the_token_unused(publisher: InMemoryPublisher) -> None:
    text = token()
    with pytest.raises(InvalidInput) as caught:
        join("Bad Name*", text)
    assert caught.value.field == "name"
    publisher.away = True
    with pytest.raises(Unavailable):
        join("a", text)
    assert not Node.objects.exists()
    publisher.away = False
    join("a", text)


def password_of(joined: services.Joined) -> str:
    return joined.redis_url.split(":")[2].split("@")[0]


def test_a_node_that_shows_its_former_password_stays_the_same_node(publisher: InMemoryPublisher) -> None:
    first = join("a")
    before = Node.objects.get()
    Node.objects.update(cordoned=True, last_report_at=timezone.now() - timedelta(minutes=5))
    again = services.join(token=token(), name="a", redis_host="h", former_password=password_of(first))
    node = Node.objects.get()
    assert (node.pk, node.cordoned, node.joined_at) == (before.pk, True, before.joined_at)
    assert not again.took_over
    assert publisher.users["a"] == node.redis_digest != before.redis_digest


@pytest.mark.parametrize("former", ["", "guessed"])
def test_a_token_for_new_nodes_takes_no_known_name_over(publisher: InMemoryPublisher, former: str) -> None:
    """The name's plan holds secrets of engines: who has a token meant for a new node does not get them."""
    join("a")
    before = Node.objects.get()
    text = token()
    with pytest.raises(Forbidden, match="tandem join-token --node a"):
        services.join(token=text, name="a", redis_host="h", former_password=former)
    assert publisher.users == {"a": before.redis_digest}
    join("b", text)


def test_a_token_for_one_name_is_good_for_no_other() -> None:
    text = services.create_join_token(actor=SYSTEM, node="a")
    with pytest.raises(Forbidden, match="TANDEM_NODE_NAME=a"):
        join("b", text)
    assert not join("a", text).took_over


def test_taking_a_name_over_gives_none_of_the_former_ones_secrets(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.deploy_ready()
    former = fleet.publisher.plans["a"]
    cordoned = services.cordon(actor=OPERATOR, name="a").cordoned
    fleet.agents["a"].silent = True
    Node.objects.update(last_report_at=timezone.now() - timedelta(minutes=1))
    joined = join("a", services.create_join_token(actor=SYSTEM, node="a"))
    assert (joined.took_over, joined.allowed_by) == (True, "tandem")
    assert Node.objects.get().cordoned is cordoned
    assert "a" not in fleet.publisher.plans
    services.uncordon(actor=OPERATOR, name="a")
    sent = len(fleet.publisher.sent)
    fleet.publisher.reports.clear()
    agent = fleet.agents["a"]
    agent.running.clear()
    agent.restart()
    agent.generation, agent.silent = 0, False
    fleet.until(lambda: [e.attempt for e in fleet.engines()] == [2, 2] and fleet.status() == "ready", 90)
    given = {assignment.secret for plan in fleet.publisher.sent[sent:] for assignment in plan.engines}
    assert len(given) == 2
    assert not given & {assignment.secret for assignment in former.engines}
    assert AuditEntry.objects.filter(action="node.take_over", target="a").count() == 1


def test_a_name_that_reports_now_is_not_taken_over() -> None:
    join("a")
    Node.objects.update(last_report_at=timezone.now())
    text = services.create_join_token(actor=SYSTEM, node="a")
    with pytest.raises(Conflict, match="TANDEM_NODE_NAME"):
        join("a", text)
    join("b")


@pytest.mark.parametrize(("field", "value"), [("node", "Bad*"), ("address", "nowhere"), ("address", "169.254.169.254")])
def test_what_a_token_is_bound_to_is_checked_when_it_is_made(field: str, value: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        services.create_join_token(actor=SYSTEM, **{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize("hours", [0, -1, 169])
def test_tokens_live_an_hour_to_a_week(hours: int) -> None:
    with pytest.raises(InvalidInput) as caught:
        services.create_join_token(actor=SYSTEM, hours=hours)
    assert caught.value.field == "hours"


@pytest.mark.parametrize(
    ("call", "allowed"),
    [
        (lambda actor: services.create_join_token(actor=actor), Role.ADMIN),
        (lambda actor: services.remove(actor=actor, name="a"), Role.ADMIN),
        (lambda actor: services.cordon(actor=actor, name="a"), Role.OPERATOR),
        (lambda actor: services.uncordon(actor=actor, name="a"), Role.OPERATOR),
    ],
)
def test_roles(call: Any, allowed: Role) -> None:
    Node.objects.create(name="a")
    for role in Role:
        if role < allowed:
            with pytest.raises(Forbidden):
                call(Actor("x", role))
    call(Actor("x", allowed))


@pytest.mark.parametrize("call", [services.cordon, services.uncordon, services.remove])
def test_a_node_that_is_not_there_is_not_found(call: Any) -> None:
    with pytest.raises(NotFound):
        call(actor=SYSTEM, name="x")
    with pytest.raises(NotFound):
        queries.node_row("x")


def test_cordoning_twice_is_one_change() -> None:
    Node.objects.create(name="a")
    assert services.cordon(actor=OPERATOR, name="a").cordoned
    assert services.cordon(actor=OPERATOR, name="a").cordoned
    assert not services.uncordon(actor=OPERATOR, name="a").cordoned
    assert list(AuditEntry.objects.order_by("id").values_list("action", flat=True)) == ["node.cordon", "node.uncordon"]


def test_a_node_that_reports_and_runs_engines_is_not_removed(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.deploy_ready()
    Node.objects.update(last_report_at=timezone.now())
    with pytest.raises(Conflict, match="a runs 2 engines"):
        services.remove(actor=SYSTEM, name="a")
    Node.objects.update(last_report_at=timezone.now() - timedelta(minutes=1))
    services.remove(actor=SYSTEM, name="a")
    assert not Node.objects.exists()
    assert fleet.publisher.plans == {}


def test_an_untrusted_node_is_removed_while_it_reports_and_its_engines_start_elsewhere(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.deploy_ready()
    former = {assignment.secret for assignment in fleet.publisher.plans["a"].engines}
    fleet.join("b")
    fleet.step()
    Node.objects.update(last_report_at=timezone.now())
    services.remove(actor=SYSTEM, name="a", untrusted=True)
    assert AuditEntry.objects.get(action="node.remove").detail["untrusted"] is True
    assert "a" not in fleet.publisher.users
    fleet.agents["a"].silent = True
    fleet.until(lambda: {e.node.name for e in fleet.engines() if e.node} == {"b"} and fleet.status() == "ready", 90)
    assert not former & {assignment.secret for assignment in fleet.publisher.plans["b"].engines}


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (None, Presence.NEVER),
        (0.0, Presence.REPORTING),
        (15.0, Presence.REPORTING),
        (15.1, Presence.SILENT),
        (60.0, Presence.SILENT),
        (60.1, Presence.LOST),
        (float("inf"), Presence.LOST),
    ],
)
def test_presence(seconds: float | None, expected: Presence) -> None:
    assert presence(seconds) is expected


def test_rows_show_facts_presence_age_and_engines(fleet: Fleet) -> None:
    fleet.join("a", facts(runtimes=(Runtime.SIM,), cpus=12))
    fleet.deploy_ready()
    Node.objects.create(name="b")
    Node.objects.filter(name="a").update(last_report_at=timezone.now() - timedelta(seconds=30))
    a, b = queries.node_rows()
    assert (a.node.name, a.status, a.engines) == ("a", "silent", 2)
    assert a.facts is not None
    assert a.facts.cpus == 12
    assert a.age_seconds == pytest.approx(30, abs=5)
    assert (b.node.name, b.status, b.age_seconds, b.facts, b.engines) == ("b", "never reported", None, None, 0)


@pytest.mark.parametrize(
    ("ahead", "says"),
    [
        (0.0, ""),
        (-9.0, ""),
        (240.0, "Its clock is about 4 min ahead of the control plane's."),
        (-40.0, "Its clock is about 40 s behind the control plane's."),
        (-90_000.0 * 4, "Its clock is about 4 d behind the control plane's."),
    ],
)
def test_a_clock_that_is_off_is_shown_and_used_for_nothing(fleet: Fleet, ahead: float, says: str) -> None:
    agent = fleet.join("a")
    agent.ahead = ahead
    fleet.deploy_ready()
    fleet.run(20)
    (row,) = queries.node_rows()
    assert (row.node.clock_offset, row.clock) == (ahead, says)
    assert fleet.status() == "ready"
    agent.silent = True
    fleet.run(14)
    assert fleet.status() == "ready"
    fleet.run(3)
    assert fleet.status() == "degraded"


def test_rows_need_one_query(fleet: Fleet, django_assert_num_queries: Any) -> None:
    for name in "abc":
        fleet.join(name)
    fleet.step()
    with django_assert_num_queries(1):
        assert len(queries.node_rows()) == 3


def test_gpus_follow_the_reports(fleet: Fleet) -> None:
    agent = fleet.join("g", facts(runtimes=(Runtime.GPU,), gpus=2))
    fleet.step()
    assert list(Gpu.objects.values_list("index", "uuid", "foreign")) == [(0, "GPU-0", []), (1, "GPU-1", [])]
    busy = facts(runtimes=(Runtime.GPU,), gpus=1)
    card = type(busy.gpus[0])(0, "GPU-9", "H", 80, 10, (ForeignProcess(7, "train.py", 70),))
    agent.facts = facts(runtimes=(Runtime.GPU,), gpus=0)
    agent.facts = type(busy)(**{f: getattr(busy, f) for f in busy.__struct_fields__} | {"gpus": (card,)})
    fleet.step()
    (gpu,) = Gpu.objects.all()
    assert (gpu.index, gpu.uuid, gpu.memory_free_bytes) == (0, "GPU-9", 10)
    assert gpu.foreign == [{"pid": 7, "name": "train.py", "memory_bytes": 70}]
    used = gpu.memory_bytes - gpu.memory_free_bytes
    assert 0 <= used <= gpu.memory_bytes


def test_a_node_that_was_just_removed_is_not_made_again_by_its_report() -> None:
    node = Node.objects.create(name="a")
    Node.objects.all().delete()
    node.pk = 7
    assert reports.record([node], {"a": NodeReport("a", "x", 1, 0, facts())}, heard=timezone.now()) == []
    assert not Node.objects.exists()


def test_facts_of_another_version_are_unknown_not_fatal() -> None:
    Node.objects.create(name="a", facts={"cpus": "many"})
    assert queries.node_row("a").facts is None
