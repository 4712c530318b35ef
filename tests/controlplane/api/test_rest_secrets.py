"""No answer holds a secret: neither an engine's nor a digest of any kind; a key or token is shown once, where it is made."""

from __future__ import annotations

import re

from django.test import Client

from controlplane.access import services as access
from controlplane.access.models import ApiKey
from controlplane.access.roles import SYSTEM, Role
from controlplane.deployments.models import Deployment
from controlplane.nodes import services as nodes
from controlplane.nodes.models import JoinToken, Node
from tests.controlplane.api.rest_world import ENGINE, ENGINE_SECRET, call, key_client
from tests.controlplane.api.test_rest_roles import TABLE


def test_no_get_shows_a_secret(admin: Client, world: Deployment) -> None:
    key, text = access.create_key(actor=SYSTEM, name="k", scope="manage", role=Role.ADMIN)
    token = nodes.create_join_token(actor=SYSTEM)
    joined = call(admin, "POST", "nodes/join", {"token": token, "name": "n9"}).json()
    password = re.search(r":([^:@/]+)@", joined["redis_url"])
    assert password is not None
    digests = [*ApiKey.objects.values_list("digest", flat=True), *JoinToken.objects.values_list("digest", flat=True)]
    digests += [digest for digest in Node.objects.values_list("redis_digest", flat=True) if digest]
    secrets = [ENGINE_SECRET, text, text.removeprefix(f"tdm-{key.id}-"), token, password[1], *digests]
    gets = [route.removeprefix("GET ") for route in TABLE if route.startswith("GET ")]
    assert len(gets) > 10
    for route in gets:
        name = "demo" if "deployments" in route else "n9"
        path = route.replace("<str:name>", name).replace("<str:engine>", ENGINE).replace("<str:key_id>", key.id)
        answer = admin.get(f"/api/{path}" + ("?attempt=1&wait=0" if path.endswith("follow") else ""))
        assert answer.status_code == 200, route
        found = [secret for secret in secrets if secret in answer.content.decode()]
        assert not found, route


def test_a_new_key_works_and_is_not_shown_again(admin: Client) -> None:
    made = call(admin, "POST", "keys", {"name": "ci", "scope": "manage", "role": "operator"}).json()
    client = Client(headers={"authorization": f"Bearer {made['key']}"})
    assert call(client, "GET", "me").json() == {"name": f"ci ({made['id']})", "kind": "key", "role": "operator"}
    listed = next(key for key in call(admin, "GET", "keys").json()["items"] if key["id"] == made["id"])
    assert "key" not in listed
    assert "digest" not in listed
    assert listed["role"] == "operator"
    assert listed["last_used_at"] is not None
    revoked = call(admin, "DELETE", f"keys/{made['id']}").json()
    assert revoked["revoked_at"] is not None
    assert call(client, "GET", "me").status_code == 401


def test_a_join_token_is_good_once(db: None, world: Deployment) -> None:
    client = key_client("manage", Role.ADMIN)
    token = call(client, "POST", "join-tokens", {}).json()["token"]
    first = call(Client(), "POST", "nodes/join", {"token": token, "name": "gpu-7"})
    assert first.status_code == 200
    assert first.json()["name"] == "gpu-7"
    again = call(Client(), "POST", "nodes/join", {"token": token, "name": "gpu-8"})
    unknown = call(Client(), "POST", "nodes/join", {"token": "tdj-unknown", "name": "gpu-8"})
    assert again.status_code == unknown.status_code == 403
    assert again.content == unknown.content
    assert not Node.objects.filter(name="gpu-8").exists()
