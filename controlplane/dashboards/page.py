"""What all pages share: signed-in only, the frame around them, the live partial of each, errors as messages.

A page lives at one URL. `?part=live` answers only its live region, which the browser fetches again when something changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import wraps
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, cast
from urllib.parse import quote

from django.contrib.auth import get_user_model
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_POST

from controlplane.access.actors import MUST_CHOOSE, actor_of
from controlplane.access.roles import Actor, Role
from controlplane.dashboards import kept
from controlplane.deployments.queries import last_step
from controlplane.fleet.errors import InvalidInput, NotFound, TandemError
from controlplane.nodes import queries as nodes
from controlplane.nodes.presence import Presence

P = ParamSpec("P")
View = Callable[Concatenate[HttpRequest, P], HttpResponse]


def whole_number(text: str, digits: int = 9) -> int | None:
    """A number from a query string; None: it is none, or has more digits than any that we gave out."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= digits else None


LOOP_STANDS_AFTER = timedelta(seconds=10)


class Item(NamedTuple):
    """One line of the side navigation."""

    route: str
    title: str
    icon: str


NAVIGATION = (
    Item("fleet", "Fleet", "fleet"),
    Item("deployments", "Deployments", "deployments"),
    Item("nodes", "Nodes", "nodes"),
    Item("keys", "Keys", "keys"),
    Item("users", "Users", "users"),
)


HELP: Final = {
    "deployments-new": ("guide", "use-it"),
    "deployment-settings": ("guide", "routing"),
    "deployment-logs": ("architecture", "engine-states"),
    "deployment-events": ("architecture", "engine-states"),
    "deployment": ("architecture", "how-a-deployment-flows-and-back"),
    "deployments": ("guide", "use-it"),
    "nodes": ("guide", "gpu-nodes"),
    "node": ("guide", "gpu-nodes"),
    "keys": ("guide", "keys"),
    "key": ("guide", "keys"),
}
"""What is read about a page: by its route, the help page and the section."""


def is_htmx(request: HttpRequest) -> bool:
    return request.headers.get("HX-Request") == "true"


def signed_in(view: View[P]) -> View[P]:
    """Lets only signed-in users through. Scripts hear 401 and let the reader sign in over the page; a form that was sent goes
    through the login with all that was typed.

    A `NotFound` of the view becomes the 404 page; any other expected error a message in the frame.
    """

    @wraps(view)
    def guarded(request: HttpRequest, *args: P.args, **kwargs: P.kwargs) -> HttpResponse:
        if not request.user.is_authenticated:
            if is_htmx(request) or request.headers.get("Accept") == "application/json":
                return signed_out()
            return kept.ask_to_sign_in(request) or redirect(f"{reverse('login')}?next={quote(kept.page_of(request))}")
        target = reverse("password")
        if MUST_CHOOSE in request.session and request.path != target:
            return HttpResponse(status=204, headers={"HX-Redirect": target}) if is_htmx(request) else redirect(target)
        try:
            return view(request, *args, **kwargs)
        except TandemError as error:
            return failure(request, error)

    return cast(View[P], guarded)  # `wraps` keeps the signature, its type does not


def posted(view: View[P]) -> View[P]:
    """Takes what forms send. Whoever only looks at its address, as by Enter in the address bar after an answer, is led to the
    page of the form."""

    @wraps(view)
    def guarded(request: HttpRequest, *args: P.args, **kwargs: P.kwargs) -> HttpResponse:
        if request.method in ("GET", "HEAD") and request.resolver_match is not None:
            form_page = (request.resolver_match.url_name or "").split("-")[0]
            return redirect("users" if form_page == "user" else reverse(form_page, args=args, kwargs=kwargs))
        return require_POST(view)(request, *args, **kwargs)

    return cast(View[P], guarded)


def signed_out() -> HttpResponse:
    """What scripts hear when nobody is signed in: they change nothing, and let the reader sign in over the page."""
    return HttpResponse(status=401, headers={"HX-Reswap": "none"})


def problems_of(error: TandemError | None) -> Sequence[TandemError]:
    """All that is wrong, one error each."""
    return error.problems if isinstance(error, InvalidInput) else [error] if error else []


def errors_of(error: TandemError | None) -> dict[str, str]:
    """What stands at which field; what belongs to none at the empty one."""
    return {problem.field or "": problem.sentence for problem in problems_of(error)}


def failure(request: HttpRequest, error: TandemError) -> HttpResponse:
    """An expected error: a note where htmx asked for a fragment, a page otherwise."""
    if is_htmx(request):
        response = render(request, "parts/note.html", {"message": error.message, "tone": "bad"}, status=error.status)
        response.headers["HX-Retarget"] = "#notices"
        response.headers["HX-Reswap"] = "innerHTML"
        return response
    template = "404.html" if isinstance(error, NotFound) else "error.html"
    return page(
        request,
        template,
        {"title": "Not found" if isinstance(error, NotFound) else "Not possible", "error": error},
        status=error.status,
    )


def page(
    request: HttpRequest,
    template: str,
    context: Mapping[str, Any],
    *,
    live: str = "",
    only_live: bool = False,
    status: int = 200,
) -> HttpResponse:
    """Render a page, or with `?part=live` its live template alone."""
    actor = actor_of(request)
    full: dict[str, Any] = {"actor": actor, "may": May(actor), **context}
    if live and (only_live or request.GET.get("part") == "live"):
        return render(request, live, full)
    match = request.resolver_match
    route = (match.url_name or "") if match else ""
    section = route.split("-")[0]
    topic, anchor = HELP.get(route) or HELP.get(section) or ("guide", "")
    section = {"deployment": "deployments", "node": "nodes", "key": "keys", "events": "fleet"}.get(section, section)
    full |= {
        "navigation": NAVIGATION,
        "section": section,
        "live_template": live,
        "foot": foot(),
        "help": f"{reverse('help', args=[topic])}#{anchor}".rstrip("#"),
        "now": timezone.now(),
    }
    return render(request, template, full, status=status)


class May:
    """What the actor may do, for templates: `may.operate`, `may.administer`."""

    def __init__(self, actor: Actor) -> None:
        self.operate = actor.role >= Role.OPERATOR
        self.administer = actor.role >= Role.ADMIN
        self.reason = f"This needs the role operator. Your role is {actor.role.label}."


class Foot(NamedTuple):
    """The fleet in two lines, at the foot of the side navigation."""

    nodes: int
    gpus: int
    reporting: int
    stands_since: datetime | None
    """When the reconcile loop stepped last, if that is long ago; None: it steps."""


def foot() -> Foot:
    rows = nodes.node_rows()
    gpus = sum(len(r.facts.gpus) for r in rows if r.facts)
    last = last_step()
    stands = last if last is not None and timezone.now() - last > LOOP_STANDS_AFTER else None
    return Foot(len(rows), gpus, sum(r.status is Presence.REPORTING for r in rows), stands)


@signed_in
def foot_part(request: HttpRequest) -> HttpResponse:
    """The foot alone, for its live region."""
    return render(request, "parts/foot.html", {"foot": foot()})


def first_start() -> bool:
    """Nobody can sign in yet."""
    return not get_user_model().objects.exists()
