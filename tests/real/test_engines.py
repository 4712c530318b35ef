"""What real engines do beside answering: the contract that stand-ins hold too, whom they listen to, what they cost idle."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import psutil
import pytest

from tests.contract.contract import CHECKS
from tests.contract.pair import EnginePair
from tests.real.conftest import Site
from tests.real.engines import ADDRESS, KEY


def test_idle_engines_leave_the_cores_alone(site: Site) -> None:
    """NIXL's progress thread alone would take a whole core of each engine, for ever (see workers/idle_plugin).

    KV that an earlier test left unfetched, as the contract's do, keeps its engine looking for half a minute: the window is
    tried again.
    """
    window, deadline = 3.0, time.monotonic() + 60
    while True:
        before = [engine.cpu_seconds() for engine in site.engines]
        time.sleep(window)
        used = [(engine.cpu_seconds() - start) / window for engine, start in zip(site.engines, before, strict=True)]
        if max(used) < 0.3:
            return
        assert time.monotonic() < deadline, used


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(site: Site, pair: EnginePair, check: Callable[[EnginePair], None]) -> None:
    check(pair)


def test_every_socket_listens_on_the_plans_address(site: Site) -> None:
    """UCX's sockets too: neither they, nor events, replay and side channel ask anybody for a key."""
    for engine in site.engines:
        listening = {
            (c.laddr.ip.removeprefix("::ffff:"), c.laddr.port)
            for process in engine.processes()
            for c in process.net_connections()
            if c.status == psutil.CONN_LISTEN
        }
        assert {ip for ip, _ in listening} == {ADDRESS}
        expected = {engine.ports.http, engine.ports.side_channel, engine.ports.events, engine.ports.replay} - {0}
        assert expected <= {port for _, port in listening}


def test_no_secret_is_in_any_command_line(site: Site) -> None:
    for engine in site.engines:
        lines = [" ".join(process.cmdline()) for process in engine.processes()]
        assert len(lines) > 1
        assert not any(KEY in line for line in lines)


def test_events_are_told_where_they_are_published(site: Site, pair: EnginePair) -> None:
    """The publisher binds the endpoint it names (`check_kv_events` received and replayed from it)."""
    for engine in (site.prefill, site.decode):
        source = pair.client.get(engine.url + "/kv_event_sources").json()["0"]
        assert source["enable_kv_cache_events"] is True
        assert source["endpoint"] == f"tcp://[::ffff:{ADDRESS}]:{engine.ports.events}"
        assert source["replay_endpoint"] == f"tcp://{ADDRESS}:{engine.ports.replay}"


def test_the_plugin_makes_nixls_agent_sleep(runtime_script: Callable[[str], str]) -> None:
    said = runtime_script(
        "import json, time, os\n"
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins()\n"
        "from nixl._api import nixl_agent, nixl_agent_config\n"
        "agent = nixl_agent('probe', nixl_agent_config(num_threads=4))\n"
        "start = sum(os.times()[:2]); time.sleep(2)\n"
        "print(json.dumps({'used': sum(os.times()[:2]) - start}))\n"
    )
    assert json.loads(said)["used"] < 0.5
