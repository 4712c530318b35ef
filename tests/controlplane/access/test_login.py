"""Users: their role, the first administrator, and passwords that are guessed too often."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.contrib.auth import authenticate
from django.contrib.auth.models import AnonymousUser, Group, User
from django.core.management import CommandError, call_command
from django.db import connection
from django.test import Client, RequestFactory
from django.utils import timezone

from controlplane.access import login, services
from controlplane.access.actors import actor_of, role_of
from controlplane.access.login import ATTEMPTS, COOKIE, FEW, PAUSE
from controlplane.access.models import ApiKey, AuditEntry, LoginAttempt
from controlplane.access.roles import SYSTEM, Actor, Role
from controlplane.fleet.errors import Forbidden

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def quick_hash(settings: Any) -> None:
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]


@pytest.mark.parametrize(
    ("groups", "superuser", "role"),
    [
        ((), False, Role.VIEWER),
        (("operator",), False, Role.OPERATOR),
        (("viewer", "admin"), False, Role.ADMIN),
        (("staff-of-floor-3",), False, Role.VIEWER),
        ((), True, Role.ADMIN),
    ],
)
def test_groups_named_after_a_role_grant_it(groups: tuple[str, ...], superuser: bool, role: Role) -> None:
    user = User.objects.create(username="u", is_superuser=superuser)
    user.groups.set([Group.objects.create(name=name) for name in groups])
    assert role_of(user) is role


def test_an_actor_is_a_user_or_a_manage_key_and_never_anonymous() -> None:
    request = RequestFactory().get("/", REMOTE_ADDR="10.1.2.3")
    request.user = User.objects.create(username="ada", is_superuser=True)
    assert actor_of(request) == Actor("ada", Role.ADMIN, "user", "10.1.2.3")
    manage, _ = services.create_key(actor=SYSTEM, name="ci", scope="manage", role=Role.OPERATOR)
    request.auth = manage  # type: ignore[attr-defined]
    assert actor_of(request) == Actor(f"ci ({manage.id})", Role.OPERATOR, "key", "10.1.2.3")
    request.auth, _ = services.create_key(actor=SYSTEM, name="app", scope="inference")  # type: ignore[attr-defined]
    with pytest.raises(Forbidden):
        actor_of(request)
    del request.auth  # type: ignore[attr-defined]
    request.user = AnonymousUser()
    with pytest.raises(Forbidden):
        actor_of(request)


def test_the_first_admin_is_made_once_and_reset_on_demand() -> None:
    out, err = StringIO(), StringIO()
    call_command("createadmin", stdout=out, stderr=err)
    password = out.getvalue().strip()
    assert len(password) == 24
    assert password not in err.getvalue()
    admin = User.objects.get(username="admin")
    assert admin.is_superuser
    assert admin.check_password(password)
    with pytest.raises(CommandError, match="--reset"):
        call_command("createadmin", stdout=StringIO(), stderr=StringIO())
    admin.refresh_from_db()
    assert admin.check_password(password)
    renewed = StringIO()
    call_command("createadmin", "--reset", stdout=renewed, stderr=StringIO())
    admin.refresh_from_db()
    assert not admin.check_password(password)
    assert admin.check_password(renewed.getvalue().strip())
    assert [entry.action for entry in AuditEntry.objects.all()] == ["user.reset", "user.create"]
    assert password not in repr(list(AuditEntry.objects.values()))


def test_the_sign_in_page_tells_a_command_that_works(client: Client) -> None:
    for _ in ("nobody can sign in yet", "the password is lost"):
        told = re.search(r"manage\.py ([^<]+)", client.get("/login/").content.decode())
        assert told
        call_command(*told[1].split(), stdout=StringIO(), stderr=StringIO())


def test_createkey_prints_the_key_alone() -> None:
    out = StringIO()
    call_command(
        "createkey", "--scope", "inference", "--name", "app", "--model", "a/b", "--expires", "1d", stdout=out,
        stderr=StringIO(),
    )  # fmt: skip
    key = services.authenticate_key(out.getvalue().strip())
    assert key is not None
    assert key.models_allowed == ["a/b"]
    assert key.expires_at is not None
    with pytest.raises(CommandError, match="only manage keys"):
        call_command("createkey", "--scope", "inference", "--name", "app", "--role", "admin", stdout=StringIO())


def sign_in(password: str, address: str = "10.0.0.1", user: str = "ada", cookie: str = "") -> Any:
    request = RequestFactory().post("/login/", REMOTE_ADDR=address)
    request.COOKIES = {COOKIE: cookie} if cookie else {}
    return authenticate(request, username=user, password=password)


def later() -> None:
    LoginAttempt.objects.update(at=timezone.now() - PAUSE - timedelta(seconds=1))


def test_guessing_a_password_pauses_that_user_at_that_address() -> None:
    User.objects.create_user("ada", password="right")
    for _ in range(ATTEMPTS):
        assert sign_in("wrong") is None
    assert sign_in("right") is None
    assert sign_in("right", address="10.0.0.2") is not None
    later()
    assert sign_in("right") is not None
    assert not LoginAttempt.objects.exists()


def test_a_right_password_forgets_the_wrong_ones() -> None:
    User.objects.create_user("ada", password="right")
    for _ in range(ATTEMPTS - 1):
        sign_in("wrong")
    assert sign_in("right") is not None
    assert not LoginAttempt.objects.exists()


@pytest.mark.parametrize("of", ["one address for all users", "many addresses for one user", "one network of IPv6"])
def test_guesses_are_bounded_and_lock_nobody_out(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    User.objects.create_user("ada", password="right")
    monkeypatch.setattr(login, "GUESSED_AT", 20)
    monkeypatch.setattr(login, "SPRAYED", 15)
    looked: list[object] = []
    monkeypatch.setattr(login.ModelBackend, "authenticate", lambda *_, **__: looked.append(1))
    for number in range(60):
        address = {
            "one address for all users": "10.0.0.1",
            "many addresses for one user": f"10.0.1.{number // 10}",
        }.get(of, f"fd00:0:0:1::{number:x}")
        assert sign_in("wrong", address, user=f"user{number}" if "all users" in of else "ada") is None
    monkeypatch.undo()
    wanted = {
        "one address for all users": 15,
        "many addresses for one user": 20 + 4 * FEW,
        "one network of IPv6": ATTEMPTS,
    }
    assert len(looked) == wanted[of]
    assert sign_in("right", "10.0.9.9") is not None, "an address that nobody has guessed from"


def test_a_browser_that_signed_in_before_is_let_in_whoever_guesses(client: Client) -> None:
    User.objects.create_user("ada", password="right")
    assert client.post("/login/", {"username": "ada", "password": "right"}, REMOTE_ADDR="10.0.0.1").status_code == 302
    cookie = client.cookies[COOKIE]
    assert (cookie["httponly"], cookie["samesite"], bool(cookie["secure"])) == (True, "Lax", False)
    for _ in range(3 * ATTEMPTS):
        sign_in("wrong")
        sign_in("wrong", cookie="forged:1tabc:signature")
        sign_in("wrong", user="eve", cookie=cookie.value)
    assert sign_in("right") is None
    assert sign_in("right", cookie=cookie.value) is not None
    for _ in range(ATTEMPTS):
        assert sign_in("wrong", cookie=cookie.value) is None
    assert sign_in("right", cookie=cookie.value) is None, "nor is it a way to guess"


@pytest.mark.django_db(transaction=True)
def test_attempts_at_once_count_like_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    User.objects.create_user("ada", password="right")
    looked: list[int] = []
    ready = threading.Barrier(16)
    real = login.ModelBackend.authenticate

    def slow(*args: Any, **kwargs: Any) -> Any:
        looked.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(login.ModelBackend, "authenticate", slow)

    def guess(_: int) -> None:
        ready.wait()
        try:
            for _ in range(3):
                assert sign_in("wrong") is None
        finally:
            connection.close()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(guess, range(16)))
    sign_in("wrong")
    assert 0 < len(looked) <= ATTEMPTS


def test_a_new_password_from_the_shell_forgets_the_attempts() -> None:
    call_command("createadmin", stdout=StringIO(), stderr=StringIO())
    for _ in range(ATTEMPTS):
        sign_in("wrong", user="admin")
    renewed = StringIO()
    call_command("createadmin", "--reset", stdout=renewed, stderr=StringIO())
    assert sign_in(renewed.getvalue().strip(), user="admin") is not None


def test_createkey_names_the_scopes_as_they_are_written() -> None:
    with pytest.raises(CommandError, match=r"choose from '?inference'?, '?manage'?\)"):
        call_command("createkey", "--name", "k", "--scope", "all")


def test_createkey_takes_limits() -> None:
    quiet = {"stdout": StringIO(), "stderr": StringIO()}
    base = ("createkey", "--name", "k", "--scope", "inference")
    call_command(*base, "--tokens-per-minute", "5000", "--priority", "-1", **quiet)
    key = ApiKey.objects.get()
    assert (key.tokens_per_minute, key.concurrency, key.priority) == (5000, None, -1)
    with pytest.raises(CommandError, match="concurrency"):
        call_command(*base, "--concurrency", "0", **quiet)
