"""What REST answers: one serializer per resource. None of them reads a secret or a digest.

Rows come from the queries of `deployments` and `nodes`; shapes of `fleet` are shown as they are.
"""

from __future__ import annotations

from typing import Any

import msgspec
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from controlplane.access.models import ApiKey
from controlplane.access.roles import Role as AccessRole
from controlplane.access.services import MANAGE
from controlplane.api import schema
from controlplane.fleet.lifecycle import State
from controlplane.fleet.model import Role
from controlplane.fleet.spec import document
from controlplane.fleet.status import Status
from controlplane.fleet.wire import Scope
from controlplane.nodes.presence import Presence

ACCESS_ROLES = [(role.label, role.label) for role in AccessRole]
POOL_ROLES = [(role.value, role.value) for role in Role]


class _Struct(serializers.Field[Any, Any, Any, Any]):
    """A msgspec struct as it is."""

    def to_representation(self, value: Any) -> Any:
        return msgspec.to_builtins(value, str_keys=True)


@extend_schema_field(schema.DOCUMENT)
class DocumentField(serializers.Field[Any, Any, Any, Any]):
    def to_representation(self, value: Any) -> Any:
        return document(value)


@extend_schema_field(schema.OBSERVATION)
class ObservationField(_Struct):
    pass


@extend_schema_field(schema.NODE_FACTS)
class NodeFactsField(_Struct):
    pass


class Counts(serializers.DictField):
    """Engines per pool."""

    child = serializers.IntegerField()


class ConditionResource(serializers.Serializer[Any]):
    status = serializers.ChoiceField(list(Status))
    sentence = serializers.CharField(help_text="What is, what is awaited, what happens next.")
    ready = Counts()
    wanted = Counts()


class EngineResource(serializers.Serializer[Any]):
    id = serializers.CharField(source="engine.id")
    name = serializers.CharField(help_text="Short name inside its deployment.")
    role = serializers.ChoiceField(POOL_ROLES, source="engine.role")
    state = serializers.ChoiceField(list(State))
    reason = serializers.CharField()
    since = serializers.DateTimeField()
    attempt = serializers.IntegerField(source="engine.attempt")
    revision = serializers.IntegerField(source="engine.revision.number")
    failures = serializers.IntegerField(source="engine.failures", help_text="Failed attempts in a row.")
    retry_at = serializers.DateTimeField(allow_null=True, help_text="When a failed engine is tried again.")
    node = serializers.CharField(source="node_name", allow_null=True)
    gpus = serializers.ListField(child=serializers.IntegerField(), source="engine.gpus")
    runtime = serializers.CharField(
        source="engine.runtime", help_text="sim (a stand-in: its answers are made up), cpu or gpu; empty until placed."
    )
    in_flight = serializers.IntegerField(allow_null=True, help_text="Requests now, as the routers count them.")
    pid = serializers.IntegerField(source="observation.pid", allow_null=True, help_text="Of its process on its node.")
    observation = ObservationField(help_text="What its node's agent saw last.")


class EngineList(serializers.Serializer[Any]):
    items = EngineResource(many=True)


class CacheResource(serializers.Serializer[Any]):
    state = serializers.CharField(help_text="exact, approximate, degraded or blind, by the router that knows least.")
    reasons = serializers.DictField(child=serializers.CharField(), help_text="By engine; `*`: all.")


class DeploymentResource(serializers.Serializer[Any]):
    name = serializers.CharField(source="deployment.name")
    served_name = serializers.CharField(source="deployment.served_name")
    generation = serializers.IntegerField(source="deployment.generation")
    created_at = serializers.DateTimeField(source="deployment.created_at")
    updated_at = serializers.DateTimeField(source="deployment.updated_at")
    document = DocumentField(source="spec", help_text="The intent: what PUT takes.")
    condition = ConditionResource()
    cache = CacheResource(allow_null=True, help_text="How exact cache-aware routing is; null: none asked for.")
    notices = serializers.ListField(child=serializers.CharField())
    engines = EngineResource(many=True)


class DeploymentList(serializers.Serializer[Any]):
    items = DeploymentResource(many=True)


class ChangeResource(serializers.Serializer[Any]):
    field = serializers.CharField()
    old = serializers.JSONField(allow_null=True)
    new = serializers.JSONField(allow_null=True)


