"""The Users page, for admins, and each user's own password. A password that was made is shown once, in the answer that made it."""

from __future__ import annotations

from typing import cast

from django.contrib import messages
from django.contrib.auth import update_session_auth_hash
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_GET, require_http_methods

from controlplane.access import users as services
from controlplane.access.actors import MUST_CHOOSE, actor_of
from controlplane.access.roles import Role
from controlplane.dashboards.asking import ask
from controlplane.dashboards.page import page, posted, signed_in
from controlplane.fleet.errors import Conflict, InvalidInput


def _role(text: str) -> Role:
    try:
        return Role[text.upper()]
    except KeyError:
        raise InvalidInput("role: choose viewer, operator or admin", field="role") from None


@signed_in
@require_GET
def users(request: HttpRequest) -> HttpResponse:
    """Everybody who may sign in, and those who may no more."""
    return _list(request)


def _list(request: HttpRequest, refused: InvalidInput | Conflict | None = None) -> HttpResponse:
    context = {
        "title": "Users",
        "rows": services.list_users(),
        "roles": list(Role),
        "values": request.POST,
        "error": refused.message.partition(": ")[2] if refused else "",
    }
    return page(request, "users/list.html", context, status=refused.status if refused else 200)


@signed_in
@posted
def create(request: HttpRequest) -> HttpResponse:
    """A new user with a one-time password, which stands in this answer and nowhere else."""
    form = request.POST
    try:
        user, text = services.create_user(
            actor=actor_of(request),
            name=form.get("name", ""),
            role=_role(form.get("role", "")),
            token=form.get("once", ""),
        )
    except (InvalidInput, Conflict) as error:
        if error.field != "name":
            raise
        return _list(request, error)
    return _shown(request, f"{user.get_username()} is added.", user.get_username(), text)


@signed_in
@posted
def change(request: HttpRequest, user: str) -> HttpResponse:
    """Another role, or no more sign-in (`active` 0), or again (1)."""
    role, active, seen = (request.POST.get(field) for field in ("role", "active", "seen"))
    now = next((row.role.label for row in services.list_users() if row.user.get_username() == user), None)
    if role and seen and now not in (None, seen, role) and "confirmed" not in request.POST:
        said = f"Somebody changed the role of {user} meanwhile. Theirs, in use now: {now}. Yours: {role}."
        return ask(request, title="Which role?", sentence=said, button="Keep mine", cancel="Take theirs")
    services.change_user(
        actor=actor_of(request),
        name=user,
        role=_role(role) if role else None,
        active=None if active is None else active == "1",
    )
    said = (
        f"{user} is {role} now."
        if role
        else f"{user} {'can sign in again' if active == '1' else 'can no longer sign in'}."
    )
    messages.success(request, said, extra_tags="link")
    return redirect("users")


@signed_in
@posted
def reset(request: HttpRequest, user: str) -> HttpResponse:
    """A new one-time password, after a question."""
    actor_of(request).require(Role.ADMIN)
    if "confirmed" not in request.POST:
        said = f"The password of {user} stops working, and {user} is signed out everywhere. You get a one-time password for {user}."
        return ask(request, title=f"Give {user} a new password?", sentence=said, button="Make a one-time password")
    text = services.reset_password(actor=actor_of(request), name=user, token=request.POST.get("once", ""))
    return _shown(request, f"{user} has a new password.", user, text)


def _shown(request: HttpRequest, said: str, name: str, text: str) -> HttpResponse:
    answer = page(
        request, "users/password_shown.html", {"title": "One-time password", "said": said, "name": name, "text": text}
    )
    answer.headers["Cache-Control"] = "no-store"
    return answer


@signed_in
@require_http_methods(["GET", "POST"])
def password(request: HttpRequest) -> HttpResponse:
    """Choose a password of one's own: whenever one likes, and first of all after a one-time password."""
    user = cast(User, request.user)
    errors: dict[str, str] = {}
    if request.method == "POST":
        old, new, again = (request.POST.get(field, "") for field in ("old", "new", "again"))
        try:
            if new != again:
                raise InvalidInput("again: this is not the same as the new password", field="again")
            address = str(request.META.get("REMOTE_ADDR", ""))[:64]
            services.choose_password(user=user, old=old, new=new, address=address)
        except InvalidInput as error:
            errors = {str(error.field): error.message.partition(": ")[2].capitalize()}
        else:
            update_session_auth_hash(request, user)  # this session goes on, all others end
            request.session.pop(MUST_CHOOSE, None)
            messages.success(request, "Your password is changed. Your other sessions have ended.", extra_tags="link")
            return redirect("fleet")
    must = MUST_CHOOSE in request.session
    context = {"title": "Choose a password", "must": must, "errors": errors}
    return render(request, "users/choose.html", context, status=400 if errors else 200)
