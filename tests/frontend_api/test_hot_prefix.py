"""A simulation in discrete events: one hot prefix, k engines that read prompts one after the other and write answers beside.

An engine has the prefix from the moment a prompt is on its way there (`kv.predict`).
"""

from __future__ import annotations

import random
from heapq import heappop, heappush
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.fleet.wire import RoutingMode, RoutingPolicy
from frontend_api.kv.evidence import Cache, Prompt
from frontend_api.routing.choice import choose
from frontend_api.routing.rates import USUAL_READ
from frontend_api.routing.view import Deployment, Engine, carrying
from tests.frontend_api.test_flow import fleet

PREFIX = 4_000
TAIL = 100
COLD = (PREFIX + TAIL) * USUAL_READ
"""Seconds in which an engine reads the prompt if it has nothing of it."""


def wait(engine: Engine) -> float:
    """What a request that has all of its prompt cached would wait there: the cost without the prompt."""
    return engine.queued * engine.read.pace + engine.in_flight * engine.step.pace


def simulate(deployment: Deployment, arrivals: list[float], answer: float) -> tuple[float, float, dict[str, int]]:
    """Requests for one prefix. Returns how far the wait at an engine that was given one was ever above the least wait, the longest
    time until a prompt was read, and who got how many."""
    engines = (*deployment.aggregated, *deployment.prefill, *deployment.decode)
    cache = Cache(deployment)
    holders: set[Engine] = {engines[0]}
    free_at = dict.fromkeys(engines, 0.0)
    served = {engine.id: 0 for engine in engines}
    numbers = count()
    events: list[tuple[float, int, carrying, Engine | None]] = []
    farthest = longest = 0.0
    for arrival in arrivals:
        while events and events[0][0] <= arrival:
            at, _, load, reader = heappop(events)
            if reader is None:
                load.release()
            else:
                load.computed()
                heappush(events, (at + answer, next(numbers), load, None))
        prompt = Prompt(cache, PREFIX + TAIL, dict.fromkeys(holders, PREFIX), {})
        choice = choose(deployment, now=arrival, prompt=prompt)
        engine = choice.decode
        assert engine is not None
        farthest = max(farthest, wait(engine) - min(wait(e) for e in engines))
        lacking = prompt.lacking(engine)
        holders.add(engine)
        load = carrying(engine, lacking).__enter__()
        free_at[engine] = max(free_at[engine], arrival) + lacking * USUAL_READ
        heappush(events, (free_at[engine], next(numbers), load, engine))
        served[engine.id] += 1
        longest = max(longest, free_at[engine] - arrival)
    for *_, load, _ in events:
        load.release()
    assert all((e.in_flight, e.queued) == (0, 0) for e in engines)
    return farthest, longest, served


def poisson(rate: float, requests: int, seed: int) -> list[float]:
    draw, now, times = random.Random(seed), 0.0, []
    for _ in range(requests):
        now += draw.expovariate(rate)
        times.append(now)
    return times


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 8), st.floats(0.1, 0.95), st.integers(0, 1_000_000), st.floats(0.1, 5.0))
def test_no_engine_waits_longer_than_the_others_by_more_than_a_cold_prompt(
    engines: int, load: float, seed: int, answer: float
) -> None:
    deployment = fleet(*(f"a{n}" for n in range(engines)), policy=RoutingPolicy(mode=RoutingMode.KV))
    rate = load * engines / (TAIL * USUAL_READ)  # of what the fleet could read if all had the prefix
    farthest, longest, served = simulate(deployment, poisson(rate, 400, seed), answer)
    assert farthest <= PREFIX * USUAL_READ + 1e-9, "the prefix is worth no longer wait than computing it takes"
    assert longest <= 3 * COLD
    assert min(served.values()) > 0 or load < 0.5


def test_a_burst_spreads_and_a_trickle_stays() -> None:
    names = [f"a{n}" for n in range(4)]
    deployment = fleet(*names, policy=RoutingPolicy(mode=RoutingMode.KV))
    _, _, served = simulate(deployment, [0.001 * n for n in range(400)], answer=2.0)
    assert min(served.values()) > 80
    deployment = fleet(*names, policy=RoutingPolicy(mode=RoutingMode.KV))
    _, _, served = simulate(deployment, [1.0 * n for n in range(100)], answer=0.5)
    assert served == {"a0": 100, "a1": 0, "a2": 0, "a3": 0}


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_a_fresh_engine_is_neither_flooded_nor_starved(factor: float) -> None:
    """Engines far from the default: the newcomer begins as one of them."""
    deployment = fleet("a0", "a1", "a2", policy=RoutingPolicy(mode=RoutingMode.KV))
    known = deployment.aggregated[:2]
    for engine in known:
        for _ in range(10):
            engine.read.learn(4_000, 4_000 * USUAL_READ * factor, 0.0)
    deployment.settle(1.0)
    counts = dict.fromkeys(["a0", "a1", "a2"], 0)
    for _ in range(300):
        choice = choose(deployment, now=1.0, prompt=Prompt(Cache(deployment), 1_000, {}, {}))
        assert choice.decode is not None
        carrying(choice.decode, 1_000).__enter__()
        counts[choice.decode.id] += 1
    assert set(counts.values()) == {100}
