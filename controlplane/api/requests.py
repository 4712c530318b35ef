"""What REST takes besides the deployment document: bodies and query parameters. Unknown fields are refused by name."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane.access.limits import BOUNDS
from controlplane.access.services import LONGEST_OVERLAP, OVERLAP
from controlplane.api.resources import ACCESS_ROLES, POOL_ROLES
from controlplane.deployments.logs import START
from controlplane.deployments.queries import EVENT_KINDS
from controlplane.fleet.spec import MAX_REPLICAS
from controlplane.fleet.wire import LOG_MAXLEN, Scope

LONGEST_POLL = 4.0
"""Seconds: below the 5 after which a Redis client gives a silent read up, and short enough to notice a new attempt soon."""
MOST_ID, MOST_ATTEMPTS = (1 << 63) - 1, (1 << 31) - 1
"""What the database's columns hold."""


class _Strict(serializers.Serializer[Any]):
    def to_internal_value(self, data: Any) -> Any:
        if unknown := sorted(set(data) - set(self.fields)):
            known = ", ".join(self.fields)
            raise serializers.ValidationError({unknown[0]: f"there is no such field; the fields are: {known}"})
        return super().to_internal_value(data)


class Scale(_Strict):
    role = serializers.ChoiceField(POOL_ROLES)
    replicas = serializers.IntegerField(min_value=0, max_value=MAX_REPLICAS)


class DryRun(serializers.Serializer[Any]):
    dry_run = serializers.BooleanField(default=False, help_text="1: answer what would change, change nothing.")


class Untrusted(serializers.Serializer[Any]):
    untrusted = serializers.BooleanField(
        default=False, help_text="1: also while it reports and runs engines; all that it stored goes too."
    )


class Page(serializers.Serializer[Any]):
    limit = serializers.IntegerField(default=50, min_value=1, max_value=500)
    before = serializers.IntegerField(
        default=None, min_value=1, max_value=MOST_ID, help_text="`next` of the page before."
    )


class EventPage(Page):
    kind = serializers.ChoiceField(
        list(EVENT_KINDS), default=None, help_text="Failures of engines, all of engines, or changes that people made."
    )
    engine = serializers.CharField(default=None, max_length=80, help_text="An engine's id.")
    text = serializers.CharField(default="", max_length=200, help_text="Words in the message, deployment or node.")


class LogTail(serializers.Serializer[Any]):
    lines = serializers.IntegerField(default=1000, min_value=1, max_value=LOG_MAXLEN)
    attempt = serializers.IntegerField(
        default=None, min_value=1, max_value=MOST_ATTEMPTS, help_text="Default: the newest."
    )


class LogFollow(serializers.Serializer[Any]):
    attempt = serializers.IntegerField(min_value=1, max_value=MOST_ATTEMPTS)
    cursor = serializers.RegexField(r"^\d{1,20}-\d{1,20}$", default=START, help_text="Of the answer before.")
    wait = serializers.FloatField(
        default=LONGEST_POLL, min_value=0, max_value=LONGEST_POLL, help_text="Seconds to wait for a new line."
    )


class Join(_Strict):
    token = serializers.CharField(max_length=200)
    name = serializers.CharField(max_length=63)
    address = serializers.CharField(
        default="", max_length=64, help_text="On which its engines will listen; default: where the request comes from."
    )
    former_password = serializers.CharField(
        default="",
        max_length=200,
        help_text="The password that the node's Redis user has now: it shows that the same node joins again.",
    )


class Standing(_Strict):
    name = serializers.CharField(max_length=63)
    password = serializers.CharField(max_length=200, help_text="The one that joining gave.")


class JoinToken(_Strict):
    hours = serializers.IntegerField(default=1, min_value=1, max_value=168)
    node = serializers.CharField(
        default="",
        max_length=63,
        help_text="The only name that it is good for, also one that is known; default: any new name.",
    )
    address = serializers.CharField(
        default="",
        max_length=64,
        help_text="Of that node's engines, where it is not the address that the node asks from.",
    )


def _limit(field: str, **more: Any) -> serializers.IntegerField:
    low, high = BOUNDS[field]
    return serializers.IntegerField(min_value=low, max_value=high, **more)


_SILENCE = "Longest wait for an engine's first byte; null: as the deployment."
_GAP = "Longest silence inside a stream; null: as the deployment."


class KeyChanges(_Strict):
    """Only what is sent is changed."""

    models = serializers.ListField(
        child=serializers.CharField(max_length=200), required=False, max_length=100, help_text="Empty: all."
    )
    expires_at = serializers.DateTimeField(required=False, allow_null=True, help_text="Null: never.")

    requests_per_minute = _limit("requests_per_minute", required=False, allow_null=True, help_text="Null: unlimited.")
    tokens_per_minute = _limit("tokens_per_minute", required=False, allow_null=True, help_text="Prompt and output.")
    concurrency = _limit("concurrency", required=False, allow_null=True, help_text="Requests at a time.")
    priority = _limit("priority", required=False, help_text="The higher is served first when engines are full.")
    silence_seconds = _limit("silence_seconds", required=False, allow_null=True, help_text=_SILENCE)
    gap_seconds = _limit("gap_seconds", required=False, allow_null=True, help_text=_GAP)


class Rotate(_Strict):
    overlap_seconds = serializers.IntegerField(
        default=OVERLAP, min_value=0, max_value=LONGEST_OVERLAP, help_text="For which the old secret still works."
    )


class NewUser(_Strict):
    name = serializers.CharField(max_length=100)
    role = serializers.ChoiceField(ACCESS_ROLES)


class UserChanges(_Strict):
    """Only what is sent is changed."""

    role = serializers.ChoiceField(ACCESS_ROLES, required=False)
    active = serializers.BooleanField(required=False, help_text="False: can no longer sign in.")


class NewKey(_Strict):
    name = serializers.CharField(max_length=100)
    scope = serializers.ChoiceField(list(Scope))
    role = serializers.ChoiceField(ACCESS_ROLES, default=None, help_text="Manage keys only; default: viewer.")
    models = serializers.ListField(child=serializers.CharField(max_length=200), default=list, max_length=100)
    expires_at = serializers.DateTimeField(default=None)
    requests_per_minute = _limit("requests_per_minute", default=None, allow_null=True, help_text="Null: unlimited.")
    tokens_per_minute = _limit("tokens_per_minute", default=None, allow_null=True, help_text="Prompt and output.")
    concurrency = _limit("concurrency", default=None, allow_null=True, help_text="Requests at a time.")
    priority = _limit("priority", default=0, help_text="The higher is served first when engines are full.")
    silence_seconds = _limit("silence_seconds", default=None, allow_null=True, help_text=_SILENCE)
    gap_seconds = _limit("gap_seconds", default=None, allow_null=True, help_text=_GAP)
