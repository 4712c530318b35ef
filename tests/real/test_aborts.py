"""A hundred clients leave a real pair at every moment: no KV stays behind, and the next answer is right.

Seen with vLLM 0.32: an aborted request frees its KV within a quarter of a second in every state. A decode engine that got the
params and is left before it has pulled tells prefill so itself; the lease of 30 s is only for params that never reached one.
"""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx

from frontend_api.flow import LEASE_SECONDS
from tests.contract.exchange import AFTER_EXPIRY, EXPIRED, FAILED
from tests.contract.pair import EnginePair
from tests.real.conftest import Site
from tests.real.test_answers import ask, chat, long_text

ABORTS = 100
AT_ONCE = 6
KV_USE = "vllm:kv_cache_usage_perc"
BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting")


def leave(url: str, tokens: int, *, after: float, chunks: int) -> int:
    """Ask for a stream and close the connection: `after` seconds, or once `chunks` pieces have come. Returns the pieces."""
    body = json.dumps(chat(long_text(tokens), stream=True, max_tokens=100)).encode()
    place = urlsplit(url)
    with socket.create_connection((place.hostname, place.port), 60) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        connection.settimeout(120 if chunks else after)
        got = 0
        try:
            while not chunks or got < chunks:
                assert connection.recv(1 << 16), "the router closed the connection"
                got += 1
        except TimeoutError:
            assert not chunks
        return got


def in_flight(url: str) -> float:
    text = httpx.get(url + "/metrics", trust_env=False).text
    lines = [line for line in text.splitlines() if line.startswith("tandem_router_in_flight")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def awaited(condition: Callable[[], bool], seconds: float) -> float:
    """How long it took to become so."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds
        time.sleep(0.05)
    return time.monotonic() - began


def test_a_hundred_aborts_leave_no_kv_behind(site: Site, pair: EnginePair) -> None:
    dice = random.Random(3)
    urls = (pair.prefill_url, pair.decode_url)

    def quiet() -> bool:
        return all(samples[name] == 0 for samples in map(pair.metrics, urls) for name in (KV_USE, *BUSY))

    awaited(quiet, LEASE_SECONDS + 5)  # what earlier tests left
    before = [pair.metrics(url) for url in urls]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        moments = [
            *(
                {"tokens": 120, "after": dice.uniform(0.001, 0.6), "chunks": 0} for _ in range(ABORTS * 5 // 10)
            ),  # prefill
            *({"tokens": 20, "after": dice.uniform(0.1, 1.0), "chunks": 0} for _ in range(ABORTS * 3 // 10)),  # between
            *(
                {"tokens": 20, "after": 0.0, "chunks": dice.randint(2, 5)} for _ in range(ABORTS * 2 // 10)
            ),  # mid-stream
        ]
        dice.shuffle(moments)
        left = [pool.submit(leave, site.router_url, **moment) for moment in moments]
        assert len([future.result() for future in left]) == ABORTS
    awaited(lambda: in_flight(site.router_url) == 0, 1)
    took = awaited(quiet, LEASE_SECONDS + 5)
    prefill, decode = (
        {name: value - old.get(name, 0.0) for name, value in pair.metrics(url).items()}
        for url, old in zip(urls, before, strict=True)
    )
    print(f"KV back after {took:.2f} s; leases that ran out: {prefill[EXPIRED]:.0f}")
    assert prefill[AFTER_EXPIRY] == 0, "text may be wrong"
    assert decode[FAILED] == 0
    assert prefill[EXPIRED] < ABORTS // 10
    text = long_text(40)
    expected, answer = (ask(url, chat(text))["choices"][0]["message"] for url in (site.aggregated.url, site.router_url))
    assert answer["content"] == expected["content"]
