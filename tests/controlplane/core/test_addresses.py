"""Where engines may listen: what a node says when it joins, and what its reports say after it was taken over."""

from __future__ import annotations

import pytest

from controlplane.deployments.models import Engine
from controlplane.fleet.errors import Forbidden, InvalidInput
from controlplane.fleet.lifecycle import State
from controlplane.fleet.model import Observation, Phase, Ports
from controlplane.nodes import addresses, queries
from controlplane.nodes.models import Node
from tests.controlplane.core.scripted import Fleet, facts


@pytest.mark.parametrize(
    ("stated", "seen", "confirmed", "settled"),
    [
        ("10.0.0.5", "10.0.0.5", "", "10.0.0.5"),
        ("", "10.0.0.5", "", "10.0.0.5"),
        ("127.0.0.1", "127.0.0.1", "", "127.0.0.1"),
        ("192.168.7.2", "10.0.0.5", "192.168.7.2", "192.168.7.2"),
        ("192.168.7.2", "", "192.168.7.2", "192.168.7.2"),
        ("", "10.0.0.5", "192.168.7.2", "192.168.7.2"),
    ],
)
def test_the_address_is_where_the_node_asks_from_or_what_an_admin_said(
    stated: str, seen: str, confirmed: str, settled: str
) -> None:
    assert addresses.settle(stated, seen=seen, confirmed=confirmed) == settled


@pytest.mark.parametrize("stated", ["127.0.0.1", "10.0.0.6", "127.8.8.8"])
@pytest.mark.parametrize("seen", ["10.0.0.5", ""])
def test_no_node_joins_with_the_address_of_another_machine(stated: str, seen: str) -> None:
    with pytest.raises(Forbidden, match=f"--address {stated}"):
        addresses.settle(stated, seen=seen, confirmed="")


@pytest.mark.parametrize(
    "stated",
    [
        "169.254.169.254",
        "169.254.1.1",
        "100.100.100.200",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "gpu-1",
        "::",
        "fe80::1",
    ],
)
def test_what_can_be_no_nodes_address_is_refused_whoever_confirms_it(stated: str) -> None:
    for seen, confirmed in ((stated, ""), ("10.0.0.5", stated)):
        with pytest.raises(InvalidInput):
            addresses.settle(stated, seen=seen, confirmed=confirmed)


def test_an_admins_address_is_the_only_one() -> None:
    with pytest.raises(Forbidden, match=r"TANDEM_NODE_ADDRESS=10\.0\.0\.7"):
        addresses.settle("10.0.0.5", seen="10.0.0.5", confirmed="10.0.0.7")


def seen(address: str = "10.0.0.5", http: int = 21_000) -> Observation:
    return Observation("e", 1, Phase.WARMING, address=address, ports=Ports(http, 0, 21_002, 21_003))


@pytest.mark.parametrize(
    ("observation", "objects"),
    [
        (seen(), ""),
        (Observation("e", 1, Phase.STARTING), ""),
        (seen("127.0.0.1"), "joined with 10.0.0.5"),
        (seen("169.254.169.254"), "joined with 10.0.0.5"),
        (seen("nonsense:80/x@"), "joined with 10.0.0.5"),
        (seen(""), "no address"),
        (seen(http=22), "outside the node's range"),
        (seen(http=30_000), "outside the node's range"),
    ],
)
def test_an_engine_is_used_only_at_its_nodes_address_and_ports(observation: Observation, objects: str) -> None:
    known = facts(address="10.0.0.5", engine_ports=(21_000, 24_999))
    said = addresses.objection(observation, pinned="10.0.0.5", facts=known)
    assert objects in said if objects else not said


@pytest.mark.parametrize("port", sorted(addresses.own_ports()))
def test_no_engine_is_the_dashboard_the_endpoint_or_redis(port: int) -> None:
    said = addresses.objection(seen("127.0.0.1", port), pinned="127.0.0.1", facts=facts(engine_ports=(1, 65_535)))
    assert "the control plane's own" in said


@pytest.mark.django_db
@pytest.mark.parametrize("address", ["169.254.169.254", "10.9.9.9", "x y"])
def test_an_engine_that_says_it_is_elsewhere_is_left_out_and_its_deployment_goes_on(fleet: Fleet, address: str) -> None:
    agent = fleet.join("a")
    fleet.deploy_ready(pools={"prefill": {"replicas": 1}, "decode": {"replicas": 2}})
    liar = fleet.engine("decode-1")
    agent.set(liar.id, address=address)
    fleet.run(2)
    assert fleet.serving() == ["decode-0", "prefill-0"]
    assert address not in str(fleet.snapshot)
    assert address not in str(fleet.publisher.plans)
    row = Engine.objects.get(pk=liar.pk)
    assert row.state != State.READY
    assert f"listens on {address}" in row.reason
    agent.set(liar.id, address="127.0.0.1")
    fleet.until(lambda: fleet.serving() == ["decode-0", "decode-1", "prefill-0"])


@pytest.mark.django_db
def test_a_node_whose_address_changed_takes_nothing_new_and_says_so(fleet: Fleet) -> None:
    agent = fleet.join("a")
    fleet.step()
    agent.facts = facts(address="10.0.0.9")
    fleet.deploy()
    fleet.run(2)
    assert queries.node_row("a").barred == "joined with 127.0.0.1 and is at 10.0.0.9 now"
    assert "a joined with 127.0.0.1 and is at 10.0.0.9 now" in fleet.engine("decode-0").reason
    assert Node.objects.get().address == "127.0.0.1"
