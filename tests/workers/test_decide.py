"""The agent's decision, as a pure function: plan and held attempts in, actions out."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.fleet.model import EngineAssignment, Peer
from controlplane.fleet.wire import NodePlan
from tests.workers.conftest import assignment
from workers.decide import Action, Forget, Held, Kill, Start, Stop, Update, decide

GRACE = 20.0
A1, A2, B1 = assignment("a"), assignment("a", attempt=2), assignment("b")
A1_PEERS = msgspec.structs.replace(A1, peers=(Peer("p", 1, "http://127.0.0.1:1", "s"),))


def plan(*engines: EngineAssignment) -> NodePlan:
    return NodePlan("x", 1, engines)


TABLE: list[tuple[str, NodePlan | None, list[Held], list[Action]]] = [
    ("nothing at all", None, [], []),
    ("no plan was ever read: engines go on", None, [Held(A1), Held(B1, ended=True)], []),
    ("no plan, but one that was asked to end does not", None, [Held(A1, stopping_for=21)], [Kill("a", 1)]),
    ("a wanted engine is missing", plan(A1), [], [Start(A1)]),
    ("all is as wanted", plan(A1, B1), [Held(A1), Held(B1)], []),
    ("an orphan", plan(B1), [Held(A1), Held(B1)], [Stop("a", 1)]),
    ("an empty plan is a plan", plan(), [Held(A1)], [Stop("a", 1)]),
    ("new peers", plan(A1_PEERS), [Held(A1)], [Update(A1_PEERS)]),
    ("new peers of one that has ended", plan(A1_PEERS), [Held(A1, ended=True)], []),
    ("a newer attempt waits for the older one's end", plan(A2), [Held(A1)], [Stop("a", 1)]),
    ("… and while that one stops", plan(A2), [Held(A1, stopping_for=3)], []),
    ("… and starts when it has ended", plan(A2), [Held(A1, ended=True)], [Forget("a", 1), Start(A2)]),
    ("an attempt that ended is not started again", plan(A1), [Held(A1, ended=True)], []),
    ("what ended and is not wanted is dropped", plan(), [Held(A1, ended=True)], [Forget("a", 1)]),
    ("within the grace", plan(), [Held(A1, stopping_for=20)], []),
    ("beyond the grace", plan(), [Held(A1, stopping_for=20.1)], [Kill("a", 1)]),
    ("one that stops and is wanted again ends first", plan(A1), [Held(A1, stopping_for=1)], []),
]


@pytest.mark.parametrize(("wanted", "held", "actions"), [pytest.param(*row[1:], id=row[0]) for row in TABLE])
def test_table(wanted: NodePlan | None, held: list[Held], actions: list[Action]) -> None:
    assert decide(wanted, held, grace=GRACE) == actions


assignments = st.builds(
    lambda engine, attempt: msgspec.structs.replace(A1, engine=engine, attempt=attempt),
    st.sampled_from("abc"),
    st.integers(1, 3),
)
plans = st.lists(assignments, max_size=3, unique_by=lambda a: a.engine).map(lambda engines: plan(*engines))
helds = st.lists(
    st.builds(Held, assignments, st.booleans(), st.none() | st.floats(0, 60)),
    max_size=6,
    unique_by=lambda h: (h.assignment.engine, h.assignment.attempt),
)


@given(plans, helds)
def test_nothing_is_started_beside_a_living_attempt(wanted: NodePlan, held: list[Held]) -> None:
    alive = {one.assignment.engine for one in held if not one.ended}
    started = [action.assignment for action in decide(wanted, held, grace=GRACE) if isinstance(action, Start)]
    assert not alive & {one.engine for one in started}
    assert not {(h.assignment.engine, h.assignment.attempt) for h in held} & {(s.engine, s.attempt) for s in started}


@given(helds)
def test_silence_starts_and_stops_nothing(held: list[Held]) -> None:
    assert all(isinstance(action, Kill) for action in decide(None, held, grace=GRACE))


@given(plans, helds)
def test_it_settles_on_just_what_is_wanted(wanted: NodePlan, held: list[Held]) -> None:
    """Whatever a node holds, a few rounds of carrying the actions out leave the wanted engines (or how they ended)."""
    state = {(one.assignment.engine, one.assignment.attempt): one for one in held}
    for _ in range(6):
        for action in decide(wanted, list(state.values()), grace=GRACE):
            match action:
                case Start(what) | Update(what):
                    state[what.engine, what.attempt] = Held(what)
                case Stop(engine, attempt):
                    key = (engine, attempt)
                    state[key] = state[key]._replace(stopping_for=0.0)
                case Kill(engine, attempt):
                    state[engine, attempt] = state[engine, attempt]._replace(ended=True)
                case Forget(engine, attempt):
                    del state[engine, attempt]
        state = {
            key: one if one.stopping_for is None else one._replace(stopping_for=one.stopping_for + 15)
            for key, one in state.items()
        }
    assert state.keys() == {(one.engine, one.attempt) for one in wanted.engines}
    assert decide(wanted, list(state.values()), grace=GRACE) == []
