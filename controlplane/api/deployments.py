"""Routes of deployments: what is wanted, and what became of it. Views parse, call one service or query, and answer."""

from __future__ import annotations

from django.urls import path
from drf_spectacular.utils import PolymorphicProxySerializer, extend_schema
from rest_framework.renderers import BaseRenderer, JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api import requests, resources
from controlplane.api.documents import JSONParser, YAMLParser, YAMLRenderer
from controlplane.api.schema import CHANGES, DOCUMENT
from controlplane.api.view import IDEMPOTENCY_KEY, IF_MATCH, ApiView, etag, would_stop
from controlplane.deployments import queries, services
from controlplane.fleet.errors import InvalidInput
from controlplane.fleet.model import Role
from controlplane.fleet.spec import document

BOTH_FORMS = {"application/json": DOCUMENT, "application/yaml": DOCUMENT}


def _answer(name: str, status: int = 200) -> Response:
    row = queries.deployment_row(name)
    return etag(Response(resources.DeploymentResource(row).data, status=status), row.deployment.generation)


CHANGED = PolymorphicProxySerializer(
    component_name="DeploymentOrDryRun",
    serializers=[resources.DeploymentResource, resources.AppliedResource],
    resource_type_field_name=None,
)
"""The deployment after a change; after a dry run what would change and stop."""


def _previewed(found: services.Applied) -> Response:
    return Response(resources.AppliedResource({**found._asdict(), "dry_run": True, "deployment": None}).data)


class Deployments(ApiView):
    parser_classes = (JSONParser, YAMLParser)

    @extend_schema(operation_id="listDeployments", responses=resources.DeploymentList)
    def get(self, request: Request) -> Response:
        return Response(resources.DeploymentList({"items": queries.deployment_rows()}).data)

    @extend_schema(
        operation_id="createDeployment",
        parameters=[IDEMPOTENCY_KEY],
        request=BOTH_FORMS,
        responses={201: resources.DeploymentResource},
    )
    def post(self, request: Request) -> Response:
        """One that cannot be placed yet is accepted too: its condition says what it waits for."""
        deployment = services.create(actor=self.actor, document=self.body, token=self.idempotency_key())
        return _answer(deployment.name, 201)


class DeploymentDetail(ApiView):
    parser_classes = (JSONParser, YAMLParser)

    def get_renderers(self) -> list[BaseRenderer]:
        reads = self.request.method == "GET"  # every other answer is about a change, not the document
        return [JSONRenderer(), YAMLRenderer()] if reads else [JSONRenderer()]

    @extend_schema(
        operation_id="getDeployment",
        responses={(200, "application/json"): resources.DeploymentResource, (200, "application/yaml"): DOCUMENT},
    )
    def get(self, request: Request, name: str) -> Response:
        """As YAML (`?format=yaml` or `Accept`): just the document, in the form that PUT takes."""
        if request.accepted_renderer.format == "yaml":
            row = queries.deployment_row(name)
            return etag(Response(document(row.spec)), row.deployment.generation)
        return _answer(name)

    @extend_schema(
        operation_id="applyDeployment",
        request=BOTH_FORMS,
        parameters=[IF_MATCH, requests.DryRun],
        responses={200: resources.AppliedResource, 201: resources.AppliedResource},
    )
    def put(self, request: Request, name: str) -> Response:
        """Make the deployment what the document says: create it, change it, or leave it alone."""
        dry_run = self.dry_run()
        wanted = {"name": name, **self.body}
        if wanted["name"] != name:
            raise InvalidInput(f"name: the document says {wanted['name']!r}, the URL {name!r}", field="name")
        applied = services.apply(actor=self.actor, document=wanted, generation=self.generation(), dry_run=dry_run)
        row = None if dry_run or applied.deployment is None else queries.deployment_row(name)
        answer = {
            "dry_run": dry_run,
            "created": applied.created,
            "changes": applied.changes,
            "needs_new_engines": applied.needs_new_engines,
            "stops": applied.stops,
            "deployment": row,
        }
        response = Response(resources.AppliedResource(answer).data, status=201 if row and applied.created else 200)
        return etag(response, row.deployment.generation) if row else response

    @extend_schema(
        operation_id="changeDeployment",
        request={"application/json": CHANGES, "application/yaml": CHANGES},
        parameters=[IF_MATCH, requests.DryRun],
        responses=CHANGED,
    )
    def patch(self, request: Request, name: str) -> Response:
        if self.dry_run():
            found = services.preview(actor=self.actor, name=name, changes=self.body, generation=self.generation())
            return _previewed(found)
        services.patch(actor=self.actor, name=name, changes=self.body, generation=self.generation())
        return _answer(name)

    @extend_schema(
        operation_id="deleteDeployment",
        parameters=[requests.DryRun],
        responses={200: resources.StopsResource, 202: resources.DeletingResource},
    )
    def delete(self, request: Request, name: str) -> Response:
        if self.dry_run():
            return would_stop(services.deletion(actor=self.actor, name=name))
        services.delete(actor=self.actor, name=name)
        sentence = "Being deleted: its engines finish their requests and end."
        return Response(resources.DeletingResource({"name": name, "sentence": sentence}).data, status=202)


