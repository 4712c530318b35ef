"""Routes of keys, the audit trail, and `me`."""

from __future__ import annotations

from django.urls import path
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.access import audit, services
from controlplane.access.roles import Role
from controlplane.api import requests, resources
from controlplane.api.view import ApiView


class Keys(ApiView):
    @extend_schema(operation_id="listKeys", responses=resources.KeyList)
    def get(self, request: Request) -> Response:
        return Response(resources.KeyList({"items": services.list_keys()}).data)

    @extend_schema(operation_id="createKey", request=requests.NewKey, responses={201: resources.NewKeyResource})
    def post(self, request: Request) -> Response:
        """The answer alone holds the key; only its digest is kept."""
        wanted = self.checked(requests.NewKey)
        role = wanted.pop("role")
        key, text = services.create_key(actor=self.actor, role=Role[role.upper()] if role else None, **wanted)
        return Response({**resources.KeyResource(key).data, "key": text}, status=201)


class KeyDetail(ApiView):
    @extend_schema(operation_id="revokeKey", responses=resources.KeyResource)
    def delete(self, request: Request, key_id: str) -> Response:
        return Response(resources.KeyResource(services.revoke_key(actor=self.actor, key_id=key_id)).data)


class Audit(ApiView):
    @extend_schema(operation_id="listAudit", parameters=[requests.Page], responses=resources.AuditPage)
    def get(self, request: Request) -> Response:
        page = self.query(requests.Page)
        items = audit.entries(limit=page["limit"], before=page["before"])
        following = items[-1].pk if len(items) == page["limit"] else None
        return Response(resources.AuditPage({"items": items, "next": following}).data)


class Me(ApiView):
    @extend_schema(operation_id="me", responses=resources.MeResource)
    def get(self, request: Request) -> Response:
        actor = self.actor
        return Response(resources.MeResource({"name": actor.name, "kind": actor.kind, "role": actor.role.label}).data)


routes = [
    path("keys", Keys.as_view()),
    path("keys/<str:key_id>", KeyDetail.as_view()),
    path("audit", Audit.as_view()),
    path("me", Me.as_view()),
]
