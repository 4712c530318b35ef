"""The one place where an exception becomes an HTTP answer, always of this shape:

    {"error": {"code": "invalid_input", "message": "…", "field": "pools.decode.replicas", "retryable": false,
               "errors": [{"field": "pools.decode.replicas", "message": "…"}, …]}}

`errors` holds everything that is wrong with an input; message and field are the first of them. A conflict over a changed deployment also tells its present `generation`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from django.core.exceptions import PermissionDenied, RequestDataTooBig
from django.db import DataError, OperationalError
from django.http import Http404
from rest_framework import exceptions
from rest_framework.response import Response
from rest_framework.views import set_rollback

from controlplane.api.documents import TooLarge
from controlplane.fleet.errors import Conflict, InvalidInput, TandemError, Unavailable

logger = logging.getLogger(__name__)

_CODES = {
    400: "invalid_input",
    401: "unauthenticated",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    406: "not_acceptable",
    413: "too_large",
    415: "unsupported_media_type",
    429: "too_many_requests",
}


Problem = tuple[str | None, str]
"""Field and message."""


def envelope(
    code: str,
    message: str,
    *,
    field: str | None = None,
    retryable: bool = False,
    generation: int | None = None,
    problems: Sequence[Problem] = (),
) -> dict[str, Any]:
    error: dict[str, Any] = {"code": code, "message": message, "field": field, "retryable": retryable}
    if problems:
        error["errors"] = [{"field": field, "message": message} for field, message in problems]
    if generation is not None:
        error["generation"] = generation
    return {"error": error}


def handler(error: Exception, context: dict[str, Any]) -> Response:
    """DRF's `EXCEPTION_HANDLER`. What nobody foresaw is logged with its trace and answered without its text."""
    set_rollback()
    if isinstance(error, OperationalError):
        logger.warning("the database did not answer: %s", error)
        error = Unavailable(_why_no_database(str(error)))
    if isinstance(error, DataError):
        logger.warning("the database refused a value: %s", error)
        error = InvalidInput("a value cannot be stored: does a text hold a NUL character?")
    if isinstance(error, TandemError):
        if error.status >= 500 and not error.retryable:
            logger.error("a service failed", exc_info=error)
        generation = error.generation if isinstance(error, Conflict) else None
        told = [(p.field, p.message) for p in error.problems] if isinstance(error, InvalidInput) else []
        body = envelope(
            error.code,
            error.message,
            field=error.field,
            retryable=error.retryable,
            generation=generation,
            problems=told,
        )
        return Response(body, status=error.status)
    if isinstance(error, Http404):
        error = exceptions.NotFound()
    elif isinstance(error, PermissionDenied):
        error = exceptions.PermissionDenied()
    elif isinstance(error, RequestDataTooBig):
        error = TooLarge("the body is too large")
    if isinstance(error, exceptions.APIException):
        return _of_framework(error)
    logger.error("a view failed", exc_info=error)
    return Response(envelope("internal_error", "this is a bug in Tandem; its log has the details"), status=500)


def _why_no_database(said: str) -> str:
    if "disk is full" in said or "No space left" in said:
        return "the disk of the database is full: make room on it, then try again"
    if "readonly" in said or "read-only" in said:
        return "the database cannot be written: check the owner and the mount of its folder"
    return "the database is busy or cannot be reached; try again in a moment"


def _of_framework(error: exceptions.APIException) -> Response:
    problems = list(_problems(error.detail))
    field, message = problems[0]
    code = _CODES.get(error.status_code, "internal_error")
    headers = {}
    if challenge := getattr(error, "auth_header", None):
        headers["WWW-Authenticate"] = challenge
    told = problems if error.status_code == 400 else []
    body = envelope(code, message, field=field, problems=told)
    return Response(body, status=error.status_code, headers=headers)


def _problems(detail: Any, path: str = "") -> Iterator[Problem]:
    """DRF's nested details as problems with dotted fields: the first of each field."""
    if isinstance(detail, dict) and detail:
        for name, inner in detail.items():
            at = path if name == "non_field_errors" else f"{path}.{name}" if path else str(name)
            yield from _problems(inner, at)
    elif isinstance(detail, list) and detail:
        yield from _problems(next((item for item in detail if item), ""), path)
    else:
        yield path or None, f"{path}: {detail}" if path else str(detail)
