"""A client that keeps asking and counts what it saw: the judge of every "without losing a request" flow."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections import Counter
from typing import Any

import httpx

KINDS = ("chat", "chat-stream", "text", "text-stream", "responses", "messages")


class Load:
    """Mixed requests at a steady rate from a thread of its own. `with Load(site): …`, then read `outcomes`.

    Every request ends as one of: ok, http-<status>, reset (connection broke), truncated (a 200 whose stream or body
    did not come to its proper end), empty (a 200 without text).
    """

    def __init__(self, site: Any, *, model: str = "demo", rate: float = 24) -> None:
        self.url, self.key, self.model, self.rate = site.openai_url, site.inference_key, model, rate
        self.outcomes: Counter[str] = Counter()
        self.failures: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def lost(self) -> dict[str, int]:
        return {kind: n for kind, n in self.outcomes.items() if kind != "ok"}

    async def _run(self) -> None:
        numbers = itertools.count()
        async with (
            httpx.AsyncClient(
                timeout=60,
                limits=httpx.Limits(max_connections=None),
                headers={"Authorization": f"Bearer {self.key}", "x-api-key": self.key},
            ) as client,
            asyncio.TaskGroup() as group,
        ):
            while not self._stop.is_set():
                group.create_task(self._one(client, next(numbers)))
                await asyncio.sleep(1 / self.rate)

    async def _one(self, client: httpx.AsyncClient, number: int) -> None:
        kind = KINDS[number % len(KINDS)]
        path, body = request(kind, self.model, f"Question {number}: " + "word " * (number % 60))
        try:
            reply = await client.post(self.url + path, json=body)
            outcome = f"http-{reply.status_code}" if reply.status_code != 200 else judge(kind, reply.text)
            detail = reply.text[-300:]
        except httpx.RemoteProtocolError as error:
            outcome, detail = "truncated", repr(error)
        except httpx.HTTPError as error:
            outcome, detail = "reset", repr(error)
        self.outcomes[outcome] += 1
        if outcome != "ok":
            self.failures.append(f"{kind} #{number}: {outcome}: {detail}")


def request(kind: str, model: str, text: str) -> tuple[str, dict[str, Any]]:
    stream = {"stream": True} if kind.endswith("-stream") else {}
    if kind.startswith("chat"):
        return "/v1/chat/completions", {
            "model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 12, **stream,
        }  # fmt: skip
    if kind.startswith("text"):
        return "/v1/completions", {"model": model, "prompt": text, "max_tokens": 12, **stream}
    if kind == "responses":
        return "/v1/responses", {"model": model, "input": text, "max_output_tokens": 12}
    return "/v1/messages", {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 12}


def judge(kind: str, text: str) -> str:
    """What a 200 was worth: ok, truncated or empty."""
    if not kind.endswith("-stream"):
        try:
            body = json.loads(text)
        except ValueError:
            return "truncated"
        said = {
            "chat": lambda: body["choices"][0]["message"]["content"],
            "text": lambda: body["choices"][0]["text"],
            "responses": lambda: body["output"][-1]["content"][0]["text"],
            "messages": lambda: body["content"][0]["text"],
        }[kind]()
        return "ok" if said else "empty"
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if not lines or lines[-1] != "[DONE]":
        return "truncated"
    chunks = [json.loads(line) for line in lines[:-1]]
    if any("error" in chunk for chunk in chunks):
        return "truncated"
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    if not any(choice.get("finish_reason") for choice in choices):
        return "truncated"
    said = "".join((c.get("delta") or {}).get("content") or c.get("text") or "" for c in choices)
    return "ok" if said else "empty"
