"""Sessions stay together, alike in every router, and never drown an engine; temperature spreads what is to be spread."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from math import exp
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.fleet.wire import Disaggregate, RoutingMode, RoutingPolicy
from frontend_api.formats.openai import ENDPOINTS, read_request, user_of
from frontend_api.routing.choice import SESSION_SLACK, choose
from frontend_api.routing.reason import Reason
from frontend_api.routing.view import Deployment, carrying
from tests.frontend_api.test_flow import fleet
from tests.frontend_api.test_routing import asked

ENGINES = tuple(f"a{n}" for n in range(8))
SESSIONS = [b"session-%d" % n for n in range(400)]
ORDERS = [RoutingMode.LEAST_LOAD, RoutingMode.ROUND_ROBIN, RoutingMode.RANDOM]


def homes(deployment: Deployment) -> dict[bytes, str]:
    found = {}
    for session in SESSIONS:
        choice = choose(deployment, now=0.0, session=session)
        assert choice.decode is not None
        assert choice.reason is Reason.AFFINITY
        found[session] = choice.decode.id
    return found


@pytest.mark.parametrize("mode", ORDERS)
def test_a_session_has_its_engine_and_sessions_spread_evenly(mode: RoutingMode) -> None:
    deployment = fleet(*ENGINES, policy=RoutingPolicy(mode=mode))
    found = homes(deployment)
    assert homes(deployment) == found
    assert homes(fleet(*reversed(ENGINES))) == found, "the order of the snapshot does not matter"
    counts = Counter(found.values())
    assert 0.5 * 50 < min(counts.values()) <= max(counts.values()) < 1.6 * 50


def test_another_process_finds_the_same_engine() -> None:
    program = (
        "from tests.frontend_api.test_sessions import *\n"
        "print(*(choose(fleet(*ENGINES), now=0.0, session=s).decode.id for s in SESSIONS[:50]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [*homes(fleet(*ENGINES)).values()][:50]


def test_an_engine_that_leaves_moves_its_own_sessions_and_one_that_comes_takes_only_its_own() -> None:
    before = homes(fleet(*ENGINES))
    after = homes(fleet(*ENGINES[:-1]))
    assert all(after[session] == engine for session, engine in before.items() if engine != "a7")
    moved = Counter(after[session] for session, engine in before.items() if engine == "a7")
    assert len(moved) >= 5, "they spread over the others"


def test_an_engine_that_is_avoided_or_down_gives_its_sessions_away_for_so_long() -> None:
    deployment = fleet(*ENGINES)
    session = SESSIONS[0]
    home = choose(deployment, now=0.0, session=session).decode
    assert home is not None
    other = choose(deployment, now=0.0, session=session, avoid={home}).decode
    home.failed(0.0, hangs=False)
    assert choose(deployment, now=0.0, session=session).decode is other is not home
    home.answered()
    assert choose(deployment, now=0.0, session=session).decode is home


def test_load_wins_where_the_sessions_engine_carries_clearly_more() -> None:
    deployment = fleet(*ENGINES)
    running = []
    for _ in range(400):
        choice = choose(deployment, now=0.0, session=b"the one")
        assert choice.decode is not None
        running.append((choice.reason, choice.decode.id))
        carrying(choice.decode).__enter__()
    loads = sorted(e.in_flight for e in deployment.aggregated)
    assert loads[-1] <= loads[0] * 1.5 + SESSION_SLACK + 1
    assert running[0][0] is Reason.AFFINITY
    assert {reason for reason, _ in running} == {Reason.AFFINITY, Reason.SESSION_MOVED}
    first_moved = next(engine for reason, engine in running if reason is Reason.SESSION_MOVED)
    assert first_moved != running[0][1]


def test_both_legs_have_their_engine() -> None:
    deployment = fleet("p0", "p1", "p2", "d0", "d1", "d2", policy=RoutingPolicy())
    pairs = {}
    for session in SESSIONS[:60]:
        choice = choose(deployment, now=0.0, session=session)
        assert choice.reason is Reason.AFFINITY
        pairs[session] = choice.prefill, choice.decode
        again = choose(deployment, now=0.0, session=session)
        assert (again.prefill, again.decode) == pairs[session]
    assert len(set(pairs.values())) == 9
    single = fleet("p0", "d0", "d1", policy=RoutingPolicy())
    assert choose(single, now=0.0, session=b"s").reason is Reason.AFFINITY, "decode's choice was the session's"


def test_a_broken_pair_is_never_taken_for_a_session() -> None:
    names = ("p0", "p1", "d0", "d1")
    for broken in ((("p0", "d0"), ("p1", "d1")), (("p0", "d0"), ("p0", "d1"))):
        deployment = fleet(*names, broken_pairs=broken, policy=RoutingPolicy())
        for session in SESSIONS[:40]:
            choice = choose(deployment, now=0.0, session=session)
            assert choice.prefill is not None
            assert choice.decode is not None
            assert (choice.prefill.id, choice.decode.id) not in broken
            again = choose(deployment, now=0.0, session=session)
            assert (again.prefill, again.decode) == (choice.prefill, choice.decode)


@pytest.mark.parametrize("mode", [RoutingMode.KV, RoutingMode.KV_APPROXIMATE])
def test_second_turn_goes_to_the_first_turns_engine_when_costs_are_equal(mode: RoutingMode) -> None:
    """Field case dyn-A8: they landed at random."""
    deployment = fleet(*ENGINES, policy=RoutingPolicy(mode=mode))
    for session in SESSIONS[:20]:
        first = choose(deployment, now=0.0, prompt=asked(deployment, 12), session=session)
        assert first.decode is not None
        assert first.reason is Reason.AFFINITY
        with carrying(first.decode):
            pass  # it ended; its KV is less than a block
        second = choose(deployment, now=0.0, prompt=asked(deployment, 15), session=session)
        assert (second.decode, second.reason) == (first.decode, Reason.AFFINITY)


def test_in_kv_modes_overlap_and_load_go_before_the_session() -> None:
    deployment = fleet(*ENGINES, policy=RoutingPolicy(mode=RoutingMode.KV))
    home = choose(deployment, now=0.0, prompt=asked(deployment, 2_000), session=b"s").decode
    assert home is not None
    warm = next(e for e in deployment.aggregated if e is not home)
    choice = choose(deployment, now=0.0, prompt=asked(deployment, 2_000, **{warm.id: 1_600}), session=b"s")
    assert (choice.decode, choice.reason) == (warm, Reason.OVERLAP)
    with carrying(home):
        choice = choose(deployment, now=0.0, prompt=asked(deployment, 10), session=b"s")
    assert choice.decode is not home


@pytest.mark.parametrize(
    ("path", "body", "user"),
    [
        ("/v1/chat/completions", {"user": "ann"}, "ann"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": '"user": "bob"'}]}, None),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": '"user": "bob"'}], "user": "ann"}, "ann"),
        ("/v1/completions", {"prompt": '{"user": "bob"}', "user": "ann"}, "ann"),
        ("/v1/chat/completions", {"metadata": {"user_id": "bob"}}, None),
        ("/v1/messages", {"metadata": {"user_id": "ann"}}, "ann"),
        ("/v1/messages", {"user": "bob"}, None),
        ("/v1/messages", {"metadata": {"user_id": 7}}, None),
        ("/v1/messages", {"metadata": [1]}, None),
        ("/v1/messages", {"metadata": None}, None),
        ("/v1/chat/completions", {"user": ""}, None),
        ("/v1/chat/completions", {"user": {"id": 1}}, None),
        ("/v1/responses", {"user": "ünïcode"}, "ünïcode"),
    ],
)
def test_the_user_is_read_as_json_and_never_from_a_prompt(path: str, body: dict[str, Any], user: str | None) -> None:
    """Field case peer-R19: `"user"` inside a prompt's text was taken for the user."""
    endpoint = ENDPOINTS[path]
    ask = read_request(endpoint, json.dumps({"model": "m", "max_tokens": 1, **body}).encode())
    assert user_of(endpoint, ask) == user


