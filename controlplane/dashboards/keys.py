"""The Keys page: who may use the endpoint and REST. A key's text is shown once, in the answer that made it."""

from __future__ import annotations

from datetime import UTC, datetime, time
from typing import NamedTuple

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils import timezone
from django.views.decorators.http import require_GET, require_POST

from controlplane.access import services
from controlplane.access.actors import actor_of
from controlplane.access.models import ApiKey
from controlplane.access.roles import Role
from controlplane.dashboards.looks import Look
from controlplane.dashboards.page import is_htmx, page, signed_in
from controlplane.fleet.errors import InvalidInput
from controlplane.fleet.wire import Scope


class Line(NamedTuple):
    key: ApiKey
    look: Look
    role: str


def _lines() -> list[Line]:
    now = timezone.now()
    return [_line(key, now) for key in services.list_keys()]


def _line(key: ApiKey, now: datetime) -> Line:
    if key.revoked_at:
        look = Look("Revoked", "square", "off")
    elif key.expires_at and key.expires_at <= now:
        look = Look("Expired", "slashed", "off")
    else:
        look = Look("Valid", "disc", "ok")
    return Line(key, look, Role(key.role).label)


@signed_in
@require_GET
def keys(request: HttpRequest) -> HttpResponse:
    """All keys, revoked and expired ones too."""
    now = timezone.now()
    lines = [_line(key, now) for key in services.list_keys()]
    return page(
        request, "keys/list.html", {"title": "Keys", "lines": lines, "roles": list(Role), "scopes": list(Scope)}
    )


@signed_in
@require_POST
def create(request: HttpRequest) -> HttpResponse:
    """A new key; its text stands in this answer and nowhere else."""
    scope = request.POST.get("scope", "")
    expires = request.POST.get("expires", "")
    try:
        day = datetime.strptime(expires, "%Y-%m-%d").date() if expires else None
        role = Role[request.POST.get("role", "viewer").upper()] if scope == Scope.MANAGE else None
    except ValueError:
        raise InvalidInput("expires: write a day as YYYY-MM-DD", field="expires") from None
    except KeyError:
        raise InvalidInput("role: choose viewer, operator or admin", field="role") from None
    models = request.POST.get("models", "").replace(",", " ").split() if scope == Scope.INFERENCE else []
    key, text = services.create_key(
        actor=actor_of(request),
        name=request.POST.get("name", ""),
        scope=scope,
        role=role,
        models=models,
        expires_at=datetime.combine(day, time.max, UTC) if day else None,
    )
    template = "keys/created.html" if is_htmx(request) else "keys/created_page.html"
    lines = _lines() if is_htmx(request) else []
    answer = page(request, template, {"title": "New key", "key": key, "text": text, "lines": lines})
    answer.headers["Cache-Control"] = "no-store"
    return answer


@signed_in
@require_POST
def revoke(request: HttpRequest, key: str) -> HttpResponse:
    """End a key for ever."""
    revoked = services.revoke_key(actor=actor_of(request), key_id=key)
    messages.success(
        request, f"The key {revoked.name} is revoked; routers refuse it within seconds.", extra_tags="link"
    )
    return redirect("keys")
