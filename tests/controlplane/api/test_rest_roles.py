"""Who may call what. The table below is the promise; the walk over the URL patterns makes sure that it is complete."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import URLPattern, URLResolver

from controlplane.access import services as access
from controlplane.access.models import AuditEntry
from controlplane.access.roles import SYSTEM, Role
from controlplane.api.urls import urlpatterns
from controlplane.api.view import UnknownRoute
from controlplane.deployments.models import Deployment, Engine
from controlplane.fleet.lifecycle import State
from controlplane.nodes import services as nodes
from tests.controlplane.api.rest_world import DOCUMENT, ENGINE, key_client, signed_in

EVERYONE = 0
"""Also those who are not signed in and hold no key."""


class Rule(NamedTuple):
    lowest: Role | int
    status: int = 200
    """Of the answer to one who may."""
    body: Callable[[], Any] = lambda: None
    audited: str = ""
    """The audit action that a change leaves."""


def token() -> Any:
    return {"token": nodes.create_join_token(actor=SYSTEM), "name": "n2"}


def scaled() -> Any:
    return {**DOCUMENT, "pools": {"prefill": {"replicas": 2}, "decode": {"replicas": 1}}}


def user(body: Any = None) -> Any:
    User.objects.create_user("vera")
    return body


def failed() -> Any:
    Engine.objects.filter(pk=ENGINE).update(state=State.FAILED)


V, O, A = Role.VIEWER, Role.OPERATOR, Role.ADMIN
TABLE = {
    "GET schema/": Rule(V),
    "GET v1/me": Rule(V),
    "GET v1/deployments": Rule(V),
    "POST v1/deployments": Rule(O, 201, lambda: {**DOCUMENT, "name": "second"}, "deployment.create"),
    "GET v1/deployments/<str:name>": Rule(V),
    "PUT v1/deployments/<str:name>": Rule(O, 200, scaled, "deployment.apply"),
    "PATCH v1/deployments/<str:name>": Rule(O, 200, lambda: {"max_model_len": 1024}, "deployment.patch"),
    "DELETE v1/deployments/<str:name>": Rule(O, 202, audited="deployment.delete"),
    "POST v1/deployments/<str:name>/scale": Rule(O, 200, lambda: {"role": "decode", "replicas": 3}, "deployment.scale"),
    "GET v1/deployments/<str:name>/engines": Rule(V),
    "POST v1/deployments/<str:name>/engines/<str:engine>/retry": Rule(O, 202, failed, "engine.retry"),
    "GET v1/deployments/<str:name>/events": Rule(V),
    "GET v1/deployments/<str:name>/revisions": Rule(V),
    "GET v1/deployments/<str:name>/engines/<str:engine>/attempts": Rule(V),
    "GET v1/deployments/<str:name>/engines/<str:engine>/logs": Rule(V),
    "GET v1/deployments/<str:name>/engines/<str:engine>/logs/follow": Rule(V),
    "GET v1/events": Rule(V),
    "GET v1/nodes": Rule(V),
    "GET v1/nodes/<str:name>": Rule(V),
    "DELETE v1/nodes/<str:name>": Rule(A, 204, audited="node.remove"),
    "POST v1/nodes/<str:name>/cordon": Rule(O, audited="node.cordon"),
    "POST v1/nodes/<str:name>/uncordon": Rule(O, audited="node.uncordon"),
    "POST v1/nodes/join": Rule(EVERYONE, 200, token, "node.join"),
    "POST v1/nodes/standing": Rule(EVERYONE, 200, lambda: {"name": "n1", "password": "p"}),
    "POST v1/join-tokens": Rule(A, 201, lambda: {"hours": 2}, "join_token.create"),
    "GET v1/keys": Rule(V),
    "POST v1/keys": Rule(A, 201, lambda: {"name": "app", "scope": "inference"}, "key.create"),
    "GET v1/keys/<str:key_id>": Rule(V),
    "PATCH v1/keys/<str:key_id>": Rule(A, 200, lambda: {"concurrency": 4}, "key.limit"),
    "POST v1/keys/<str:key_id>/rotate": Rule(A, 200, lambda: {"overlap_seconds": 60}, "key.rotate"),
    "DELETE v1/keys/<str:key_id>": Rule(A, audited="key.revoke"),
    "GET v1/users": Rule(V),
    "POST v1/users": Rule(A, 201, lambda: {"name": "new", "role": "viewer"}, "user.create"),
    "PATCH v1/users/<str:name>": Rule(A, 200, lambda: user({"role": "operator"}), "user.change"),
    "POST v1/users/<str:name>/password": Rule(A, 200, user, "user.password"),
    "GET v1/audit": Rule(V),
}


def routes(patterns: Any = urlpatterns, prefix: str = "") -> Iterator[str]:
    """Every `METHOD route` under /api/ that some view answers."""
    for pattern in patterns:
        at = prefix + str(pattern.pattern)
        if isinstance(pattern, URLResolver):
            yield from routes(pattern.url_patterns, at)
            continue
        assert isinstance(pattern, URLPattern)
        view = pattern.callback.view_class  # type: ignore[attr-defined]
        if view is not UnknownRoute:
            yield from (f"{m.upper()} {at}" for m in ("get", "post", "put", "patch", "delete") if hasattr(view, m))


def test_the_table_has_every_route_and_no_other() -> None:
    assert sorted(routes()) == sorted(TABLE)


CALLERS: dict[str, tuple[Role | None, Callable[[], Client]]] = {
    "nobody": (None, Client),
    "inference key": (None, lambda: key_client("inference")),
    "viewer key": (V, lambda: key_client("manage", V)),
    "operator key": (O, lambda: key_client("manage", O)),
    "admin key": (A, lambda: key_client("manage", A)),
    "viewer session": (V, lambda: signed_in(V)),
    "operator session": (O, lambda: signed_in(O)),
    "admin session": (A, lambda: signed_in(A)),
}


def send(client: Client, route: str, body: Any) -> Any:
    method, _, path = route.partition(" ")
    key, _ = access.create_key(actor=SYSTEM, name="victim", scope="inference")
    node = (
        "demo" if "deployments" in path else "vera" if "users" in path else "n3" if path.endswith("/uncordon") else "n1"
    )
    path = path.replace("<str:name>", node).replace("<str:engine>", ENGINE).replace("<str:key_id>", key.id)
    query = "?attempt=1&wait=0" if path.endswith("follow") else ""
    return client.generic(
        method, f"/api/{path}{query}", json.dumps(body).encode() if body else b"", content_type="application/json"
    )


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("route", TABLE)
def test_only_those_may_whom_the_table_allows(route: str, caller: str, world: Deployment) -> None:
    rule, (role, make) = TABLE[route], CALLERS[caller]
    client, body = make(), rule.body()
    before = AuditEntry.objects.count() + 1  # one row is of the key that `send` makes
    answer = send(client, route, body)
    written = list(AuditEntry.objects.all()[: AuditEntry.objects.count() - before])
    if rule.lowest is EVERYONE or (role is not None and role >= rule.lowest):
        assert answer.status_code == rule.status, answer.content
        assert [entry.action for entry in written] == ([rule.audited] if rule.audited else [])
    else:
        assert answer.status_code == (401 if caller == "nobody" else 403), answer.content
        assert answer.json()["error"]["code"] == ("unauthenticated" if caller == "nobody" else "forbidden")
        assert not written
    assert answer.headers["Cache-Control"] == "no-store"
