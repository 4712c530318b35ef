"""The web process as people run it, for browser tests: uvicorn on a port of its own, SQLite and Redis of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx

from tests.conftest import RedisServer, free_port

ROOT = Path(__file__).resolve().parents[2]
PASSWORD = "correct horse battery staple"
USERS = ("admin", "operator", "viewer")
_PREPARE = """
from django.contrib.auth.models import Group, User
for name in {users!r}:
    user = User.objects.create_user(name, password={password!r})
    user.groups.add(Group.objects.get_or_create(name=name)[0])
"""


class Web:
    """Start with `start`, then `url`. One user per role, named after it, all with `PASSWORD`."""

    def __init__(self, folder: Path, redis: RedisServer) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        self._log = folder / "web.log"
        self._environ = {
            **os.environ,
            "TANDEM_HOME": str(folder / "home"),
            "TANDEM_WEB_PORT": str(self.port),
            "TANDEM_LOG_LEVEL": "warning",
            "REDIS_URL": redis.url,
            "DJANGO_SETTINGS_MODULE": "controlplane.settings",
            "PYTHONPATH": str(ROOT),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.django("from django.core.management import call_command; call_command('migrate', verbosity=0)")
        self.django(_PREPARE.format(users=USERS, password=PASSWORD))
        self.serve()

    def serve(self) -> None:
        """Start the web process alone; the database is as it was."""
        command = [sys.executable, "-m", "controlplane.web"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self._environ,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 60
        while True:
            try:
                httpx.get(self.url + "/login/")
                return
            except httpx.TransportError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise RuntimeError(self._log.read_text()) from None
                time.sleep(0.05)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(20)
            self._process = None

    def django(self, code: str) -> str:
        """Run Python with this site's database and Redis, as another process of the control plane would; its output."""
        head = "import django; django.setup()\nfrom tests.browser import seed\n"
        run = subprocess.run(
            [sys.executable, "-c", head + code], cwd=ROOT, env=self._environ, capture_output=True, text=True
        )
        if run.returncode:
            raise RuntimeError(run.stderr)
        return run.stdout.strip()
