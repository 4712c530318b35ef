"""Whatever goes wrong under /api/, the answer is the one envelope, and it names the field."""

from __future__ import annotations

import logging
from typing import Any
from unittest.mock import patch

import pytest
from django.db import DataError, OperationalError
from django.test import Client

from controlplane.access import services as access
from controlplane.access.models import ApiKey
from controlplane.access.roles import Role
from controlplane.api import documents
from controlplane.deployments import services
from controlplane.deployments.models import Deployment
from controlplane.fleet.errors import Unavailable
from tests.controlplane.api.rest_world import DOCUMENT, ENGINE, call, key_client, refusal, signed_in


@pytest.mark.parametrize(
    "path", ["", "v1", "v1/", "v2/deployments", "v1/deployments/", "v1/nope", "v1/nodes/n1/reboot"]
)
@pytest.mark.parametrize("method", ["get", "post", "options", "put"])
def test_unknown_routes_are_json_404(db: None, method: str, path: str) -> None:
    assert refusal(getattr(Client(), method)(f"/api/{path}"), 404)["code"] == "not_found"


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("application/json", "{", "not valid JSON"),
        ("application/json", '{"a": NaN}', "not valid JSON"),
        ("application/json", "[1]", "a list"),
        ("application/json", '"x"', "single value"),
        ("application/json", "[" * 50_000, "not valid JSON"),
        ("application/json", b"\xff\xfe", "UTF-8"),
        ("application/json", r'{"\ud800": 1}', "half a surrogate pair"),
        ("application/yaml", r'model: "\uDC00"', "half a surrogate pair"),
        ("application/yaml", "a: [", "not valid YAML"),
        ("application/yaml", "# nothing", "is empty"),
        ("application/yaml", "a: 1\n---\nb: 2", "not valid YAML"),
        ("application/yaml", "a: &x 1\nb: *x", "aliases"),
        ("application/yaml", "name: a\nname: b", "given twice"),
        ("application/yaml", "? [a, b]\n: 1", "not valid YAML"),
        ("application/yaml", "a: !!python/object/apply:os.system [id]", "not valid YAML"),
        ("application/yaml", "[" * 5_000, "more than 20 levels"),
    ],
)
def test_malformed_bodies_are_400(admin: Client, kind: str, text: str | bytes, says: str) -> None:
    answer = admin.generic("PUT", "/api/v1/deployments/demo", text, content_type=kind)
    error = refusal(answer, 400)
    assert error["code"] == "invalid_input"
    assert says in error["message"]
    assert not Deployment.objects.exists()


def test_a_body_beyond_the_limit_is_413(admin: Client) -> None:
    text = '{"name": "' + "x" * documents.MAX_BYTES + '"}'
    answer = admin.generic("PUT", "/api/v1/deployments/demo", text, content_type="application/json")
    assert refusal(answer, 413)["code"] == "too_large"


def test_other_media_types_and_methods_are_refused(admin: Client) -> None:
    answer = admin.generic("PUT", "/api/v1/deployments/demo", "a=1", content_type="application/x-www-form-urlencoded")
    assert refusal(answer, 415)["code"] == "unsupported_media_type"
    assert refusal(call(admin, "PATCH", "nodes"), 405)["code"] == "method_not_allowed"
    assert refusal(admin.get("/api/v1/nodes", headers={"accept": "text/csv"}), 406)["code"] == "not_acceptable"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"models": "x"}, "models"),
        ({"name": "Demo!"}, "name"),
        ({"model": "smollm2"}, "model"),
        ({"pools": {"decode": {"replicas": 1}}}, "pools"),
        ({"pools": {"prefill": {"replicas": 1}, "decode": {"replicas": -1}}}, "pools.decode.replicas"),
        ({"pools": {"aggregated": {"extra_args": ["--port=1"]}}}, "pools.aggregated.extra_args"),
        ({"routing": {"mode": "magic"}}, "routing.mode"),
        ({"routing": {"affinity": "cookie"}}, "routing.affinity"),
        ({"routing": {"temperature": -1}}, "routing.temperature"),
        ({"model": "/models/a\0b"}, "model"),
        ({"pools": {"aggregated": {"extra_args": ["--seed", "1\0"]}}}, "pools.aggregated.extra_args"),
    ],
)
def test_a_bad_document_names_the_field(admin: Client, change: dict[str, Any], field: str) -> None:
    error = refusal(call(admin, "POST", "deployments", {**DOCUMENT, **change}), 400)
    assert error["field"] == field
    assert error["message"]
    assert not error["retryable"]


@pytest.mark.parametrize(
    ("method", "path", "body", "field"),
    [
        ("POST", "deployments/demo/scale", {"role": "decode", "replicas": 1, "force": True}, "force"),
        ("POST", "deployments/demo/scale", {"role": "decode"}, "replicas"),
        ("POST", "deployments/demo/scale", {"role": "decoder", "replicas": 1}, "role"),
        ("POST", "deployments/demo/scale", {"role": "aggregated", "replicas": 1}, "role"),
        ("PUT", "deployments/other", DOCUMENT, "name"),
        ("PUT", "deployments/demo?dry_run=perhaps", DOCUMENT, "dry_run"),
        ("POST", "keys", {"name": "k", "scope": "root"}, "scope"),
        ("POST", "keys", {"name": "k", "scope": "inference", "models": [1, {}]}, "models.1"),
        ("POST", "join-tokens", {"hours": 0}, "hours"),
        ("POST", "nodes/join", {"token": "x"}, "name"),
        ("GET", "audit?limit=0", None, "limit"),
        ("GET", "events?before=x", None, "before"),
        ("GET", f"deployments/demo/engines/{ENGINE}/logs?lines=many", None, "lines"),
        ("GET", f"deployments/demo/engines/{ENGINE}/logs/follow?attempt=1&wait=600", None, "wait"),
        ("GET", f"deployments/demo/engines/{ENGINE}/logs/follow?attempt=1&cursor=%24", None, "cursor"),
    ],
)
def test_a_bad_request_names_the_field(
    admin: Client, world: Deployment, method: str, path: str, body: Any, field: str
) -> None:
    error = refusal(call(admin, method, path, body), 400)
    assert error["field"] == field
    assert error["message"]


