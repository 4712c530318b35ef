"""Sign in and out. The answer to a wrong name and to a wrong password is one and the same."""

from __future__ import annotations

from typing import Any

from django.contrib.auth import views as auth
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase

from controlplane.access.login import remember
from controlplane.dashboards import kept
from controlplane.dashboards.page import first_start, is_htmx, page


class Login(auth.LoginView):
    """The only page that needs no login, and the same over a page whose session has ended. A wrong password answers 400."""

    redirect_authenticated_user = True
    extra_context = {"title": "Sign in"}  # noqa: RUF012  (Django's own shape)

    def get_template_names(self) -> list[str]:
        return ["parts/sign_in.html" if is_htmx(self.request) else "login.html"]

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        """Over a page, whoever has signed in meanwhile (in another tab) needs no form."""
        if is_htmx(request) and request.user.is_authenticated:
            return HttpResponse(status=204)
        return super().dispatch(request, *args, **kwargs)

    def form_valid(self, form: Any) -> HttpResponse:
        """Onwards; over a page 204; with a form that was sent too late, the offer to send it again."""
        response: HttpResponse = super().form_valid(form)
        if is_htmx(self.request):
            response = HttpResponse(status=204)
        elif found := kept.read(self.request.POST.get("kept", "")):
            context = {
                "title": "Send it again?",
                "kept": found,
                "said": "Your session had ended; you are signed in again.",
            }
            response = page(self.request, "again.html", context)
        remember(self.request, response, form.get_user().get_username())
        return response

    def form_invalid(self, form: Any) -> HttpResponse:
        response = super().form_invalid(form)
        response.status_code = 400
        return response

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        return super().get_context_data(nobody=first_start(), kept=self.request.POST.get("kept", ""), **kwargs)
