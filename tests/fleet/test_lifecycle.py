"""The state table: complete, closed, bounded in time, and the only way from one state to the next."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.fleet import lifecycle
from controlplane.fleet.errors import IllegalTransition
from controlplane.fleet.lifecycle import (
    BOOT,
    EDGES,
    HOLDS_NODE,
    LIMITS,
    LIVE,
    SERVING,
    Event,
    Owner,
    State,
    advance,
    allowed,
)

AT_REST = {State.READY, State.STOPPED}


def reachable(start: State) -> set[State]:
    found, todo = {start}, [start]
    while todo:
        here = todo.pop()
        for edge in EDGES:
            if edge.source is here and edge.target not in found:
                found.add(edge.target)
                todo.append(edge.target)
    return found


def test_every_state_is_reached_from_pending() -> None:
    assert reachable(State.PENDING) == set(State)


@pytest.mark.parametrize("state", [s for s in State if s is not State.STOPPED])
def test_every_state_can_end(state: State) -> None:
    assert State.STOPPED in reachable(state)


def test_stopped_is_the_end() -> None:
    assert reachable(State.STOPPED) == {State.STOPPED}


def test_no_event_leads_two_ways() -> None:
    pairs = [(edge.source, edge.event) for edge in EDGES]
    assert len(pairs) == len(set(pairs))


def test_every_event_and_owner_is_used() -> None:
    assert {edge.event for edge in EDGES} == set(Event)
    assert {edge.owner for edge in EDGES} == set(Owner)


@pytest.mark.parametrize("state", [s for s in State if s not in AT_REST])
def test_every_waiting_state_has_a_limit_and_says_what_it_awaits(state: State) -> None:
    assert LIMITS[state].seconds > 0
    assert LIMITS[state].awaits
    assert allowed(state, Event.OVERRUN) or state is State.FAILED, "when the limit passes, something happens"


def test_states_at_rest_have_none() -> None:
    assert set(LIMITS) == set(State) - AT_REST


@pytest.mark.parametrize("state", [s for s in State if s not in (State.STOPPED, State.DRAINING, State.STOPPING)])
def test_the_user_can_let_go_of_an_engine_in_every_state(state: State) -> None:
    assert allowed(state, Event.DRAIN)


@pytest.mark.parametrize("state", [*BOOT, State.READY, State.UNHEALTHY])
def test_a_process_may_die_and_a_node_fall_silent_in_every_state_that_has_one(state: State) -> None:
    assert advance(state, Event.EXIT) is State.FAILED
    assert advance(state, Event.SILENCE) is State.LOST


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("event", list(Event))
def test_advance_follows_the_table_or_raises(state: State, event: Event) -> None:
    edges = [edge for edge in EDGES if (edge.source, edge.event) == (state, event)]
    assert allowed(state, event) == bool(edges)
    if edges:
        assert advance(state, event) is edges[0].target
    else:
        with pytest.raises(IllegalTransition, match=f"{state} cannot take the event {event}"):
            advance(state, event)


@given(st.lists(st.sampled_from(list(Event)), max_size=60))
def test_a_walk_keeps_its_promises(events: list[Event]) -> None:
    """READY only from proof, recovery; a drained engine never serves again without a new attempt."""
    state, leaving = State.PENDING, False
    for event in events:
        if not allowed(state, event):
            continue
        before, state = state, advance(state, event)
        if state is State.READY:
            assert (before, event) in {(State.WARMING, Event.PROVE), (State.UNHEALTHY, Event.RECOVER)}
        leaving = leaving or event is Event.DRAIN
        if leaving:
            assert state in {State.DRAINING, State.STOPPING, State.STOPPED}
        if state is State.PENDING:
            assert event in {Event.RETRY, Event.HALT}
        if before is State.LOST and state is State.READY:
            pytest.fail("a returned engine proves itself again")


def test_the_groups_of_states_fit_each_other() -> None:
    assert set(SERVING) <= set(LIVE) <= set(HOLDS_NODE)
    assert set(BOOT) <= set(LIVE)
    assert not {State.PENDING, State.FAILED, State.STOPPED} & set(HOLDS_NODE)


def test_back_off_doubles_to_a_bound() -> None:
    waits = [lifecycle.backoff_seconds(n) for n in range(12)]
    assert waits[:4] == [2, 2, 4, 8]
    assert waits == sorted(waits)
    assert max(waits) == lifecycle.backoff_seconds(10**4) == LIMITS[State.FAILED].seconds


def test_the_diagram_shows_every_edge() -> None:
    drawn = lifecycle.mermaid()
    for edge in EDGES:
        line = next(line for line in drawn.splitlines() if line.startswith(f"    {edge.source} --> {edge.target}:"))
        assert f"{edge.event} ({edge.owner})" in line
