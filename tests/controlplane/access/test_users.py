"""Users: added with a one-time password, changed, locked; nobody shuts himself out, and the site never loses its last admin."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import User
from django.test import Client

from controlplane.access import users
from controlplane.access.actors import role_of
from controlplane.access.first_start import create_admin
from controlplane.access.models import AuditEntry
from controlplane.access.roles import Actor, Role
from controlplane.fleet.errors import Conflict, Forbidden, InvalidInput, NotFound

pytestmark = pytest.mark.django_db
KEY = Actor("ci (1234)", Role.ADMIN, "key")
ADMIN = Actor("admin", Role.ADMIN)
OWN = "a long password of mine"


@pytest.fixture(autouse=True)
def admin() -> User:
    """As `make up` leaves a site: one superuser."""
    create_admin()
    AuditEntry.objects.all().delete()
    return User.objects.get()


def add(name: str = "vera", role: Role = Role.VIEWER) -> str:
    return users.create_user(actor=ADMIN, name=name, role=role)[1]


def sign_in(name: str, password: str) -> Client:
    client = Client()
    answer = client.post("/login/", {"username": name, "password": password})
    assert answer.status_code == 302, "the password is not taken"
    return client


def choose(client: Client, old: str, new: str = OWN, again: str = "") -> int:
    return client.post("/password/", {"old": old, "new": new, "again": again or new}).status_code


def test_a_new_user_must_choose_a_password_before_anything_else() -> None:
    password = add(role=Role.OPERATOR)
    client = sign_in("vera", password)
    for path in ("/", "/users/", "/deployments/none/"):
        assert client.get(path).headers["Location"] == "/password/"
    part = client.get("/foot/", headers={"HX-Request": "true"})
    assert (part.status_code, part.headers["HX-Redirect"]) == (204, "/password/")
    assert client.get("/api/v1/me").status_code == 403
    assert sign_in("vera", password).get("/").headers["Location"] == "/password/", "also at the second sign-in"
    assert choose(client, password) == 302
    assert client.get("/").status_code == 200
    assert client.get("/api/v1/me").json()["role"] == "operator"
    assert sign_in("vera", OWN).get("/").status_code == 200
    assert [row.must_choose for row in users.list_users()] == [False, False]


@pytest.mark.parametrize(
    ("old", "new", "again", "says"),
    [
        ("wrong", OWN, OWN, "This is not your password now"),
        ("", "short", "short", "too short"),
        ("", "password1234", "password1234", "too common"),
        ("", OWN, OWN + "x", "This is not the same as the new password"),
    ],
)
def test_a_password_that_is_not_taken_says_why_at_its_field(old: str, new: str, again: str, says: str) -> None:
    password = add()
    client = sign_in("vera", password)
    answer = client.post("/password/", {"old": old or password, "new": new, "again": again})
    assert answer.status_code == 400
    assert says in answer.text
    assert password not in answer.text
    assert client.get("/").status_code == 302


def test_a_new_password_ends_all_sessions_and_the_old_password() -> None:
    first = add()
    client = sign_in("vera", first)
    assert choose(client, first) == 302
    second = users.reset_password(actor=ADMIN, name="vera")
    assert client.get("/").headers["Location"].startswith("/login/")
    assert Client().post("/login/", {"username": "vera", "password": OWN}).status_code == 400
    assert sign_in("vera", second).get("/").headers["Location"] == "/password/"


def test_a_locked_user_is_out_at_once_and_may_come_back() -> None:
    password = add()
    client = sign_in("vera", password)
    choose(client, password)
    users.change_user(actor=ADMIN, name="vera", active=False)
    assert client.get("/").headers["Location"].startswith("/login/")
    assert Client().post("/login/", {"username": "vera", "password": OWN}).status_code == 400
    users.change_user(actor=ADMIN, name="vera", active=True)
    assert sign_in("vera", OWN).get("/").status_code == 200


def test_nobody_changes_his_own_role_or_locks_himself() -> None:
    add("second", Role.ADMIN)
    for change in ({"role": Role.VIEWER}, {"active": False}):
        with pytest.raises(Conflict, match="your own"):
            users.change_user(actor=ADMIN, name="admin", **change)  # type: ignore[arg-type]
    users.change_user(actor=ADMIN, name="admin", role=Role.ADMIN, active=True)  # as it is: no change


def test_the_last_admin_stays_whoever_asks() -> None:
    add("op", Role.OPERATOR)
    locked = add("locked", Role.ADMIN)
    assert locked
    users.change_user(actor=ADMIN, name="locked", active=False)
    for change in ({"role": Role.OPERATOR}, {"active": False}):
        with pytest.raises(Conflict, match="admin is the last admin"):
            users.change_user(actor=KEY, name="admin", **change)  # type: ignore[arg-type]
    users.change_user(actor=KEY, name="op", role=Role.ADMIN)
    users.change_user(actor=KEY, name="admin", role=Role.VIEWER)
    assert role_of(User.objects.get(username="admin")) is Role.VIEWER
    assert not User.objects.get(username="admin").is_superuser


def test_roles_replace_each_other_and_every_change_is_audited() -> None:
    add()
    for role in (Role.ADMIN, Role.OPERATOR, Role.OPERATOR, Role.VIEWER):
        assert role_of(users.change_user(actor=ADMIN, name="vera", role=role)) is role
    users.reset_password(actor=ADMIN, name="vera")
    entries = list(AuditEntry.objects.order_by("pk").values_list("action", "target", "detail"))
    assert entries == [
        ("user.create", "vera", {"role": "viewer"}),
        ("user.change", "vera", {"role": ["viewer", "admin"]}),
        ("user.change", "vera", {"role": ["admin", "operator"]}),
        ("user.change", "vera", {"role": ["operator", "viewer"]}),
        ("user.password", "vera", {}),
    ]


@pytest.mark.parametrize("name", ["", " ", "a b", "-x", "ä", "a" * 101, "a/b", "<b>"])
def test_a_bad_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        add(name)
    assert refused.value.field == "name"


def test_a_name_is_taken_once_whatever_its_case_and_sending_twice_adds_one() -> None:
    sent = [users.create_user(actor=ADMIN, name="vera", role=Role.VIEWER, token="form-1") for _ in range(2)]
    assert sent[0] == sent[1]
    for name in ("vera", "VERA", "Admin"):
        with pytest.raises(Conflict, match="there is a user"):
            add(name)
    assert User.objects.count() == 2


def test_only_admins_and_only_of_users_that_exist() -> None:
    add()
    operator = Actor("olga", Role.OPERATOR)
    for call in (
        lambda: users.create_user(actor=operator, name="x", role=Role.VIEWER),
        lambda: users.change_user(actor=operator, name="vera", role=Role.ADMIN),
        lambda: users.reset_password(actor=operator, name="admin"),
    ):
        with pytest.raises(Forbidden):
            call()
    with pytest.raises(NotFound):
        users.change_user(actor=ADMIN, name="nobody", active=False)


def test_the_page_shows_a_password_once_and_says_what_was_refused() -> None:
    client = Client()
    client.force_login(User.objects.get(username="admin"))
    made = client.post("/users/create/", {"name": "vera", "role": "operator", "once": "t1"})
    assert made.headers["Cache-Control"] == "no-store"
    password = made.text.partition('id="password-text">')[2].partition("<")[0]
    assert sign_in("vera", password).get("/").status_code == 302
    assert password not in client.get("/users/").text
    again = client.post("/users/create/", {"name": "Vera", "role": "viewer", "once": "t2"})
    assert again.status_code == 409
    assert "There is a user Vera already" in again.text
    asked = client.post("/users/vera/password/", {})
    assert "signed out everywhere" in asked.text
    assert User.objects.get(username="vera").check_password(password), "a question changes nothing"
