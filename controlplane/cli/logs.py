"""`tandem logs [-f]`: the lines of one engine or of every engine of a deployment.

Following is a long poll with a cursor, one thread per engine: a broken connection is asked again from the same cursor, so
that no line is lost or shown twice; a later attempt is followed from its first line; engines that come later join in.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

from controlplane.cli.client import Client, Refused
from controlplane.fleet.errors import TandemError

RESCAN_SECONDS = 2.0
"""How often a followed deployment is looked at for new engines."""
FROM_THE_START = "0-0"
LONGEST_PAUSE = 5.0
"""Between two tries while the control plane is away."""


class Target(NamedTuple):
    deployment: str
    engine: str | None
    """Id or short name; None: all."""


def show_logs(client: Client, arguments: argparse.Namespace) -> int:
    """Raises `Refused` when there is no such engine or deployment."""
    target = _find(client, arguments.target)
    engines = _engines(client, target)
    if arguments.follow:
        return _Follower(client, target, arguments).run(engines)
    for engine in engines:
        query = {"lines": arguments.lines} | ({"attempt": arguments.attempt} if arguments.attempt else {})
        chunk = client.call("GET", *_log_path(target, engine), **query)
        for line in _shown(target, engine, chunk, arguments.times):
            print(line)
    return 0


def _shown(target: Target, engine: dict[str, Any], chunk: dict[str, Any], times: bool) -> Iterator[str]:
    """The chunk's lines as they are printed: of several engines with its name, with the times where they are asked for."""
    prefix = f"{engine['name']} | " if target.engine is None else ""
    for line, at in zip(chunk["lines"], chunk["times"], strict=True):
        yield prefix + (f"{datetime.fromtimestamp(at, UTC):%F %T} " if times else "") + line


def _find(client: Client, text: str) -> Target:
    name, _, engine = text.partition("/")
    if engine:
        return Target(name, engine)
    deployments = client.call("GET", "deployments")["items"]
    for deployment in deployments:
        if deployment["name"] == text:
            return Target(text, None)
        if any(found["id"] == text for found in deployment["engines"]):
            return Target(deployment["name"], text)
    raise Refused(f"there is no engine or deployment {text}: `tandem get deployments` shows them", status=404)


def _engines(client: Client, target: Target) -> list[dict[str, Any]]:
    items = client.call("GET", "deployments", target.deployment, "engines")["items"]
    if target.engine is None:
        return list(items)
    chosen = [engine for engine in items if target.engine in (engine["id"], engine["name"])]
    if not chosen:
        raise Refused(f"{target.deployment} has no engine {target.engine}", status=404)
    return chosen


def _log_path(target: Target, engine: dict[str, Any]) -> tuple[str, ...]:
    return "deployments", target.deployment, "engines", engine["id"], "logs"


class _Follower:
    """The threads of one `logs -f`, and the one place where they print."""

    def __init__(self, client: Client, target: Target, arguments: argparse.Namespace) -> None:
        self._client, self._target = client, target
        self._attempt: int | None = arguments.attempt
        self._lines: int = arguments.lines
        self._times: bool = arguments.times
        self._printing = threading.Lock()
        self._ended = threading.Event()
        """Set by a thread that ends, so that the main thread looks again at once."""
        self._refusal: TandemError | None = None

    def run(self, engines: list[dict[str, Any]]) -> int:
        """Until interrupted, or until nothing is left that could log: the deployment is gone, the one attempt has ended."""
        threads: dict[str, threading.Thread] = {}
        while True:
            for engine in engines:
                if engine["id"] not in threads:
                    thread = threading.Thread(target=self._follow, args=(engine,), daemon=True)
                    threads[engine["id"]] = thread
                    thread.start()
            self._ended.wait(RESCAN_SECONDS)
            self._ended.clear()
            if self._refusal is not None:
                raise self._refusal
            wanted = self._target.engine is None and self._attempt is None
            engines = self._rescan() if wanted else []
            if not engines and not any(thread.is_alive() for thread in threads.values()):
                return 0

    def _rescan(self) -> list[dict[str, Any]]:
        """The deployment's engines now; none while it cannot be asked or once it is gone."""
        try:
            return _engines(self._client, self._target)
        except TandemError:
            return []

    def _follow(self, engine: dict[str, Any]) -> None:
        try:
            self._follow_attempts(engine)
        except Refused as error:
            if error.status != 404:
                self._refusal = error
            self._remark(engine, "is gone" if error.status == 404 else "cannot be followed")
        finally:
            self._ended.set()

    def _follow_attempts(self, engine: dict[str, Any]) -> None:
        path = _log_path(self._target, engine)
        first = {"lines": self._lines} | ({"attempt": self._attempt} if self._attempt else {})
        chunk = self._ask(engine, *path, **first)
        while True:
            self._print(engine, chunk)
            attempt, cursor = chunk["attempt"], chunk["cursor"]
            if not chunk["lines"] and chunk["current_attempt"] > attempt:
                if self._attempt is not None:
                    return
                attempt, cursor = chunk["current_attempt"], FROM_THE_START
                self._remark(engine, f"attempt {attempt}")
            chunk = self._ask(engine, *path, "follow", attempt=attempt, cursor=cursor)

    def _ask(self, engine: dict[str, Any], *path: str, **query: Any) -> Any:
        """The answer, however long the control plane is away. Raises `Refused` when trying again is of no use."""
        pause = 0.25
        while True:
            try:
                return self._client.call("GET", *path, **query)
            except TandemError as error:
                if not error.retryable:
                    raise
                if pause == 0.25:
                    self._remark(engine, f"waits: {error.message}")
            threading.Event().wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _print(self, engine: dict[str, Any], chunk: dict[str, Any]) -> None:
        with self._printing:
            for line in _shown(self._target, engine, chunk, self._times):
                print(line)
            sys.stdout.flush()

    def _remark(self, engine: dict[str, Any], text: str) -> None:
        with self._printing:
            print(f"--- {engine['name']} {text}", file=sys.stderr, flush=True)
