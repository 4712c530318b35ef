"""Joining by REST: what an outsider, and somebody with a token meant for something else, gets."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from controlplane.access.roles import SYSTEM
from controlplane.deployments.models import Event
from controlplane.nodes import services
from controlplane.nodes.models import Node
from tests.controlplane.api.rest_world import call, refusal

pytestmark = pytest.mark.django_db


def join(
    at: str, name: str = "n7", token: str | None = None, headers: dict[str, str] | None = None, **body: str
) -> Any:
    token = services.create_join_token(actor=SYSTEM) if token is None else token
    return call(Client(REMOTE_ADDR=at), "POST", "nodes/join", {"token": token, "name": name, **body}, **(headers or {}))


@pytest.mark.parametrize(
    ("at", "body", "pinned"),
    [
        ("10.0.0.7", {}, "10.0.0.7"),
        ("10.0.0.7", {"address": "10.0.0.7"}, "10.0.0.7"),
        ("::ffff:10.0.0.7", {"address": "10.0.0.7"}, "10.0.0.7"),
        ("127.0.0.1", {"address": "127.0.0.1"}, "127.0.0.1"),
    ],
)
def test_a_node_joins_with_the_address_it_asks_from(at: str, body: dict[str, str], pinned: str) -> None:
    answer = join(at, **body)
    assert answer.status_code == 200, answer.content
    assert answer.json()["address"] == pinned
    assert Node.objects.get().address == pinned
    assert Event.objects.get(kind="joined").node_name == "n7"


PROXIED = {"X-Forwarded-For": "10.0.0.9"}


@pytest.mark.parametrize(
    ("at", "address", "headers"),
    [
        ("10.0.0.7", "127.0.0.1", {}),
        ("10.0.0.7", "10.0.0.9", {}),
        ("10.0.0.7", "10.0.0.9", PROXIED),
        ("10.0.0.7", "10.0.0.9", {"X-Real-IP": "10.0.0.9"}),
        ("127.0.0.1", "127.0.0.1", PROXIED),
        ("127.0.0.1", "127.0.0.1", {"X-Forwarded-Proto": "https"}),
        ("127.0.0.1", "10.0.0.9", PROXIED),
    ],
)
def test_no_header_makes_another_machines_address_a_nodes_own(at: str, address: str, headers: dict[str, str]) -> None:
    error = refusal(join(at, headers=headers, address=address), 403)
    assert f"tandem join-token --address {address}" in error["message"]
    assert not Node.objects.exists()


@pytest.mark.parametrize("address", ["169.254.169.254", "0.0.0.0", "http://10.0.0.7", "224.0.0.1"])
def test_what_can_be_no_nodes_address_is_refused(address: str) -> None:
    assert refusal(join("10.0.0.7", address=address), 400)["field"] == "address"


def test_taking_a_name_over_needs_a_token_for_it_and_is_said() -> None:
    join("10.0.0.7")
    assert "tandem join-token --node n7" in refusal(join("10.0.0.8"), 403)["message"]
    assert Node.objects.get().address == "10.0.0.7"
    taken = join("10.0.0.8", token=services.create_join_token(actor=SYSTEM, node="n7"))
    assert taken.json()["took_over"] is True
    assert Node.objects.get().address == "10.0.0.8"
    told = Event.objects.get(kind="taken-over")
    assert "another machine now, at 10.0.0.8" in told.message


def test_an_outsider_learns_nothing_from_a_join(db: None) -> None:
    join("10.0.0.7")
    refused = [refusal(join("10.0.0.8", name, token="tdj-guessed"), 403) for name in ("n7", "n8")]
    assert refused[0]["message"] == refused[1]["message"], "nor which names there are"


def test_an_agent_learns_that_its_machine_is_the_node_no_more_and_nothing_else() -> None:
    def standing(name: str, password: str) -> list[str]:
        answer = call(Client(), "POST", "nodes/standing", {"name": name, "password": password})
        assert answer.status_code == 200
        return [name for name, holds in answer.json().items() if holds]

    first = join("10.0.0.7").json()["redis_url"].split(":")[2].split("@")[0]
    assert standing("n7", first) == []
    assert standing("unknown", "anything") == [], "a database that was restored may have forgotten it"
    taken = services.create_join_token(actor=SYSTEM, node="n7")
    Node.objects.update(last_report_at=None)
    join("10.0.0.8", token=taken)
    assert standing("n7", first) == ["replaced"]
    services.remove(actor=SYSTEM, name="n7", untrusted=True)
    assert standing("n7", first) == ["removed"]
    join("10.0.0.9")
    assert standing("n7", first) == ["replaced"]
