"""Who is alive, whatever is restarted, restored or silent meanwhile: nothing goes to the dead, and the living lose nothing."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import transaction
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from controlplane.deployments import services
from controlplane.deployments.loop import PAUSE
from controlplane.deployments.models import Event
from controlplane.fleet.model import Role
from controlplane.fleet.wire import NodeReport
from controlplane.nodes.presence import SILENT_AFTER
from controlplane.publish import InMemoryPublisher
from tests.controlplane.core.scripted import OPERATOR, Fleet

pytestmark = pytest.mark.django_db


class Site:
    """Node `well` reports for ever; `frail` is silenced and comes back. Notes when each wrote a report last."""

    def __init__(self) -> None:
        self.fleet = Fleet(InMemoryPublisher())
        self.wrote: dict[str, datetime] = {}
        self.copy: dict[str, NodeReport] = {}
        self.seen = 0
        for name in ("frail", "well"):
            self.fleet.join(name)
        self.run(3)
        self.fleet.deploy(pools={"aggregated": {"replicas": 2}})
        self.run(6)

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.fleet.step()
            for name, agent in self.fleet.agents.items():
                if not agent.silent:
                    self.wrote[name] = self.fleet.now
            self.check()

    def check(self) -> None:
        for event in Event.objects.filter(pk__gt=self.seen).order_by("pk"):
            self.seen = event.pk
            if event.kind == "place":
                silent = (self.fleet.now - self.wrote[event.node_name]).total_seconds()
                assert silent <= SILENT_AFTER + PAUSE, "an engine was placed on a node that is silent"
            elif event.kind == "silence":
                assert event.node_name != "well", "a node that reports lost its engine"

    def chapter(
        self, *, speaks: bool, watched: int, restarted: bool, down: float, reports_unseen: bool, redis: str
    ) -> None:
        """`frail` reports or not while the controller watches; then the controller is down, and Redis perhaps not as before."""
        frail = self.fleet.agents["frail"]
        frail.silent = not speaks
        self.run(watched)
        if restarted:
            for agent in self.fleet.agents.values():
                agent.restart()
        if redis == "copied":
            self.copy = dict(self.fleet.publisher.reports)
        self._pass(down / 4, "frail" if reports_unseen and speaks else "")
        self._pass(3 * down / 4, "well")
        if redis == "restored":
            self.fleet.publisher.reports = dict(self.copy)
        if redis == "lost":
            for kept in (self.fleet.publisher.reports, self.fleet.publisher.plans, self.fleet.publisher.snapshots):
                kept.clear()
        replicas = 2 + (Event.objects.filter(kind="scaled").count() + 1) % 5
        services.scale(actor=OPERATOR, name="demo", role=Role.AGGREGATED, replicas=replicas)
        frail.silent = True
        self.run(4)

    def _pass(self, seconds: float, reports: str) -> None:
        """Time in which the controller sees nothing."""
        self.fleet.now += timedelta(seconds=seconds)
        if reports:
            self.fleet.agents[reports].report()
            self.wrote[reports] = self.fleet.now


chapters = st.fixed_dictionaries(
    {
        "speaks": st.booleans(),
        "watched": st.sampled_from([1, 3, 20]),
        "restarted": st.booleans(),
        "down": st.sampled_from([0.0, 4.0, 8.0, 20.0, 80.0, 1800.0]),
        "reports_unseen": st.booleans(),
        "redis": st.sampled_from(["kept", "copied", "restored", "lost"]),
    }
)


@settings(
    max_examples=20, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)  # shrinking takes minutes
@given(st.lists(chapters, min_size=1, max_size=4))
def test_nothing_goes_to_the_dead_and_the_living_lose_nothing(story: list[dict[str, Any]]) -> None:
    with transaction.atomic():
        site = Site()
        for chapter in story:
            site.chapter(**chapter)
        transaction.set_rollback(True)
