"""Answers for what no view expected: unknown paths, stale forms. A crash has `templates/500.html` and touches nothing."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from controlplane.dashboards.page import failure
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
    if request.user.is_authenticated:
        return failure(request, Forbidden(said))
    return render(request, "bare.html", {"title": "Reload and try again", "message": said}, status=403)
