"""A deployment's condition is a sentence derived from its engines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.fleet.lifecycle import State
from controlplane.fleet.model import Role
from controlplane.fleet.status import EngineView, Status, derive

P, D = Role.PREFILL, Role.DECODE
ONE_EACH = {P: 1, D: 1}


def views(prefill: str, decode: str, reason: str = "because.") -> list[EngineView]:
    pairs = [(P, state) for state in prefill.split()] + [(D, state) for state in decode.split()]
    return [EngineView(role, State(state), f"{role}-{i}", reason) for i, (role, state) in enumerate(pairs)]


@pytest.mark.parametrize(
    ("wanted", "engines", "status", "words"),
    [
        (ONE_EACH, views("ready", "ready"), Status.READY, "Serving with 1 prefill and 1 decode."),
        (ONE_EACH, [], Status.STARTING, "Starting: 0 of 1 prefill and 0 of 1 decode ready."),
        (ONE_EACH, views("starting", "fetching"), Status.STARTING, "decode ready. prefill-0: because."),
        (ONE_EACH, views("pending", "pending"), Status.WAITING, "Not serving yet. prefill-0: because."),
        (ONE_EACH, views("failed", "warming"), Status.FAILED, "Not serving. prefill-0: because."),
        (ONE_EACH, views("failed", "ready"), Status.DEGRADED, "prefill-0: because."),
        (ONE_EACH, views("ready", "failed"), Status.FAILED, "decode-1: because."),
        (ONE_EACH, views("ready draining", "ready"), Status.READY, "Serving"),
        ({P: 1, D: 2}, views("ready", "ready pending"), Status.DEGRADED, "1 of 1 prefill and 1 of 2 decode"),
        ({P: 1, D: 2}, views("ready", "ready failed"), Status.DEGRADED, "decode-2: because."),
        ({P: 1, D: 2}, views("ready", "ready unhealthy"), Status.DEGRADED, "decode-2: because."),
        ({P: 1, D: 3}, views("ready", "ready warming pending"), Status.DEGRADED, "decode-3: because."),
        (
            {P: 1, D: 2},
            views("ready", "ready starting"),
            Status.SCALING,
            "Serving with 1 prefill and 1 decode. Scaling decode to 2: 1 engine is starting.",
        ),
        (
            {P: 2, D: 3},
            views("ready warming", "ready"),
            Status.SCALING,
            "Scaling prefill to 2: 1 engine is starting. Scaling decode to 3: 2 engines are starting.",
        ),
        (
            {P: 1, D: 0},
            views("ready", ""),
            Status.NOT_SERVING,
            "Not serving: no decode engine is wanted. Scale decode up to serve.",
        ),
        ({P: 1, D: 0}, views("failed", "draining"), Status.NOT_SERVING, "no decode engine is wanted"),
        ({P: 0, D: 1}, views("", "ready"), Status.READY, "Serving with 0 prefill and 1 decode."),
        ({P: 0, D: 0}, [], Status.STOPPED, "Scale a pool up to serve."),
        ({P: 0, D: 0}, views("draining", "stopping"), Status.STOPPED, "Stopping: 2 engines"),
        (
            {Role.AGGREGATED: 1},
            [EngineView(Role.AGGREGATED, State.READY, "aggregated-0", "")],
            Status.READY,
            "1 aggregated",
        ),
        (
            {Role.AGGREGATED: 1},
            [EngineView(Role.AGGREGATED, State.LOST, "aggregated-0", "gone.")],
            Status.FAILED,
            "gone.",
        ),
        (
            ONE_EACH,
            [EngineView(P, State.LOST, "prefill-0", "silent."), EngineView(D, State.LOST, "decode-0", "silent.", True)],
            Status.DEGRADED,
            "Perhaps serving: requests still go to decode-0. silent.",
        ),
        (
            ONE_EACH,
            [EngineView(P, State.READY, "prefill-0", ""), EngineView(D, State.STARTING, "d", "Loads.", False, 3, 2)],
            Status.FAILED,
            "Not serving. d failed 2 times in a row. Attempt 3: Loads.",
        ),
        (
            ONE_EACH,
            [EngineView(P, State.READY, "prefill-0", ""), EngineView(D, State.FAILED, "d", "Exit 1.", False, 1, 1)],
            Status.FAILED,
            "Not serving. d failed once. Exit 1.",
        ),
    ],
)
def test_conditions(wanted: dict[Role, int], engines: list[EngineView], status: Status, words: str) -> None:
    condition = derive(wanted, engines)
    assert condition.status is status
    assert words in condition.sentence


@pytest.mark.parametrize(("attempt", "failures"), [(2, 0), (2, 1), (9, 3)])
def test_an_engine_that_is_being_replaced_is_trouble_until_it_is_ready(attempt: int, failures: int) -> None:
    again = EngineView(D, State.STARTING, "decode-1", "Loads the model.", attempt=attempt, failures=failures)
    assert derive({P: 1, D: 2}, [*views("ready", "ready"), again]).status is Status.DEGRADED


def test_deleting_comes_before_all_else() -> None:
    assert derive(ONE_EACH, views("ready", "failed"), deleting=True).status is Status.DELETING


def test_an_old_reason_never_shows_on_a_deployment_that_serves() -> None:
    assert "No suitable" not in derive(ONE_EACH, views("ready", "ready", "No suitable workers.")).sentence


@given(
    st.lists(st.tuples(st.sampled_from([P, D]), st.sampled_from(list(State))), max_size=8),
    st.integers(0, 4),
    st.integers(0, 4),
    st.booleans(),
)
def test_counts_and_status_agree(engines: list[tuple[Role, State]], prefill: int, decode: int, deleting: bool) -> None:
    wanted = {P: prefill, D: decode}
    condition = derive(wanted, [EngineView(r, s, "x", "y.") for r, s in engines], deleting=deleting)
    for role in wanted:
        assert condition.ready[role] == sum((r, s) == (role, State.READY) for r, s in engines)
    assert condition.wanted == wanted
    assert condition.sentence.endswith(".")
    assert condition.serves == (condition.ready[D] > 0)
    if condition.status in (Status.READY, Status.SCALING):
        assert condition.serves, "prefill alone answers nobody"
    if condition.status is Status.READY:
        assert all(condition.ready[role] >= count for role, count in wanted.items())
    if condition.status is Status.DEGRADED:
        assert condition.ready[D] > 0
