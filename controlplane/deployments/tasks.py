"""The controller's task, and how the rest of the control plane hastens it. The beat alone suffices."""

from __future__ import annotations

import logging
from typing import Any

from celery.signals import worker_ready
from django.utils import timezone
from kombu.exceptions import OperationalError

from controlplane import publish
from controlplane.celery import app
from controlplane.deployments import loop
from controlplane.deployments.guard import Guard

log = logging.getLogger(__name__)


@app.task(name="controlplane.reconcile")
def reconcile() -> None:
    """One step of the reconcile loop."""
    loop.one_step(timezone.now(), publish.current())


@worker_ready.connect
def _guard(sender: Any, **_: Any) -> None:
    if getattr(sender, "app", None) is app:
        Guard(publish.current()).start()


def wake() -> None:
    """Ask for a step now. Never fails: when Redis is away the next beat does it."""
    try:
        reconcile.apply_async(expires=5, retry=False)
    except (OperationalError, OSError) as error:
        log.warning("reconcile was not hastened: %s", error)
