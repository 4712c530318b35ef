"""The two tasks of a node's queue. They hand over and return: no work, no waiting, and no truth lies in a message.

A lost, late or repeated task does no harm, because the agent reads its newest plan by itself on every step.
"""

from __future__ import annotations

from collections.abc import Callable

from celery import Celery

from controlplane.fleet.wire import APPLY_PLAN_TASK, REPORT_NOW_TASK


def register(app: Celery, *, apply_plan: Callable[[], None], report_now: Callable[[], None]) -> None:
    """Gives the app both tasks. Arguments that a newer control plane may send are ignored."""

    @app.task(name=APPLY_PLAN_TASK)
    def _apply_plan(*_: object, **__: object) -> None:
        apply_plan()

    @app.task(name=REPORT_NOW_TASK)
    def _report_now(*_: object, **__: object) -> None:
        report_now()
