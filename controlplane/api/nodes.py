"""Routes of nodes: what is there, who may join. `join` is the one route without a login; its one-time token is the proof."""

from __future__ import annotations

from ipaddress import ip_address

from django.db import transaction
from django.urls import path
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.access.roles import Role
from controlplane.api import requests, resources
from controlplane.api.view import IDEMPOTENCY_KEY, ApiView, would_stop
from controlplane.deployments import effects, node_events
from controlplane.nodes import queries, services
from controlplane.nodes.addresses import is_own
from controlplane.nodes.joining import host_of, join_address


class Nodes(ApiView):
    @extend_schema(operation_id="listNodes", responses=resources.NodeList)
    def get(self, request: Request) -> Response:
        return Response(resources.NodeList({"items": queries.node_rows()}).data)


class NodeDetail(ApiView):
    @extend_schema(operation_id="getNode", responses=resources.NodeResource)
    def get(self, request: Request, name: str) -> Response:
        return Response(resources.NodeResource(queries.node_row(name)).data)

    @extend_schema(
        operation_id="removeNode",
        parameters=[requests.DryRun, requests.Untrusted],
        responses={200: resources.StopsResource, 204: None},
    )
    def delete(self, request: Request, name: str) -> Response:
        """Take the node's access away and forget it."""
        if self.dry_run():
            self.actor.require(Role.ADMIN)
            return would_stop(effects.of_node_removal(queries.node_row(name).node.name))
        untrusted: bool = self.query(requests.Untrusted)["untrusted"]
        services.remove(actor=self.actor, name=name, untrusted=untrusted)
        return Response(status=204)


class NodeCordon(ApiView):
    @extend_schema(operation_id="cordonNode", request=None, responses=resources.NodeResource)
    def post(self, request: Request, name: str) -> Response:
        """Give the node no new engines; those it runs go on."""
        services.cordon(actor=self.actor, name=name)
        return Response(resources.NodeResource(queries.node_row(name)).data)


class NodeUncordon(ApiView):
    @extend_schema(operation_id="uncordonNode", request=None, responses=resources.NodeResource)
    def post(self, request: Request, name: str) -> Response:
        services.uncordon(actor=self.actor, name=name)
        return Response(resources.NodeResource(queries.node_row(name)).data)


class NodeJoin(ApiView):
    authentication_classes = ()
    permission_classes = ()

    @extend_schema(operation_id="joinNode", auth=[], request=requests.Join, responses=resources.JoinedResource)
    def post(self, request: Request) -> Response:
        """Called by the agent. Unknown, used and expired tokens are refused alike. A name that has joined before is let in again
        with its former password, or taken over with a token that was made for it."""
        wanted = self.checked(requests.Join)
        host = host_of(request) or "127.0.0.1"
        with transaction.atomic():
            joined = services.join(**wanted, redis_host=host, seen=_asked_from(request))
            node_events.tell_joined(joined)
        return Response(resources.JoinedResource(joined).data)


class NodeStanding(ApiView):
    authentication_classes = ()
    permission_classes = ()

    @extend_schema(
        operation_id="nodeStanding", auth=[], request=requests.Standing, responses=resources.StandingResource
    )
    def post(self, request: Request) -> Response:
        """Asked by an agent whose login Redis refuses: whether that is for good, because another machine is this node now, or an
        admin removed it."""
        asked = self.checked(requests.Standing)
        told = {"replaced": services.is_replaced(**asked), "removed": services.is_removed(asked["name"])}
        return Response(resources.StandingResource(told).data)


class JoinTokens(ApiView):
    @extend_schema(
        operation_id="createJoinToken",
        parameters=[IDEMPOTENCY_KEY],
        request=requests.JoinToken,
        responses={201: resources.JoinTokenResource},
    )
    def post(self, request: Request) -> Response:
        wanted = self.checked(requests.JoinToken)
        token = services.create_join_token(actor=self.actor, once=self.idempotency_key(), **wanted)
        at = join_address(host_of(request))
        answer = {"token": token, **wanted, "join_url": at.url, "note": at.note}
        return Response(resources.JoinTokenResource(answer).data, status=201)


_TOLD_BY_PROXIES = {"X-Forwarded-For", "X-Forwarded-Proto", "X-Real-IP", "Forwarded", "Via"}


def _asked_from(request: Request) -> str:
    """The address that a request comes from. Empty: from a proxy on this machine that the web server does not know for one."""
    try:
        address = ip_address(str(request.META.get("REMOTE_ADDR", "")))
    except ValueError:
        return ""
    seen = str(getattr(address, "ipv4_mapped", None) or address)
    return "" if is_own(seen) and _TOLD_BY_PROXIES & set(request.headers) else seen


routes = [
    path("nodes", Nodes.as_view()),
    path("nodes/join", NodeJoin.as_view()),
    path("nodes/standing", NodeStanding.as_view()),
    path("nodes/<str:name>", NodeDetail.as_view()),
    path("nodes/<str:name>/cordon", NodeCordon.as_view()),
    path("nodes/<str:name>/uncordon", NodeUncordon.as_view()),
    path("join-tokens", JoinTokens.as_view()),
]
