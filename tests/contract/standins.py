"""Stand-in engines as processes of their own: what tests start when they need engines that answer."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import TracebackType

import httpx

from tests.conftest import free_port
from tests.contract.pair import EnginePair

KEY = "engine-key"


class StandIn:
    """One `python -m workers.sim`, up when entered, ended by SIGTERM when left."""

    def __init__(self, role: str, *arguments: str, model: str = "stand-in") -> None:
        self.port, self.side_channel, self.events, self.replay = (free_port() for _ in range(4))
        self.url = f"http://127.0.0.1:{self.port}"
        self.argv = [
            sys.executable, "-m", "workers.sim", "--host", "127.0.0.1", "--port", str(self.port), "--role", role,
            "--served-model-name", model, "--side-channel-port", str(self.side_channel),
            "--events-port", str(self.events), "--replay-port", str(self.replay), "--startup-seconds", "0",
            "--itl-ms", "1", *arguments,
        ]  # fmt: skip
        self.client = httpx.Client(
            base_url=self.url, headers={"authorization": f"Bearer {KEY}"}, timeout=30, trust_env=False
        )

    def __enter__(self) -> StandIn:
        self.process = subprocess.Popen(self.argv, env=os.environ | {"VLLM_API_KEY": KEY}, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while True:
            try:
                self.client.get("/version")
                return self
            except httpx.TransportError:
                assert self.process.poll() is None, f"the stand-in ended with {self.process.returncode}"
                assert time.monotonic() < deadline, "the stand-in did not come up"
                time.sleep(0.02)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.client.close()
        self.process.terminate()
        self.process.wait(10)

    def faults(self, *names: str) -> None:
        self.client.post("/sim/faults", json={"faults": names}).raise_for_status()

    def metrics(self) -> dict[str, float]:
        return EnginePair(self.url, self.url, KEY, "", "", "").metrics(self.url)


def pair_of(prefill: StandIn, decode: StandIn, model: str = "stand-in") -> EnginePair:
    events, replay = (f"tcp://127.0.0.1:{port}" for port in (prefill.events, prefill.replay))
    return EnginePair(prefill.url, decode.url, KEY, model, events, replay, timeout=30)
