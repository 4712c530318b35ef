"""What people change on a deployment's page. Each view is one service call; the page then shows what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from msgspec.structs import asdict

from controlplane.access.actors import actor_of
from controlplane.dashboards import form
from controlplane.dashboards.asking import ask, mistyped
from controlplane.dashboards.clash import clash, was_seen
from controlplane.dashboards.deployments import Changes, overview, routing_values, settings_page
from controlplane.dashboards.page import is_htmx, page, posted, signed_in
from controlplane.deployments import queries, services
from controlplane.fleet import spec
from controlplane.fleet.errors import Conflict, InvalidInput
from controlplane.fleet.model import Role
from controlplane.fleet.wire import RoutingPolicy

ROUTING_LABELS = {
    "mode": "How an engine is chosen",
    "affinity": "What keeps a session together",
    "disaggregate": "Which prompts a prefill engine reads",
    "on_prefill_failure": "When prefill fails",
    "local_below_tokens": "Decode reads prompts below",
    "temperature": "Temperature of the choice",
    "max_in_flight": "Requests at one engine",
    "queue_limit": "Waiting requests",
    "queue_seconds": "Longest wait, seconds",
    "silence_seconds": "Engine's first byte, seconds",
    "gap_seconds": "Silence inside a stream, seconds",
}


@signed_in
@posted
def scale(request: HttpRequest, name: str) -> HttpResponse:
    """Set one pool's replicas from the number that the reader saw; answers the picture as it is now. What would stop service
    is asked first."""
    actor, sent = actor_of(request), request.POST
    try:
        replicas, role = int(sent.get("replicas", "")), Role(sent.get("role", ""))
        seen = int(sent["seen"]) if sent.get("seen") else None
    except ValueError:
        raise InvalidInput("replicas: enter a pool and a whole number", field="replicas") from None
    stops = services.preview_scale(actor=actor, name=name, role=role, replicas=replicas).stops
    if stops and "confirmed" not in sent:
        verb = f"Scale {role} to {replicas}"
        return ask(request, title=f"{verb}?", sentence=stops, button=verb, target="#deployment", swap="innerMorph")
    services.scale(actor=actor, name=name, role=role, replicas=replicas, seen=seen)
    if is_htmx(request):
        return overview(request, queries.deployment_row(name), only_live=True)
    return redirect("deployment", name)


@signed_in
@posted
def retry(request: HttpRequest, name: str) -> HttpResponse:
    """Try a failed engine again at once; answers the picture as it is now."""
    services.retry(actor=actor_of(request), name=name, engine=request.POST.get("engine", ""))
    if is_htmx(request):
        return overview(request, queries.deployment_row(name), only_live=True)
    return redirect("deployment", name)


@signed_in
@posted
def change_document(request: HttpRequest, name: str) -> HttpResponse:
    """Tell what the written document would change (`step` preview), or make it so (`step` apply).

    The change is meant for the generation the reader saw: one that came between is a conflict, not lost.
    """
    actor = actor_of(request)
    sent = request.POST
    text, generation = sent.get("yaml", ""), sent.get("generation", "")
    preview = sent.get("step") != "apply"
    try:
        document = form.parse_yaml(text)
        if document.get("name", name) != name:
            raise InvalidInput(
                f"name: this page changes {name}. To make another deployment, use New deployment", field="name"
            )
        if not generation.isdigit():
            raise InvalidInput("generation: reload the page", field="generation")
        wanted = {"name": name, **document}
        asks = not preview and "confirmed" not in sent
        applied = services.apply(actor=actor, document=wanted, generation=int(generation), dry_run=preview or asks)
        if asks and applied.stops:
            return ask(request, title="Apply this?", sentence=applied.stops, button="Apply", target="#changes")
        if asks:
            services.apply(actor=actor, document=wanted, generation=int(generation))
    except InvalidInput as error:
        changes = Changes(None, "\n".join(error.sentences))
    except Conflict as error:
        changes = Changes(None, error.message)
        row = queries.deployment_row(name)
        if error.generation and not row.deployment.deleting_since:
            base = form.parse_yaml(sent.get("seen", "") or text)
            changes = Changes(None, error.message, clash(base, row.deployment.intent, _full(wanted), target=name))
            generation = str(row.deployment.generation)
    else:
        if not preview:
            messages.success(request, f"{name} is changed. Its engines follow.", extra_tags="link")
            target = reverse("deployment-settings", args=[name])
            return HttpResponse(status=204, headers={"HX-Redirect": target}) if is_htmx(request) else redirect(target)
        changes = Changes(applied)
    if is_htmx(request):
        context = {"changes": changes, "row": queries.deployment_row(name)}
        return page(request, "deployments/changes.html", context)
    return settings_page(request, queries.deployment_row(name), text, changes)


def _full(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document as it would be stored."""
    return spec.document(spec.parse(document))


@signed_in
@posted
def routing(request: HttpRequest, name: str) -> HttpResponse:
    """Change the routing policy: applies at once, no engine restarts. What somebody else changed in it meanwhile is a clash."""
    actor, sent = actor_of(request), request.POST
    row = queries.deployment_row(name)
    text = form.yaml_of(row.deployment.intent)
    base = was_seen(sent.get("seen", ""))
    try:
        policy = form.routing_of(sent)
        if base is not None:
            mine = {**asdict(RoutingPolicy()), **{k: value for k, value in policy.items() if value is not None}}
            if found := clash(base, routing_values(row), mine, target=name, labels=ROUTING_LABELS):
                return settings_page(request, row, text, clash=found, sent=sent.dict())
        generation = None if base is None else row.deployment.generation
        services.patch(actor=actor, name=name, changes={"routing": policy}, generation=generation)
    except InvalidInput as error:
        return settings_page(request, row, text, refused=(sent.dict(), error))
    messages.success(request, "The routing policy is changed. Routers follow within seconds.", extra_tags="link")
    return redirect("deployment-settings", name)


@signed_in
@posted
def delete(request: HttpRequest, name: str) -> HttpResponse:
    """Delete after the name was typed: engines drain first, then the row goes."""
    if request.POST.get("name", "").strip() != name:
        row = queries.deployment_row(name)
        return settings_page(request, row, form.yaml_of(row.deployment.intent), confirm_error=mistyped(name, "delete"))
    services.delete(actor=actor_of(request), name=name)
    messages.success(request, f"{name} is being deleted: its engines finish their requests first.", extra_tags="link")
    return redirect("deployments")
