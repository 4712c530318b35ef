"""Keys over REST: limits at creation and later, rotation, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from tests.controlplane.api.rest_world import call

pytestmark = pytest.mark.django_db
LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrency", "priority")


def make(admin: Client, **more: Any) -> dict[str, Any]:
    answer = call(admin, "POST", "keys", {"name": "app", "scope": "inference", **more})
    assert answer.status_code == 201, answer.content
    return answer.json()


def limits_of(key: dict[str, Any]) -> list[Any]:
    return [key[field] for field in LIMITS]


def test_limits_are_set_shown_and_changed(admin: Client) -> None:
    key = make(admin, requests_per_minute=60, priority=-2)
    assert limits_of(key) == [60, None, None, -2]
    assert limits_of(make(admin)) == [None, None, None, 0]
    path = f"keys/{key['id']}"
    changed = call(admin, "PATCH", path, {"requests_per_minute": None, "tokens_per_minute": 5000}).json()
    assert limits_of(changed) == [None, 5000, None, -2]
    assert limits_of(call(admin, "GET", path).json()) == [None, 5000, None, -2]
    assert limits_of(call(admin, "PATCH", path, {}).json()) == [None, 5000, None, -2]
    edited = call(admin, "PATCH", path, {"models": ["b", "a"], "expires_at": "2999-01-31T12:00:00Z"}).json()
    assert (edited["models"], edited["expires_at"], limits_of(edited)[1]) == (["a", "b"], "2999-01-31T12:00:00Z", 5000)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"requests_per_minute": 0}, "requests_per_minute"),
        ({"tokens_per_minute": "many"}, "tokens_per_minute"),
        ({"concurrency": -1}, "concurrency"),
        ({"priority": None}, "priority"),
        ({"priority": 11}, "priority"),
        ({"rpm": 5}, "rpm"),
    ],
)
def test_a_bad_limit_is_named(admin: Client, body: dict[str, Any], field: str) -> None:
    key = make(admin)
    for method, path, more in (
        ("PATCH", f"keys/{key['id']}", {}),
        ("POST", "keys", {"name": "k", "scope": "inference"}),
    ):
        answer = call(admin, method, path, {**more, **body})
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, field)
    assert limits_of(call(admin, "GET", f"keys/{key['id']}").json()) == [None, None, None, 0]


def test_a_manage_key_is_not_limited(admin: Client) -> None:
    key = make(admin, scope="manage")
    answer = call(admin, "PATCH", f"keys/{key['id']}", {"concurrency": 1})
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "concurrency")


def test_a_rotation_tells_the_new_secret_once_and_how_long_the_old_one_works(admin: Client) -> None:
    key = make(admin, scope="manage", role="viewer")
    assert key["old_secret_works_until"] is None
    rotated = call(admin, "POST", f"keys/{key['id']}/rotate", {"overlap_seconds": 60}).json()
    assert rotated["id"] == key["id"]
    assert rotated["key"] != key["key"]
    assert rotated["old_secret_works_until"] > rotated["created_at"]
    for secret in (key["key"], rotated["key"]):
        assert call(Client(headers={"authorization": f"Bearer {secret}"}), "GET", "me").status_code == 200
    assert "key" not in call(admin, "GET", f"keys/{key['id']}").json()
    last = call(admin, "POST", f"keys/{key['id']}/rotate", {"overlap_seconds": 0}).json()
    assert call(Client(headers={"authorization": f"Bearer {rotated['key']}"}), "GET", "me").status_code == 401
    assert call(Client(headers={"authorization": f"Bearer {last['key']}"}), "GET", "me").status_code == 200


@pytest.mark.parametrize("body", [{"overlap_seconds": -1}, {"overlap_seconds": 31 * 86_400}, {"overlap_seconds": "x"}])
def test_a_bad_overlap_is_named(admin: Client, body: dict[str, Any]) -> None:
    answer = call(admin, "POST", f"keys/{make(admin)['id']}/rotate", body)
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "overlap_seconds")


def test_what_ended_is_a_conflict_and_what_never_was_is_missing(admin: Client) -> None:
    key = make(admin)
    call(admin, "DELETE", f"keys/{key['id']}")
    for method, path, body in (("PATCH", "", {"concurrency": 1}), ("POST", "/rotate", {})):
        assert call(admin, method, f"keys/{key['id']}{path}", body).status_code == 409
        assert call(admin, method, f"keys/none{path}", body).status_code == 404