# ---- temperature

WARM = RoutingPolicy(mode=RoutingMode.KV, temperature=0.5, disaggregate=Disaggregate.ALWAYS)


def test_temperature_draws_as_a_softmax_of_scaled_costs() -> None:
    deployment = fleet("a0", "a1", "a2", policy=WARM)
    prompt = asked(deployment, 1_000, a0=1_000, a1=500)  # scaled costs: 0, about a half, 1
    scaled = {"a0": 0.0, "a1": 499 / 999, "a2": 1.0}
    weights = {name: exp(-cost / 0.5) for name, cost in scaled.items()}
    draws = 2_000
    counts: Counter[str] = Counter()
    for n in range(draws):
        choice = choose(deployment, now=0.0, prompt=prompt, chance=lambda n=n: n / draws)  # type: ignore[misc]
        assert choice.decode is not None
        counts[choice.decode.id] += 1
        assert choice.reason is (Reason.OVERLAP if choice.decode.id == "a0" else Reason.TEMPERATURE)
    for name, weight in weights.items():
        assert counts[name] / draws == pytest.approx(weight / sum(weights.values()), abs=0.002)


@given(
    st.floats(1e-300, 100.0), st.floats(0, 1, exclude_max=True), st.lists(st.integers(0, 50), min_size=1, max_size=8)
)
def test_any_temperature_and_chance_take_one_of_the_pool(temperature: float, chance: float, loads: list[int]) -> None:
    deployment = fleet(*ENGINES[: len(loads)], policy=RoutingPolicy(mode=RoutingMode.KV, temperature=temperature))
    for engine, load in zip(deployment.aggregated, loads, strict=True):
        engine.in_flight = load
    choice = choose(deployment, now=0.0, prompt=asked(deployment, 10), chance=lambda: chance)
    assert choice.decode in deployment.aggregated
    if temperature < 1e-6 and loads.count(min(loads)) == 1:
        assert choice.decode is not None
        assert choice.decode.in_flight == min(loads)


def test_zero_is_the_cheapest_and_chance_is_not_asked() -> None:
    def never() -> float:
        raise AssertionError

    for policy in (RoutingPolicy(mode=RoutingMode.KV), RoutingPolicy(temperature=1.0)):
        deployment = fleet("a0", "a1", policy=policy)
        with carrying(deployment.aggregated[0]):
            prompt = asked(deployment, 100) if policy.mode is RoutingMode.KV else None
            choice = choose(deployment, now=0.0, prompt=prompt, chance=never)
        assert choice.decode is deployment.aggregated[1]