@pytest.mark.parametrize(
    "path",
    [
        "deployments/none",
        "deployments/none/engines",
        "deployments/none/revisions",
        "deployments/demo/engines/none/logs",
        "deployments/none/engines/demo-decode-0-beef/logs",
        "nodes/none",
        "deployments/demo?format=xml",
    ],
)
def test_what_is_not_there_is_404(admin: Client, world: Deployment, path: str) -> None:
    assert refusal(call(admin, "GET", path), 404)["code"] == "not_found"


@pytest.mark.parametrize("path", ["deployments/a%00b", "nodes/a%00b", "deployments/demo/engines/a%00b/logs"])
def test_a_nul_in_the_path_finds_nothing(admin: Client, world: Deployment, path: str) -> None:
    assert call(admin, "GET", path).status_code in (400, 404), "PostgreSQL refuses the value, SQLite knows no such row"


def test_an_error_is_json_also_for_one_who_asked_for_yaml(admin: Client) -> None:
    answer = admin.get("/api/v1/deployments/none", headers={"accept": "application/yaml"})
    refusal(answer, 404)


def test_bad_keys_are_refused_in_one_and_the_same_way(db: None) -> None:
    client = key_client("manage", Role.ADMIN)
    valid = str(client.defaults["HTTP_AUTHORIZATION"]).removeprefix("Bearer ")
    expired = key_client("manage", Role.ADMIN)
    ApiKey.objects.exclude(digest=access.digest_of(valid)).update(expires_at="2020-01-01T00:00Z")
    answers = [
        Client().get("/api/v1/me", headers={"authorization": text})
        for text in ("Bearer ", "Bearer tdm-x", f"Basic {valid}", valid, f"Bearer {valid}x", "Bearer \x00é")
    ]
    answers.append(expired.get("/api/v1/me"))
    assert len({answer.content for answer in answers}) == 1
    for answer in answers:
        assert refusal(answer, 401)["code"] == "unauthenticated"
        assert answer.headers["WWW-Authenticate"].startswith("Bearer")
    assert client.get("/api/v1/me").status_code == 200


def test_a_session_needs_its_csrf_token(world: Deployment) -> None:
    client = signed_in(Role.ADMIN, check_csrf=True)
    assert call(client, "GET", "deployments").status_code == 200
    assert "CSRF" in refusal(call(client, "DELETE", "deployments/demo"), 403)["message"]
    assert Deployment.objects.get().deleting_since is None


def test_what_is_away_is_503_and_worth_another_try(admin: Client, world: Deployment) -> None:
    with patch.object(services, "scale", side_effect=Unavailable("Redis cannot be reached")):
        error = refusal(call(admin, "POST", "deployments/demo/scale", {"role": "decode", "replicas": 2}), 503)
    assert (error["code"], error["retryable"]) == ("unavailable", True)
    with patch.object(services, "scale", side_effect=OperationalError("database is locked")):
        error = refusal(call(admin, "POST", "deployments/demo/scale", {"role": "decode", "replicas": 2}), 503)
    assert error["retryable"]
    assert "locked" not in error["message"]
    with patch.object(services, "scale", side_effect=OperationalError("database or disk is full")):
        error = refusal(call(admin, "POST", "deployments/demo/scale", {"role": "decode", "replicas": 2}), 503)
    assert "make room" in error["message"]


def test_what_the_database_cannot_hold_is_400(admin: Client, world: Deployment) -> None:
    with patch.object(services, "patch", side_effect=DataError("NUL")):
        error = refusal(call(admin, "PATCH", "deployments/demo", {"model": "/a"}), 400)
    assert error["code"] == "invalid_input"


def test_a_defect_is_logged_and_its_text_kept_inside(
    admin: Client, world: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        patch.object(services, "scale", side_effect=RuntimeError("secret inside")),
        caplog.at_level(logging.ERROR, "controlplane.api.errors"),
    ):
        answer = call(admin, "POST", "deployments/demo/scale", {"role": "decode", "replicas": 2})
    assert refusal(answer, 500)["code"] == "internal_error"
    assert b"secret inside" not in answer.content
    assert "secret inside" in caplog.text


def test_an_answer_tells_everything_that_is_wrong(admin: Client) -> None:
    wrong = {"name": "A B", "model": "x", "max_model_len": "many", "pools": {"aggregated": {"replicas": -1}}}
    error = refusal(call(admin, "POST", "deployments", wrong), 400)
    told = {problem["field"]: problem["message"] for problem in error["errors"]}
    assert set(told) == {"name", "model", "max_model_len", "pools.aggregated.replicas"}
    assert told[error["field"]] == error["message"]
    error = refusal(call(admin, "POST", "keys", {"scope": "nothing", "priority": 99}), 400)
    assert {problem["field"] for problem in error["errors"]} == {"name", "scope", "priority"}
