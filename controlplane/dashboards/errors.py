"""Answers for what no view expected: unknown paths, stale forms. A crash has `templates/500.html` and touches nothing."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from controlplane.dashboards import kept
from controlplane.dashboards.page import failure, is_htmx, page, signed_out
from controlplane.fleet.errors import Forbidden, NotFound


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Django's `handler404`. Those who are not signed in learn nothing of what exists."""
    if request.user.is_authenticated:
        return failure(request, NotFound("There is no page at this address."))
    return render(
        request, "bare.html", {"title": "Not found", "message": "There is no page at this address."}, status=404
    )


def stale_form(request: HttpRequest, reason: str = "") -> HttpResponse:
    """Django's `CSRF_FAILURE_VIEW`: the form's token is not this browser's, mostly after a long sleep or a new login."""
    said = "This page is older than your session, so nothing was changed. Reload it and try again."
    if not is_htmx(request) and kept.came_from_here(request):
        if not request.user.is_authenticated:
            if (login := kept.ask_to_sign_in(request)) is not None:
                return login
        elif (found := kept.of_request(request)) is not None:
            context = {"title": "Send it again?", "kept": found, "said": "This page was older than your session."}
            return page(request, "again.html", context, status=403)
    if request.user.is_authenticated:
        return failure(request, Forbidden(said))
    if is_htmx(request):  # cookies were cleared
        return signed_out()
    return render(request, "bare.html", {"title": "Reload and try again", "message": said}, status=403)
