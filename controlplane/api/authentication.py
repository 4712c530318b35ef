"""Who may open /api/: a browser session (with CSRF token) or `Authorization: Bearer <manage key>`. Inference keys never do."""

from __future__ import annotations

from typing import Any

from drf_spectacular.extensions import OpenApiAuthenticationExtension
from rest_framework.authentication import BaseAuthentication
from rest_framework.exceptions import AuthenticationFailed, PermissionDenied
from rest_framework.request import Request

from controlplane.access.models import ApiKey
from controlplane.access.services import MANAGE, authenticate_key


class KeyHolder:
    """What DRF takes for the user when a key was sent. Roles are read from the key, by `actor_of`."""

    is_authenticated = True
    is_active = True


class ManageKey(BaseAuthentication):
    """Bearer keys. Unknown, malformed, expired and revoked ones get one and the same 401."""

    def authenticate(self, request: Request) -> tuple[KeyHolder, ApiKey] | None:
        scheme, _, text = request.META.get("HTTP_AUTHORIZATION", "").partition(" ")
        if not scheme:
            return None
        key = authenticate_key(text.strip()) if scheme.lower() == "bearer" else None
        if key is None:
            raise AuthenticationFailed(
                "this key is not valid (unknown, expired or revoked): send `Bearer <manage key>`"
            )
        if key.scope != MANAGE:
            raise PermissionDenied("this key's scope is inference: use one with the scope manage")
        return KeyHolder(), key

    def authenticate_header(self, request: Request) -> str:
        return 'Bearer realm="tandem"'


class ManageKeyScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    target_class = ManageKey
    name = "manageKey"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {"type": "http", "scheme": "bearer", "description": "An API key with the scope manage."}
