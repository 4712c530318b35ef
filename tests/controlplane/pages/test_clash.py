"""Two people change the same thing: who comes second sees both versions and chooses; nothing is put back unseen."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse
from msgspec.structs import asdict

from controlplane.access import services as access
from controlplane.access.limits import Limits
from controlplane.access.roles import SYSTEM, Actor, Role
from controlplane.deployments import services
from controlplane.deployments.models import Deployment
from controlplane.fleet.wire import RoutingPolicy
from tests.browser import seed
from tests.controlplane.pages.test_every_page import signed_in

pytestmark = pytest.mark.django_db
BEN = Actor("ben", Role.ADMIN)


@pytest.fixture
def admin() -> Client:
    return signed_in("admin")


def form_at(page: str, action: str) -> dict[str, str]:
    """What a browser would send of a form as it stands."""
    inside = page.split(f'action="{action}"', 1)[1].split("</form>", 1)[0]
    sent = {}
    for tag in re.findall(r"<input[^>]*>", inside):
        found = {k: html.unescape(v) for k, v in re.findall(r'(\w[\w-]*)="([^"]*)"', tag)}
        if "name" in found and (found.get("type") != "radio" or " checked" in tag):
            sent[found["name"]] = found.get("value", "")
    if area := re.search(r"<textarea[^>]*>([^<]*)", inside):
        sent["yaml"] = html.unescape(area[1])
    return sent


def text(answer: Any) -> str:
    return html.unescape(answer.content.decode())


def routing() -> dict[str, Any]:
    """What differs from the defaults."""
    usual = asdict(RoutingPolicy())
    return {k: v for k, v in Deployment.objects.get().intent.get("routing", {}).items() if v != usual[k]}


@pytest.fixture
def stale(admin: Client) -> dict[str, str]:
    """A routing form that was opened before ben changed the mode."""
    seed.one_ready_pair()
    opened = form_at(admin.get("/deployments/smollm2/settings/").content.decode(), "/deployments/smollm2/routing/")
    assert opened["generation"] == "1"
    services.patch(actor=BEN, name="smollm2", changes={"routing": {"mode": "random", "queue_limit": 7}})
    return opened


def test_a_stale_routing_form_changes_nothing_and_shows_both_versions(admin: Client, stale: dict[str, str]) -> None:
    answer = admin.post("/deployments/smollm2/routing/", {**stale, "mode": "kv", "queue_seconds": "12"})
    assert answer.status_code == 409
    assert routing() == {"mode": "random", "queue_limit": 7}
    (clash,) = (answer.context["clash"],)
    assert clash.who == "ben"
    told = {d.label: (d.theirs, d.mine, d.by_them, d.by_me) for d in clash.differences}
    assert told == {
        "How an engine is chosen": ("random", "kv", True, True),
        "Waiting requests": (7, 1000, True, False),
        "Longest wait, seconds": (30.0, 12.0, False, True),
    }
    kept = form_at(answer.content.decode(), "/deployments/smollm2/routing/")  # Keep mine: the same form again
    assert (kept["generation"], kept["mode"], kept["queue_seconds"]) == ("2", "kv", "12")
    assert admin.post("/deployments/smollm2/routing/", kept).status_code == 302
    assert routing() == {"mode": "kv", "queue_seconds": 12.0}


def test_taking_theirs_is_a_look_at_the_page(admin: Client, stale: dict[str, str]) -> None:
    page = text(admin.post("/deployments/smollm2/routing/", {**stale, "mode": "kv"}))
    assert '<a class="button" href="/deployments/smollm2/settings/">Take theirs</a>' in page
    theirs = form_at(text(admin.get("/deployments/smollm2/settings/")), "/deployments/smollm2/routing/")
    assert (theirs["mode"], theirs["queue_limit"]) == ("random", "7")


def test_a_change_of_something_else_is_no_clash(admin: Client) -> None:
    seed.one_ready_pair()
    opened = form_at(admin.get("/deployments/smollm2/settings/").content.decode(), "/deployments/smollm2/routing/")
    services.scale(actor=BEN, name="smollm2", role=services.Role.DECODE, replicas=5)
    assert admin.post("/deployments/smollm2/routing/", {**opened, "mode": "kv"}).status_code == 302
    assert routing() == {"mode": "kv"}
    assert Deployment.objects.get().intent["pools"]["decode"]["replicas"] == 5


@pytest.mark.parametrize("htmx", [{"HX-Request": "true"}, {}])
def test_a_stale_document_shows_both_versions_and_keeps_what_was_typed(admin: Client, htmx: dict[str, str]) -> None:
    seed.one_ready_pair()
    at = "/deployments/smollm2/document/"
    opened = form_at(admin.get("/deployments/smollm2/settings/").content.decode(), at)
    services.scale(actor=BEN, name="smollm2", role=services.Role.DECODE, replicas=5)
    typed = opened["yaml"] + "max_model_len: 512\n"
    for step in ("preview", "apply"):
        answer = admin.post(at, {**opened, "yaml": typed, "step": step}, headers=htmx)
        told = {d.label: (d.theirs, d.mine) for d in answer.context["changes"].clash.differences}
        assert told == {"max_model_len": (None, 512), "pools.decode.replicas": (5, 1)}
    assert Deployment.objects.get().generation == 2
    assert htmx or "max_model_len: 512" in form_at(answer.content.decode(), at)["yaml"]
    assert 'name="generation" value="2" form="document-form"' in text(answer)
    again = {**opened, "yaml": typed, "step": "apply", "generation": "2", "confirmed": "1"}
    assert admin.post(at, again, headers=htmx).status_code in (204, 302)
    assert Deployment.objects.get().intent["max_model_len"] == 512


def test_a_keys_limits_and_its_models_clash_each_for_themselves(admin: Client) -> None:
    key, _ = access.create_key(actor=SYSTEM, name="app", scope="inference", limits=Limits(60))
    page = admin.get(f"/keys/{key.id}/").content.decode()
    limits, edit = (form_at(page, reverse(name, args=[key.id])) for name in ("key-limit", "key-edit"))
    access.limit_key(actor=BEN, key_id=key.id, changes={"requests_per_minute": 90})
    answer = admin.post(f"/keys/{key.id}/limits/", {**limits, "concurrency": "4"})
    assert answer.status_code == 409
    assert access.get_key(key.id).limits == Limits(90)
    (found,) = answer.context["clashed"].values()
    assert found.who == "ben"
    assert [(d.label, d.theirs, d.mine) for d in found.differences] == [
        ("Requests at a time", None, 4),
        ("Requests a minute", 90, 60),
    ]
    kept = form_at(answer.content.decode(), f"/keys/{key.id}/limits/")
    assert admin.post(f"/keys/{key.id}/limits/", kept).status_code == 302
    assert access.get_key(key.id).limits == Limits(60, None, 4)
    assert admin.post(f"/keys/{key.id}/edit/", {**edit, "models": "m"}).status_code == 302, (
        "its fields are as they were"
    )
    assert admin.post(f"/keys/{key.id}/edit/", {**edit, "models": "n", "expires": "2099-01-01"}).status_code == 409
    assert access.get_key(key.id).models_allowed == ["m"]