class AppliedResource(serializers.Serializer[Any]):
    dry_run = serializers.BooleanField()
    created = serializers.BooleanField()
    changes = ChangeResource(many=True)
    needs_new_engines = serializers.BooleanField(help_text="The change cannot reach running engines.")
    stops = serializers.CharField(help_text="What stops answering by it, as a sentence; empty: nothing.")
    deployment = DeploymentResource(allow_null=True, help_text="Null in a dry run.")


class StopsResource(serializers.Serializer[Any]):
    """A dry run of what cannot be undone."""

    dry_run = serializers.BooleanField(default=True)
    stops = serializers.CharField(help_text="What stops by it, as a sentence; empty: nothing.")


class DeletingResource(serializers.Serializer[Any]):
    name = serializers.CharField()
    sentence = serializers.CharField()


class EventResource(serializers.Serializer[Any]):
    id = serializers.IntegerField()
    at = serializers.DateTimeField()
    deployment = serializers.CharField(source="deployment_name")
    engine = serializers.CharField(source="engine_id")
    node = serializers.CharField(source="node_name")
    kind = serializers.CharField()
    old_state = serializers.CharField()
    new_state = serializers.CharField()
    message = serializers.CharField()
    actor = serializers.CharField()


class EventPage(serializers.Serializer[Any]):
    items = EventResource(many=True)
    next = serializers.IntegerField(allow_null=True, help_text="Pass as `before` for the next page; null: the end.")


class RevisionResource(serializers.Serializer[Any]):
    number = serializers.IntegerField()
    created_at = serializers.DateTimeField()
    created_by = serializers.CharField()
    document = serializers.SerializerMethodField()

    @extend_schema_field(schema.DOCUMENT)
    def get_document(self, revision: Any) -> Any:
        return revision.spec


class RevisionList(serializers.Serializer[Any]):
    items = RevisionResource(many=True)


class AttemptResource(serializers.Serializer[Any]):
    number = serializers.IntegerField()
    node = serializers.CharField(source="node_name")
    placed_at = serializers.DateTimeField()
    ended_at = serializers.DateTimeField(allow_null=True)
    exit_code = serializers.IntegerField(allow_null=True, help_text="Negative: the signal that ended it.")
    reason = serializers.CharField()
    command = serializers.ListField(child=serializers.CharField())


class AttemptList(serializers.Serializer[Any]):
    items = AttemptResource(many=True)


class LogResource(serializers.Serializer[Any]):
    attempt = serializers.IntegerField()
    current_attempt = serializers.IntegerField(
        help_text="Higher than `attempt`: the engine has been started again since."
    )
    lines = serializers.ListField(child=serializers.CharField(trim_whitespace=False))
    times = serializers.ListField(
        child=serializers.FloatField(), help_text="When each line came, in seconds since 1970 by Redis's clock."
    )
    cursor = serializers.CharField(help_text="Pass to `follow` for what comes after these lines.")


class NodeResource(serializers.Serializer[Any]):
    name = serializers.CharField(source="node.name")
    address = serializers.CharField(source="node.address")
    status = serializers.ChoiceField(list(Presence))
    last_report_age = serializers.FloatField(
        source="age_seconds", allow_null=True, help_text="Seconds since its last report came; null: there was none."
    )
    report_error = serializers.CharField(
        source="node.report_error", help_text="Why its newest report cannot be read; empty: it can be."
    )
    clock_offset = serializers.FloatField(
        source="node.clock_offset",
        allow_null=True,
        help_text="Seconds by which its clock is ahead of the control plane's, about; null: not known. Used for nothing.",
    )
    cut_off = serializers.CharField(
        source="node.cut_off", help_text="Why its access was taken away; empty: it was not."
    )
    agent = serializers.CharField(source="node.agent", help_text="Random id of the agent process that reports.")
    cordoned = serializers.BooleanField(source="node.cordoned")
    engines = serializers.IntegerField()
    joined_at = serializers.DateTimeField(source="node.joined_at")
    facts = NodeFactsField()


class NodeList(serializers.Serializer[Any]):
    items = NodeResource(many=True)


class JoinedResource(serializers.Serializer[Any]):
    name = serializers.CharField()
    redis_url = serializers.CharField(help_text="Holds the node's own password: keep it in a file of mode 0600.")
    address = serializers.CharField(help_text="On which its engines must listen.")
    took_over = serializers.BooleanField(
        help_text="Another node had this name: its access has ended, and its engines are started again."
    )


