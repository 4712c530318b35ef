"""Deployments over REST: the document goes in and comes out the same, changes are guarded by the generation."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from django.test import Client

from controlplane.access import services as access
from controlplane.access.models import AuditEntry
from controlplane.access.roles import SYSTEM
from controlplane.deployments.models import Deployment, Event
from controlplane.nodes.models import Node
from tests.controlplane.api.rest_world import DOCUMENT, ENGINE, call, refusal


def scaled(prefill: int, decode: int) -> dict[str, Any]:
    return {**DOCUMENT, "pools": {"prefill": {"replicas": prefill}, "decode": {"replicas": decode}}}


def test_what_cannot_be_placed_is_accepted_and_says_what_it_waits_for(admin: Client) -> None:
    answer = call(admin, "POST", "deployments", DOCUMENT)
    assert answer.status_code == 201
    body = answer.json()
    assert body["condition"]["status"] in ("waiting", "starting")
    assert body["condition"]["sentence"]
    assert body["condition"]["wanted"] == {"prefill": 1, "decode": 1}
    assert body["condition"]["ready"] == {"prefill": 0, "decode": 0}


def test_a_taken_name_is_a_conflict(admin: Client, world: Deployment) -> None:
    assert refusal(call(admin, "POST", "deployments", DOCUMENT), 409)["code"] == "conflict"


def test_yaml_that_comes_out_goes_in_unchanged(admin: Client, world: Deployment) -> None:
    exported = admin.get("/api/v1/deployments/demo?format=yaml")
    assert exported.headers["Content-Type"].startswith("application/yaml")
    assert exported.content == admin.get("/api/v1/deployments/demo", headers={"accept": "application/yaml"}).content
    again = admin.generic("PUT", "/api/v1/deployments/demo", exported.content, content_type="application/yaml")
    assert again.status_code == 200
    assert (again.json()["created"], again.json()["changes"]) == (False, [])
    assert exported.headers["ETag"] == again.headers["ETag"] == '"1"'
    document = yaml.safe_load(exported.content)
    assert document == call(admin, "GET", "deployments/demo").json()["document"]
    copy = yaml.safe_dump({**document, "name": "copy", "served_name": "copy"})
    created = admin.generic("PUT", "/api/v1/deployments/copy", copy, content_type="application/yaml")
    assert created.status_code == 201


def test_put_creates_then_changes_then_leaves_alone(admin: Client) -> None:
    created = call(admin, "PUT", "deployments/demo", DOCUMENT)
    assert (created.status_code, created.json()["created"]) == (201, True)
    changed = call(admin, "PUT", "deployments/demo", scaled(1, 4))
    assert changed.status_code == 200
    assert changed.json()["changes"] == [{"field": "pools.decode.replicas", "old": 1, "new": 4}]
    assert changed.json()["needs_new_engines"] is False
    assert changed.json()["deployment"]["generation"] == 2
    events = Event.objects.count()
    same = call(admin, "PUT", "deployments/demo", scaled(1, 4))
    assert same.json()["changes"] == []
    assert same.json()["deployment"]["generation"] == 2
    assert Event.objects.count() == events


def test_the_name_may_be_left_to_the_url(admin: Client) -> None:
    document = {key: value for key, value in DOCUMENT.items() if key != "name"}
    assert call(admin, "PUT", "deployments/demo", document).status_code == 201


def test_a_dry_run_tells_and_changes_nothing(admin: Client, world: Deployment) -> None:
    before = (AuditEntry.objects.count(), Event.objects.count())
    answer = call(admin, "PUT", "deployments/demo?dry_run=1", {**scaled(2, 1), "max_model_len": 512})
    assert answer.status_code == 200
    body = answer.json()
    assert body["dry_run"]
    assert body["needs_new_engines"]
    assert body["deployment"] is None
    assert {change["field"] for change in body["changes"]} == {"pools.prefill.replicas", "max_model_len"}
    created = call(admin, "PUT", "deployments/fresh?dry_run=1", {**DOCUMENT, "name": "fresh"})
    assert (created.status_code, created.json()["created"]) == (200, True)
    assert Deployment.objects.get().generation == 1
    assert (AuditEntry.objects.count(), Event.objects.count()) == before


@pytest.mark.parametrize(
    ("method", "path", "body", "says"),
    [
        ("POST", "deployments/demo/scale", {"role": "decode", "replicas": 0}, "until decode is scaled up again"),
        ("POST", "deployments/demo/scale", {"role": "prefill", "replicas": 0}, ""),
        ("PATCH", "deployments/demo", {"pools": {"decode": {"replicas": 0}}}, "until decode is scaled up again"),
        ("PATCH", "deployments/demo", {"max_model_len": 512}, "until the first new engine is ready"),
        ("PATCH", "deployments/demo", {"routing": {"mode": "random"}}, ""),
        ("PUT", "deployments/demo", scaled(1, 0), "until decode is scaled up again"),
        ("DELETE", "deployments/demo", None, "Nobody will answer requests for demo any more"),
        ("DELETE", "nodes/n1", None, "demo until its engines run on another node"),
        ("DELETE", "keys/KEY", None, "It is the last key that opens the endpoint"),
    ],
)
def test_a_dry_run_says_what_would_stop(
    admin: Client, world: Deployment, method: str, path: str, body: Any, says: str
) -> None:
    key, _ = access.create_key(actor=SYSTEM, name="app", scope="inference", models=["demo"])
    answer = call(admin, method, f"{path.replace('KEY', key.pk)}?dry_run=1", body)
    assert answer.status_code == 200, answer.content
    stops = answer.json()["stops"]
    assert says in stops if says else stops == ""
    assert (Deployment.objects.get().generation, Deployment.objects.get().deleting_since) == (1, None)
    assert Node.objects.exists()
    assert access.get_key(key.pk).works()


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "deployments/demo", scaled(1, 2)),
        ("PUT", "deployments/demo?dry_run=1", scaled(1, 2)),
        ("PATCH", "deployments/demo", {"max_model_len": 512}),
        ("POST", "deployments/demo/scale", {"role": "decode", "replicas": 2}),
    ],
)
def test_a_change_meant_for_another_generation_is_a_conflict_that_tells_the_present_one(
    admin: Client, world: Deployment, method: str, path: str, body: Any
) -> None:
    call(admin, "PATCH", "deployments/demo", {"block_size": 32})
    error = refusal(call(admin, method, path, body, **{"if-match": '"1"'}), 409)
    assert error["generation"] == 2
    assert Deployment.objects.get().generation == 2
    assert call(admin, method, path, body, **{"if-match": '"2"'}).status_code == 200
    assert refusal(call(admin, method, path, body, **{"if-match": "new"}), 400)["field"] == "If-Match"


def test_patch_merges_and_scale_touches_one_pool(admin: Client, world: Deployment) -> None:
    patched = call(admin, "PATCH", "deployments/demo", {"pools": {"prefill": {"replicas": 3}}}).json()
    assert patched["document"]["pools"] == {"prefill": {"replicas": 3}, "decode": {"replicas": 1}}
    body = call(admin, "POST", "deployments/demo/scale", {"role": "decode", "replicas": 0}).json()
    assert body["condition"]["wanted"] == {"prefill": 3, "decode": 0}
    assert body["generation"] == 3


def test_deleting_is_accepted_and_shown(admin: Client, world: Deployment) -> None:
    answer = call(admin, "DELETE", "deployments/demo")
    assert answer.status_code == 202
    assert answer.json()["name"] == "demo"
    assert call(admin, "GET", "deployments/demo").json()["condition"]["status"] == "deleting"


def test_engines_revisions_and_logs(admin: Client, world: Deployment) -> None:
    (engine,) = call(admin, "GET", "deployments/demo/engines").json()["items"]
    assert (engine["id"], engine["name"], engine["state"], engine["node"]) == (ENGINE, "decode-0", "ready", "n1")
    (revision,) = call(admin, "GET", "deployments/demo/revisions").json()["items"]
    assert revision["number"] == 1
    assert revision["document"]["model"] == DOCUMENT["model"]
    tail = call(admin, "GET", f"deployments/demo/engines/{ENGINE}/logs?lines=1").json()
    assert (tail["attempt"], tail["current_attempt"], tail["lines"]) == (1, 1, ["second line"])
    path = f"deployments/demo/engines/{ENGINE}/logs/follow?attempt=1&wait=0"
    assert call(admin, "GET", path).json()["lines"] == ["first line", "second line"]
    assert call(admin, "GET", f"{path}&cursor={tail['cursor']}").json()["lines"] == []


def test_events_and_audit_come_in_pages_without_gap_or_repeat(admin: Client, world: Deployment) -> None:
    for replicas in range(2, 9):
        call(admin, "POST", "deployments/demo/scale", {"role": "decode", "replicas": replicas})
    for path in ("deployments/demo/events", "events", "audit"):
        whole = call(admin, "GET", f"{path}?limit=500").json()
        assert whole["next"] is None
        seen: list[Any] = []
        before = ""
        while True:
            page = call(admin, "GET", f"{path}?limit=3{before}").json()
            seen += page["items"]
            if page["next"] is None:
                break
            before = f"&before={page['next']}"
        assert seen == whole["items"]
        assert len({item["id"] for item in seen}) == len(seen) >= 8
