"""API keys: what is stored, who may make which, when one is recognised."""

from __future__ import annotations

import contextlib
import re
from datetime import UTC, datetime, timedelta

import pytest
from django.utils import timezone

from controlplane.access import services
from controlplane.access.expiry import parse_expiry
from controlplane.access.models import ApiKey, AuditEntry
from controlplane.access.roles import Actor, Role
from controlplane.fleet.errors import Conflict, Forbidden, InvalidInput, NotFound

pytestmark = pytest.mark.django_db
ADMIN = Actor("ada", Role.ADMIN, "user", "10.0.0.7")


def test_a_key_has_256_random_bits_and_only_its_digest_is_stored() -> None:
    key, text = services.create_key(actor=ADMIN, name="ci", scope="manage", role=Role.OPERATOR)
    assert re.fullmatch(rf"tdm-{key.id}-[A-Za-z0-9_-]{{43}}", text)
    stored = repr([list(ApiKey.objects.values()), list(AuditEntry.objects.values())])
    assert text not in stored
    assert text.split("-", 2)[2] not in stored
    assert key.digest == services.digest_of(text)


def test_each_key_is_another() -> None:
    texts = {services.create_key(actor=ADMIN, name="k", scope="inference")[1] for _ in range(20)}
    assert len(texts) == 20


def test_creating_and_revoking_leave_audit_rows() -> None:
    key, _ = services.create_key(actor=ADMIN, name="ci", scope="inference", models=["b", "a", "a"])
    services.revoke_key(actor=ADMIN, key_id=key.id)
    revoke, create = AuditEntry.objects.all()
    assert (create.action, create.target, create.actor, create.address) == ("key.create", key.id, "ada", "10.0.0.7")
    assert create.detail == {"name": "ci", "scope": "inference", "models": ["a", "b"], "expires_at": None}
    assert (revoke.action, revoke.target) == ("key.revoke", key.id)


@pytest.mark.parametrize("maker", list(Role))
@pytest.mark.parametrize("role", list(Role))
def test_no_key_may_more_than_its_maker(maker: Role, role: Role) -> None:
    with contextlib.suppress(Forbidden):
        services.create_key(actor=Actor("m", maker), name="k", scope="manage", role=role)
    assert all(key.role <= maker for key in ApiKey.objects.all())
    assert ApiKey.objects.count() == (maker is Role.ADMIN)


@pytest.mark.parametrize("role", [Role.VIEWER, Role.OPERATOR])
def test_only_admins_make_and_revoke_keys(role: Role) -> None:
    key, _ = services.create_key(actor=ADMIN, name="k", scope="inference")
    with pytest.raises(Forbidden):
        services.create_key(actor=Actor("vi", role), name="k", scope="inference")
    with pytest.raises(Forbidden):
        services.revoke_key(actor=Actor("vi", role), key_id=key.id)
    assert AuditEntry.objects.count() == 1


def past() -> datetime:
    return timezone.now() - timedelta(seconds=1)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": " "}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"name": "x" * 101}, "name"),
        ({"scope": "root"}, "scope"),
        ({"scope": "inference", "role": Role.VIEWER}, "role"),
        ({"scope": "manage", "models": ["m"]}, "models"),
        ({"models": ["m", ""]}, "models"),
        ({"models": ["a\0"]}, "models"),
        ({"models": ["m" * 201]}, "models"),
        ({"expires_at": past}, "expires_at"),
    ],
)
def test_a_refusal_names_the_field(change: dict[str, object], field: str) -> None:
    wanted = {"name": "k", "scope": "inference", **change}
    if callable(made := wanted.get("expires_at")):
        wanted["expires_at"] = made()
    with pytest.raises(InvalidInput) as refused:
        services.create_key(actor=ADMIN, **wanted)  # type: ignore[arg-type]
    assert refused.value.field == field
    assert not ApiKey.objects.exists()


def test_unknown_revoked_and_expired_keys_are_refused_alike() -> None:
    key, text = services.create_key(actor=ADMIN, name="k", scope="manage")
    assert services.authenticate_key(text) == key
    assert services.authenticate_key(text + "x") is None
    assert services.authenticate_key("") is None
    ApiKey.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
    assert services.authenticate_key(text) is None
    ApiKey.objects.update(expires_at=timezone.now() + timedelta(hours=1))
    assert services.authenticate_key(text) is not None
    services.revoke_key(actor=ADMIN, key_id=key.id)
    assert services.authenticate_key(text) is None


def test_revoking_twice_or_nothing_is_told() -> None:
    key, _ = services.create_key(actor=ADMIN, name="k", scope="manage")
    services.revoke_key(actor=ADMIN, key_id=key.id)
    with pytest.raises(Conflict):
        services.revoke_key(actor=ADMIN, key_id=key.id)
    with pytest.raises(NotFound):
        services.revoke_key(actor=ADMIN, key_id="nope")


def test_use_is_noted_at_most_once_a_minute() -> None:
    key, text = services.create_key(actor=ADMIN, name="k", scope="manage")
    services.authenticate_key(text)
    key.refresh_from_db()
    first = key.last_used_at
    assert first is not None
    services.authenticate_key(text)
    key.refresh_from_db()
    assert key.last_used_at == first
    ApiKey.objects.update(last_used_at=first - timedelta(seconds=61))
    services.authenticate_key(text)
    key.refresh_from_db()
    assert key.last_used_at is not None
    assert key.last_used_at >= first


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("", None),
        ("30d", datetime(2030, 1, 31, tzinfo=UTC)),
        ("12h", datetime(2030, 1, 1, 12, tzinfo=UTC)),
        ("2031-02-03", datetime(2031, 2, 3, tzinfo=UTC)),
        ("2031-02-03T04:05+02:00", datetime(2031, 2, 3, 2, 5, tzinfo=UTC)),
    ],
)
def test_expiry_is_a_span_or_a_moment(text: str, moment: datetime | None) -> None:
    assert parse_expiry(text, now=datetime(2030, 1, 1, tzinfo=UTC)) == moment


@pytest.mark.parametrize("text", ["0d", "d", "soon", "3w", "-1d"])
def test_other_expiries_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="expires_at"):
        parse_expiry(text)
