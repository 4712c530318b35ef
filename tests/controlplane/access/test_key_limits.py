"""Limits of keys, and their rotation with an overlap."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from controlplane.access import services
from controlplane.access.expiry import parse_overlap
from controlplane.access.limits import BOUNDS, UNLIMITED, Limits, changed, parse_limit
from controlplane.access.models import ApiKey, AuditEntry, RetiredSecret
from controlplane.access.roles import Actor, Role
from controlplane.fleet.errors import Conflict, Forbidden, InvalidInput, NotFound

ADMIN = Actor("ada", Role.ADMIN, "user", "10.0.0.7")
db = pytest.mark.django_db


@pytest.mark.parametrize("field", BOUNDS)
def test_bounds(field: str) -> None:
    low, high = BOUNDS[field]
    for value in (low, high):
        assert getattr(changed(UNLIMITED, {field: value}), field) == value
    for value in (low - 1, high + 1):
        with pytest.raises(InvalidInput) as refused:
            changed(UNLIMITED, {field: value})
        assert refused.value.field == field


def test_what_is_not_named_stays_and_none_takes_a_limit_away() -> None:
    before = Limits(60, 1000, 4, 2)
    assert changed(before, {"concurrency": None, "tokens_per_minute": 5}) == Limits(60, 5, None, 2)
    assert changed(before, {"priority": None}).priority == 0


@pytest.mark.parametrize(
    ("text", "value"), [("60", 60), (" 1_000,000 ", 1_000_000), ("", None), ("None", None), ("-3", -3)]
)
def test_limits_as_people_write_them(text: str, value: int | None) -> None:
    assert parse_limit(text, "priority") == value


@pytest.mark.parametrize("text", ["x", "1.5", "1e3", "--1", "٣", "9" * 13])
def test_what_is_no_limit_names_its_field(text: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_limit(text, "concurrency")
    assert refused.value.field == "concurrency"


@pytest.mark.parametrize(("text", "seconds"), [("0", 0), ("90s", 90), ("30m", 1800), ("24h", 86_400), ("7d", 604_800)])
def test_overlaps(text: str, seconds: int) -> None:
    assert parse_overlap(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "1w", "-1h", "24"])
def test_other_overlaps_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="overlap"):
        parse_overlap(text)


@db
def test_limits_are_set_at_creation_and_changed_later() -> None:
    key, _ = services.create_key(actor=ADMIN, name="k", scope="inference", limits=Limits(60, None, 4, 2))
    services.limit_key(actor=ADMIN, key_id=key.id, changes={"tokens_per_minute": 9000, "concurrency": None})
    services.limit_key(actor=ADMIN, key_id=key.id, changes={"priority": 2})  # as it is: nothing to audit
    assert services.get_key(key.id).limits == Limits(60, 9000, None, 2)
    limited, made = AuditEntry.objects.all()
    assert made.detail.items() >= {"requests_per_minute": 60, "concurrency": 4, "priority": 2}.items()
    assert (limited.action, limited.target) == ("key.limit", key.id)
    assert limited.detail == {"name": "k", "tokens_per_minute": [None, 9000], "concurrency": [4, None]}


@db
@pytest.mark.parametrize("field", BOUNDS)
def test_manage_keys_have_no_limits(field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        services.create_key(actor=ADMIN, name="k", scope="manage", limits=changed(UNLIMITED, {field: 5}))
    assert refused.value.field == field
    key, _ = services.create_key(actor=ADMIN, name="k", scope="manage")
    with pytest.raises(InvalidInput):
        services.limit_key(actor=ADMIN, key_id=key.id, changes={field: 5})


@db
def test_bad_limits_make_no_key() -> None:
    with pytest.raises(InvalidInput):
        services.create_key(actor=ADMIN, name="k", scope="inference", limits=Limits(requests_per_minute=0))
    assert not ApiKey.objects.exists()


CHANGES: list[Any] = [
    lambda actor, key: services.limit_key(actor=actor, key_id=key, changes={"concurrency": 1}),
    lambda actor, key: services.rotate_key(actor=actor, key_id=key),
]


@db
@pytest.mark.parametrize("change", CHANGES)
def test_only_admins_change_keys_and_only_living_ones(change: Any) -> None:
    key, text = services.create_key(actor=ADMIN, name="k", scope="inference")
    for role in (Role.VIEWER, Role.OPERATOR):
        with pytest.raises(Forbidden):
            change(Actor("vi", role), key.id)
    with pytest.raises(NotFound):
        change(ADMIN, "none")
    services.revoke_key(actor=ADMIN, key_id=key.id)
    with pytest.raises(Conflict):
        change(ADMIN, key.id)
    assert services.authenticate_key(text) is None


@db
def test_a_rotated_key_keeps_everything_but_its_secret() -> None:
    key, old = services.create_key(actor=ADMIN, name="ci", scope="manage", role=Role.OPERATOR)
    assert services.get_key(key.id).old_secret_works_until() is None
    same, new = services.rotate_key(actor=ADMIN, key_id=key.id, overlap_seconds=3600)
    assert new.startswith(f"tdm-{key.id}-")
    assert new != old
    assert (same.id, same.name, same.role) == (key.id, "ci", Role.OPERATOR)
    assert services.authenticate_key(old) == services.authenticate_key(new) == key
    until = services.get_key(key.id).old_secret_works_until()
    assert until is not None
    assert AuditEntry.objects.first().detail == {"name": "ci", "old_works_until": until.isoformat()}  # type: ignore[union-attr]
    RetiredSecret.objects.update(works_until=timezone.now() - timedelta(seconds=1))
    assert services.authenticate_key(old) is None
    assert services.authenticate_key(new) == key
    assert services.get_key(key.id).old_secret_works_until() is None


@db
def test_an_overlap_of_nothing_ends_the_old_secret_at_once() -> None:
    key, old = services.create_key(actor=ADMIN, name="k", scope="manage")
    _, overlapping = services.rotate_key(actor=ADMIN, key_id=key.id, overlap_seconds=600)
    assert services.authenticate_key(old) == key
    _, new = services.rotate_key(actor=ADMIN, key_id=key.id, overlap_seconds=0)
    assert services.authenticate_key(old) is services.authenticate_key(overlapping) is None
    assert services.authenticate_key(new) == key


@db
def test_rotating_again_ends_no_earlier_overlap_and_cleans_up_what_ended() -> None:
    key, first = services.create_key(actor=ADMIN, name="k", scope="manage")
    _, second = services.rotate_key(actor=ADMIN, key_id=key.id)
    _, third = services.rotate_key(actor=ADMIN, key_id=key.id)
    assert all(services.authenticate_key(text) == key for text in (first, second, third))
    RetiredSecret.objects.update(works_until=timezone.now() - timedelta(seconds=1))
    services.rotate_key(actor=ADMIN, key_id=key.id)
    assert RetiredSecret.objects.count() == 1


@db
def test_revoking_ends_the_old_secret_too() -> None:
    key, old = services.create_key(actor=ADMIN, name="k", scope="manage")
    _, new = services.rotate_key(actor=ADMIN, key_id=key.id)
    services.revoke_key(actor=ADMIN, key_id=key.id)
    assert services.authenticate_key(old) is services.authenticate_key(new) is None
    assert services.get_key(key.id).old_secret_works_until() is None


@db
def test_an_expired_key_is_not_rotated_and_no_overlap_outlives_the_key() -> None:
    key, _ = services.create_key(actor=ADMIN, name="k", scope="manage", expires_at=timezone.now() + timedelta(hours=1))
    services.rotate_key(actor=ADMIN, key_id=key.id)
    assert services.get_key(key.id).old_secret_works_until() == key.expires_at
    ApiKey.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
    with pytest.raises(Conflict):
        services.rotate_key(actor=ADMIN, key_id=key.id)


@db
@pytest.mark.parametrize("seconds", [-1, services.LONGEST_OVERLAP + 1])
def test_an_overlap_has_bounds(seconds: int) -> None:
    key, _ = services.create_key(actor=ADMIN, name="k", scope="manage")
    with pytest.raises(InvalidInput) as refused:
        services.rotate_key(actor=ADMIN, key_id=key.id, overlap_seconds=seconds)
    assert refused.value.field == "overlap"


@db
def test_routers_tell_of_use() -> None:
    key, _ = services.create_key(actor=ADMIN, name="k", scope="inference")
    now = timezone.now()
    for ago, seen in (
        (300, 300),
        (290, 300),
        (200, 200),
        (-50, 0),
    ):  # less than a minute later: not written; future: now
        services.note_uses({key.id: (now - timedelta(seconds=ago)).timestamp(), "gone": now.timestamp()})
        last = services.get_key(key.id).last_used_at
        assert last is not None
        assert abs((now - last).total_seconds() - seen) < 10


@db
def test_models_and_expiry_are_edited_and_audited_and_the_secret_stays() -> None:
    later = timezone.now() + timedelta(days=9)
    key, text = services.create_key(actor=ADMIN, name="app", scope="inference", models=["one"])
    services.edit_key(actor=ADMIN, key_id=key.pk, changes={"models": ["two", "one", "two"], "expires_at": later})
    stored = services.authenticate_key(text)
    assert stored is not None
    assert (stored.models_allowed, stored.expires_at) == (["one", "two"], later)
    services.edit_key(actor=ADMIN, key_id=key.pk, changes={"models": ["one", "two"]})
    (edit,) = AuditEntry.objects.filter(action="key.edit")
    assert edit.detail["models"] == [["one"], ["one", "two"]]
    assert edit.detail["expires_at"] == [None, later.isoformat()]
    services.edit_key(actor=ADMIN, key_id=key.pk, changes={"models": [], "expires_at": None, "concurrency": 3})
    key.refresh_from_db()
    assert (key.models_allowed, key.expires_at, key.concurrency) == ([], None, 3)


@db
@pytest.mark.parametrize(
    ("scope", "changes", "field"),
    [
        ("inference", {"models": ["x" * 201]}, "models"),
        ("inference", {"models": ["a\tb"]}, "models"),
        ("manage", {"models": ["one"]}, "models"),
        ("inference", {"expires_at": timezone.now() - timedelta(seconds=1)}, "expires_at"),
    ],
)
def test_an_edit_that_makes_no_sense_names_its_field_and_changes_nothing(
    scope: str, changes: dict[str, Any], field: str
) -> None:
    key, _ = services.create_key(actor=ADMIN, name="app", scope=scope)
    limits = {"concurrency": 3} if scope == "inference" else {}
    with pytest.raises(InvalidInput) as refused:
        services.edit_key(actor=ADMIN, key_id=key.pk, changes={**changes, **limits})
    assert refused.value.field == field
    key.refresh_from_db()
    assert (key.models_allowed, key.expires_at, key.concurrency) == ([], None, None)


@db
def test_a_revoked_key_is_not_edited_and_only_admins_edit() -> None:
    key, _ = services.create_key(actor=ADMIN, name="app", scope="inference")
    with pytest.raises(Forbidden):
        services.edit_key(actor=ADMIN._replace(role=Role.OPERATOR), key_id=key.pk, changes={"models": ["one"]})
    services.revoke_key(actor=ADMIN, key_id=key.pk)
    with pytest.raises(Conflict, match="was revoked"):
        services.edit_key(actor=ADMIN, key_id=key.pk, changes={"models": ["one"]})
