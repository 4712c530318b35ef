"""The New deployment page: a form of two lanes and a YAML tab that stay in step by a round trip to the server."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.http import require_http_methods

from controlplane.access.actors import actor_of
from controlplane.access.roles import Role as AccessRole
from controlplane.dashboards import form
from controlplane.dashboards.page import errors_of, is_htmx, page, problems_of, signed_in
from controlplane.deployments import queries, services
from controlplane.fleet.errors import Conflict, InvalidInput, TandemError
from controlplane.fleet.spec import document as document_of
from controlplane.nodes import queries as nodes


@signed_in
@require_http_methods(["GET", "POST"])
def new(request: HttpRequest) -> HttpResponse:
    """Show the form, turn it from one writing into the other (`show`), or create the deployment.

    A wrong field answers 400 with the sentence at the field, and everything that was typed still there.
    """
    actor = actor_of(request)
    actor.require(AccessRole.OPERATOR)
    if request.method == "GET":
        return _copy(request, name) if (name := request.GET.get("from")) else _form(request, dict(form.DEFAULTS))
    values = {key: str(value) for key, value in request.POST.items()}
    written = values.get("writing", "form")
    wanted = values.get("show")
    try:
        document = form.parse_yaml(values.get("yaml", "")) if written == "yaml" else form.document_of(values)
        if wanted:
            text = values.get("yaml", "") if written == "yaml" == wanted else form.yaml_of(document)
            return _form(request, form.values_of(document), writing=wanted, yaml=text)
        deployment = services.create(actor=actor, document=document, token=values.get("once", ""))
    except (InvalidInput, Conflict) as error:
        kept = values if written == "form" else dict(form.DEFAULTS)
        return _form(request, kept, writing=written, yaml=values.get("yaml", ""), error=error)
    target = reverse("deployment", args=[deployment.name])
    return HttpResponse(status=204, headers={"HX-Redirect": target}) if is_htmx(request) else redirect(target)


def _copy(request: HttpRequest, name: str) -> HttpResponse:
    """The form, filled as the deployment `name` is. Raises `NotFound`."""
    document = form.copy_of(document_of(queries.deployment_row(name).spec), queries.served_names())
    writing = "form" if form.fits(document) else "yaml"
    return _form(request, form.values_of(document), writing=writing, yaml=form.yaml_of(document))


def _form(
    request: HttpRequest,
    values: dict[str, str],
    *,
    writing: str = "form",
    yaml: str = "",
    error: TandemError | None = None,
) -> HttpResponse:
    node_rows = nodes.node_rows()
    runtimes = {runtime for row in node_rows if row.facts for runtime in row.facts.runtimes}
    context: dict[str, Any] = {
        "title": "New deployment",
        "values": values,
        "writing": writing,
        "yaml": yaml,
        "error": error,
        "errors": errors_of(error),
        "problems": problems_of(error),
        "elsewhere": [p for p in problems_of(error) if writing == "yaml" or p.field not in form.FIELDS],
        "lanes": [(role, role.value.capitalize()) for role in form.SHAPES["disaggregated"]],
        "aggregated": form.SHAPES["aggregated"][0],
        "node_rows": node_rows,
        "runtimes": sorted(runtimes),
        "gpus": sum(len(row.facts.gpus) for row in node_rows if row.facts),
    }
    template = "deployments/new_body.html" if is_htmx(request) else "deployments/new.html"
    return page(request, template, context, status=error.status if error else 200)
