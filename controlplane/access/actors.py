"""Who stands behind a request: a signed-in user or a manage key, as the `Actor` that services ask about.

Reads users' groups; never decides whether a credential is valid (that is `services.authenticate_key` and Django's login).
"""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import User
from django.http import HttpRequest

from controlplane.access.models import ApiKey
from controlplane.access.roles import Actor, Role
from controlplane.access.services import MANAGE
from controlplane.fleet.errors import Forbidden

MUST_CHOOSE = "must_choose_password"
"""Set in a session that began with a one-time password: it may do nothing but choose another."""
_BY_NAME = {role.label: role for role in Role}


def role_of(user: User) -> Role:
    """A user's role: superusers are admins, a group named after a role grants it, nobody is less than a viewer."""
    if user.is_superuser:
        return Role.ADMIN
    return max((_BY_NAME[group.name] for group in user.groups.all() if group.name in _BY_NAME), default=Role.VIEWER)


def actor_of(request: HttpRequest | Any) -> Actor:
    """The actor of an authenticated request, Django's or DRF's.

    Raises `Forbidden` for an anonymous request and for a key that is not a manage key: a view that forgot to ask for a
    login still changes nothing.
    """
    address = str(request.META.get("REMOTE_ADDR", ""))[:64]
    key = getattr(request, "auth", None)
    if isinstance(key, ApiKey):
        if key.scope != MANAGE:
            raise Forbidden("this key's scope is inference; REST and CLI need one with the scope manage")
        return Actor(f"{key.name} ({key.id})", Role(key.role), "key", address)
    user = request.user
    if not isinstance(user, User) or not user.is_authenticated:
        raise Forbidden("sign in first")
    if MUST_CHOOSE in getattr(request, "session", ()):
        raise Forbidden("choose a password of your own first: sign in to the dashboard")
    return Actor(user.get_username(), role_of(user), "user", address)
