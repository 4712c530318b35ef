"""Intent (Deployment, Revision), state (Engine, Attempt), history (Event), and the reconcile loop's lease."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import models

from controlplane.fleet.lifecycle import State
from controlplane.fleet.model import Role
from controlplane.nodes.models import Node


class Deployment(models.Model):
    """One served model as the user wants it. Written by `services` alone."""

    name = models.CharField(max_length=40, unique=True)
    served_name = models.CharField(max_length=200)
    """What clients send as `model`; unique among deployments that are not being deleted."""
    intent = models.JSONField()
    """`fleet.spec.document` of the wanted DeploymentSpec, replicas and routing included."""
    generation = models.PositiveIntegerField(default=1)
    """Rises by one with every change of the intent."""
    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True)
    deleting_since = models.DateTimeField(null=True, blank=True)
    """Set by delete; the row goes when its last engine has ended."""

    class Meta:
        ordering: ClassVar = ["name"]
        constraints: ClassVar = [
            models.UniqueConstraint(
                fields=["served_name"], condition=models.Q(deleting_since=None), name="served_name_once_among_active"
            )
        ]

    def __str__(self) -> str:
        return self.name


class Revision(models.Model):
    """An immutable spec that engines are started from."""

    deployment = models.ForeignKey(Deployment, on_delete=models.CASCADE, related_name="revisions")
    number = models.PositiveIntegerField()
    spec = models.JSONField()
    """`fleet.spec.document` of the spec's engine part."""
    created_at = models.DateTimeField(auto_now_add=True)
    created_by = models.CharField(max_length=150)

    class Meta:
        ordering: ClassVar = ["deployment", "-number"]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["deployment", "number"], name="revision_number_once_per_deployment")
        ]

    def __str__(self) -> str:
        return f"{self.deployment.name} r{self.number}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Raises `TypeError` on any change of a stored revision."""
        if self.pk is not None:
            raise TypeError("a revision never changes: make a new one")
        super().save(*args, **kwargs)


class Engine(models.Model):
    """One replica's state. Written by `loop` alone, but for `retry_asked`, which is intent."""

    id = models.CharField(primary_key=True, max_length=80)
    """`<deployment>-<role>-<index>-<4 hex>`, unique for ever."""
    deployment = models.ForeignKey(Deployment, on_delete=models.CASCADE, related_name="engines")
    revision = models.ForeignKey(Revision, on_delete=models.PROTECT, related_name="engines")
    role = models.CharField(max_length=16, choices=[(r.value, r.value) for r in Role])
    index = models.PositiveIntegerField()
    state = models.CharField(
        max_length=16, default=State.PENDING.value, choices=[(s.value, s.value) for s in State], db_index=True
    )
    reason = models.TextField(blank=True)
    """One sentence: why it is in this state, or what it does now."""
    since = models.DateTimeField()
    attempt = models.PositiveIntegerField(default=1)
    failures = models.PositiveIntegerField(default=0)
    """Failed attempts in a row; 0 after it has been ready for a while."""
    retry_asked = models.PositiveIntegerField(null=True, blank=True)
    """The failed attempt after which somebody asked to try again at once. Written by `services`, followed by `loop`."""
    node = models.ForeignKey(Node, null=True, blank=True, on_delete=models.SET_NULL, related_name="engines")
    gpus = models.JSONField(default=list)
    """GPU indexes on its node (kept, like the node, until it is placed anew)."""
    runtime = models.CharField(max_length=8, blank=True)
    """sim, cpu or gpu, chosen when placed."""
    memory_fraction = models.FloatField(null=True, blank=True)
    """Chosen when placed (GPU only)."""
    secret = models.CharField(max_length=64)
    """The engine's own API key; never shown, never logged."""
    observation = models.JSONField(null=True, blank=True)
    """Newest `fleet.model.Observation` of this attempt as builtins."""
    ready_at = models.DateTimeField(null=True, blank=True)
    """When this attempt first became ready; None: it never was."""
    left_version = models.BigIntegerField(null=True, blank=True)
    """First snapshot version without it, set when it drains."""
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering: ClassVar = ["deployment", "role", "index", "created_at"]

    def __str__(self) -> str:
        return self.id

    @property
    def name(self) -> str:
        """Short name inside its deployment: `decode-0`."""
        return f"{self.role}-{self.index}"


class Moved(models.Model):
    """KV that engine processes which have ended had received, so that a deployment's totals never fall. Written by `loop`
    alone."""

    deployment = models.OneToOneField(Deployment, on_delete=models.CASCADE, primary_key=True, related_name="moved")
    bytes = models.BigIntegerField(default=0)
    transfers = models.BigIntegerField(default=0)
    failures = models.BigIntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.deployment.name}: {self.bytes} B"


class Attempt(models.Model):
    """One process of an engine, kept after its end. Its log is under `wire.log_key(node, engine, number)`."""

    engine = models.ForeignKey(Engine, on_delete=models.CASCADE, related_name="attempts")
    number = models.PositiveIntegerField()
    node_name = models.CharField(max_length=63)
    placed_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True, blank=True)
    exit_code = models.IntegerField(null=True, blank=True)
    reason = models.TextField(blank=True)
    command = models.JSONField(default=list)

    class Meta:
        ordering: ClassVar = ["engine", "-number"]
        constraints: ClassVar = [models.UniqueConstraint(fields=["engine", "number"], name="attempt_once_per_engine")]

    def __str__(self) -> str:
        return f"{self.engine_id} #{self.number}"


class Event(models.Model):
    """History and outbox: one row for every change of intent or state."""

    at = models.DateTimeField(auto_now_add=True, db_index=True)
    deployment_name = models.CharField(max_length=40, db_index=True, blank=True)
    engine_id = models.CharField(max_length=80, blank=True, db_index=True)
    node_name = models.CharField(max_length=63, blank=True)
    kind = models.CharField(max_length=32)
    """A lifecycle event, or created, scaled, changed, deleting, deleted."""
    old_state = models.CharField(max_length=16, blank=True)
    new_state = models.CharField(max_length=16, blank=True)
    message = models.TextField()
    actor = models.CharField(max_length=150)
    """Who caused it: a user, a key's name, or tandem."""

    class Meta:
        ordering: ClassVar = ["-at", "-id"]

    def __str__(self) -> str:
        return f"{self.at:%F %T} {self.deployment_name} {self.message}"


class Lease(models.Model):
    """Who may run a loop now (taken by a conditional update, never waited for), and how steadily the loop has run."""

    name = models.CharField(primary_key=True, max_length=32)
    holder = models.CharField(max_length=64, blank=True)
    until = models.DateTimeField(null=True, blank=True)
    stepped_at = models.DateTimeField(null=True, blank=True)
    """The last whole step."""
    resumed_at = models.DateTimeField(null=True, blank=True)
    """The first step after the last pause: nothing is lost and no limit passes shortly after it."""

    def __str__(self) -> str:
        return f"{self.name}: {self.holder}"


class Published(models.Model):
    """What was last published under a name (`snapshot`). The version rises only when the content changes."""

    name = models.CharField(primary_key=True, max_length=32)
    version = models.BigIntegerField(default=0)
    digest = models.CharField(max_length=64, blank=True)

    def __str__(self) -> str:
        return f"{self.name} v{self.version}"
