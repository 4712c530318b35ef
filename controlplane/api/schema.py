"""What OpenAPI cannot read off the views: the shapes of `fleet` (kept there, once) and the error envelope of every route."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from controlplane.fleet.model import NodeFacts, Observation
from controlplane.fleet.spec import DeploymentSpec

_AT: Final = "#/components/schemas/"
DOCUMENT: Final = {"$ref": _AT + "DeploymentSpec"}
CHANGES: Final = {"$ref": _AT + "DeploymentChanges"}
NODE_FACTS: Final = {"oneOf": [{"$ref": _AT + "NodeFacts"}, {"type": "null"}]}
OBSERVATION: Final = {"oneOf": [{"$ref": _AT + "Observation"}, {"type": "null"}]}

_ERROR: Final = {
    "type": "object",
    "description": "What is wrong, which field is to blame, and whether trying the same again may help.",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "code": {"type": "string"},
                "message": {"type": "string"},
                "field": {"type": ["string", "null"]},
                "retryable": {"type": "boolean"},
                "errors": {
                    "type": "array",
                    "description": "Everything that is wrong with an input (400); message and field are the first of them.",
                    "items": {
                        "type": "object",
                        "properties": {"field": {"type": ["string", "null"]}, "message": {"type": "string"}},
                        "required": ["field", "message"],
                    },
                },
                "generation": {"type": "integer", "description": "Of the deployment that changed meanwhile (409)."},
            },
            "required": ["code", "message", "field", "retryable"],
        }
    },
    "required": ["error"],
}


def _fleet_components() -> dict[str, Any]:
    _, components = msgspec.json.schema_components(
        (DeploymentSpec, NodeFacts, Observation), ref_template=_AT + "{name}"
    )
    spec = components["DeploymentSpec"]
    components["DeploymentChanges"] = {
        **spec,
        "title": "DeploymentChanges",
        "description": "The fields of a deployment that shall change; objects are merged, everything else is replaced.",
        "required": [],
    }
    return components


def complete(result: dict[str, Any], generator: Any, request: Any, public: bool) -> dict[str, Any]:
    """Post-processing hook of drf-spectacular."""
    schemas = result["components"].setdefault("schemas", {})
    schemas.update(_fleet_components(), Error=_ERROR)
    failure = {
        "description": "Refused or failed.",
        "content": {"application/json": {"schema": {"$ref": _AT + "Error"}}},
    }
    for path in result["paths"].values():
        for operation in path.values():
            operation["responses"]["default"] = failure
    return result
