"""Walks of the whole loop on the real database: scripted agents, a clock, and what agents, routers and people are told."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.access.models import ApiKey, AuditEntry
from controlplane.access.roles import SYSTEM
from controlplane.dashboards.fleet import summary, tiles
from controlplane.deployments import loop, queries, services
from controlplane.deployments.decide import NETWORK_HEALS
from controlplane.deployments.models import Attempt, Deployment, Engine, Event
from controlplane.fleet import wire
from controlplane.fleet.errors import Conflict, NotFound
from controlplane.fleet.lifecycle import LIMITS, State, backoff_seconds
from controlplane.fleet.model import EngineLoad, Phase, Role, Runtime
from controlplane.fleet.pairing import NO_TRANSFER
from controlplane.fleet.wire import RouterStatus
from controlplane.nodes import queries as node_queries
from controlplane.nodes import services as node_services
from controlplane.nodes.models import Node
from tests.controlplane.core.scripted import GIB, OPERATOR, Fleet, facts


def events_of(engine: Engine) -> list[str]:
    return [event.kind for event in reversed(queries.events(engine=engine.id))]


# -- the happy path


def test_a_deployment_becomes_ready_and_every_step_of_it_is_history(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.deploy()
    assert fleet.status() == "starting"
    fleet.until(lambda: fleet.status() == "ready")
    decode = fleet.engine("decode-0")
    assert events_of(decode) == ["created", "place", "start", "warm", "prove"]
    assert decode.reason == "Serving."
    attempt = Attempt.objects.get(engine=decode)
    assert (attempt.number, attempt.node_name, attempt.ended_at) == (1, "a", None)
    assert attempt.command == ["python", "-m", "engine", "decode"]


def test_the_snapshot_names_ready_engines_with_all_a_router_needs(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.deploy_ready()
    (deployment,) = fleet.snapshot.deployments
    prefill, decode = sorted(deployment.engines, key=lambda e: e.role, reverse=True)
    row = fleet.engine("decode-0")
    assert (decode.id, decode.name, decode.attempt, decode.role, decode.secret) == (
        row.id,
        "decode-0",
        1,
        Role.DECODE,
        row.secret,
    )
    ports = row.observation["ports"]
    assert decode.url == f"http://127.0.0.1:{ports['http']}"
    assert decode.events == f"tcp://127.0.0.1:{ports['events']}"
    assert decode.replay == f"tcp://127.0.0.1:{ports['replay']}"
    assert (decode.block_size, decode.kv_blocks, decode.ranks) == (16, 4_096, 2)
    assert prefill.secret != decode.secret
    assert deployment.wants_prefill
    assert deployment.broken_pairs == ()
    assert deployment.tokenizer == "/models/m"


def test_the_snapshot_says_where_the_tokenizer_is(fleet: Fleet) -> None:
    agent = fleet.join("a")
    fleet.deploy_ready()
    deployment = fleet.snapshot.deployments[0]
    assert (deployment.tokenizer, deployment.tokenizer_key) == ("/models/m", "")
    agent.set(fleet.engine("prefill-0").id, tokenizer_folder="/cache/t", tokenizer="d1")
    fleet.until(lambda: fleet.snapshot.deployments[0].tokenizer == "/cache/t")
    assert fleet.snapshot.deployments[0].tokenizer_key == wire.tokenizer_key("a", "d1") == "tandem:node:a:tokenizer:d1"


def test_a_decode_engines_plan_names_the_prefill_engines_that_answer(fleet: Fleet) -> None:
    agent = fleet.join("a")
    fleet.deploy()
    fleet.step()
    prefill = fleet.engine("prefill-0")
    agent.stuck.add(prefill.id)
    fleet.run(5)
    peers = {a.engine: a.peers for a in fleet.publisher.plans["a"].engines}
    assert set(peers.values()) == {()}, "nobody answers yet"
    assert fleet.state("decode-0") == "warming"
    assert fleet.engine("decode-0").reason == "It answers. Waiting for a prefill engine, to test a KV transfer with it."
    agent.stuck.clear()
    fleet.until(lambda: fleet.status() == "ready")
    peers = {a.engine: a.peers for a in fleet.publisher.plans["a"].engines}
    (peer,) = peers[fleet.engine("decode-0").id]
    snapshot_of_prefill = next(e for e in fleet.snapshot.deployments[0].engines if e.role is Role.PREFILL)
    assert (peer.engine, peer.attempt, peer.url, peer.secret) == (
        prefill.id,
        1,
        snapshot_of_prefill.url,
        prefill.secret,
    )


def test_an_unchanged_world_publishes_nothing_again(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.deploy_ready()
    fleet.run(2)
    plans, snapshots, history = len(fleet.publisher.sent), len(fleet.publisher.snapshots), Event.objects.count()
    fleet.run(30)
    assert (len(fleet.publisher.sent), len(fleet.publisher.snapshots), Event.objects.count()) == (
        plans,
        snapshots,
        history,
    )


def test_snapshot_versions_and_plan_generations_only_rise(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.deploy_ready()
    services.scale(actor=OPERATOR, name="demo", role=Role.DECODE, replicas=3)
    fleet.until(lambda: fleet.status() == "ready")
    services.delete(actor=OPERATOR, name="demo")
    fleet.until(lambda: not Deployment.objects.exists())
    versions = [s.version for s in fleet.publisher.snapshots]
    assert versions == sorted(set(versions))
    generations = [p.generation for p in fleet.publisher.sent]
    assert generations == sorted(set(generations))


def test_an_aggregated_pool_needs_no_pair(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.deploy_ready(pools={"aggregated": {"replicas": 2}})
    assert fleet.serving() == ["aggregated-0", "aggregated-1"]
    assert not fleet.snapshot.deployments[0].wants_prefill


def test_keys_are_in_the_snapshot_until_they_end(fleet: Fleet) -> None:
    soon = fleet.now + timedelta(seconds=5)
    ApiKey.objects.create(id="k1", name="k", digest="d1", scope="inference", models_allowed=["m"], created_by="x")
    ApiKey.objects.create(id="k2", name="k", digest="d2", scope="inference", created_by="x", expires_at=soon)
    fleet.step()
    assert [(k.id, k.digest, k.models) for k in fleet.snapshot.keys] == [("k1", "d1", ("m",)), ("k2", "d2", ())]
    fleet.run(6)
    assert [k.id for k in fleet.snapshot.keys] == ["k1"]
    ApiKey.objects.update(revoked_at=fleet.now)
    fleet.step()
    assert fleet.snapshot.keys == ()


def test_a_rotated_key_is_one_key_with_two_secrets_until_the_overlap_ends(fleet: Fleet) -> None:
    row = ApiKey.objects.create(id="k1", name="k", digest="new", scope="inference", tokens_per_minute=9, created_by="x")
    until = fleet.now + timedelta(seconds=5)
    row.retired.create(digest="old", works_until=until)
    fleet.step()
    assert [(k.id, k.digest, k.tokens_per_minute) for k in fleet.snapshot.keys] == [("k1", "new", 9), ("k1", "old", 9)]
    assert [k.expires_at for k in fleet.snapshot.keys] == [None, until.timestamp()]
    fleet.run(6)
    assert [k.digest for k in fleet.snapshot.keys] == ["new"]


def test_a_change_of_limits_reaches_the_routers(fleet: Fleet) -> None:
    ApiKey.objects.create(id="k1", name="k", digest="d1", scope="inference", created_by="x")
    fleet.step()
    ApiKey.objects.update(requests_per_minute=7, concurrency=2, priority=3)
    fleet.step()
    (key,) = fleet.snapshot.keys
    assert (key.requests_per_minute, key.tokens_per_minute, key.concurrency, key.priority) == (7, None, 2, 3)


def test_what_routers_saw_of_keys_becomes_their_last_use(fleet: Fleet) -> None:
    for name in ("k1", "k2"):
        ApiKey.objects.create(id=name, name="k", digest=name, scope="inference", created_by="x")
    at = timezone.now().timestamp() - 30
    fleet.publisher.routers = [
        RouterStatus("a", 1, keys_seen={"k1": at - 5}),
        RouterStatus("b", 1, keys_seen={"k1": at, "gone": at}),
    ]
    loop.one_step(fleet.now, fleet.publisher)
    used = dict(ApiKey.objects.values_list("pk", "last_used_at"))
    assert (used["k1"].timestamp(), used["k2"]) == (pytest.approx(at), None)


# -- scaling


def test_scale_up_adds_engines_while_the_others_serve_on(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.deploy_ready()
    before = {e.id for e in fleet.engines()}
    services.scale(actor=OPERATOR, name="demo", role=Role.DECODE, replicas=3)
    calm = {"scaling", "ready"}
    for _ in range(10):
        assert fleet.status() in calm, "what was asked for and is on its way is no trouble"
        fleet.step()
        assert {"decode-0", "prefill-0"} <= set(fleet.serving())
    assert fleet.status() == "ready"
    assert fleet.serving() == ["decode-0", "decode-1", "decode-2", "prefill-0"]
    assert before < {e.id for e in fleet.engines()}


def test_scale_down_takes_engines_that_are_not_ready_then_the_highest_index(fleet: Fleet) -> None:
    agent = fleet.join("a")
    fleet.deploy_ready(pools={"prefill": {"replicas": 1}, "decode": {"replicas": 4}})
    agent.set(fleet.engine("decode-1").id, phase=Phase.UNHEALTHY)
    fleet.step()
    assert fleet.state("decode-1") == "unhealthy"
    services.scale(actor=OPERATOR, name="demo", role=Role.DECODE, replicas=2)
    fleet.run(10)
    assert fleet.serving() == ["decode-0", "decode-2", "prefill-0"]
    services.scale(actor=OPERATOR, name="demo", role=Role.DECODE, replicas=3)
    fleet.until(lambda: fleet.status() == "ready")
    assert fleet.serving() == ["decode-0", "decode-1", "decode-2", "prefill-0"], "the free index is taken again"


def test_a_draining_engine_leaves_the_snapshot_first_and_ends_when_nothing_is_in_flight(fleet: Fleet) -> None:
    agent = fleet.join("a")
    fleet.deploy_ready(pools={"prefill": {"replicas": 1}, "decode": {"replicas": 2}})
    leaving = fleet.engine("decode-1").id
    fleet.in_flight = {leaving: 1}
    services.scale(actor=OPERATOR, name="demo", role=Role.DECODE, replicas=1)
    fleet.run(20)
    assert fleet.serving() == ["decode-0", "prefill-0"]
    assert Engine.objects.get(pk=leaving).state == "draining"
    assert leaving in {a.engine for a in fleet.publisher.plans["a"].engines}, "it runs on while requests are in flight"
    fleet.in_flight = {}
    agent.set(leaving, load=EngineLoad(running=1))
    fleet.run(5)
    assert Engine.objects.get(pk=leaving).state == "draining", "its own load counts too"
    agent.set(leaving, load=EngineLoad())
    fleet.until(lambda: Engine.objects.get(pk=leaving).state == "stopped")
    assert events_of(Engine.objects.get(pk=leaving))[-3:] == ["drain", "drained", "gone"]
    assert Attempt.objects.get(engine=leaving).ended_at is not None


def test_a_drain_waits_until_every_router_has_acknowledged(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.deploy_ready(pools={"aggregated": {"replicas": 2}})
    leaving = fleet.engine("aggregated-1").id
    services.scale(actor=OPERATOR, name="demo", role=Role.AGGREGATED, replicas=1)
    behind = RouterStatus("r2", fleet.snapshot.version)
    fleet.step()
    for _ in range(10):
        fleet.now += timedelta(seconds=1)
        for agent in fleet.agents.values():
            agent.beat()
        fleet.publisher.routers = [behind, RouterStatus("r1", fleet.snapshot.version)]
        loop.one_step(fleet.now, fleet.publisher)
    assert Engine.objects.get(pk=leaving).state == "draining"
    fleet.run(3)
    assert Engine.objects.get(pk=leaving).state == "stopped"


def test_without_any_router_a_drain_goes_by_the_engines_own_load(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.deploy_ready(pools={"aggregated": {"replicas": 2}})
    fleet.router = None
    leaving = fleet.engine("aggregated-1").id
    services.scale(actor=OPERATOR, name="demo", role=Role.AGGREGATED, replicas=1)
    fleet.run(3)
    assert Engine.objects.get(pk=leaving).state == "draining"
    fleet.until(lambda: Engine.objects.get(pk=leaving).state == "stopped", 10)


def test_a_drain_that_never_ends_is_cut_at_its_limit(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.deploy_ready(pools={"aggregated": {"replicas": 2}})
    leaving = fleet.engine("aggregated-1").id
    fleet.in_flight = {leaving: 1}
    services.scale(actor=OPERATOR, name="demo", role=Role.AGGREGATED, replicas=1)
    fleet.step()
    fleet.skip(LIMITS[State.DRAINING].seconds - 5)
    fleet.run(3)
    assert Engine.objects.get(pk=leaving).state == "draining"
    fleet.run(5)
    assert Engine.objects.get(pk=leaving).state == "stopped"
    assert "overrun" in events_of(Engine.objects.get(pk=leaving))


def test_zero_replicas_is_stopped_and_can_be_started_again(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.deploy_ready()
    for role in (Role.PREFILL, Role.DECODE):
        services.scale(actor=OPERATOR, name="demo", role=role, replicas=0)
    fleet.until(lambda: not fleet.engines())
    row = queries.deployment_row("demo")
    assert row.condition.status == "stopped"
    assert row.engines == []
    assert fleet.snapshot.deployments[0].engines == ()
    assert fleet.snapshot.deployments[0].status == "Stopped: 0 replicas are wanted. Scale a pool up to serve."
    for role in (Role.PREFILL, Role.DECODE):
        services.scale(actor=OPERATOR, name="demo", role=role, replicas=1)
    fleet.until(lambda: fleet.status() == "ready")


def test_prefill_alone_is_not_called_ready_and_routers_learn_why(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.deploy_ready()
    services.scale(actor=OPERATOR, name="demo", role=Role.DECODE, replicas=0)
    fleet.until(lambda: fleet.serving() == ["prefill-0"])
    condition = queries.deployment_row("demo").condition
    assert (condition.status, condition.serves) == ("not-serving", False)
    assert fleet.snapshot.deployments[0].status == condition.sentence
    assert condition.sentence == "Not serving: no decode engine is wanted. Scale decode up to serve."
    look, clauses = summary(queries.deployment_rows(), node_queries.node_rows())
    assert (look.word, look.tone) == ("Not serving", "bad")
    assert clauses[0].said == "does not serve: no decode engine is wanted."


def test_scaling_down_stops_what_never_started(fleet: Fleet) -> None:
    fleet.deploy(pools={"aggregated": {"replicas": 3}})
    fleet.step()
    services.scale(actor=OPERATOR, name="demo", role=Role.AGGREGATED, replicas=1)
    fleet.step()
    assert [e.name for e in fleet.engines()] == ["aggregated-0"]


# -- changes and deletion


def test_a_new_revision_drains_the_old_engines_and_brings_new_ones(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.deploy_ready()
    old = {e.id for e in fleet.engines()}
    services.patch(actor=OPERATOR, name="demo", changes={"max_model_len": 1024})
    fleet.until(lambda: not old & {e.id for e in fleet.engines()} and fleet.status() == "ready")
    assert {e.revision.number for e in fleet.engines()} == {2}
    assert {a.spec.max_model_len for a in fleet.publisher.plans["a"].engines} == {1024}


def test_a_change_of_routing_touches_no_engine(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.deploy_ready()
    before = {e.id for e in fleet.engines()}
    services.patch(actor=OPERATOR, name="demo", changes={"routing": {"mode": "round-robin"}})
    fleet.run(3)
    assert {e.id for e in fleet.engines()} == before
    assert fleet.snapshot.deployments[0].routing.mode == "round-robin"


def test_a_deleted_deployment_drains_and_goes_and_its_history_stays(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.deploy_ready()
    busy = fleet.engine("decode-0").id
    fleet.in_flight = {busy: 2}
    services.delete(actor=OPERATOR, name="demo")
    fleet.run(10)
    assert fleet.snapshot.deployments == ()
    assert fleet.status() == "deleting"
    fleet.in_flight = {}
    fleet.until(lambda: not Deployment.objects.exists())
    assert not Engine.objects.exists()
    assert queries.events(deployment="demo")[0].kind == "deleted"
    assert fleet.publisher.plans["a"].engines == ()
    fleet.deploy()
    fleet.until(lambda: fleet.status() == "ready")


# -- what cannot be placed


def test_what_cannot_be_placed_says_what_it_waits_for_and_the_words_go_with_the_state(fleet: Fleet) -> None:
    fleet.deploy()
    fleet.run(3)
    engine = fleet.engine("decode-0")
    assert (engine.state, engine.reason) == ("pending", "Waiting for a node: none has joined yet.")
    assert fleet.status() == "waiting"
    assert fleet.snapshot.deployments[0].status == "Not serving yet. decode-0: Waiting for a node: none has joined yet."
    fleet.join("a", facts(runtimes=(Runtime.CPU,), memory=2 * GIB))
    fleet.run(3)
    assert (
        fleet.engine("decode-0").reason
        == "Waiting for a node with room (cpu): a has 2 GiB free, and the engine needs 4 GiB."
    )
    fleet.join("b", facts(runtimes=(Runtime.CPU,), memory=64 * GIB))
    fleet.until(lambda: fleet.status() == "ready")
    assert "Waits" not in fleet.engine("decode-0").reason
    assert "Waits" not in queries.deployment_row("demo").condition.sentence


def test_a_cordoned_node_takes_no_new_engines_and_keeps_its_own(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.deploy_ready()
    node_services.cordon(actor=OPERATOR, name="a")
    services.scale(actor=OPERATOR, name="demo", role=Role.DECODE, replicas=2)
    fleet.run(5)
    assert fleet.serving() == ["decode-0", "prefill-0"]
    assert fleet.engine("decode-1").reason == "Waiting for a node that takes engines: a is cordoned."
    node_services.uncordon(actor=OPERATOR, name="a")
    fleet.until(lambda: fleet.status() == "ready")


# -- failures


def test_a_killed_engine_is_replaced_by_a_new_attempt_with_a_new_secret(fleet: Fleet) -> None:
    agent = fleet.join("a")
    fleet.deploy_ready()
    first = fleet.engine("decode-0")
    agent.kill(first.id)
    fleet.step()
    second = fleet.engine("decode-0")
    assert (second.id, second.state) == (first.id, "failed")
    assert second.reason == "The process ended by signal 9."
    assert fleet.serving() == ["prefill-0"]
    fleet.until(lambda: fleet.status() == "ready")
    third = fleet.engine("decode-0")
    assert third.attempt == 2
    assert third.secret != first.secret
    newest, oldest = queries.attempts(first.id)
    assert (oldest.number, oldest.exit_code, oldest.reason) == (1, -9, second.reason)
    assert oldest.ended_at is not None
    assert (newest.number, newest.exit_code, newest.ended_at) == (2, None, None)


def test_an_engine_that_always_fails_backs_off_and_keeps_every_reason(fleet: Fleet) -> None:
    agent = fleet.join("a")
    agent.failing["demo-decode"] = "no memory left"
    fleet.deploy()
    fleet.until(lambda: Attempt.objects.filter(engine__role="decode", ended_at__isnull=False).count() == 5, 120)
    failed = list(Event.objects.filter(kind="exit").order_by("id").values_list("at", flat=True))
    assert len(failed) == 5
    attempts = list(Attempt.objects.filter(engine__role="decode").order_by("number"))
    waits = [(after.placed_at - before.ended_at).total_seconds() for before, after in itertools.pairwise(attempts)]
    assert waits == [backoff_seconds(n) for n in range(1, 5)]
    assert all(a.reason.startswith("no memory left") for a in attempts[:5])
    assert fleet.status() == "failed"


def test_a_crash_loop_is_one_state_and_tells_how_often_it_failed(fleet: Fleet) -> None:
    fleet.join("a").failing["demo-decode"] = "no memory left"
    fleet.deploy()
    fleet.step()
    fleet.until(lambda: fleet.state("decode-0") == "failed")
    seen = set()
    for _ in range(12):
        row = queries.deployment_row("demo")
        (decode,) = (e for e in row.engines if e.engine.role == Role.DECODE)
        seen.add((row.condition.status, decode.state is State.FAILED))
        assert "decode-0 failed" in row.condition.sentence
        assert (decode.retry_at is not None) == (decode.state is State.FAILED)
        assert decode.last_failure == "no memory left"
        assert decode.failing_since == Attempt.objects.get(engine=decode.engine, number=1).ended_at
        fleet.step()
    assert seen == {("failed", True), ("failed", False)}
    assert "decode-0 failed 3 times in a row." in queries.deployment_row("demo").condition.sentence


def test_a_failed_engine_is_tried_again_at_once_when_somebody_asks(fleet: Fleet) -> None:
    fleet.join("a").failing["demo-decode"] = "no memory left"
    fleet.deploy()
    fleet.step()
    fleet.until(lambda: fleet.engine("decode-0").failures == 5, 120)
    fleet.step()
    assert fleet.state("decode-0") == "failed", "the back-off is 32 s"
    for _ in range(2):  # twice is no error, and no second request
        services.retry(actor=OPERATOR, name="demo", engine="decode-0")
    assert Event.objects.filter(kind="retry-asked", actor="olga").count() == 1
    assert AuditEntry.objects.filter(action="engine.retry", actor="olga").count() == 1
    fleet.step()
    assert (fleet.state("decode-0"), fleet.engine("decode-0").attempt) == ("placed", 6)
    with pytest.raises(Conflict, match="decode-0 has not failed: it is placed, attempt 6"):
        services.retry(actor=OPERATOR, name="demo", engine=fleet.engine("decode-0").pk)
    fleet.until(lambda: fleet.state("decode-0") == "failed")
    fleet.step()
    assert fleet.state("decode-0") == "failed", "one request is for one attempt"
    with pytest.raises(NotFound):
        services.retry(actor=OPERATOR, name="demo", engine="decode-7")


def test_failures_are_forgotten_after_a_steady_minute(fleet: Fleet) -> None:
    agent = fleet.join("a")
    fleet.deploy_ready()
    agent.kill(fleet.engine("decode-0").id)
    fleet.step()
    fleet.until(lambda: fleet.status() == "ready")
    assert fleet.engine("decode-0").failures == 1
    fleet.skip(58)
    fleet.step()
    assert fleet.engine("decode-0").failures == 1
    fleet.run(3)
    assert fleet.engine("decode-0").failures == 0


def test_engines_that_their_agent_was_told_to_end_have_not_failed(fleet: Fleet) -> None:
    agent = fleet.join("a")
    fleet.deploy_ready()
    for _ in range(3):
        for engine in fleet.engines():
            agent.set(engine.id, phase=Phase.EXITED, exit_code=0, stopped=True, detail="Stopped: its agent stops.")
        fleet.step()
        assert {e.state for e in fleet.engines()} == {"placed"}, "at once, without a back-off"
        fleet.until(lambda: fleet.status() == "ready")
    assert {e.failures for e in fleet.engines()} == {0}
    assert "exit" not in {event.kind for event in queries.events(limit=999)}
    newest, *ended = queries.attempts(fleet.engine("decode-0").id)
    assert (newest.ended_at, newest.exit_code) == (None, None)
    assert {(a.exit_code, a.reason) for a in ended} == {(0, "Stopped: its agent stops.")}


def test_nothing_is_placed_on_a_node_whose_agent_was_told_to_stop(fleet: Fleet) -> None:
    agent = fleet.join("a")
    fleet.deploy_ready()
    for engine in fleet.engines():
        agent.set(engine.id, phase=Phase.EXITED, exit_code=0, stopped=True, detail="Stopped: its agent stops.")
    agent.leaving = True
    agent.report()
    agent.silent = True
    fleet.run(30)
    assert {e.state for e in fleet.engines()} == {"pending"}
    assert fleet.status() == "waiting"
    assert fleet.engine("decode-0").reason == "Waiting for a node that takes engines: a is stopping its agent."
    agent.silent = agent.leaving = False
    agent.running.clear()
    agent.restart()
    fleet.until(lambda: fleet.status() == "ready")


def test_a_failed_attempt_is_tried_on_another_node_when_there_is_one(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.deploy_ready(pools={"aggregated": {"replicas": 1}})
    fleet.join("b")
    fleet.run(2)
    fleet.agents["a"].kill(fleet.engine("aggregated-0").id, 1)
    fleet.step()
    fleet.until(lambda: fleet.status() == "ready")
    assert fleet.engine("aggregated-0").node.name == "b"


def test_an_unhealthy_engine_leaves_the_snapshot_and_comes_back(fleet: Fleet) -> None:
    agent = fleet.join("a")
    fleet.deploy_ready()
    engine = fleet.engine("prefill-0").id
    agent.set(engine, phase=Phase.UNHEALTHY, detail="No answer within 5 s.")
    fleet.step()
    assert fleet.serving() == ["decode-0"]
    assert fleet.engine("prefill-0").reason == "No answer within 5 s."
    agent.set(engine, phase=Phase.WARMING, detail="")
    fleet.step()
    assert fleet.serving() == ["decode-0", "prefill-0"]


def test_an_engine_that_stays_unhealthy_is_started_anew(fleet: Fleet) -> None:
    agent = fleet.join("a")
    fleet.deploy_ready()
    agent.set(fleet.engine("prefill-0").id, phase=Phase.UNHEALTHY)
    fleet.step()
    fleet.skip(LIMITS[State.UNHEALTHY].seconds - 5)
    fleet.run(3)
    assert fleet.state("prefill-0") == "unhealthy"
    fleet.until(lambda: fleet.engine("prefill-0").attempt == 2)
    fleet.until(lambda: fleet.status() == "ready")


def test_an_engine_stuck_in_starting_fails_at_its_limit(fleet: Fleet) -> None:
    agent = fleet.join("a")
    fleet.deploy()
    fleet.step()
    agent.stuck.add(fleet.engine("prefill-0").id)
    fleet.run(20)
    fleet.skip(LIMITS[State.STARTING].seconds - 30)
    fleet.run(2)
    assert fleet.state("prefill-0") == "starting"
    fleet.run(15)
    attempts = queries.attempts(fleet.engine("prefill-0").id)
    assert attempts[-1].reason.startswith("Waited 15 min for the engine's first answer.")
    assert fleet.engine("decode-0").attempt == 1, "waiting for a partner on its way is no failure"


def test_a_pair_that_cannot_transfer_is_told_to_routers_and_people(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.deploy_ready()
    prefill = fleet.engine("prefill-0").id
    b = fleet.join("b")
    b.broken_pairs = True
    node_services.cordon(actor=OPERATOR, name="a")
    services.scale(actor=OPERATOR, name="demo", role=Role.DECODE, replicas=2)
    fleet.run(8)
    second = fleet.engine("decode-1")
    assert second.state == "warming"
    assert second.reason == "It answers, but the KV transfer with every prefill engine failed."
    assert fleet.serving() == ["decode-0", "prefill-0"], "it gets no traffic"
    b.set(second.id, pairs=())
    b.broken_pairs = False
    fleet.until(lambda: fleet.status() == "ready")
    b.broken_pairs = True
    fleet.run(2)
    assert fleet.snapshot.deployments[0].broken_pairs == ((prefill, second.id),)
    assert "The KV transfer prefill-0 → decode-1 failed: refused" in queries.deployment_row("demo").notices
    fleet.agents["a"].kill(prefill)
    b.broken_pairs = False
    fleet.step()
    assert fleet.snapshot.deployments[0].broken_pairs == (), "a replaced engine has a clean record"


def test_where_no_kv_transfer_works_any_more_the_deployment_is_degraded(fleet: Fleet) -> None:
    """All engines serve, but decode computes every prompt: not what was asked for."""
    agent = fleet.join("a")
    fleet.deploy_ready()
    assert fleet.status() == "ready"
    agent.broken_pairs = True
    fleet.until(lambda: fleet.engine("decode-0").reason == NO_TRANSFER)
    (row,) = queries.deployment_rows()
    assert row.condition.status == "degraded"
    assert row.condition.serves
    assert "no KV transfer works: decode computes every prompt." in row.condition.sentence
    _, clauses = summary([row], node_queries.node_rows())
    assert clauses[0].names == ("demo",)
    agent.broken_pairs = False
    fleet.until(lambda: fleet.status() == "ready")


def test_decode_serves_alone_while_prefill_fails(fleet: Fleet) -> None:
    agent = fleet.join("a")
    agent.failing["demo-prefill"] = "broken"
    fleet.deploy()
    fleet.until(lambda: fleet.serving() == ["decode-0"])
    assert fleet.engine("decode-0").reason.startswith("Serving alone")
    assert fleet.status() == "degraded"


def test_an_engine_its_agent_no_longer_knows_has_exited(fleet: Fleet) -> None:
    agent = fleet.join("a")
    fleet.deploy_ready()
    engine = fleet.engine("decode-0").id
    agent.beat = agent.report  # type: ignore[method-assign]  # it goes on reporting, without starting anything
    del agent.running[(engine, 1)]
    fleet.step()
    assert fleet.engine("decode-0").state == "failed"


# -- silence


def test_a_silent_nodes_engines_become_suspects_and_stay_in_the_snapshot(fleet: Fleet) -> None:
    agent = fleet.join("a")
    fleet.deploy_ready()
    agent.silent = True
    fleet.run(15)
    assert fleet.serving() == ["decode-0", "prefill-0"]
    fleet.run(2)
    assert {e.state for e in fleet.engines()} == {"lost"}
    assert fleet.serving() == ["decode-0?", "prefill-0?"]
    assert fleet.status() == "degraded", "requests are still served: that it does not serve would be a lie"
    fleet.skip(3600)
    fleet.run(3)
    assert {e.state for e in fleet.engines()} == {"lost"}, "there is no other node: nothing is thrown away"
    agent.silent = False
    fleet.step()
    assert {e.state for e in fleet.engines()} == {"ready"}
    assert fleet.serving() == ["decode-0", "prefill-0"]
    assert {e.attempt for e in fleet.engines()} == {1}


def test_a_lost_engine_moves_after_a_minute_and_the_old_process_is_stopped_on_return(fleet: Fleet) -> None:
    a = fleet.join("a")
    fleet.deploy_ready()
    fleet.join("b")
    fleet.run(2)
    a.silent = True
    fleet.run(20)
    fleet.skip(35)
    fleet.run(3)
    assert {e.node.name for e in fleet.engines()} == {"a"}
    fleet.until(lambda: fleet.status() == "ready")
    assert {e.node.name for e in fleet.engines()} == {"b"}
    assert {e.attempt for e in fleet.engines()} == {2}
    assert len(a.running) == 2, "the old processes live on"
    a.silent = False
    fleet.run(3)
    assert a.running == {}, "the plan without them stops them"
    assert fleet.status() == "ready"
    assert events_of(fleet.engine("decode-0"))[5:9] == ["silence", "replace", "retry", "place"]


def test_when_most_nodes_fall_silent_at_once_nothing_is_moved_for_a_while(fleet: Fleet) -> None:
    for name in "abc":
        fleet.join(name)
    fleet.deploy_ready(pools={"prefill": {"replicas": 3}, "decode": {"replicas": 3}})
    where = {e.id: e.node.name for e in fleet.engines()}
    for name in "bc":
        fleet.agents[name].silent = True
    fleet.run(20)
    fleet.skip(NETWORK_HEALS - 30)
    fleet.run(5)
    assert {e.id: e.node.name for e in fleet.engines()} == where
    assert len(fleet.serving()) == 6
    fleet.skip(60)
    fleet.until(lambda: fleet.status() == "ready")
    assert {e.node.name for e in fleet.engines()} == {"a"}, "no network is cut for that long"


@pytest.mark.parametrize("gone", [1, 2, 5])
def test_nodes_that_are_long_gone_have_no_say(fleet: Fleet, gone: int) -> None:
    for name in ("a", "b", *(f"gone-{n}" for n in range(gone))):
        fleet.join(name)
    fleet.run(2)
    for n in range(gone):
        fleet.agents[f"gone-{n}"].silent = True
    fleet.run(20)
    fleet.skip(120)
    fleet.deploy_ready(pools={"aggregated": {"replicas": 2}})
    assert {e.node.name for e in fleet.engines()} == {"a", "b"}
    fleet.agents["b"].silent = True
    fleet.run(20)
    fleet.skip(45)
    fleet.until(lambda: fleet.status() == "ready", 10)
    assert {e.node.name for e in fleet.engines()} == {"a"}


def test_a_node_that_was_lost_before_a_restart_takes_nothing_until_it_reports(fleet: Fleet) -> None:
    agent = fleet.join("a")
    fleet.run(2)
    agent.silent = True  # its last report stays in Redis
    fleet.run(20)
    fleet.skip(1800)
    fleet.now += timedelta(minutes=10)  # the control plane is down
    fleet.deploy()
    fleet.run(30)
    assert {e.state for e in fleet.engines()} == {"pending"}
    assert fleet.engine("decode-0").reason == "Waiting for a node that takes engines: a does not report."
    agent.silent = False
    fleet.until(lambda: fleet.status() == "ready", 10)


def test_a_report_that_came_while_the_controller_was_down_is_no_sign_of_life(fleet: Fleet) -> None:
    agent = fleet.join("a")
    fleet.run(3)
    agent.report()
    agent.silent = True
    fleet.now += timedelta(minutes=30)
    fleet.deploy()
    for _ in range(30):
        fleet.step()
        assert {e.state for e in fleet.engines()} == {"pending"}


def test_a_report_that_comes_back_with_an_older_copy_of_redis_is_no_sign_of_life(fleet: Fleet) -> None:
    agent = fleet.join("a")
    fleet.run(3)
    early = fleet.publisher.reports["a"]
    agent.restart()
    fleet.run(3)
    agent.silent = True
    fleet.run(20)
    fleet.skip(1800)
    fleet.publisher.reports["a"] = early
    fleet.deploy()
    for _ in range(30):
        fleet.step()
        assert {e.state for e in fleet.engines()} == {"pending"}


def test_lost_engines_of_one_deployment_move_one_after_the_other(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.deploy_ready(pools={"aggregated": {"replicas": 4}})
    fleet.join("b")
    fleet.run(2)
    fleet.agents["a"].silent = True
    moved: list[int] = []
    fleet.run(20)
    fleet.skip(35)
    for _ in range(15):
        fleet.step()
        moved.append(Engine.objects.filter(node__name="b").count())
    assert moved[-1] == 4
    assert max(after - before for before, after in itertools.pairwise(moved)) == 1


def test_a_node_that_only_looks_silent_because_the_controller_was_down_loses_nothing(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.deploy_ready()
    for agent in fleet.agents.values():
        agent.silent = True  # nothing is reported while the controller is down, and for a few seconds after
    fleet.now += timedelta(hours=3)
    fleet.run(5)
    assert {e.state for e in fleet.engines()} == {"ready"}
    fleet.agents["a"].silent = False
    fleet.run(20)
    assert {e.state for e in fleet.engines()} == {"ready"}


def test_limits_do_not_pass_because_the_controller_was_down(fleet: Fleet) -> None:
    agent = fleet.join("a")
    agent.deaf = True
    fleet.deploy()
    fleet.run(5)
    assert {e.state for e in fleet.engines()} == {"placed"}
    fleet.now += timedelta(hours=1)
    fleet.step()
    assert {e.state for e in fleet.engines()} == {"placed"}
    agent.deaf = False
    fleet.until(lambda: fleet.status() == "ready")
    assert {e.attempt for e in fleet.engines()} == {1}


def test_missing_reports_mean_nothing_while_redis_is_away(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.deploy_ready()
    fleet.publisher.away = True
    for _ in range(20):
        fleet.now += timedelta(seconds=5)
        assert loop.one_step(fleet.now, fleet.publisher) is False
    fleet.publisher.away = False
    fleet.agents["a"].silent = True
    fleet.run(10)
    assert {e.state for e in fleet.engines()} == {"ready"}


def test_an_agent_restart_that_adopts_changes_nothing(fleet: Fleet) -> None:
    agent = fleet.join("a")
    fleet.deploy_ready()
    history = Event.objects.count()
    agent.restart()
    agent.report()  # its first report comes before it has read its plan
    running, agent.running = agent.running, {}
    agent.report()
    loop.one_step(fleet.now + timedelta(seconds=1), fleet.publisher)
    agent.running = running
    fleet.run(3)
    assert Event.objects.count() == history
    assert fleet.status() == "ready"


# -- messages


def test_late_reports_of_the_same_agent_are_ignored(fleet: Fleet) -> None:
    agent = fleet.join("a")
    fleet.deploy()
    fleet.run(2)
    early = fleet.publisher.reports["a"]
    fleet.until(lambda: fleet.status() == "ready")
    agent.silent = True
    fleet.publisher.reports["a"] = early
    fleet.run(3)
    assert fleet.status() == "ready"
    assert Node.objects.get().report_sequence > early.sequence


def test_the_same_report_again_is_no_sign_of_life(fleet: Fleet) -> None:
    agent = fleet.join("a")
    fleet.deploy_ready()
    agent.silent = True  # its last report stays in Redis
    fleet.run(20)
    assert {e.state for e in fleet.engines()} == {"lost"}


def test_reports_of_older_attempts_strangers_and_other_nodes_are_ignored(fleet: Fleet) -> None:
    a, b = fleet.join("a"), fleet.join("b")
    fleet.deploy_ready(pools={"aggregated": {"replicas": 1}})
    engine = fleet.engine("aggregated-0")
    here, there = (a, b) if engine.node.name == "a" else (b, a)
    here.kill(engine.id)
    fleet.until(lambda: fleet.engine("aggregated-0").attempt == 2)
    fleet.until(lambda: fleet.status() == "ready")
    home = fleet.agents[fleet.engine("aggregated-0").node.name]
    other = there if home is here else here
    key = (engine.id, 2)
    dead = home.running[key]
    for agent in (home, other):
        agent.beat = agent.report  # type: ignore[method-assign]
    other.running[key] = type(dead)(engine.id, 2, Phase.EXITED, exit_code=3)
    other.running[(engine.id, 1)] = type(dead)(engine.id, 1, Phase.EXITED, exit_code=3)
    home.running[(engine.id, 1)] = type(dead)(engine.id, 1, Phase.EXITED, exit_code=3)
    home.running[("stranger", 1)] = type(dead)("stranger", 1, Phase.WARMING)
    fleet.run(5)
    assert fleet.status() == "ready"


def test_a_plan_that_was_not_taken_in_is_sent_again(fleet: Fleet) -> None:
    agent = fleet.join("a")
    fleet.run(2)
    agent.deaf = True
    fleet.deploy()
    fleet.step()
    sent = len(fleet.publisher.sent)
    fleet.run(25)
    again = fleet.publisher.sent[sent:]
    assert [p.generation for p in again] == [fleet.publisher.sent[sent - 1].generation] * 2


def test_a_plan_that_redis_lost_is_stored_again_for_an_agent_that_starts(fleet: Fleet) -> None:
    agent = fleet.join("a")
    fleet.deploy_ready()
    plan = fleet.publisher.plans.pop("a")
    agent.restart()
    fleet.run(12)
    assert fleet.publisher.plans["a"] == plan
    assert fleet.status() == "ready"


def test_what_could_not_be_sent_is_sent_at_the_next_step(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.join("a")
    fleet.run(2)
    fleet.deploy()
    reads = fleet.publisher.snapshot_version

    def away_after_the_reads() -> int | None:
        version = reads()
        fleet.publisher.away = True
        return version

    with monkeypatch.context() as patch:
        patch.setattr(fleet.publisher, "snapshot_version", away_after_the_reads)
        fleet.router = None
        plans, snapshots = len(fleet.publisher.sent), len(fleet.publisher.snapshots)
        assert loop.one_step(fleet.now + timedelta(seconds=1), fleet.publisher)
    assert (len(fleet.publisher.sent), len(fleet.publisher.snapshots)) == (plans, snapshots)
    fleet.publisher.away = False
    fleet.step(2)
    assert fleet.publisher.sent[-1].generation == Node.objects.get().plan_generation
    assert len(fleet.publisher.sent) == plans + 1
    assert fleet.snapshot.deployments[0].name == "demo"


def test_a_snapshot_that_redis_lost_is_published_again_with_its_version(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.deploy_ready()
    last = fleet.snapshot
    fleet.publisher.snapshots.clear()
    fleet.step()
    assert fleet.snapshot.version == last.version
    assert fleet.snapshot.deployments == last.deployments


def test_versions_go_beyond_what_a_router_has_seen(fleet: Fleet) -> None:
    """A database from a backup must not publish versions that routers think are old."""
    fleet.join("a")
    fleet.deploy_ready()
    fleet.publisher.routers = [RouterStatus("r1", 900)]
    loop.one_step(fleet.now + timedelta(seconds=1), fleet.publisher)
    assert fleet.snapshot.version == 901
    fleet.agents["a"].generation = 700
    fleet.run(2)
    assert fleet.publisher.sent[-1].generation == 701


def test_redis_users_are_made_again(fleet: Fleet) -> None:
    Node.objects.create(name="a", redis_digest="d")
    fleet.step()
    assert fleet.publisher.users == {"a": "d"}


# -- nodes that go, and two controllers


def test_engines_of_a_removed_node_are_placed_anew(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.deploy_ready()
    fleet.agents.pop("a")
    fleet.join("b")
    fleet.run(20)
    node_services.remove(actor=SYSTEM, name="a")
    fleet.until(lambda: fleet.status() == "ready")
    assert {e.node.name for e in fleet.engines()} == {"b"}


def test_a_removed_node_does_not_hold_a_deletion_up(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.deploy_ready()
    fleet.agents.pop("a")
    fleet.run(20)
    node_services.remove(actor=SYSTEM, name="a")
    services.delete(actor=OPERATOR, name="demo")
    fleet.until(lambda: not Deployment.objects.exists(), 10)


def test_a_lease_that_is_held_is_not_waited_for_and_an_old_one_is_taken(fleet: Fleet) -> None:
    fleet.step()
    lease = loop.Lease.objects
    lease.update(holder="other", until=fleet.now + timedelta(seconds=30))
    assert loop.one_step(fleet.now + timedelta(seconds=1), fleet.publisher) is False
    assert lease.get().holder == "other"
    assert loop.one_step(fleet.now + timedelta(seconds=31), fleet.publisher) is True
    assert lease.get().holder == ""


def test_a_controller_that_lost_its_lease_while_it_thought_writes_nothing(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.join("a")
    fleet.deploy()
    decide = loop.decide

    def slow(*args: object, **kwargs: object) -> object:
        loop.Lease.objects.update(holder="other")
        return decide(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "decide", slow)
    assert loop.one_step(fleet.now + timedelta(seconds=1), fleet.publisher) is False
    assert not Engine.objects.exists()
    assert fleet.publisher.sent == []


def test_an_attempt_that_its_node_starts_anew_is_not_taken_for_ready(fleet: Fleet) -> None:
    agent = fleet.join("a")
    fleet.deploy_ready()
    decode = fleet.engine("decode-0")
    agent.stuck.add(decode.id)
    agent.set(decode.id, phase=Phase.STARTING, detail="Starting: it loads the model.", pid=4711, load=None, pairs=())
    fleet.run(2)
    again = fleet.engine("decode-0")
    assert (again.state, again.attempt, again.reason) == ("starting", decode.attempt, "Starting: it loads the model.")
    assert fleet.serving() == ["prefill-0"]
    agent.stuck.clear()
    fleet.until(lambda: fleet.status() == "ready")
    assert fleet.engine("decode-0").failures == 0


def test_fields_of_a_newer_version_do_not_stop_the_loop(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.deploy_ready()
    row = Deployment.objects.get(name="demo")
    row.intent |= {"of_tomorrow": 1, "routing": {"of_tomorrow": 2}}
    row.intent["pools"]["decode"] |= {"of_tomorrow": 3, "replicas": 2}
    row.save()
    fleet.until(lambda: fleet.serving() == ["decode-0", "decode-1", "prefill-0"])


def test_browsers_hear_what_changed(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.deploy()
    fleet.publisher.topics.clear()
    fleet.step()
    assert set(fleet.publisher.topics) == {"deployments", "deployment:demo", "nodes", "node:a"}
    assert len(fleet.publisher.topics) == 4


# -- totals


def test_what_a_deployment_moved_never_falls(fleet: Fleet) -> None:
    agent = fleet.join("a")
    fleet.deploy_ready(pools={"prefill": {"replicas": 1}, "decode": {"replicas": 2}})
    first, second = (fleet.engine(f"decode-{n}").id for n in (0, 1))
    agent.set(first, load=EngineLoad(nixl_bytes=5_000, nixl_transfers=5, nixl_failures=1))
    agent.set(second, load=EngineLoad(nixl_bytes=700, nixl_transfers=7))
    told: list[int] = []

    def run(seconds: int) -> None:
        for _ in range(seconds):
            fleet.step()
            moved = queries.deployment_row("demo").moved
            assert moved is not None
            told.append(moved.bytes)

    run(2)
    services.scale(actor=OPERATOR, name="demo", role=Role.DECODE, replicas=1)
    run(8)
    assert [e.name for e in fleet.engines()] == ["decode-0", "prefill-0"]
    agent.kill(first)
    agent.set(first, load=None)
    run(10)
    agent.set(first, load=EngineLoad(nixl_bytes=30, nixl_transfers=3))
    run(2)
    fleet.skip(7200)
    run(2)
    assert told == sorted(told)
    assert queries.deployment_row("demo").moved == (5_730, 15, 1)
    assert tiles(queries.deployment_rows(), [])[-1].quantity.value == "5.73"
    services.patch(actor=OPERATOR, name="demo", changes={"max_model_len": 1024})
    run(15)
    assert told == sorted(told)