class DeploymentScale(ApiView):
    @extend_schema(
        operation_id="scaleDeployment",
        request=requests.Scale,
        parameters=[IF_MATCH, requests.DryRun],
        responses=CHANGED,
    )
    def post(self, request: Request, name: str) -> Response:
        wanted = self.checked(requests.Scale)
        pool = {"role": Role(wanted["role"]), "replicas": wanted["replicas"]}
        if self.dry_run():
            return _previewed(services.preview_scale(actor=self.actor, name=name, generation=self.generation(), **pool))
        services.scale(actor=self.actor, name=name, generation=self.generation(), **pool)
        return _answer(name)


class DeploymentEngines(ApiView):
    @extend_schema(operation_id="listEngines", responses=resources.EngineList)
    def get(self, request: Request, name: str) -> Response:
        return Response(resources.EngineList({"items": queries.deployment_row(name).engines}).data)


class EngineRetry(ApiView):
    @extend_schema(operation_id="retryEngine", request=None, responses={202: resources.EngineResource})
    def post(self, request: Request, name: str, engine: str) -> Response:
        """Try a failed engine again now, instead of after its back-off. `engine`: id or short name."""
        services.retry(actor=self.actor, name=name, engine=engine)
        found = next(e for e in queries.deployment_row(name).engines if engine in (e.engine.pk, e.name))
        return Response(resources.EngineResource(found).data, status=202)


class DeploymentEvents(ApiView):
    @extend_schema(operation_id="listDeploymentEvents", parameters=[requests.EventPage], responses=resources.EventPage)
    def get(self, request: Request, name: str) -> Response:
        """Also of a deployment that was deleted: history outlives it."""
        return event_page(self, deployment=name)


class Events(ApiView):
    @extend_schema(operation_id="listEvents", parameters=[requests.EventPage], responses=resources.EventPage)
    def get(self, request: Request) -> Response:
        return event_page(self, deployment=None)


def event_page(view: ApiView, *, deployment: str | None) -> Response:
    page = view.query(requests.EventPage)
    items = queries.events(deployment=deployment, **page)
    following = items[-1].id if len(items) == page["limit"] else None
    return Response(resources.EventPage({"items": items, "next": following}).data)


class DeploymentRevisions(ApiView):
    @extend_schema(operation_id="listRevisions", responses=resources.RevisionList)
    def get(self, request: Request, name: str) -> Response:
        revisions = queries.deployment_row(name).deployment.revisions.order_by("-number")
        return Response(resources.RevisionList({"items": revisions}).data)


routes = [
    path("deployments", Deployments.as_view()),
    path("deployments/<str:name>", DeploymentDetail.as_view()),
    path("deployments/<str:name>/scale", DeploymentScale.as_view()),
    path("deployments/<str:name>/engines", DeploymentEngines.as_view()),
    path("deployments/<str:name>/engines/<str:engine>/retry", EngineRetry.as_view()),
    path("deployments/<str:name>/events", DeploymentEvents.as_view()),
    path("deployments/<str:name>/revisions", DeploymentRevisions.as_view()),
    path("events", Events.as_view()),
]
