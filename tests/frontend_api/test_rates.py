"""Rates learned from traffic: near the truth, never poisoned, alike for engines that are alike."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend_api.routing.rates import ENOUGH, FASTEST, SLOWEST, USUAL_READ, Rate, settle


def rates(count: int) -> list[Rate]:
    return [Rate(USUAL_READ, 256) for _ in range(count)]


def measure(rate: Rate, pace: float, times: int = ENOUGH, *, now: float = 0.0, tokens: int = 2_000) -> None:
    for _ in range(times):
        rate.learn(tokens, tokens * pace, now)


@pytest.mark.parametrize("true", [1e-6, 1e-4, 8e-3])
def test_a_few_measurements_are_enough(true: float) -> None:
    (rate,) = pool = rates(1)
    measure(rate, true, 3)
    settle(pool, (), 0.0)
    assert rate.pace == pytest.approx(true)


def test_short_prompts_tell_nothing() -> None:
    (rate,) = pool = rates(1)
    rate.learn(255, 100.0, 0.0)
    settle(pool, (), 0.0)
    assert (rate.pace, rate.measured) == (USUAL_READ, 0)


def test_a_stall_moves_it_only_so_far_and_is_forgotten() -> None:
    (rate,) = pool = rates(1)
    measure(rate, 1e-4, 20)
    rate.learn(1_000, 600.0, 0.0)  # 6,000 times as long
    assert rate.own < 3e-4
    measure(rate, 1e-4, 10)
    settle(pool, (), 0.0)
    assert rate.pace == pytest.approx(1e-4, rel=0.15)


def test_an_engine_that_stalls_for_long_is_dear_and_tried_again() -> None:
    stalled, other = pool = rates(2)
    measure(stalled, 1e-4)
    measure(other, 1e-4)
    measure(stalled, 1.0, 20)
    settle(pool, (), 0.0)
    assert stalled.pace > 0.5
    assert other.pace == pytest.approx(1e-4)
    for second in range(1, 150):  # it gets nothing; the other works on
        other.learn(1_000, 0.1, float(second))
        settle(pool, (), float(second))
    assert stalled.pace == pytest.approx(1e-4)


def test_a_fresh_engine_begins_as_its_kind() -> None:
    for true in (1e-6, 8e-3):
        old, new = pool = rates(2)
        measure(old, true)
        settle(pool, (), 0.0)
        assert new.pace == old.pace == pytest.approx(true)


def test_a_pool_without_traffic_follows_its_kin_and_without_any_stays() -> None:
    reads, computes = rates(2), rates(1)
    measure(computes[0], 3e-3)
    settle(reads, computes, 0.0)
    assert [rate.pace for rate in reads] == [pytest.approx(3e-3)] * 2
    settle(reads, (), 10_000.0)
    assert [rate.pace for rate in reads] == [pytest.approx(3e-3)] * 2
    settle(reads, (), 10_001.0, USUAL_READ)
    assert [rate.pace for rate in reads] == [USUAL_READ] * 2, "nobody has ever measured it, nor lately its kin"


def test_equal_engines_cost_exactly_alike_and_a_slow_one_does_not() -> None:
    draw = random.Random(1)
    pool = rates(5)
    for rate in pool:
        for _ in range(30):
            measure(rate, 1e-4 * draw.uniform(0.7, 1.3), 1)
    measure(pool[4], 1e-3, 30)
    settle(pool, (), 0.0)
    assert len({rate.pace for rate in pool[:4]}) == 1
    assert pool[4].pace > 5 * pool[0].pace


def test_one_unlucky_first_prompt_makes_nobody_dear() -> None:
    warm, cold = pool = rates(2)
    measure(warm, 1e-4)
    measure(cold, 1e-2, 1)
    settle(pool, (), 0.0)
    assert cold.pace == warm.pace == pytest.approx(1e-4)


MEASURES = st.lists(
    st.tuples(
        st.integers(0, 3), st.integers(-5, 200_000), st.floats(-10, 1e6, allow_nan=False), st.floats(0, 60, allow_nan=False)
    ),
    max_size=60,
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(MEASURES)
def test_whatever_is_measured_paces_stay_sane(measures: list[tuple[int, int, float, float]]) -> None:
    pool, now = rates(4), 0.0
    for at, tokens, seconds, later in measures:
        pool[at].learn(tokens, seconds, now)
        now += later
        settle(pool, (), now)
        for rate in pool:
            assert 0.99 * FASTEST <= rate.own <= 1.01 * SLOWEST
            assert 0.99 * FASTEST <= rate.pace <= 1.01 * SLOWEST
        guessed = {rate.pace for rate in pool if rate.measured < ENOUGH}
        assert len(guessed) <= 1, "who was measured too seldom costs as its kind does"
    for _ in range(300):
        now += 1.0
        pool[0].learn(1_000, 0.1, now)
        settle(pool, (), now)
    assert [rate.pace for rate in pool] == [pytest.approx(1e-4, rel=0.01)] * 4
