"""A real web process, whose state tests may prepare."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import redis

from controlplane.fleet import wire

ROOT = Path(__file__).resolve().parents[3]

_ENGINE = """
import os, django
django.setup()
from django.utils import timezone
from controlplane.deployments.models import Attempt, Deployment, Engine
from controlplane.nodes.models import Node
name, engine, role, attempt = os.environ["ENGINE"].split()
deployment = Deployment.objects.get(name=name)
values = dict(
    deployment=deployment, revision=deployment.revisions.latest("number"), role=role, index=0, state="ready",
    since=timezone.now(), node=Node.objects.get_or_create(name="n1")[0], attempt=int(attempt), secret="s",
)
row, _ = Engine.objects.update_or_create(id=engine, defaults=values)
for number in range(1, row.attempt + 1):
    Attempt.objects.get_or_create(engine=row, number=number, defaults=dict(node_name="n1", placed_at=timezone.now()))
"""


class Web:
    """The process and its state folder. It can be stopped and started again; port and state stay."""

    def __init__(self, home: Path, port: int, redis_url: str) -> None:
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        self.redis = redis.Redis.from_url(redis_url)
        self.env = {
            **os.environ,
            "TANDEM_HOME": str(home),
            "TANDEM_WEB_PORT": str(port),
            "REDIS_URL": redis_url,
            "DJANGO_SETTINGS_MODULE": "controlplane.settings",
        }
        self.env.pop("DATABASE_URL", None)
        self._log = home / "web.log"
        self._process: subprocess.Popen[bytes] | None = None

    def python(self, *arguments: str, **env: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, env=self.env | env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def start(self) -> None:
        command = [sys.executable, "-m", "controlplane.web"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, env=self.env, stdout=log, stderr=log)
        until(lambda: _answers(self.url) or self._died(), "the web process answers")

    def _died(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(self._log.read_text())
        return False

    def stop(self) -> None:
        """As a crash does it: open requests are cut."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def engine(self, deployment: str, engine: str, *, role: str = "decode", attempt: int = 1) -> None:
        """Write an engine row, as the reconcile loop does."""
        self.python("-c", _ENGINE, ENGINE=f"{deployment} {engine} {role} {attempt}")

    def log(self, engine: str, attempt: int, *lines: str) -> None:
        """Write log lines, as an agent does."""
        for line in lines:
            self.redis.xadd(wire.log_key("n1", engine, attempt), {"line": line})


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/api/v1/me", trust_env=False).status_code == 401
    except httpx.TransportError:
        return False


def until(condition: Callable[[], Any], what: str, seconds: float = 30) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)
    return found
