"""A form that was sent when the session had ended: through the login with all that was typed, and never sent by itself."""

from __future__ import annotations

import html
import json
import re
from typing import Any

import pytest
from django.contrib.auth.models import Group, User
from django.test import Client

from controlplane.dashboards import kept
from controlplane.deployments.models import Deployment
from tests.browser import seed

pytestmark = pytest.mark.django_db
ROUTING = {"mode": "random", "queue_limit": "77", "csrfmiddlewaretoken": "old"}
PAGE = "http://testserver/deployments/smollm2/settings/"
LOGIN = {"username": "olga", "password": "x" * 20}


@pytest.fixture
def client() -> Client:
    """Of somebody whose session has ended."""
    seed.one_ready_pair()
    User.objects.create_user("olga", password=LOGIN["password"]).groups.add(Group.objects.create(name="operator"))
    return Client()


def hidden(answer: Any, *names: str) -> dict[str, str]:
    found = re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', answer.content.decode())
    return {name: html.unescape(value) for name, value in found if not names or name in names}


def test_what_was_typed_goes_through_the_login_and_is_offered_again(client: Client) -> None:
    asked = client.post("/deployments/smollm2/routing/", ROUTING, headers={"referer": PAGE})
    assert asked.status_code == 401
    carried = hidden(asked, "kept", "next")
    wrong = client.post("/login/", {**LOGIN, "password": "wrong", **carried})
    assert (wrong.status_code, hidden(wrong, "kept")["kept"]) == (400, carried["kept"])
    offered = client.post("/login/", {**LOGIN, **carried})
    assert (offered.status_code, Deployment.objects.get().generation) == (200, 1), "nothing is sent by itself"
    assert 'action="/deployments/smollm2/routing/"' in offered.content.decode()
    assert 'href="/deployments/smollm2/settings/">Discard it' in offered.content.decode()
    sent = hidden(offered)
    assert {key: sent[key] for key in ("mode", "queue_limit")} == {"mode": "random", "queue_limit": "77"}
    assert client.post("/deployments/smollm2/routing/", sent).status_code == 302
    assert Deployment.objects.get().intent["routing"]["queue_limit"] == 77


def test_a_form_that_was_sent_with_nothing_leads_to_the_page_it_stood_on(client: Client) -> None:
    answer = client.post("/deployments/smollm2/routing/", headers={"referer": PAGE})
    assert answer.headers["Location"] == "/login/?next=/deployments/smollm2/settings/"
    elsewhere = client.post("/deployments/smollm2/routing/", headers={"referer": "https://evil.example/x"})
    assert elsewhere.headers["Location"] == "/login/?next=/"


def test_a_password_is_never_kept(client: Client) -> None:
    answer = client.post("/password/", {"old": "secret-1", "new": "secret-2", "again": "secret-2"})
    assert "secret-" not in answer.content.decode() + answer.headers.get("Location", "")


@pytest.mark.parametrize(
    "written",
    ["", "x", "[]", "{}", '["/nowhere/", "/", []]', '["//evil.example/", "/", []]', '["https://evil.example/", "/", []]',
     '["/nodes/", "//evil.example", []]', '["/nodes/", "/", [["a"]]]', "[1, 2, 3]", '["/nodes/", "/\\\\\\\\evil.example", []]'],
)  # fmt: skip
def test_what_is_carried_leads_nowhere_else(client: Client, written: str) -> None:
    assert kept.read(written) is None
    assert client.post("/login/", {**LOGIN, "kept": written, "next": "/nodes/"}).headers["Location"] == "/nodes/"


def test_a_form_older_than_the_session_is_offered_again_if_this_site_made_it(client: Client) -> None:
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(User.objects.get())
    for origin, offered in (("http://testserver", True), ("https://evil.example", False), ("null", False)):
        answer = strict.post("/deployments/smollm2/routing/", ROUTING, headers={"origin": origin})
        assert answer.status_code == 403
        assert ("Send it again?" in answer.content.decode()) is offered, origin
    assert Deployment.objects.get().generation == 1


def test_signing_in_over_a_page_answers_without_a_page(client: Client) -> None:
    over = {"HX-Request": "true"}
    form = client.get("/login/", headers=over).content.decode()
    assert "You are signed out" in form
    assert "<html" not in form
    wrong = client.post("/login/", {**LOGIN, "password": "wrong"}, headers=over)
    assert (wrong.status_code, "name or the password is wrong" in wrong.content.decode()) == (400, True)
    assert client.post("/login/", LOGIN, headers=over).status_code == 204
    assert client.get("/login/", headers=over).status_code == 204, "in another tab, perhaps"
    assert json.loads(client.get("/api/v1/me").content)["name"] == "olga"
