"""A running prefill and decode engine, as the contract sees them: stand-in or real, it makes no difference."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
import msgspec

PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What the first leg carries, so that its KV is kept for a remote reader."""


@dataclass
class EnginePair:
    """Handle of two engines that may hand KV over. Addresses as a client on this machine dials them."""

    prefill_url: str
    decode_url: str
    key: str
    model: str
    events: str
    """ZMQ address of the prefill engine's KV event publisher."""
    replay: str
    timeout: float = 120.0
    """Seconds that one request may take (a real engine on a CPU is slow)."""
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(headers={"authorization": f"Bearer {self.key}"}, timeout=self.timeout)

    def post(self, url: str, path: str, body: object) -> httpx.Response:
        return self.client.post(url + path, json=body)

    def ok(self, url: str, path: str, body: object) -> dict:
        reply = self.post(url, path, body)
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("application/json")
        return reply.json()

    def stream(self, url: str, path: str, body: dict) -> list[dict | str]:
        """The frames of a stream: parsed data, or the text of a frame that is not JSON. `event:` lines must repeat
        the type of their data."""
        with self.client.stream("POST", url + path, json=body | {"stream": True}) as reply:
            text = reply.read().decode()
            assert reply.status_code == 200, text
            assert reply.headers["content-type"].startswith("text/event-stream")
        frames: list[dict | str] = []
        for block in filter(None, text.split("\n\n")):
            lines = block.split("\n")
            data = next(line for line in lines if line.startswith("data: ")).removeprefix("data: ")
            frame = msgspec.json.decode(data) if data.startswith("{") else data
            if lines[0].startswith("event: ") and isinstance(frame, dict):
                assert frame["type"] == lines[0].removeprefix("event: ")
            frames.append(frame)
        return frames

    def metrics(self, url: str) -> dict[str, float]:
        """Samples by name and labels, `engine` and `model_name` left out: `name` or `name{source="x"}`."""
        samples = {}
        for line in self.client.get(url + "/metrics").text.splitlines():
            if not line.startswith("vllm:"):
                continue
            series, value = line.rsplit(" ", 1)
            name, _, labels = series.partition("{")
            kept = [p for p in labels.rstrip("}").split(",") if p and not p.startswith(("engine=", "model_name="))]
            samples[name + ("{" + ",".join(kept) + "}" if kept else "")] = float(value)
        return samples

    def grown(self, url: str, before: dict[str, float], awaited: str | None = None) -> dict[str, float]:
        """What rose since `before`. A real engine's connector figures follow its answers: `awaited` names one that
        shall have risen, if it does within five seconds."""
        deadline = time.monotonic() + 5
        while True:
            grown = {name: value - before.get(name, 0.0) for name, value in self.metrics(url).items()}
            if awaited is None or grown[awaited] > 0 or time.monotonic() > deadline:
                return grown
            time.sleep(0.02)

    def nudge(self) -> None:
        """Something to do for both engines: an idle one puts off notices and figures until its next step."""
        for url in (self.decode_url, self.prefill_url):
            self.ok(url, "/v1/completions", {"model": self.model, "prompt": "Red,", "max_tokens": 1})

    def settled(
        self, url: str, condition: Callable[[dict[str, float]], bool], seconds: float = 5.0
    ) -> dict[str, float]:
        """The engine's metrics once they are so; fails after `seconds`."""
        deadline = time.monotonic() + seconds
        while not condition(samples := self.metrics(url)):
            assert time.monotonic() < deadline, samples
            time.sleep(0.02)
        return samples


def fresh_text(words: int) -> str:
    """A text that no engine has seen before, two to four tokens a word."""
    return " ".join(secrets.token_hex(2) for _ in range(words))
