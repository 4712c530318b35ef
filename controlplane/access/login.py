"""Signing in by password, slowed down: after `FAILURES` wrong ones for one user from one address, none counts for `PAUSE`.

The refusal looks like a wrong password, so that it tells nobody anything.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.contrib.auth.backends import ModelBackend
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest
from django.utils import timezone

from controlplane.access.models import FailedLogin

FAILURES = 10
PAUSE = timedelta(minutes=5)


class ThrottledBackend(ModelBackend):
    """Django's password check behind a count of recent failures, kept in the database: all web processes share it."""

    def authenticate(
        self, request: HttpRequest | None, username: str | None = None, password: str | None = None, **kwargs: Any
    ) -> User | None:
        """The user, or None. Raises `PermissionDenied` (which Django's `authenticate` answers with None) during a pause."""
        who = {
            "username": (username or "")[:150],
            "address": str(request.META.get("REMOTE_ADDR", ""))[:64] if request else "",
        }
        FailedLogin.objects.filter(at__lt=timezone.now() - PAUSE).delete()
        if FailedLogin.objects.filter(**who).count() >= FAILURES:
            raise PermissionDenied
        user = super().authenticate(request, username=username, password=password, **kwargs)
        if user is None:
            FailedLogin.objects.create(**who)
        else:
            FailedLogin.objects.filter(**who).delete()
        return user
