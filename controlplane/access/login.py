"""Signing in by password, slowed down for those who guess, and for nobody else.

Each attempt is written down before the password is looked at, so that many at once count like one after the other. In any
`PAUSE`: `ATTEMPTS` for one user from one address, fewer while a user is guessed at from many addresses, and `SPRAYED` from one
address for all users. A browser in which that user has signed in before has a count of its own: whoever guesses, from wherever,
can neither use it up nor lock its user out. No well-kept library does this: django-axes counts what has failed, so that
attempts at once are all tried, and its limits per user lock that user out.

A refusal looks like a wrong password, so that it tells nobody anything.
"""

from __future__ import annotations

import ipaddress
import secrets
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.contrib.auth.backends import ModelBackend
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponseBase
from django.utils import timezone

from controlplane.access.models import LoginAttempt

PAUSE = timedelta(minutes=5)
ATTEMPTS = 10
SPRAYED = 50
GUESSED_AT = 100
"""Attempts for one user, from all addresses, after which each address has `FEW`."""
FEW = 2
COOKIE = "tandem_browser"
COOKIE_AGE = timedelta(days=365)


class ThrottledBackend(ModelBackend):
    """Django's password check behind the count of recent attempts, kept in the database: all web processes share it."""

    def authenticate(
        self, request: HttpRequest | None, username: str | None = None, password: str | None = None, **kwargs: Any
    ) -> User | None:
        """The user, or None. Raises `PermissionDenied` (which Django's `authenticate` answers with None) during a pause."""
        name = (username or "")[:150]
        browser = _browser(request, name)
        attempts = LoginAttempt.objects.filter(username=name, place=browser or _address(request))
        LoginAttempt.objects.filter(at__lt=timezone.now() - PAUSE).delete()
        if _too_many(name, _address(request), browser, 0):
            raise PermissionDenied
        reserved = LoginAttempt.objects.create(username=name, place=browser or _address(request))
        if _too_many(name, _address(request), browser, 1):  # others came at the same moment
            reserved.delete()
            raise PermissionDenied
        user = super().authenticate(request, username=username, password=password, **kwargs)
        if user is not None:
            attempts.delete()
        return user


def _too_many(name: str, address: str, browser: str, own: int) -> bool:
    """Whether the attempts of now, `own` of them this one's, leave no room."""
    everywhere = LoginAttempt.objects.filter(username=name)
    if browser:
        return everywhere.filter(place=browser).count() - own >= ATTEMPTS
    allowed = ATTEMPTS if everywhere.exclude(place__startswith="browser ").count() - own < GUESSED_AT else FEW
    return (
        everywhere.filter(place=address).count() - own >= allowed
        or LoginAttempt.objects.filter(place=address).count() - own >= SPRAYED
    )


def remember(request: HttpRequest, response: HttpResponseBase, username: str) -> None:
    """Let this browser, in which the user has just signed in, be known again."""
    response.set_signed_cookie(
        COOKIE,
        _browser(request, username).removeprefix("browser ") or secrets.token_hex(16),
        salt=_salt(username),
        max_age=COOKIE_AGE,
        httponly=True,
        samesite="Lax",
        secure=settings.SESSION_COOKIE_SECURE,
    )


def _browser(request: HttpRequest | None, username: str) -> str:
    """Which browser of this user it is, by the cookie that it was given; empty: an unknown one."""
    known = request.get_signed_cookie(COOKIE, default="", salt=_salt(username), max_age=COOKIE_AGE) if request else ""
    return f"browser {known}" if known else ""


def _salt(username: str) -> str:
    return f"controlplane.access.login {username}"


def _address(request: HttpRequest | None) -> str:
    """Where it comes from; of IPv6 the network, as one machine has all of its addresses."""
    text = str(request.META.get("REMOTE_ADDR", "")) if request else ""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text[:64]
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))
    return text
