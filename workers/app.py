"""The agent's Celery worker: one queue, one Redis user, JSON only, nothing broadcast.

It runs in a thread of its own and only hastens the loop: while it is down the node goes on, a second or two slower.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from celery import Celery
from celery.worker import state
from kombu.transport.redis import Channel

from controlplane.fleet.addresses import broker_url
from controlplane.fleet.wire import node_prefix, queue_name
from workers.tasks import register

log = logging.getLogger(__name__)

_RESTART_AFTER = 5.0


def make_app(node: str, redis_url: str) -> Celery:
    """A Celery app that touches only keys under the node's own prefix."""
    app = Celery("workers", broker=broker_url(redis_url), set_as_current=False)
    app.conf.update(
        task_default_queue=queue_name(node),
        broker_transport_options={
            "global_keyprefix": node_prefix(node),
            "ack_emulation": False,  # its lock is a script, and a lost wake-up costs a second: the node may run no scripts
            "socket_connect_timeout": 5,
            "socket_keepalive": True,
        },
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        task_serializer="json",
        accept_content=["json"],
        task_ignore_result=True,
        task_store_errors_even_if_ignored=False,
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        worker_hijack_root_logger=False,
    )
    return app


# What was not done when a channel closes is let go: putting it back needs rights that the node has not, and kombu would then dump
# it into a file.
Channel.do_restore = False


class WakeWorker:
    """Consumes the node's queue in a daemon thread, for as long as the process lives."""

    def __init__(self, node: str, redis_url: str, wake: Callable[[], None], report_now: Callable[[], None]) -> None:
        self._app = make_app(node, redis_url)
        register(self._app, apply_plan=wake, report_now=report_now)
        self._thread = threading.Thread(target=self._run, name="celery", daemon=True)

    def start(self) -> None:
        state.should_stop = None
        self._thread.start()

    def stop(self) -> None:
        """Asks it to end and waits a little: a worker that still looks for its broker ends with the process."""
        state.should_stop = 0
        self._thread.join(3)

    def _run(self) -> None:
        while state.should_stop is None:
            try:
                self._app.WorkController(
                    app=self._app,
                    pool="threads",
                    concurrency=1,
                    without_gossip=True,
                    without_mingle=True,
                    without_heartbeat=True,
                    task_events=False,
                    quiet=True,
                ).start()
            except Exception:
                log.exception("The node's Celery worker failed; it starts again in %d s.", _RESTART_AFTER)
            if state.should_stop is None:
                time.sleep(_RESTART_AFTER)
