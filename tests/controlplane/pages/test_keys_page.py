"""The Keys pages: made with limits, changed, rotated, revoked; and what they say when something is wrong."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone

from controlplane.access import services
from controlplane.access.limits import Limits
from controlplane.access.models import ApiKey
from controlplane.access.roles import SYSTEM
from tests.controlplane.pages.test_every_page import signed_in

pytestmark = pytest.mark.django_db
HTMX = {"HX-Request": "true"}


@pytest.fixture
def admin() -> Client:
    return signed_in("admin")


def text_of(answer: object) -> str:
    return answer.content.decode()  # type: ignore[attr-defined]


def secret_in(page: str) -> str:
    found = re.search(r'id="key-text">(tdm-[^<]+)<', page)
    assert found is not None
    return found[1]


def test_a_key_is_made_with_limits_and_told_once(admin: Client) -> None:
    form = {"name": "app", "scope": "inference", "requests_per_minute": "60", "tokens_per_minute": "", "priority": "−3"}
    answer = admin.post("/keys/create/", form, headers=HTMX)
    assert answer.headers["Cache-Control"] == "no-store"
    key = ApiKey.objects.get()
    assert key.limits == Limits(60, None, None, -3)
    assert key.digest == services.digest_of(secret_in(text_of(answer)))
    assert "60 requests/min" in text_of(answer), "the table follows"
    assert "tdm-" + key.id + "-…" in text_of(admin.get("/keys/"))
    assert "key-text" not in text_of(admin.get("/keys/"))


@pytest.mark.parametrize("headers", [HTMX, {}])
def test_everything_that_is_wrong_is_told_at_its_field_and_nothing_typed_is_lost(
    admin: Client, headers: dict[str, str]
) -> None:
    wrong = {
        "requests_per_minute": ("lots", "Enter a whole number, or leave it empty"),
        "tokens_per_minute": ("0", "Enter a whole number from 1"),
        "concurrency": ("1.5", "Enter a whole number"),
        "priority": ("11", "Enter a whole number from -10 to 10"),
        "expires": ("2001-01-01", "This time has passed"),
        "name": ("x" * 101, "Write 1 to 100"),
    }
    form = {"scope": "inference", "models": "good-one"} | {field: text for field, (text, _) in wrong.items()}
    answer = admin.post("/keys/create/", form, headers=headers)
    page = text_of(answer)
    assert answer.status_code == 400
    assert "6 problems." in page
    for field, (text, says) in wrong.items():
        assert re.search(rf'name="{field}"[^>]*value="{text}"[^>]*aria-invalid="true" autofocus', page), field
        assert says in page, field
    assert 'value="good-one"' in page
    assert not ApiKey.objects.exists()


def test_a_manage_key_ignores_what_is_hidden_in_its_form(admin: Client) -> None:
    admin.post("/keys/create/", {"name": "ops", "scope": "manage", "requests_per_minute": "5", "role": "operator"})
    assert ApiKey.objects.get().limits == Limits()


def test_limits_are_changed_and_taken_away(admin: Client) -> None:
    key, _ = services.create_key(actor=SYSTEM, name="app", scope="inference", limits=Limits(60, 1000, 4, 2))
    assert "60 requests/min, 1,000 tokens/min, 4 at a time, priority +2" in text_of(admin.get(f"/keys/{key.id}/"))
    form = {"requests_per_minute": "", "tokens_per_minute": "2,000", "concurrency": "4", "priority": "0"}
    answer = admin.post(f"/keys/{key.id}/limits/", form, follow=True)
    assert "The limits of app are saved" in text_of(answer)
    assert services.get_key(key.id).limits == Limits(None, 2000, 4, 0)
    refused = admin.post(f"/keys/{key.id}/limits/", {**form, "concurrency": "0"})
    assert refused.status_code == 400
    assert re.search(r'name="concurrency"[^>]*value="0"[^>]*aria-invalid="true"', text_of(refused))
    assert services.get_key(key.id).concurrency == 4


def test_a_rotation_shows_the_new_secret_and_how_long_the_old_one_works(admin: Client) -> None:
    key, old = services.create_key(actor=SYSTEM, name="app", scope="inference")
    said = text_of(admin.post(f"/keys/{key.id}/rotate/", {"overlap": "24h"}, headers=HTMX))
    assert secret_in(said).startswith(f"tdm-{key.id}-")
    assert "The old one works until" in said
    assert services.authenticate_key(old) == key
    assert "two secrets work" in text_of(admin.get("/keys/"))
    assert "Old secret works until" in text_of(admin.get(f"/keys/{key.id}/"))
    page = text_of(
        admin.post(f"/keys/{key.id}/rotate/", {"overlap": "0", "confirmed": "1"})
    )  # without scripts: a page of its own
    assert "The old one has stopped working" in page
    refused = admin.post(f"/keys/{key.id}/rotate/", {"overlap": "soon"}, headers=HTMX)
    assert (refused.status_code, "overlap" in text_of(refused)) == (400, True)


def test_a_key_that_ended_offers_nothing(admin: Client) -> None:
    key, _ = services.create_key(actor=SYSTEM, name="app", scope="inference")
    services.revoke_key(actor=SYSTEM, key_id=key.id)
    page = text_of(admin.get(f"/keys/{key.id}/"))
    assert "Revoked at" in page
    assert "Save limits" not in page
    assert admin.post(f"/keys/{key.id}/rotate/", {"overlap": "24h"}).status_code == 409
    assert admin.get("/keys/none/").status_code == 404


def test_last_use_is_told(admin: Client) -> None:
    key, _ = services.create_key(actor=SYSTEM, name="app", scope="inference")
    assert "never" in text_of(admin.get(f"/keys/{key.id}/"))
    services.note_uses({key.id: (timezone.now() - timedelta(minutes=5)).timestamp()})
    assert "5 min" in re.sub(r"<[^>]+>", "", text_of(admin.get(f"/keys/{key.id}/")))


def test_many_keys_are_filtered(admin: Client) -> None:
    for number in range(12):
        services.create_key(actor=SYSTEM, name=f"tenant-{number:03}", scope="inference", models=[f"m{number}"])
    assert admin.get("/keys/").content.count(b"<tr>") == 13
    part = admin.get("/keys/?part=live&q=m11 valid")
    assert [line.key.name for line in part.context["lines"]] == ["tenant-011"]
    assert "1 of 12 keys" in text_of(part)
    assert "No key matches" in text_of(admin.get("/keys/?q=nobody-has-this"))


def test_models_and_the_day_of_its_end_are_edited_and_the_hour_stays(admin: Client) -> None:
    until = timezone.now().replace(hour=9, minute=30, microsecond=0) + timedelta(days=3)
    key, _ = services.create_key(actor=SYSTEM, name="app", scope="inference", expires_at=until)
    path = f"/keys/{key.pk}/edit/"
    assert admin.post(path, {"models": "smollm2, org/other", "expires": f"{until:%F}"}).status_code == 302
    key.refresh_from_db()
    assert (key.models_allowed, key.expires_at) == (["org/other", "smollm2"], until)
    refused = admin.post(path, {"models": "x", "expires": "2001-01-01"})
    assert refused.status_code == 400
    assert "This time has passed" in text_of(refused)
    assert 'value="2001-01-01"' in text_of(refused), "what was typed stays"
    assert admin.post(path, {"models": "", "expires": ""}).status_code == 302
    key.refresh_from_db()
    assert (key.models_allowed, key.expires_at) == ([], None)
