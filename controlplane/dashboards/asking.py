"""Asking before something stops: the change that was sent comes back as a question, and is made when it is sent again."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse

from controlplane.dashboards import kept
from controlplane.dashboards.page import is_htmx, page

_ONCE = ("csrfmiddlewaretoken", "confirmed")


def sent_again(request: HttpRequest) -> list[tuple[str, str]]:
    """The fields of a form as they were sent, for a form that sends them once more."""
    return [(name, str(value)) for name in request.POST if name not in _ONCE for value in request.POST.getlist(name)]


def ask(
    request: HttpRequest,
    *,
    title: str,
    sentence: str,
    button: str,
    cancel: str = "Cancel",
    target: str = "",
    swap: str = "innerHTML",
) -> HttpResponse:
    """A question before the change in this request: a dialog over the page, or without scripts a page of its own.

    A yes sends the same fields and `confirmed`. `target` and `swap`: where the answer to that goes on the page.
    """
    context = {
        "title": title, "sentence": sentence, "button": button, "cancel": cancel, "target": target, "swap": swap,
        "back": kept.page_of(request), "fields": [*sent_again(request), ("confirmed", "1")],
    }  # fmt: skip
    if not is_htmx(request):
        return page(request, "ask.html", context)
    answer = page(request, "parts/ask.html", context)
    answer.headers["HX-Retarget"], answer.headers["HX-Reswap"] = "#dialog", "innerHTML"
    return answer


def mistyped(name: str, verb: str) -> str:
    """What stands at the field of a name that confirms, when another one was typed."""
    return f"This is not the name. Type {name} to {verb} it."
