"""Attempts of engines and their logs. `follow` is a long poll with a cursor: it passes every proxy, a broken connection loses no line (ask
again with the same cursor), and the answer that comes without lines after `wait` seconds is the heartbeat."""

from __future__ import annotations

from django.urls import path
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api import requests, resources
from controlplane.api.view import ApiView
from controlplane.deployments import logs, queries
from controlplane.deployments.models import Engine
from controlplane.fleet.errors import NotFound


def _engine(deployment: str, engine: str) -> Engine:
    found = Engine.objects.select_related("node").filter(pk=engine, deployment__name=deployment).first()
    if found is None:
        raise NotFound(f"{deployment} has no engine {engine}")
    return found


def _answer(chunk: logs.LogChunk, engine: Engine) -> Response:
    answer = {
        "attempt": chunk.attempt,
        "current_attempt": engine.attempt,
        "lines": chunk.lines,
        "times": chunk.times,
        "cursor": chunk.cursor,
    }
    return Response(resources.LogResource(answer).data)


class EngineAttempts(ApiView):
    @extend_schema(operation_id="listAttempts", responses=resources.AttemptList)
    def get(self, request: Request, name: str, engine: str) -> Response:
        """Every process the engine has had, newest first: why and how each ended."""
        return Response(resources.AttemptList({"items": queries.attempts(_engine(name, engine).pk)}).data)


class EngineLogs(ApiView):
    @extend_schema(operation_id="tailLog", parameters=[requests.LogTail], responses=resources.LogResource)
    def get(self, request: Request, name: str, engine: str) -> Response:
        """The last lines of one attempt, also of one that crashed."""
        asked, found = self.query(requests.LogTail), _engine(name, engine)
        return _answer(logs.tail(engine=found, attempt=asked["attempt"], lines=asked["lines"]), found)


class EngineLogsFollow(ApiView):
    @extend_schema(operation_id="followLog", parameters=[requests.LogFollow], responses=resources.LogResource)
    def get(self, request: Request, name: str, engine: str) -> Response:
        """Lines after the cursor, as soon as there are any; none after `wait` seconds. Ask again with the new cursor."""
        asked, found = self.query(requests.LogFollow), _engine(name, engine)
        wait: float = asked["wait"] if asked["attempt"] == found.attempt else 0  # a past attempt writes no more
        chunk = logs.follow(engine=found, attempt=asked["attempt"], cursor=asked["cursor"], wait_seconds=wait)
        found.refresh_from_db(fields=["attempt"])
        return _answer(chunk, found)


routes = [
    path("deployments/<str:name>/engines/<str:engine>/attempts", EngineAttempts.as_view()),
    path("deployments/<str:name>/engines/<str:engine>/logs", EngineLogs.as_view()),
    path("deployments/<str:name>/engines/<str:engine>/logs/follow", EngineLogsFollow.as_view()),
]
