"""Keeps one node from filling the Redis that all share: measures what each has there, and ends the access of one that took too much.

A thread of the controller's process, which needs no write to Redis to begin its work: when Redis is full, messages no longer pass.
"""

from __future__ import annotations

import logging
import threading
import time

from django.db import close_old_connections

from controlplane.deployments import node_events
from controlplane.deployments.models import Engine
from controlplane.fleet import wire
from controlplane.fleet.errors import Unavailable
from controlplane.fleet.lifecycle import HOLDS_NODE
from controlplane.nodes import services
from controlplane.nodes.allowance import judge
from controlplane.publish import Publisher

log = logging.getLogger(__name__)

LOOK_SECONDS, LOOK_RARELY_SECONDS = 1.0, 10.0
"""Between looks at how full Redis is, and between measurements of all nodes while it is not full."""
FULL = 0.25
"""Share of its memory from which on all nodes are measured at each look."""
FULL_BYTES = 512 << 20
"""The same where no `maxmemory` is set."""


def look(publisher: Publisher) -> list[str]:
    """Measure all nodes; end the access of those that took too much. Returns their names. Raises `Unavailable`."""
    found = publisher.footprints()
    current: dict[str, set[str]] = {}
    placed = Engine.objects.filter(state__in=[state.value for state in HOLDS_NODE], node__name__in=found)
    for engine, attempt, node in placed.values_list("pk", "attempt", "node__name"):
        key = wire.log_key(node, engine, attempt).removeprefix(wire.node_prefix(node))
        current.setdefault(node, set()).add(key)
    ended = []
    for name, footprint in found.items():
        logs = current.get(name, set())
        verdict = judge(footprint, engines=len(logs), current=logs)
        if verdict.cut:
            services.cut_off(name=name, why=verdict.cut)
            node_events.tell_cut_off(name, verdict.cut)
            ended.append(name)
        elif verdict.drop:
            log.info(
                "node %s: %d old logs are dropped, as it has more in Redis than its share", name, len(verdict.drop)
            )
            publisher.drop_keys(name, verdict.drop)
    return ended


class Guard(threading.Thread):
    """Looks for as long as the process lives."""

    def __init__(self, publisher: Publisher) -> None:
        super().__init__(name="guard", daemon=True)
        self._publisher = publisher
        self._measured = 0.0

    def run(self) -> None:
        while True:
            try:
                self.step()
            except Unavailable as error:
                log.debug("Redis was not measured: %s", error)
            except Exception:
                log.exception("nodes were not measured")
            finally:
                close_old_connections()
            time.sleep(LOOK_SECONDS)

    def step(self) -> None:
        used, most = self._publisher.memory()
        if used > (FULL * most if most else FULL_BYTES) or time.monotonic() - self._measured >= LOOK_RARELY_SECONDS:
            look(self._publisher)
            self._measured = time.monotonic()
