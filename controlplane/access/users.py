"""Users: add, change, and choose passwords. Nobody can leave the site without an admin, or shut himself out.

A password that an admin was shown is for one use: whoever signs in with it must choose another before anything else.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from django.contrib.auth.models import Group, User
from django.contrib.auth.password_validation import validate_password
from django.contrib.auth.signals import user_logged_in
from django.core.exceptions import ValidationError
from django.db import transaction
from django.dispatch import receiver

from controlplane.access import audit
from controlplane.access.actors import MUST_CHOOSE, role_of
from controlplane.access.models import OneTimePassword
from controlplane.access.once import Once
from controlplane.access.roles import Actor, Role
from controlplane.fleet.errors import Conflict, InvalidInput, NotFound

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,99}")
PASSWORD_LENGTH = 24
"""Of one-time passwords: 144 bits."""


class UserRow(NamedTuple):
    user: User
    role: Role
    must_choose: bool
    """The password that an admin was shown has not been replaced yet."""


def list_users() -> list[UserRow]:
    """All users, by name; those who may not sign in too."""
    shown = set(OneTimePassword.objects.values_list("user_id", flat=True))
    users = User.objects.prefetch_related("groups").order_by("username")
    return [UserRow(user, role_of(user), user.pk in shown) for user in users]


@transaction.atomic
def create_user(*, actor: Actor, name: str, role: Role, token: str = "") -> tuple[User, str]:
    """A new user and the one-time password. `token`: makes a second sending harmless (`once`).

    Raises `Forbidden` (needs admin), `InvalidInput` (name) or `Conflict` (the name is taken).
    """
    actor.require(Role.ADMIN)
    name = name.strip()
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            "name: write 1 to 100 letters, digits and . @ + - _, beginning with a letter or digit", field="name"
        )
    sent = Once(actor, "user.create", token, [name, role])
    if sent.target:
        return _existing(sent.target), sent.secret()[:PASSWORD_LENGTH]
    if User.objects.filter(username__iexact=name).exists():
        raise Conflict(f"name: there is a user {name} already", field="name")
    user = User.objects.create_user(name)
    _give(user, role)
    password = _show(user, sent)
    audit.record(actor=actor, action="user.create", target=name, role=role.label)
    sent.made(name)
    return user, password


@transaction.atomic
def change_user(*, actor: Actor, name: str, role: Role | None = None, active: bool | None = None) -> User:
    """Give a user another role, or let him sign in no more (`active` false) and again. What is not named stays.

    Raises `Forbidden` (needs admin), `NotFound`, or `Conflict` for the actor's own account and for the last admin.
    """
    actor.require(Role.ADMIN)
    user = _existing(name)
    told: dict[str, Any] = {}
    if role is not None and role != role_of(user):
        told["role"] = [role_of(user).label, role.label]
    if active is not None and active != user.is_active:
        told["active"] = active
    if not told:
        return user
    if actor.kind == "user" and actor.name == name:
        raise Conflict("you cannot change your own role or lock your own account: ask another admin")
    loses = active is False or (role is not None and role < Role.ADMIN)
    if loses and user.is_active and role_of(user) is Role.ADMIN and not _other_admin(user):
        raise Conflict(f"{name} is the last admin: make somebody else an admin first")
    if role is not None and "role" in told:
        _give(user, role)
    if active is not None:
        user.is_active = active
        user.save(update_fields=["is_active"])
    audit.record(actor=actor, action="user.change", target=name, **told)
    return user


@transaction.atomic
def reset_password(*, actor: Actor, name: str, token: str = "") -> str:
    """A new one-time password; the user's sessions end. Raises `Forbidden` (needs admin) or `NotFound`."""
    actor.require(Role.ADMIN)
    user = _existing(name)
    sent = Once(actor, "user.password", token, [name])
    if sent.target:
        return sent.secret()[:PASSWORD_LENGTH]
    password = _show(user, sent)
    audit.record(actor=actor, action="user.password", target=name)
    sent.made(name)
    return password


@transaction.atomic
def choose_password(*, user: User, old: str, new: str, address: str = "") -> None:
    """Raises `InvalidInput` (field `old` or `new`) with what is wrong with the old or the new password."""
    if not user.check_password(old):
        raise InvalidInput("old: this is not your password now", field="old")
    if new == old:
        raise InvalidInput("new: choose another than the one you have now", field="new")
    try:
        validate_password(new, user)
    except ValidationError as error:
        raise InvalidInput(f"new: {' '.join(error.messages)}", field="new") from None
    user.set_password(new)
    user.save(update_fields=["password"])
    OneTimePassword.objects.filter(user=user).delete()
    own = Actor(user.get_username(), role_of(user), address=address)
    audit.record(actor=own, action="user.choose_password", target=user.get_username())


def _existing(name: str) -> User:
    user = User.objects.select_for_update().filter(username=name).first()
    if user is None:
        raise NotFound(f"there is no user {name}")
    return user


def _give(user: User, role: Role) -> None:
    """The role, and no other."""
    if user.is_superuser and role is not Role.ADMIN:
        user.is_superuser = user.is_staff = False
        user.save(update_fields=["is_superuser", "is_staff"])
    others = Group.objects.filter(name__in=[other.label for other in Role])
    user.groups.remove(*others)
    user.groups.add(Group.objects.get_or_create(name=role.label)[0])


def _show(user: User, sent: Once) -> str:
    password = sent.secret()[:PASSWORD_LENGTH]
    user.set_password(password)
    user.save(update_fields=["password"])
    OneTimePassword.objects.get_or_create(user=user)
    return password


def _other_admin(user: User) -> bool:
    others = User.objects.select_for_update().filter(is_active=True).exclude(pk=user.pk)
    return any(role_of(other) is Role.ADMIN for other in others)


@receiver(user_logged_in)
def _note_one_time_password(sender: Any, request: Any, user: User, **more: Any) -> None:
    if OneTimePassword.objects.filter(user=user).exists():
        request.session[MUST_CHOOSE] = True
