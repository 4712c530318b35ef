"""Routes of keys, the audit trail, and `me`."""

from __future__ import annotations

from django.urls import path
from drf_spectacular.utils import PolymorphicProxySerializer, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.access import audit, services
from controlplane.access.limits import Limits
from controlplane.access.roles import Role
from controlplane.api import requests, resources
from controlplane.api.view import IDEMPOTENCY_KEY, ApiView, would_stop
from controlplane.deployments import effects


class Keys(ApiView):
    @extend_schema(operation_id="listKeys", responses=resources.KeyList)
    def get(self, request: Request) -> Response:
        return Response(resources.KeyList({"items": services.list_keys()}).data)

    @extend_schema(
        operation_id="createKey",
        parameters=[IDEMPOTENCY_KEY],
        request=requests.NewKey,
        responses={201: resources.NewKeyResource},
    )
    def post(self, request: Request) -> Response:
        """The answer alone holds the key; only its digest is kept."""
        wanted = self.checked(requests.NewKey)
        role = wanted.pop("role")
        limits = Limits(**{field: wanted.pop(field) for field in Limits._fields})
        key, text = services.create_key(
            actor=self.actor,
            role=Role[role.upper()] if role else None,
            limits=limits,
            token=self.idempotency_key(),
            **wanted,
        )
        return Response({**resources.KeyResource(key).data, "key": text}, status=201)


class KeyDetail(ApiView):
    @extend_schema(operation_id="getKey", responses=resources.KeyResource)
    def get(self, request: Request, key_id: str) -> Response:
        return Response(resources.KeyResource(services.get_key(key_id)).data)

    @extend_schema(operation_id="editKey", request=requests.KeyChanges, responses=resources.KeyResource)
    def patch(self, request: Request, key_id: str) -> Response:
        """Only what is sent is changed; null takes a limit or the expiry away."""
        changes = self.checked(requests.KeyChanges)
        return Response(resources.KeyResource(services.edit_key(actor=self.actor, key_id=key_id, changes=changes)).data)

    @extend_schema(
        operation_id="revokeKey",
        parameters=[requests.DryRun],
        responses=PolymorphicProxySerializer(
            component_name="KeyOrDryRun",
            serializers=[resources.KeyResource, resources.StopsResource],
            resource_type_field_name=None,
        ),
    )
    def delete(self, request: Request, key_id: str) -> Response:
        if self.dry_run():
            self.actor.require(Role.ADMIN)
            return would_stop(effects.of_revocation(services.get_key(key_id)))
        return Response(resources.KeyResource(services.revoke_key(actor=self.actor, key_id=key_id)).data)


class KeyRotate(ApiView):
    @extend_schema(
        operation_id="rotateKey",
        parameters=[IDEMPOTENCY_KEY],
        request=requests.Rotate,
        responses=resources.NewKeyResource,
    )
    def post(self, request: Request, key_id: str) -> Response:
        """A new secret for the same key, in this answer alone. The old one works for `overlap_seconds` more."""
        wanted = self.checked(requests.Rotate)
        key, text = services.rotate_key(actor=self.actor, key_id=key_id, token=self.idempotency_key(), **wanted)
        return Response({**resources.KeyResource(key).data, "key": text})


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
    path("keys/<str:key_id>/rotate", KeyRotate.as_view()),
    path("audit", Audit.as_view()),
    path("me", Me.as_view()),
]
