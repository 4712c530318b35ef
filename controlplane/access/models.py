"""API keys (digest only) and the audit trail. Users and groups are Django's own; a group named after a role grants it."""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar

from django.contrib.auth.models import User
from django.db import models
from django.utils import timezone

from controlplane.access.limits import Limits
from controlplane.access.roles import Role


class ApiKey(models.Model):
    """A key for the OpenAI endpoint (scope inference) or for REST and CLI (scope manage). The key itself is never stored."""

    id = models.CharField(primary_key=True, max_length=16)
    """Public part, shown in lists and logs: the key begins with `tdm-<id>-`."""
    name = models.CharField(max_length=100)
    digest = models.CharField(max_length=64, unique=True)
    scope = models.CharField(max_length=16, choices=[("inference", "inference"), ("manage", "manage")])
    role = models.PositiveSmallIntegerField(default=Role.VIEWER, choices=[(r.value, r.label) for r in Role])
    """What a manage key may do; no meaning for inference keys."""
    models_allowed = models.JSONField(default=list, blank=True)
    """Served names; empty: all."""
    requests_per_minute = models.PositiveIntegerField(null=True, blank=True)
    tokens_per_minute = models.PositiveIntegerField(null=True, blank=True)
    concurrency = models.PositiveIntegerField(null=True, blank=True)
    priority = models.SmallIntegerField(default=0)
    silence_seconds = models.PositiveIntegerField(null=True, blank=True)
    gap_seconds = models.PositiveIntegerField(null=True, blank=True)
    created_by = models.CharField(max_length=150)
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)
    last_used_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering: ClassVar = ["-created_at"]

    def __str__(self) -> str:
        return f"{self.id} ({self.name})"

    @property
    def limits(self) -> Limits:
        return Limits(**{field: getattr(self, field) for field in Limits._fields})

    @property
    def editable(self) -> dict[str, Any]:
        """What `services.edit_key` changes, by its names."""
        return {**self.limits._asdict(), "models": self.models_allowed, "expires_at": self.expires_at}

    def works(self) -> bool:
        """It opens its door now: neither revoked nor expired."""
        return self.revoked_at is None and (self.expires_at is None or self.expires_at > timezone.now())

    def old_secret_works_until(self) -> datetime | None:
        """The last moment of a secret from before a rotation; None: only the newest one works."""
        if self.revoked_at is not None:
            return None
        ends = [old.works_until for old in self.retired.all()]
        last = min(filter(None, (max(ends, default=None), self.expires_at)), default=None) if ends else None
        return last if last is not None and last > timezone.now() else None


class RetiredSecret(models.Model):
    """What a key was before it was rotated: it still opens the door as that key, for a while."""

    key = models.ForeignKey(ApiKey, models.CASCADE, related_name="retired")
    digest = models.CharField(max_length=64, unique=True)
    works_until = models.DateTimeField()

    class Meta:
        ordering: ClassVar = ["works_until"]

    def __str__(self) -> str:
        return f"{self.key_id} until {self.works_until:%F %T}"


class OneTimePassword(models.Model):
    """The user's password was shown to an admin: another must be chosen at the next sign-in."""

    user = models.OneToOneField(User, models.CASCADE, related_name="one_time_password")

    def __str__(self) -> str:
        return self.user.get_username()


class AuditEntry(models.Model):
    """One change by one actor. Written in the transaction of the change, never altered."""

    at = models.DateTimeField(auto_now_add=True, db_index=True)
    actor = models.CharField(max_length=150)
    actor_kind = models.CharField(max_length=16)
    address = models.CharField(max_length=64, blank=True)
    action = models.CharField(max_length=64, db_index=True)
    """noun.verb: `deployment.scale`, `key.create`."""
    target = models.CharField(max_length=200)
    detail = models.JSONField(default=dict)

    class Meta:
        ordering: ClassVar = ["-at", "-id"]

    def __str__(self) -> str:
        return f"{self.at:%F %T} {self.actor} {self.action} {self.target}"


class LoginAttempt(models.Model):
    """One attempt of the last minutes to sign in that did not succeed, or is under way; see `login`."""

    at = models.DateTimeField(auto_now_add=True, db_index=True)
    username = models.CharField(max_length=150)
    place = models.CharField(max_length=64, db_index=True)
    """The client's address, or `browser ` and the number of one that the user is known by."""

    def __str__(self) -> str:
        return f"{self.username} from {self.place}"


class Submission(models.Model):
    """A form or a REST call that was sent with a token of its own; see `once`."""

    digest = models.CharField(primary_key=True, max_length=64)
    """SHA-256 of the sender, the action and the token."""
    contents = models.CharField(max_length=64)
    """SHA-256 of what was sent."""
    salt = models.CharField(max_length=32)
    target = models.CharField(max_length=200, blank=True)
    """What it made."""
    at = models.DateTimeField(auto_now_add=True, db_index=True)

    def __str__(self) -> str:
        return f"{self.target} at {self.at:%F %T}"
