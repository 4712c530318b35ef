"""The first administrator. Called from a shell on the machine itself, never over the network: whoever can run it owns
the state folder anyway, so no web page ever makes an admin out of its first visitor."""

from __future__ import annotations

import secrets

from django.contrib.auth.models import User
from django.db import transaction

from controlplane.access import audit
from controlplane.access.models import LoginAttempt
from controlplane.access.roles import SYSTEM

ADMIN = "admin"


@transaction.atomic
def create_admin(*, reset: bool = False) -> str | None:
    """The generated password of the user `admin`, made now; None when that user exists and `reset` is not asked for.

    A reset also ends the sessions of that user, and makes it an active superuser again.
    """
    user = User.objects.select_for_update().filter(username=ADMIN).first()
    if user is not None and not reset:
        return None
    password = secrets.token_urlsafe(18)
    if user is None:
        user = User(username=ADMIN)
    user.is_superuser = user.is_staff = user.is_active = True
    user.set_password(password)
    user.save()
    LoginAttempt.objects.filter(username=ADMIN).delete()  # whoever lost the password has tried it often
    audit.record(actor=SYSTEM, action="user.reset" if reset else "user.create", target=ADMIN)
    return password
