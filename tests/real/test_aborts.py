"""A hundred clients leave a real pair at every moment: no KV stays behind, and the next answer is right. So it is when the
router itself is killed.

Seen with vLLM 0.32: an aborted request frees its KV within a quarter of a second in every state. A decode engine that got the
params and is left before it has pulled tells prefill so itself; the lease of 30 s is only for params that never reached one.
"""

from __future__ import annotations

import json
import random
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from frontend_api.flow import LEASE_SECONDS
from tests.contract.exchange import AFTER_EXPIRY, EXPIRED, FAILED
from tests.contract.pair import EnginePair
from tests.real.conftest import Site, router, snapshot
from tests.real.test_answers import ask, ask_both, chat, long_text

ABORTS = 100
LONE = 20
"""Of which each has the engines for itself."""
AT_ONCE = 6
STAGES = ("prefill", "decode", "streaming")
LEAST = 5
"""Aborts in each stage."""
SHORT, LONG = 15, 60
"""Tokens of a prompt, of which a core computes a hundred a second."""
KV_USE = "vllm:kv_cache_usage_perc"
BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting")
UNHEARD = "vllm:nixl_num_failed_notifications_total"


def begin(url: str, tokens: int) -> socket.socket:
    """Asks for a stream that would go on for minutes."""
    fields = {"stream": True, "max_tokens": 1_500, "ignore_eos": True}
    body = json.dumps(chat(long_text(tokens)) | fields).encode()
    place = urlsplit(url)
    connection = socket.create_connection((place.hostname, place.port), 60)
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    return connection


def leave(url: str, tokens: int, after: float, *, half: bool) -> None:
    """Closes the connection after so many seconds. `half`: only its own direction, and waits for the router to close."""
    with closing(begin(url, tokens)) as connection:
        until = time.monotonic() + after
        while (left := until - time.monotonic()) > 0:
            if select.select([connection], [], [], left)[0]:
                assert connection.recv(1 << 16), "the router closed the connection"
        if half:
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(20)
            while connection.recv(1 << 16):
                pass


def in_flight(url: str) -> float:
    text = httpx.get(url + "/metrics", trust_env=False).text
    lines = [line for line in text.splitlines() if line.startswith("tandem_router_in_flight")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def last(url: str, count: int) -> list[dict]:
    """What the router tells of the requests that ended last."""
    found: list[dict] = httpx.get(f"{url}/debug/decisions?limit={count}", trust_env=False).json()["decisions"]
    return found


def stage(decision: dict) -> str:
    """How far a request that streams had come when its client left."""
    assert decision["result"] == "aborted"
    return STAGES[0 if decision["prefill_seconds"] is None else 1 if decision["ttft"] is None else 2]


def awaited(condition: Callable[[], bool], seconds: float) -> float:
    """How long it took to become so."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds
        time.sleep(0.05)
    return time.monotonic() - began


@contextmanager
def nothing_stays_behind(site: Site, pair: EnginePair) -> Iterator[None]:
    """Within the lease KV use is again what it was, no leg failed that nobody cut, and text is right."""
    urls = (pair.prefill_url, pair.decode_url)

    def quiet() -> bool:
        return all(samples[name] == 0 for samples in map(pair.metrics, urls) for name in (KV_USE, *BUSY))

    awaited(quiet, LEASE_SECONDS + 5)  # what earlier tests left
    before = [pair.metrics(url) for url in urls]
    yield
    took = awaited(quiet, LEASE_SECONDS + 5)
    prefill, decode = (
        {name: value - old.get(name, 0.0) for name, value in pair.metrics(url).items()}
        for url, old in zip(urls, before, strict=True)
    )
    print(f"KV back after {took:.2f} s; leases that ran out: {prefill[EXPIRED]:.0f}")
    assert prefill[AFTER_EXPIRY] == 0, "text may be wrong"
    assert decode[FAILED] == decode[UNHEARD] == 0
    assert prefill[EXPIRED] < ABORTS // 10
    expected, answer = (reply["choices"][0]["message"] for reply in ask_both(site, chat(long_text(40))))
    assert answer["content"] == expected["content"]


def test_a_hundred_aborts_leave_no_kv_behind(site: Site, pair: EnginePair) -> None:
    dice = random.Random(3)
    url = site.router_url
    with ThreadPoolExecutor(AT_ONCE) as pool:
        with nothing_stays_behind(site, pair):
            list(pool.map(lambda _: leave(url, LONG, 1, half=False), range(AT_ONCE)))  # connected and warm
        ask(url, chat(long_text(LONG), max_tokens=1))
        usual = last(url, 1)[0]["e2e"]
        with nothing_stays_behind(site, pair):
            left = [
                pool.submit(
                    leave,
                    url,
                    dice.choice((SHORT, LONG)),
                    dice.uniform(0.001, AT_ONCE * usual),
                    half=dice.random() < 0.2,
                )
                for _ in range(ABORTS - LONE)
            ]
            for future in left:
                future.result()
            awaited(lambda: in_flight(url) == 0, 10)
            stages = Counter(map(stage, last(url, ABORTS - LONE)))
            after = usual / 2
            while stages.total() < ABORTS or min(stages[name] for name in STAGES) < LEAST:
                assert stages.total() < 3 * ABORTS, stages
                leave(url, SHORT, after, half=dice.random() < 0.2)
                awaited(lambda: in_flight(url) == 0, 10)
                stages[reached := stage(last(url, 1)[0])] += 1
                # The moment between the legs is short, and how soon it comes is the machine's affair.
                rarest = min(STAGES, key=lambda name: stages[name])
                after *= 1.12 if STAGES.index(reached) < STAGES.index(rarest) else 0.93
    print(stages)


def test_a_killed_router_leaves_no_kv_behind(site: Site, pair: EnginePair, tmp_path: Path) -> None:
    """With requests in every state: its connections end with it, and engines see that."""
    dice = random.Random(4)
    with nothing_stays_behind(site, pair):
        for _ in range(5):
            with router(snapshot(site.prefill, site.decode), tmp_path) as (url, process):
                held = []
                for _ in range(AT_ONCE):
                    held.append(begin(url, dice.choice((SHORT, LONG))))
                    time.sleep(dice.uniform(0, 0.3))
                awaited(lambda: pair.metrics(pair.decode_url)[KV_USE] > 0, 60)  # one at least streams
                process.kill()
                for connection in held:
                    connection.close()
