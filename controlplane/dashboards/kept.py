"""A form that was sent when the session had ended, or with the token of an older one: what was typed goes through the login
and is offered to be sent once more. Nothing is sent by itself: whoever made the form, somebody must press the button."""

from __future__ import annotations

import json
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import Resolver404, resolve

_SILENT = ("csrfmiddlewaretoken", "kept")
_FOR_MACHINES = ("once", "seen", "generation", "confirmed", "writing", "step")
"""Sent along, but nothing that somebody typed."""


class Kept(NamedTuple):
    path: str
    """Where the form goes."""
    back: str
    """The page it stood on."""
    fields: list[tuple[str, str]]

    @property
    def typed(self) -> list[tuple[str, str]]:
        return [(name, value) for name, value in self.fields if name not in _FOR_MACHINES and value]


def page_of(request: HttpRequest) -> str:
    """The path of the page that somebody looks at: of a form, the one it stood on."""
    if request.method == "GET":
        return request.get_full_path()
    came = urlsplit(request.headers.get("Referer", ""))
    return came.path or "/" if came.netloc == request.get_host() else "/"


def of_request(request: HttpRequest) -> Kept | None:
    """What a form sent; None: nothing, or a password, which is never kept."""
    fields = [(n, str(value)) for n in request.POST if n not in _SILENT for value in request.POST.getlist(n)]
    route = request.resolver_match.url_name if request.resolver_match else None
    if not fields or route in ("login", "logout", "password") or any("password" in name for name, _ in fields):
        return None
    return Kept(request.path, page_of(request), fields)


def written(kept: Kept) -> str:
    return json.dumps(kept)


def read(text: str) -> Kept | None:
    """What `written` wrote, if it leads to a page of this site."""
    try:
        path, back, fields = json.loads(text)
        kept = Kept(str(path), str(back), [(str(name), str(value)) for name, value in fields])
        resolve(kept.path)
    except (ValueError, TypeError, Resolver404):
        return None
    local = all(at.startswith("/") and not at.startswith(("//", "/\\")) for at in (kept.path, kept.back))
    return kept if local else None


def ask_to_sign_in(request: HttpRequest) -> HttpResponse | None:
    """The login page with what was sent; None: nothing was."""
    kept = of_request(request) if request.method == "POST" else None
    if kept is None:
        return None
    context: dict[str, Any] = {"title": "Sign in", "next": kept.back, "kept": written(kept)}
    return render(request, "login.html", context, status=401)


def came_from_here(request: HttpRequest) -> bool:
    """Whether a browser says that a page of this site sent the form."""
    return urlsplit(request.headers.get("Origin", "")).netloc == request.get_host()
