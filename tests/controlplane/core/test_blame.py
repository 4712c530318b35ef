"""Who is taken out and started again where requests or KV transfers fail: the engine at fault, never its partners."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from controlplane.deployments import queries
from controlplane.fleet.lifecycle import LIMITS, State
from controlplane.fleet.model import Phase, Role
from controlplane.fleet.wire import Fault
from tests.controlplane.core.scripted import Fleet

SIZES = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 3)]


def deploy(fleet: Fleet, prefills: int, decodes: int) -> None:
    fleet.join("a")
    fleet.deploy_ready(pools={"prefill": {"replicas": prefills}, "decode": {"replicas": decodes}})


def attempts(fleet: Fleet) -> dict[str, int]:
    return {e.name: e.attempt for e in fleet.engines()}


def long_after(fleet: Fleet, times: int = 3) -> None:
    """Each limit that passes brings the next attempt, if any."""
    for _ in range(times):
        fleet.skip(LIMITS[State.WARMING].seconds + 60)
        fleet.run(6)


@pytest.mark.parametrize(("prefills", "decodes"), SIZES)
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_only_the_engine_that_fails_requests_is_started_again(
    fleet: Fleet, role: Role, prefills: int, decodes: int
) -> None:
    deploy(fleet, prefills, decodes)
    short = f"{role}-0"
    faulty = fleet.engine(short).id
    pair = (faulty, "decode") if role is Role.PREFILL else ("prefill", faulty)
    fleet.agents["a"].broken = {pair: role}
    fleet.blames = {faulty}
    fleet.run(2)
    assert (fleet.state(short), fleet.engine(short).reason) == ("unhealthy", f"{short} answers 500.")
    assert f"{short}?" in fleet.serving(), "the router still sees whether it recovers"
    long_after(fleet)
    now = attempts(fleet)
    assert now.pop(short) > 2
    assert set(now.values()) == {1}
    fleet.blames, fleet.agents["a"].broken = set(), {}
    fleet.until(lambda: fleet.status() == "ready", 60)


@pytest.mark.parametrize(("prefills", "decodes"), SIZES)
@pytest.mark.parametrize("faulty", ["prefill-0", "decode-0", "pair"])
def test_only_the_engine_whose_transfers_all_fail_is_started_again(
    fleet: Fleet, faulty: str, prefills: int, decodes: int
) -> None:
    deploy(fleet, prefills, decodes)
    left = "prefill" if faulty == "decode-0" else "prefill-0"
    right = "decode" if faulty == "prefill-0" else "decode-0"
    fleet.agents["a"].broken = {(left, right): None}
    fleet.run(2)
    long_after(fleet)
    started_again = {name for name, attempt in attempts(fleet).items() if attempt > 1}
    if (prefills, decodes) == (1, 1):
        expected = set()
    elif faulty == "pair":
        expected = {(1, 2): {"decode-0"}, (2, 1): {"prefill-0"}}.get((prefills, decodes), set())
    else:
        expected = {faulty}
    assert started_again == expected
    if not expected:
        pair = (fleet.engine("prefill-0").id, fleet.engine("decode-0").id)
        assert fleet.snapshot.deployments[0].broken_pairs == (pair,)
        assert any("prefill-0 → decode-0 failed" in notice for notice in queries.deployment_row("demo").notices)


def test_an_engine_restarted_beside_one_that_fails_waits_for_it(fleet: Fleet) -> None:
    deploy(fleet, 1, 1)
    agent = fleet.agents["a"]
    decode = fleet.engine("decode-0").id
    agent.broken = {("prefill", decode): Role.DECODE}
    agent.set(decode, phase=Phase.UNHEALTHY, detail="It says that it is healthy, but a test completion failed.")
    agent.stuck.add(decode)  # it comes no further, attempt after attempt
    agent.kill(fleet.engine("prefill-0").id)
    fleet.run(10)
    long_after(fleet)
    assert attempts(fleet)["prefill-0"] == 2
    assert attempts(fleet)["decode-0"] > 1
    agent.stuck.clear()
    agent.broken = {}
    fleet.until(lambda: fleet.status() == "ready", 60)
    assert attempts(fleet)["prefill-0"] == 2


def test_blame_of_a_moment_or_of_an_earlier_attempt_does_not_count(fleet: Fleet) -> None:
    deploy(fleet, 1, 1)
    decode = fleet.engine("decode-0").id
    fault = Fault(decode, 1, "status-500", "It answers 500.", 4.0, 3)
    for blame in (fault, replace(fault, seconds=60.0, attempt=9)):
        fleet.agents["a"].beat()
        fleet._faults = lambda blame=blame: iter([blame])  # type: ignore[method-assign]
        fleet.run(3)
        assert fleet.status() == "ready"


def test_engines_of_a_pool_that_are_all_blamed_are_started_again_one_after_the_other(fleet: Fleet) -> None:
    deploy(fleet, 1, 3)
    fleet.blames = {"decode"}
    fleet.run(2)
    assert [name for name in fleet.serving() if "decode" in name] == ["decode-0?", "decode-1?", "decode-2?"]
    fleet.skip(LIMITS[State.UNHEALTHY].seconds + 1)
    fleet.step()
    assert sorted(e.state for e in fleet.engines(role=Role.DECODE)) == ["failed", "unhealthy", "unhealthy"]


def test_agents_are_asked_to_look_at_what_routers_doubt(fleet: Fleet) -> None:
    deploy(fleet, 2, 1)
    prefill, decode = fleet.engine("prefill-1"), fleet.engine("decode-0")
    faults = (
        Fault(decode.id, 1, "refused-transfer", "No transfer from prefill-1.", 20.0, 3, prefill.id, 1),
        Fault(prefill.id, 1, "silent", "prefill-1 is silent.", 20.0, 3),
    )
    fleet._faults = lambda: iter(faults)  # type: ignore[method-assign]
    fleet.run(2)
    plan = {a.engine: a for a in fleet.publisher.plans["a"].engines}
    assert [(p.engine, p.doubted) for p in plan[decode.id].peers] == [
        (fleet.engine("prefill-0").id, False),
        (prefill.id, True),
    ]
    assert {name: a.doubted for name, a in plan.items() if a.doubted} == {prefill.id: True}
    fleet._faults = lambda: iter(())  # type: ignore[method-assign]
    fleet.run(2)
    assert not any(a.doubted or any(p.doubted for p in a.peers) for a in fleet.publisher.plans["a"].engines)
    assert fleet.status() == "ready"


def test_routers_that_are_gone_blame_nobody(fleet: Fleet) -> None:
    deploy(fleet, 1, 1)
    fleet.blames = {"decode-0"}
    fleet.run(2)
    assert fleet.status() == "degraded"
    sentence = queries.deployment_row("demo").condition.sentence
    assert sentence == "Perhaps serving: requests still go to decode-0. decode-0 answers 500."
    fleet.router = None
    fleet.run(2)
    assert fleet.status() == "ready"
