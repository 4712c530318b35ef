"""Every process is killed while a client keeps asking. Engines live on; what died comes back and goes on."""

from __future__ import annotations

import os
import signal

import httpx
import pytest

from tests.flows.load import Load
from tests.flows.site import Site


@pytest.fixture(scope="module", autouse=True)
def _deployed(site: Site) -> None:
    site.deploy(prefill=1, decode=2)


def _pids(site: Site) -> dict[str, int]:
    return {engine["id"]: engine["pid"] for engine in site.engines()}


def test_a_killed_agent_adopts_its_engines(site: Site) -> None:
    before = _pids(site)
    with Load(site) as load:
        site.kill("agent")
        for pid in before.values():
            os.kill(pid, 0)
        site.start("agent")
        agents = {node["agent"] for node in site.items("/nodes")}
        site.until(lambda: {n["agent"] for n in site.items("/nodes")} != agents, "the new agent reports")
        site.until(lambda: site.ready(prefill=1, decode=2), "all are ready")
        assert _pids(site) == before
    assert load.lost == {}, "\n".join(load.failures[:10])


def test_a_stopped_agent_with_keep_engines_leaves_them(site: Site) -> None:
    before = _pids(site)
    site.stop("agent")  # the fixture's agent runs without KEEP_ENGINES
    site.until(lambda: not any(_exists(pid) for pid in before.values()), "its engines ended with it")
    site.start("agent", KEEP_ENGINES="1")
    site.until(lambda: site.ready(prefill=1, decode=2), "new attempts are ready", 120)
    after = _pids(site)
    assert not set(after.values()) & set(before.values())
    site.stop("agent")
    assert all(_exists(pid) for pid in after.values())
    site.start("agent", KEEP_ENGINES="1")
    site.until(lambda: site.ready(prefill=1, decode=2), "all are adopted")
    assert _pids(site) == after


def test_a_killed_engine_is_replaced_and_the_next_request_served(site: Site) -> None:
    site.until(lambda: site.ask()[0] == 200, "it serves")
    victim = site.engines(role="decode")[0]
    os.kill(victim["pid"], signal.SIGKILL)
    status, _ = site.ask()
    assert status == 200, "the other decode engine answers at once"
    site.until(
        lambda: site.ready(prefill=1, decode=2) and victim["pid"] not in _pids(site).values(), "it is replaced", 120
    )
    events = site.items("/deployments/demo/events")
    assert any(victim["id"] == e["engine"] and e["new_state"] == "failed" for e in events)


def test_control_plane_and_redis_may_die_while_requests_flow(site: Site) -> None:
    before = _pids(site)
    with Load(site) as load:
        site.kill("controller")
        site.kill("web")
        site.redis.stop()
        seen = load.outcomes.total()
        site.until(lambda: load.outcomes.total() > seen + 40, "requests go on")
        site.redis.start()
        site.start("web")
        site.start("controller")
        site.until(lambda: site.ready(prefill=1, decode=2), "all are ready again")
        site.scale("decode", 3)
        site.until(lambda: site.ready(prefill=1, decode=3), "the control plane acts again", 120)
    assert load.lost == {}, "\n".join(load.failures[:10])
    assert before.items() <= _pids(site).items(), "no engine was touched"
    site.scale("decode", 2)
    site.until(lambda: site.ready(prefill=1, decode=2), "scaled back")


def test_a_router_restarted_without_redis_serves_from_its_own_copy(site: Site) -> None:
    site.redis.stop()
    try:
        assert site.stop("router") == 0
        site.start("router")
        site.until(lambda: httpx.get(site.openai_url + "/ready").status_code == 200, "the router is ready")
        assert site.ask()[0] == 200
    finally:
        site.redis.start()
    site.until(lambda: site.ready(prefill=1, decode=2), "the control plane is back")


def test_a_stale_or_repeated_plan_changes_nothing(site: Site) -> None:
    import redis

    from controlplane.fleet import wire

    before = _pids(site)
    client = redis.Redis.from_url(site.redis.url)
    plan = wire.decode(client.get(wire.plan_key("node-a")), wire.NodePlan)  # type: ignore[arg-type]
    client.set(wire.plan_key("node-a"), wire.encode(wire.NodePlan("node-a", plan.generation - 1)))
    client.delete(wire.report_key("node-a"))
    agents = [n["last_report_age"] for n in site.items("/nodes")]
    assert agents
    site.until(lambda: client.get(wire.report_key("node-a")), "a lost report is sent anew")
    client.set(wire.plan_key("node-a"), wire.encode(plan))
    site.until(lambda: site.ready(prefill=1, decode=2), "all are still ready")
    assert _pids(site) == before


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
