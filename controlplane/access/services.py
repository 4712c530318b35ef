"""API keys: make, revoke, list, recognise. The key's text exists once, in the answer that made it; the row has its digest.

Never logs or stores a key. Routers learn of a new or revoked key with the next snapshot, which the reconcile beat makes.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils import timezone

from controlplane.access import audit
from controlplane.access.models import ApiKey
from controlplane.access.roles import Actor, Role
from controlplane.fleet.errors import Conflict, InvalidInput, NotFound
from controlplane.fleet.wire import Scope

INFERENCE: Final = Scope.INFERENCE.value
MANAGE: Final = Scope.MANAGE.value
PREFIX: Final = "tdm"
USED_EVERY: Final = timedelta(minutes=1)
"""`last_used_at` is written at most this often: reads must not turn into writes."""


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
) -> tuple[ApiKey, str]:
    """A new key and its text, which cannot be had again. A manage key without a role is a viewer.

    Only admins make keys, so that no key may more than its maker. Raises `Forbidden`, or `InvalidInput` naming the field.
    """
    actor.require(Role.ADMIN)
    name = name.strip()
    if not 1 <= len(name) <= 100 or not name.isprintable():
        raise InvalidInput("name: write 1 to 100 printable characters that say who uses the key", field="name")
    if scope not in tuple(Scope):
        raise InvalidInput("scope: choose inference (OpenAI endpoint) or manage (REST and CLI)", field="scope")
    if scope == INFERENCE and role is not None:
        raise InvalidInput("role: only manage keys have a role; leave it out or choose the scope manage", field="role")
    if scope == MANAGE and models:
        raise InvalidInput("models: only inference keys are limited to models; leave it out", field="models")
    if not all(1 <= len(model) <= 200 and model.isprintable() for model in models):
        raise InvalidInput("models: write served names, of 1 to 200 printable characters each", field="models")
    if expires_at is not None and expires_at <= timezone.now():
        raise InvalidInput("expires_at: this time has passed; choose a later one, or leave it out", field="expires_at")
    role = role or Role.VIEWER
    key_id = secrets.token_hex(4)
    text = f"{PREFIX}-{key_id}-{secrets.token_urlsafe(32)}"
    key = ApiKey.objects.create(
        id=key_id,
        name=name,
        digest=digest_of(text),
        scope=scope,
        role=role,
        models_allowed=sorted(set(models)),
        created_by=actor.name,
        expires_at=expires_at,
    )
    shown = {"role": role.label} if scope == MANAGE else {"models": key.models_allowed}
    expiry = expires_at.isoformat() if expires_at else None
    audit.record(actor=actor, action="key.create", target=key.id, name=name, scope=scope, expires_at=expiry, **shown)
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
    """All keys, newest first, revoked and expired ones included."""
    return ApiKey.objects.order_by("-created_at", "id")


def authenticate_key(text: str) -> ApiKey | None:
    """The valid key with this text. Unknown, malformed, revoked and expired keys are None alike."""
    now = timezone.now()
    usable = Q(expires_at=None) | Q(expires_at__gt=now)
    key = ApiKey.objects.filter(usable, digest=digest_of(text), revoked_at=None).first()
    if key is not None and (key.last_used_at is None or key.last_used_at < now - USED_EVERY):
        ApiKey.objects.filter(pk=key.pk).update(last_used_at=now)
    return key
