"""The base of every REST view: who acts, what `If-Match` asks for, and that answers are JSON errors and never cached."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from drf_spectacular.utils import OpenApiParameter
from rest_framework import serializers
from rest_framework.exceptions import NotFound
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.access.actors import actor_of
from controlplane.access.roles import Actor
from controlplane.api import requests, resources
from controlplane.fleet.errors import InvalidInput

IF_MATCH = OpenApiParameter(
    "If-Match", str, OpenApiParameter.HEADER, description="The generation that the change is meant for; else 409."
)
IDEMPOTENCY_KEY = OpenApiParameter(
    "Idempotency-Key",
    str,
    OpenApiParameter.HEADER,
    description="Any text of your own. Sent again with the same contents within a day, it makes nothing new: the first answer "
    "comes back (a secret for 10 minutes, then 409).",
)


class ApiView(APIView):
    request: Request

    @property
    def actor(self) -> Actor:
        return actor_of(self.request)

    @property
    def body(self) -> Mapping[str, Any]:
        """The parsed body; an empty one is an empty mapping. Raises `ParseError`."""
        data = self.request.data
        assert isinstance(data, Mapping), "the parsers of `documents` give mappings only"
        return data

    def checked(self, serializer: type[serializers.Serializer[Any]]) -> dict[str, Any]:
        """The body as the serializer reads it. Raises DRF's `ValidationError` naming the field."""
        return _checked(serializer, self.body)

    def query(self, serializer: type[serializers.Serializer[Any]]) -> dict[str, Any]:
        """The query parameters as the serializer reads them."""
        return _checked(serializer, self.request.query_params.dict())

    def dry_run(self) -> bool:
        """Whether the change is only to be told: `?dry_run=1`."""
        asked: bool = self.query(requests.DryRun)["dry_run"]
        return asked

    def idempotency_key(self) -> str:
        """Empty: the call has none."""
        return self.request.headers.get("Idempotency-Key", "").strip()

    def generation(self) -> int | None:
        """The generation in `If-Match`, None without one. Raises `InvalidInput`."""
        text = self.request.headers.get("If-Match", "*").strip()
        if text == "*":
            return None
        match = re.fullmatch(r'(?:W/)?"?(\d{1,9})"?', text)
        if match is None:
            raise InvalidInput('If-Match: send the generation that GET showed, for example "3"', field="If-Match")
        return int(match[1])

    def finalize_response(self, request: Request, response: Any, *args: Any, **kwargs: Any) -> Any:
        response = super().finalize_response(request, response, *args, **kwargs)
        if response.exception:  # an error is JSON whatever the answer would have been
            response.accepted_renderer, response.accepted_media_type = JSONRenderer(), JSONRenderer.media_type
        response.headers["Cache-Control"] = "no-store"
        return response


class UnknownRoute(ApiView):
    """Everything under /api/ that no other route takes."""

    authentication_classes = ()
    permission_classes = ()
    schema = None

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        raise NotFound("there is no such route; /api/schema/ lists them (those under /api/v1/ end without a slash)")


def _checked(serializer: type[serializers.Serializer[Any]], data: Mapping[str, Any]) -> dict[str, Any]:
    bound = serializer(data=data)
    bound.is_valid(raise_exception=True)
    return bound.validated_data


def would_stop(sentence: str) -> Response:
    """The answer to a dry run of what cannot be undone."""
    return Response(resources.StopsResource({"dry_run": True, "stops": sentence}).data)


def etag(response: Response, generation: int) -> Response:
    """The response with the deployment's generation as its entity tag."""
    response.headers["ETag"] = f'"{generation}"'
    return response