class StandingResource(serializers.Serializer[Any]):
    replaced = serializers.BooleanField(help_text="Another machine has joined by this name since.")
    removed = serializers.BooleanField(help_text="An admin removed this node, and none has joined by its name since.")


class JoinTokenResource(serializers.Serializer[Any]):
    token = serializers.CharField(help_text="Shown this once.")
    hours = serializers.IntegerField()
    node = serializers.CharField(help_text="The only name that it is good for; empty: any new one.")
    address = serializers.CharField(help_text="Of that node's engines; empty: where it asks from.")
    join_url = serializers.CharField(help_text="For `python -m workers --join`.")
    note = serializers.CharField(help_text="Why other machines do not reach it, and the remedy; empty: they do.")


class KeyResource(serializers.Serializer[Any]):
    id = serializers.CharField()
    name = serializers.CharField()
    scope = serializers.ChoiceField(list(Scope))
    role = serializers.SerializerMethodField(help_text="Null for inference keys.")
    models = serializers.ListField(
        child=serializers.CharField(), source="models_allowed", help_text="Served names; empty: all."
    )
    requests_per_minute = serializers.IntegerField(allow_null=True, help_text="Null: unlimited.")
    tokens_per_minute = serializers.IntegerField(allow_null=True, help_text="Prompt and output; null: unlimited.")
    concurrency = serializers.IntegerField(allow_null=True, help_text="Requests at a time; null: unlimited.")
    priority = serializers.IntegerField()
    silence_seconds = serializers.IntegerField(
        allow_null=True, help_text="Longest wait for an engine's first byte; null: as the deployment."
    )
    gap_seconds = serializers.IntegerField(
        allow_null=True, help_text="Longest silence inside a stream; null: as the deployment."
    )
    created_by = serializers.CharField()
    created_at = serializers.DateTimeField()
    expires_at = serializers.DateTimeField(allow_null=True)
    revoked_at = serializers.DateTimeField(allow_null=True)
    last_used_at = serializers.DateTimeField(allow_null=True)
    old_secret_works_until = serializers.SerializerMethodField(
        help_text="After a rotation; null: only the newest works."
    )

    @extend_schema_field(serializers.DateTimeField(allow_null=True))
    def get_old_secret_works_until(self, key: ApiKey) -> str | None:
        until = key.old_secret_works_until()
        return None if until is None else serializers.DateTimeField().to_representation(until)

    @extend_schema_field(serializers.ChoiceField(ACCESS_ROLES, allow_null=True))
    def get_role(self, key: ApiKey) -> str | None:
        return AccessRole(key.role).label if key.scope == MANAGE else None


class NewKeyResource(KeyResource):
    key = serializers.CharField(help_text="The key itself, shown this once.")


class KeyList(serializers.Serializer[Any]):
    items = KeyResource(many=True)


class UserResource(serializers.Serializer[Any]):
    name = serializers.CharField(source="user.username")
    role = serializers.ChoiceField(ACCESS_ROLES, source="role.label")
    active = serializers.BooleanField(source="user.is_active", help_text="False: can no longer sign in.")
    one_time_password = serializers.BooleanField(
        source="must_choose", help_text="The password that was shown has not been replaced yet."
    )
    last_login = serializers.DateTimeField(source="user.last_login", allow_null=True)


class UserList(serializers.Serializer[Any]):
    items = UserResource(many=True)


class NewUserResource(UserResource):
    password = serializers.CharField(help_text="For one use, shown this once.")


class AuditResource(serializers.Serializer[Any]):
    id = serializers.IntegerField()
    at = serializers.DateTimeField()
    actor = serializers.CharField()
    actor_kind = serializers.CharField()
    address = serializers.CharField()
    action = serializers.CharField()
    target = serializers.CharField()
    detail = serializers.DictField()


class AuditPage(serializers.Serializer[Any]):
    items = AuditResource(many=True)
    next = serializers.IntegerField(allow_null=True, help_text="Pass as `before` for the next page; null: the end.")


class MeResource(serializers.Serializer[Any]):
    name = serializers.CharField()
    kind = serializers.ChoiceField(["user", "key"])
    role = serializers.ChoiceField(ACCESS_ROLES)
