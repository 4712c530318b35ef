"""API keys: make, edit, rotate, revoke, list, recognise. The key's text exists once, in the answer that made it; the row has its digest.

Never logs or stores a key. Routers learn of a new or revoked key with the next snapshot, which the reconcile beat makes.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils import timezone

from controlplane.access import audit
from controlplane.access.limits import UNLIMITED, Limits, changed
from controlplane.access.models import ApiKey, RetiredSecret
from controlplane.access.once import Once
from controlplane.access.roles import Actor, Role
from controlplane.fleet.errors import Conflict, InvalidInput, NotFound, Problems
from controlplane.fleet.wire import Scope

INFERENCE: Final = Scope.INFERENCE.value
MANAGE: Final = Scope.MANAGE.value
PREFIX: Final = "tdm"
USED_EVERY: Final = timedelta(minutes=1)
"""`last_used_at` is written at most this often: reads must not turn into writes."""
OVERLAP: Final = 86_400
"""Seconds for which the old secret of a rotated key works, unless said otherwise."""
LONGEST_OVERLAP: Final = 30 * 86_400


def digest_of(text: str) -> str:
    """Lower-case hex SHA-256 of a key. No salt or stretching: keys have 256 random bits."""
    return hashlib.sha256(text.encode()).hexdigest()


@transaction.atomic
def create_key(
    *,
    actor: Actor,
    name: str,
    scope: str,
    role: Role | None = None,
    models: Sequence[str] = (),
    expires_at: datetime | None = None,
    limits: Limits = UNLIMITED,
    token: str = "",
) -> tuple[ApiKey, str]:
    """A new key and its text, which cannot be had again. A manage key without a role is a viewer. `token`: makes a second
    sending harmless (`once`).

    Only admins make keys, so that no key may more than its maker. Raises `Forbidden`, `InvalidInput` naming the field, or
    `Conflict`.
    """
    actor.require(Role.ADMIN)
    name = name.strip()
    limits = check_key(name=name, scope=scope, role=role, models=models, expires_at=expires_at, limits=limits)
    role = role or Role.VIEWER
    sent = Once(actor, "key.create", token, [name, scope, role, sorted(models), expires_at, limits])
    if sent.target:
        return _again(sent)
    key_id = secrets.token_hex(4)
    text = _text(key_id, sent)
    key = ApiKey.objects.create(
        id=key_id,
        name=name,
        digest=digest_of(text),
        scope=scope,
        role=role,
        models_allowed=sorted(set(models)),
        created_by=actor.name,
        expires_at=expires_at,
        **limits._asdict(),
    )
    shown = {"role": role.label} if scope == MANAGE else {"models": key.models_allowed, **_set(limits)}
    expiry = expires_at.isoformat() if expires_at else None
    audit.record(actor=actor, action="key.create", target=key.id, name=name, scope=scope, expires_at=expiry, **shown)
    sent.made(key.id)
    return key, text


def check_key(
    *, name: str, scope: str, role: Role | None, models: Sequence[str], expires_at: datetime | None, limits: Limits
) -> Limits:
    """The limits as they are stored. Raises `InvalidInput` with everything that `create_key` would refuse."""
    found = Problems()
    if not 1 <= len(name) <= 100 or not name.isprintable():
        found.add("write 1 to 100 printable characters that say who uses the key", "name")
    if scope not in tuple(Scope):
        found.add("choose inference (OpenAI endpoint) or manage (REST and CLI)", "scope")
    if scope == INFERENCE and role is not None:
        found.add("only manage keys have a role; leave it out or choose the scope manage", "role")
    if scope == MANAGE and models:
        found.add("only inference keys are limited to models; leave it out", "models")
    with found.part():
        _check_models(models)
    with found.part():
        _check_expiry(expires_at)
    with found.part():
        limits = changed(UNLIMITED, limits._asdict())
        _check_limited(scope, limits)
    found.raise_any()
    return limits


@transaction.atomic
def limit_key(
    *, actor: Actor, key_id: str, changes: Mapping[str, int | None], seen: Mapping[str, Any] | None = None
) -> ApiKey:
    """Set some of a key's limits anew (fields of `Limits`; None: unlimited). What is not named stays. `seen`: fields as they
    were when the change was made; where the key has others now, nothing is changed.

    Raises `Forbidden`, `NotFound`, `Conflict` (a revoked key, or `seen`), or `InvalidInput` naming the field.
    """
    actor.require(Role.ADMIN)
    key = _locked(key_id)
    if seen is not None and any(key.editable[field] != value for field, value in seen.items()):
        raise Conflict(f"key {key_id} changed meanwhile; read it again", field="seen")
    limits = changed(key.limits, changes)
    _check_limited(key.scope, limits)
    told = {field: [old, new] for field, old, new in zip(Limits._fields, key.limits, limits, strict=True) if old != new}
    if told:
        for field, value in limits._asdict().items():
            setattr(key, field, value)
        key.save(update_fields=Limits._fields)
        audit.record(actor=actor, action="key.limit", target=key.id, name=key.name, **told)
    return key


@transaction.atomic
def edit_key(*, actor: Actor, key_id: str, changes: Mapping[str, Any], seen: Mapping[str, Any] | None = None) -> ApiKey:
    """Change what a key may and until when: fields of `Limits`, `models` (served names; empty: all), `expires_at` (None:
    never). What is not named stays; its secret does too. `seen`: as in `limit_key`.

    Raises `Forbidden`, `NotFound`, `Conflict` (a revoked key, or `seen`), or `InvalidInput` naming the field.
    """
    limits = {field: value for field, value in changes.items() if field in Limits._fields}
    found = Problems()
    with found.part():
        limit_key(actor=actor, key_id=key_id, changes=limits, seen=seen)
    key = _locked(key_id)
    told: dict[str, Any] = {}
    if "models" in changes:
        models = sorted(set(changes["models"]))
        if key.scope == MANAGE and models:
            found.add("only inference keys are limited to models; leave it out", "models")
        with found.part():
            _check_models(models)
        if models != key.models_allowed:
            told["models"], key.models_allowed = [key.models_allowed, models], models
    if "expires_at" in changes and changes["expires_at"] != key.expires_at:
        with found.part():
            _check_expiry(changes["expires_at"])
        told["expires_at"] = [at and at.isoformat() for at in (key.expires_at, changes["expires_at"])]
        key.expires_at = changes["expires_at"]
    found.raise_any()
    if told:
        key.save(update_fields=["models_allowed", "expires_at"])
        audit.record(actor=actor, action="key.edit", target=key.id, name=key.name, **told)
    return key


@transaction.atomic
def rotate_key(*, actor: Actor, key_id: str, overlap_seconds: int = OVERLAP, token: str = "") -> tuple[ApiKey, str]:
    """A new secret for the same key: its id, name, models, limits and use stay. The old secret works for `overlap_seconds`
    more, and counts as the same key; 0 ends it at once, and with it all that earlier rotations let work on. Returns the key
    and its new text, which cannot be had again. `token`: makes a second sending harmless (`once`).

    Raises `Forbidden`, `NotFound`, `Conflict` for a revoked or expired key, or `InvalidInput`.
    """
    actor.require(Role.ADMIN)
    if not 0 <= overlap_seconds <= LONGEST_OVERLAP:
        raise InvalidInput(f"overlap: choose 0 to {LONGEST_OVERLAP} seconds (30 days)", field="overlap")
    key = _locked(key_id)
    now = timezone.now()
    if key.expires_at is not None and key.expires_at <= now:
        raise Conflict(f"key {key_id} expired at {key.expires_at:%F %T} UTC; make a new one")
    sent = Once(actor, "key.rotate", token, [key_id, overlap_seconds])
    if sent.target:
        return _again(sent)
    until = now + timedelta(seconds=overlap_seconds)
    (key.retired.filter(works_until__lte=now) if overlap_seconds else key.retired).all().delete()
    if overlap_seconds:
        RetiredSecret.objects.create(key=key, digest=key.digest, works_until=until)
    text = _text(key.id, sent)
    key.digest = digest_of(text)
    key.save(update_fields=["digest"])
    sent.made(key.id)
    audit.record(actor=actor, action="key.rotate", target=key.id, name=key.name, old_works_until=until.isoformat())
    return key, text


@transaction.atomic
def revoke_key(*, actor: Actor, key_id: str) -> ApiKey:
    """End a key for ever. The row stays, so that logs and audit rows keep their meaning.

    Raises `Forbidden`, `NotFound`, or `Conflict` when it was revoked before.
    """
    actor.require(Role.ADMIN)
    changed = ApiKey.objects.filter(pk=key_id, revoked_at=None).update(revoked_at=timezone.now())
    key = ApiKey.objects.filter(pk=key_id).first()
    if key is None:
        raise NotFound(f"there is no key {key_id}")
    if not changed:
        raise Conflict(f"key {key_id} was revoked at {key.revoked_at:%F %T} UTC")
    audit.record(actor=actor, action="key.revoke", target=key.id, name=key.name)
    return key


def list_keys() -> QuerySet[ApiKey]:
    """All keys, newest first, revoked and expired ones included; with their retired secrets."""
    return ApiKey.objects.prefetch_related("retired").order_by("-created_at", "id")


def get_key(key_id: str) -> ApiKey:
    """Raises `NotFound`."""
    key = list_keys().filter(pk=key_id).first()
    if key is None:
        raise NotFound(f"there is no key {key_id}")
    return key


def authenticate_key(text: str) -> ApiKey | None:
    """The valid key with this text. Unknown, malformed, revoked and expired keys are None alike."""
    now = timezone.now()
    digest = digest_of(text)
    key = _usable(now).filter(digest=digest).first()
    if key is None:
        key = _usable(now).filter(retired__digest=digest, retired__works_until__gt=now).first()
    if key is not None:
        _note_use(key.pk, now, now)
    return key


def note_uses(uses: Mapping[str, float]) -> None:
    """Remember when routers saw keys. `uses`: key id -> seconds since 1970 by a router's clock."""
    now = timezone.now()
    known = dict(ApiKey.objects.filter(pk__in=uses).values_list("pk", "last_used_at"))
    for key_id, last in known.items():
        at = min(datetime.fromtimestamp(uses[key_id], UTC), now)
        if last is None or at - last >= USED_EVERY:
            _note_use(key_id, at, now)


