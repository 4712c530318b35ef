"""Sign in and out. The answer to a wrong name and to a wrong password is one and the same."""

from __future__ import annotations

from typing import Any

from django.contrib.auth import views as auth
from django.http import HttpResponse

from controlplane.access.login import remember
from controlplane.dashboards.page import first_start


class Login(auth.LoginView):
    """The only page that needs no login. A wrong password answers 400."""

    template_name = "login.html"
    redirect_authenticated_user = True
    extra_context = {"title": "Sign in"}  # noqa: RUF012  (Django's own shape)

    def form_valid(self, form: Any) -> HttpResponse:
        response = super().form_valid(form)
        remember(self.request, response, form.get_user().get_username())
        return response

    def form_invalid(self, form: Any) -> HttpResponse:
        response = super().form_invalid(form)
        response.status_code = 400
        return response

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        return super().get_context_data(nobody=first_start(), **kwargs)
