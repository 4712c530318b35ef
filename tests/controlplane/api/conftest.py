"""A small world to act on. What services publish stays in memory."""

from __future__ import annotations

import pytest
from django.test import Client
from django.utils import timezone

from controlplane import publish
from controlplane.access.roles import SYSTEM, Role
from controlplane.deployments import services
from controlplane.deployments.models import Attempt, Deployment, Engine
from controlplane.fleet import wire
from controlplane.nodes.models import Node
from tests.controlplane.api.rest_world import DOCUMENT, ENGINE, ENGINE_SECRET, key_client


@pytest.fixture
def world(db: None, publisher: publish.InMemoryPublisher) -> Deployment:
    """One deployment with one decode engine on one node, that has logged two lines."""
    deployment = services.create(actor=SYSTEM, document=DOCUMENT)
    node = Node.objects.create(name="n1", address="10.0.0.5", redis_digest="d1ge57" * 10)
    Engine.objects.create(
        id=ENGINE,
        deployment=deployment,
        revision=deployment.revisions.get(),
        role="decode",
        index=0,
        state="ready",
        since=timezone.now(),
        node=node,
        runtime="sim",
        secret=ENGINE_SECRET,
    )
    Attempt.objects.create(engine_id=ENGINE, number=1, node_name="n1", placed_at=timezone.now())
    Node.objects.create(name="n3", cordoned=True)
    publisher.logs[wire.log_key("n1", ENGINE, 1)] = ["first line", "second line"]
    return deployment


@pytest.fixture
def admin(db: None) -> Client:
    return key_client("manage", Role.ADMIN)
