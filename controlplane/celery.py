"""The controller's Celery app: reconcile on a beat, hastened by changes. The beat alone suffices."""

from __future__ import annotations

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")

from controlplane.fleet import config
from controlplane.fleet.addresses import broker_url
from controlplane.publish import DEFAULT_REDIS

RECONCILE_EVERY = 1.0

app = Celery("tandem")
app.conf.update(
    broker_url=broker_url(config.load().redis_url or DEFAULT_REDIS),
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    broker_transport_options={
        "global_keyprefix": "tandem:control:",
        "socket_keepalive": True,
        "socket_connect_timeout": 3,
        "max_retries": 0,  # of a sender only: a web request never waits for Redis, the beat comes anyway
    },
    task_default_queue="control",
    task_ignore_result=True,
    task_serializer="json",
    accept_content=["json"],
    worker_enable_remote_control=False,
    worker_send_task_events=False,
    worker_hijack_root_logger=False,
    timezone="UTC",
    beat_schedule={
        "reconcile": {
            "task": "controlplane.reconcile",
            "schedule": RECONCILE_EVERY,
            "options": {"expires": 5},
        },
    },
)
app.autodiscover_tasks(["controlplane.deployments"])
