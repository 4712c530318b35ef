"""The OpenAPI document: complete, valid, and about the same shapes as the code."""

from __future__ import annotations

import json
import re
from io import StringIO
from typing import Any

import msgspec
import pytest
from django.core.management import call_command
from django.test import Client

from controlplane.fleet.spec import DeploymentSpec
from tests.controlplane.api.test_rest_roles import TABLE


@pytest.fixture
def schema(admin: Client) -> Any:
    answer = admin.get("/api/schema/")
    assert answer.status_code == 200
    return answer.json()


def test_it_is_valid_and_made_without_a_warning() -> None:
    call_command("spectacular", "--validate", "--fail-on-warn", stdout=StringIO())


def test_every_route_is_described_with_its_answer_and_its_error(schema: Any) -> None:
    described = {
        f"{method.upper()} {path.removeprefix('/api/')}"
        for path, operations in schema["paths"].items()
        for method in operations
    }
    expected = {route.replace("<str:", "{").replace(">", "}") for route in TABLE} - {"GET schema/"}
    assert described == expected
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            responses = dict(operation["responses"])
            assert responses.pop("default")["content"]["application/json"]["schema"]["$ref"].endswith("/Error"), path
            assert set(responses) <= {"200", "201", "202", "204"}, path
            assert responses, path
            assert all(status == "204" or answer["content"] for status, answer in responses.items()), path
            has_body = method in ("put", "patch") or (
                method == "post" and not path.endswith(("cordon", "retry", "/password"))
            )
            assert ("requestBody" in operation) is has_body, (method, path)


def test_every_reference_leads_somewhere(schema: Any) -> None:
    references = set(re.findall(r"#/components/schemas/([^\"]+)\"", json.dumps(schema)))
    assert len(references) > 20
    assert references <= set(schema["components"]["schemas"])


def test_every_operation_has_a_name_of_its_own(schema: Any) -> None:
    names = [operation["operationId"] for operations in schema["paths"].values() for operation in operations.values()]
    assert len(names) == len(set(names))


def test_only_what_agents_ask_needs_no_credentials(schema: Any) -> None:
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            needs = [next(iter(way), "") for way in operation.get("security", [{}])]
            assert sorted(needs) == (
                [""] if path.endswith(("nodes/join", "nodes/standing")) else ["cookieAuth", "manageKey"]
            )


def test_the_document_is_the_spec(schema: Any) -> None:
    described = schema["components"]["schemas"]["DeploymentSpec"]
    assert set(described["properties"]) == {field.encode_name for field in msgspec.structs.fields(DeploymentSpec)}
    put = schema["paths"]["/api/v1/deployments/{name}"]["put"]["requestBody"]["content"]
    assert set(put) == {"application/json", "application/yaml"}
    assert all(form["schema"]["$ref"].endswith("/DeploymentSpec") for form in put.values())