def _note_use(key_id: str, at: datetime, now: datetime) -> None:
    stale = Q(last_used_at=None) | Q(last_used_at__lt=at - USED_EVERY) | Q(last_used_at__gt=now)
    ApiKey.objects.filter(stale, pk=key_id).update(last_used_at=at)


def _usable(now: datetime) -> QuerySet[ApiKey]:
    return ApiKey.objects.filter(Q(expires_at=None) | Q(expires_at__gt=now), revoked_at=None)


def _locked(key_id: str) -> ApiKey:
    key = ApiKey.objects.select_for_update().filter(pk=key_id).first()
    if key is None:
        raise NotFound(f"there is no key {key_id}")
    if key.revoked_at is not None:
        raise Conflict(f"key {key_id} was revoked at {key.revoked_at:%F %T} UTC")
    return key


def _text(key_id: str, sent: Once) -> str:
    return f"{PREFIX}-{key_id}-{sent.secret()}"


def _again(sent: Once) -> tuple[ApiKey, str]:
    """What the first sending made. Raises `Conflict` where its secret is not the key's any more."""
    key = get_key(sent.target)
    text = _text(key.id, sent)
    if not key.works() or key.digest != digest_of(text):
        raise Conflict(f"this was sent before and made a secret for {key.name} that is not its secret any more")
    return key, text


def _check_models(models: Sequence[str]) -> None:
    if not all(1 <= len(model) <= 200 and model.isprintable() for model in models):
        raise InvalidInput("models: write served names, of 1 to 200 printable characters each", field="models")


def _check_expiry(expires_at: datetime | None) -> None:
    if expires_at is not None and expires_at <= timezone.now():
        raise InvalidInput("expires_at: this time has passed; choose a later one, or leave it out", field="expires_at")


def _set(limits: Limits) -> dict[str, int]:
    return {field: value for field, value in limits._asdict().items() if value}


def _check_limited(scope: str, limits: Limits) -> None:
    if scope == MANAGE and (found := next(iter(_set(limits)), None)) is not None:
        raise InvalidInput(f"{found}: only inference keys are limited; leave it out", field=found)
