"""The rules that every form keeps: what makes something is done once however often it is sent; what edits something carries
what it was made from; the rest means the same however often it is sent."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import Group, User
from django.test import Client
from django.urls import resolve

from controlplane.access import services as access
from controlplane.access.models import ApiKey, RetiredSecret
from controlplane.access.roles import SYSTEM
from controlplane.deployments.models import Deployment
from controlplane.nodes.models import JoinToken
from tests.browser import seed
from tests.controlplane.pages.test_every_page import signed_in

pytestmark = pytest.mark.django_db

MAKES = {"deployments-new", "keys-create", "key-rotate", "nodes-join-token", "users-create", "user-reset"}
EDITS = {"deployment-routing", "deployment-document", "deployment-scale", "key-edit", "key-limit", "user-change"}
REPEATABLE = {"deployment-delete", "deployment-retry", "node-cordon", "node-remove", "key-revoke", "logout"}
"""They set one state; the second time there is nothing left to do, or it is said."""


@pytest.fixture
def world() -> dict[str, str]:
    _, decode = seed.one_ready_pair()
    seed.node("spare", report_age=900)
    User.objects.create_user("vera").groups.add(Group.objects.get_or_create(name="viewer")[0])
    type(decode).objects.filter(pk=decode.pk).update(state="failed", reason="It ended.")
    return {"key": access.create_key(actor=SYSTEM, name="demo", scope="inference")[0].pk}


def forms(client: Client, world: dict[str, str]) -> list[tuple[str, str]]:
    """Every form that changes something, on every page: its route, and what is in it."""
    found = []
    for path in (
        "/", "/new/", "/deployments/", "/deployments/smollm2/", "/deployments/smollm2/settings/", "/nodes/", "/nodes/spare/",
        "/keys/", f"/keys/{world['key']}/", "/users/",
    ):  # fmt: skip
        page = client.get(path).content.decode()
        for tag, inside in re.findall(r'(<form[^>]*method="post"[^>]*>)(.*?)</form>', page, re.DOTALL):
            action = re.search(r'action="([^"]+)"', tag)
            assert action, f"{path}: a form without a route: {tag}"
            found.append((str(resolve(action[1]).url_name), inside))
    return found


def test_every_form_keeps_the_rule_of_its_kind(world: dict[str, str]) -> None:
    seen = set()
    for route, inside in forms(signed_in("admin"), world):
        seen.add(route)
        named = set(re.findall(r'name="([\w.]+)"', inside))
        assert "csrfmiddlewaretoken" in named, route
        assert ("once" in named) is (route in MAKES), route
        if route in EDITS:
            assert "seen" in named or named <= {"csrfmiddlewaretoken", "active"}, route
        assert route in MAKES | EDITS | REPEATABLE, f"{route}: say in this test what its second sending means"
    assert seen == MAKES | EDITS | REPEATABLE


@pytest.mark.parametrize(
    ("path", "form", "made", "shown"),
    [
        ("/keys/create/", {"name": "app", "scope": "inference"}, ApiKey.objects.count, r"tdm-\w+-[\w-]{43}"),
        ("/keys/KEY/rotate/", {"overlap": "24h"}, RetiredSecret.objects.count, r"tdm-\w+-[\w-]{43}"),
        ("/join-token/", {"hours": "1"}, JoinToken.objects.count, r"tdj-[\w-]{43}"),
        ("/users/create/", {"name": "ulla", "role": "viewer"}, User.objects.count, r'id="password-text">[^<]+'),
        ("/new/", {"name": "made", "model": "package:x"}, Deployment.objects.count, ""),
    ],
)
def test_a_form_that_is_sent_twice_is_done_once_and_answers_alike(
    world: dict[str, str], path: str, form: dict[str, Any], made: Callable[[], int], shown: str
) -> None:
    client, before = signed_in("admin"), made()
    answers = [client.post(path.replace("KEY", world["key"]), {**form, "once": "t"}) for _ in range(2)]
    assert answers[0].status_code == answers[1].status_code in (200, 302)
    assert made() == before + 1
    texts = [re.findall(shown, answer.content.decode()) if shown else answer.headers["Location"] for answer in answers]
    assert texts[0] == texts[1] != []


def test_a_role_that_somebody_else_changed_meanwhile_is_asked_about(world: dict[str, str]) -> None:
    client = signed_in("admin")
    change = {"role": "operator", "seen": "viewer"}
    User.objects.get(username="vera").groups.set([Group.objects.get(name="admin")])
    asked = client.post("/users/vera/change/", change)
    assert "Theirs, in use now: admin. Yours: operator." in asked.content.decode()
    assert client.post("/users/vera/change/", {**change, "confirmed": "1"}).status_code == 302
    assert [group.name for group in User.objects.get(username="vera").groups.all()] == ["operator"]


@pytest.mark.parametrize("headers", [{"HX-Request": "true"}, {}])
def test_a_join_command_tells_a_bad_name_at_its_field_and_asks_before_a_node_is_taken_over(
    world: dict[str, str], headers: dict[str, str]
) -> None:
    client = signed_in("admin")
    wrong = client.post("/join-token/", {"hours": "8", "node": "Not A Name", "once": "t"}, headers=headers)
    page = wrong.content.decode()
    assert wrong.status_code == 400
    assert re.search(r'name="node"[^>]*value="Not A Name" aria-invalid="true" autofocus', page)
    assert "Use 1 to 63 lower-case letters" in page
    assert '<option value="8" selected>' in page
    asked = client.post("/join-token/", {"hours": "1", "node": "spare", "once": "t"}, headers=headers)
    assert "Let another machine take over spare?" in asked.content.decode()
    assert not JoinToken.objects.exists()
    yes = {"hours": "1", "node": "spare", "once": "t", "confirmed": "1"}
    assert "tdj-" in client.post("/join-token/", yes, headers=headers).content.decode()
    assert JoinToken.objects.get().node == "spare"
