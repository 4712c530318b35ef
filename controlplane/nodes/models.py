"""Nodes, their GPUs, and the one-time tokens by which they join."""

from __future__ import annotations

from typing import ClassVar

from django.db import models


class Node(models.Model):
    """A machine with an agent. What is known of it comes from its newest report; when it came is the server's time."""

    name = models.CharField(max_length=63, unique=True)
    address = models.CharField(max_length=64, blank=True)
    """Where its engines listen, as it was when the node joined. Its reports cannot change it."""
    facts = models.JSONField(default=dict)
    """`fleet.model.NodeFacts` as builtins; empty before the first report."""
    cordoned = models.BooleanField(default=False)
    """Takes no new engines."""
    report_error = models.CharField(max_length=300, blank=True)
    """Why its newest report cannot be read; its last readable one counts then. Empty: it can be."""
    cut_off = models.CharField(max_length=300, blank=True)
    """Why its access was taken away, as `node <name> …`; empty: it was not."""
    agent = models.CharField(max_length=64, blank=True)
    report_sequence = models.BigIntegerField(default=0)
    clock_offset = models.FloatField(null=True, blank=True)
    """Seconds by which its clock is ahead of the server's, about; None: not known. Shown, and used for nothing."""
    last_report_at = models.DateTimeField(null=True, blank=True)
    plan_generation = models.BigIntegerField(default=0)
    """Newest plan published to it."""
    plan_digest = models.CharField(max_length=64, blank=True)
    """Of that plan's engines, so that an unchanged plan is not published again."""
    plan_sent_at = models.DateTimeField(null=True, blank=True)
    """When that plan was last stored in Redis; None: it was not, and is to be."""
    applied_generation = models.BigIntegerField(default=0)
    """Newest plan its agent has taken in."""
    redis_digest = models.CharField(max_length=64, blank=True)
    """SHA-256 of its Redis password, from which its Redis user can be made again."""
    joined_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering: ClassVar = ["name"]

    def __str__(self) -> str:
        return self.name


class Gpu(models.Model):
    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="gpus")
    index = models.PositiveSmallIntegerField()
    uuid = models.CharField(max_length=64)
    name = models.CharField(max_length=100)
    memory_bytes = models.BigIntegerField()
    memory_free_bytes = models.BigIntegerField()
    foreign = models.JSONField(default=list)
    """Processes Tandem did not start: pid, name, memory_bytes."""

    class Meta:
        ordering: ClassVar = ["node", "index"]
        constraints: ClassVar = [models.UniqueConstraint(fields=["node", "index"], name="gpu_once_per_node")]

    def __str__(self) -> str:
        return f"{self.node.name}:{self.index}"


class JoinToken(models.Model):
    """Lets one agent join once. Only the digest is kept."""

    digest = models.CharField(max_length=64, unique=True)
    created_by = models.CharField(max_length=150)
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
    used_at = models.DateTimeField(null=True, blank=True)
    used_by = models.CharField(max_length=63, blank=True)
    """Name of the node that joined with it."""
    node = models.CharField(max_length=63, blank=True)
    """The only name it is good for, also one that is known; empty: any new name."""
    address = models.CharField(max_length=64, blank=True)
    """Where that node's engines will listen, in an admin's word; empty: where the node asks from."""

    class Meta:
        ordering: ClassVar = ["-created_at"]

    def __str__(self) -> str:
        return self.digest[:8]
