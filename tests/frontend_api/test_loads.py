"""Loads that router processes show each other: who has what, who is gone, and that nobody herds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.fleet.model import Role
from controlplane.fleet.wire import FleetSnapshot, RoutingPolicy, SnapshotDeployment, SnapshotEngine
from frontend_api.flow import Serving
from frontend_api.routing.choice import choose
from frontend_api.routing.loads import SILENCE_SECONDS, Loads, Table
from frontend_api.routing.view import Deployment, Engine, View, carrying
from frontend_api.steps import Wait
from frontend_api.trace import Trace


def snapshot(*names: str, attempt: int = 1) -> FleetSnapshot:
    engines = tuple(
        SnapshotEngine(id=n, name=n, attempt=attempt, role=Role.AGGREGATED, url=f"http://{n}:1") for n in names
    )
    return FleetSnapshot(1, deployments=(SnapshotDeployment("d", "m", RoutingPolicy(), engines),))


class Process:
    """What one router process knows."""

    def __init__(self, table: Table | None, index: int = 0) -> None:
        self.loads = Loads(table, index)
        self.view = View([self.loads])

    def take(self, *names: str, attempt: int = 1) -> Process:
        self.view.take(snapshot(*names, attempt=attempt))
        return self

    def engine(self, name: str) -> Engine:
        return next(e for e in self.view.engines() if e.id == name)

    @property
    def deployment(self) -> Deployment:
        return self.view.deployments["m"]

    def others(self) -> dict[str, tuple[int, int]]:
        self.loads.look(0.0)
        return {e.id: (e.others, e.others_queued) for e in self.view.engines() if e.others or e.others_queued}


@pytest.fixture
def table() -> Iterator[Table]:
    made = Table(4)
    yield made
    made.close()


def test_a_load_is_seen_at_once_and_gone_at_once(table: Table) -> None:
    one, two = Process(table, 0).take("a", "b"), Process(table, 1).take("a", "b")
    with carrying(one.engine("b"), 500) as load:
        assert two.others() == {"b": (1, 500)}
        load.computed()
        assert two.others() == {"b": (1, 0)}
        load.move(one.engine("a"))
        assert two.others() == {"a": (1, 0)}
        assert one.others() == {}
    assert two.others() == {}


def test_of_a_request_that_finds_its_engine_taken_no_engine_is_told(table: Table) -> None:
    one, two = Process(table, 0).take("a"), Process(table, 1).take("a")
    one.deployment.routing = RoutingPolicy(max_in_flight=1)
    trace = Trace()
    with carrying(two.engine("a")):
        flow = Serving(one.deployment, None, trace, lambda: 0.0, loads=one.loads).steps()
        assert isinstance(next(flow), Wait)
        assert one.engine("a").in_flight == 0
    assert (trace.decode, trace.reason) == (None, "engines-full")


def test_processes_may_take_snapshots_in_at_different_moments(table: Table) -> None:
    one, two = Process(table, 0).take("a", "b"), Process(table, 1).take("b")
    with carrying(one.engine("a")), carrying(one.engine("b")), carrying(one.engine("b")):
        assert two.others() == {"b": (2, 0)}
        two.take("c", "b", "a")
        assert two.others() == {"a": (1, 0), "b": (2, 0)}
        with carrying(two.engine("c")), carrying(two.engine("a")):
            assert one.others() == {"a": (1, 0)}
            one.take("c", "a")
            assert one.others() == {"a": (1, 0), "c": (1, 0)}
            assert two.others()["b"] == (2, 0)  # one's requests there run on
    assert (one.others(), two.others()) == ({}, {})


def test_another_attempt_is_another_engine(table: Table) -> None:
    one, two = Process(table, 0).take("a"), Process(table, 1).take("a")
    with carrying(one.engine("a")):
        two.take("a", attempt=2)
        assert two.others() == {}


def test_cells_of_engines_that_left_are_used_again(table: Table) -> None:
    one, two = Process(table, 0).take("a"), Process(table, 1).take("a")
    held = carrying(one.engine("a")).__enter__()
    for number in range(5_000):  # more than a row holds
        one.take(f"x{number}")
    one.take("b")
    two.take("a", "b")
    with carrying(one.engine("b")):
        assert two.others() == {"a": (1, 0), "b": (1, 0)}
    held.release()
    assert two.others() == {}
    one.take("c")
    two.take("a", "c")
    with carrying(one.engine("c")):
        assert two.others() == {"c": (1, 0)}


def test_a_dead_process_has_no_load(table: Table) -> None:
    one, two = Process(table, 0).take("a"), Process(table, 1).take("a")
    carrying(one.engine("a"), 70).__enter__()
    one.loads.claim((5, 9))
    assert (two.others(), two.loads.claims()) == ({"a": (1, 70)}, [(5, 9)])
    table.clear(0)
    assert (two.others(), two.loads.claims()) == ({}, [])
    successor = Process(table, 0).take("a")
    with carrying(successor.engine("a")):
        assert two.others() == {"a": (1, 0)}


def test_routers_of_other_hosts_are_heard_until_they_fall_silent() -> None:
    one = Process(None).take("a", "b")
    one.loads.hear("r1", {"a:1": (3, 100, 0), "gone:1": (9, 9, 9)}, 0.0)
    one.loads.hear("r2", {"a:1": (1, 0, 0), "b:1": (1, 0, 0)}, 1.0)
    assert one.others() == {"a": (4, 100), "b": (1, 0)}
    one.take("b", "a")
    assert one.others() == {"a": (4, 100), "b": (1, 0)}
    one.loads.hear("r2", {}, 1.5)
    assert one.others() == {"a": (3, 100)}
    one.loads.refresh(SILENCE_SECONDS - 0.1)
    assert one.engine("a").others == 3
    one.loads.refresh(SILENCE_SECONDS)
    assert one.engine("a").others == 0


def test_what_is_said_to_other_hosts_is_what_they_understand() -> None:
    one, two = Process(None).take("a", "b"), Process(None).take("a", "b")
    with carrying(one.engine("b"), 9):
        two.loads.hear("one", one.loads.said(), 0.0)
    assert two.others() == {"b": (1, 9)}
    assert one.loads.said() == {}


@pytest.mark.parametrize("shared", [True, False], ids=["one host", "four hosts"])
def test_a_burst_on_several_routers_does_not_herd(table: Table, shared: bool) -> None:
    """Case dyn-A22: with each router seeing its own requests only, the ties went to the same engines: 448 to 0."""
    names = [f"e{number}" for number in range(4)]
    processes = [Process(table if shared else None, index).take(*names) for index in range(4)]
    busy = [carrying(processes[0].engine("e0")).__enter__() for _ in range(40)]  # one router alone has made it hot
    taken: Counter[str] = Counter()
    for round_ in range(112):
        for number, process in enumerate(processes):
            if shared:
                process.loads.look(0.0)
            elif round_ % 4 == 0:  # a few times a second
                for other, speaker in enumerate(processes):
                    if other != number:
                        process.loads.hear(f"r{other}", speaker.loads.said(), 0.0)
            engine = choose(process.deployment, now=0.0).decode
            assert engine is not None
            busy.append(carrying(engine).__enter__())
            taken[engine.id] += 1
    total = Counter({"e0": 40}) + taken
    assert sum(taken.values()) == 448
    assert max(total.values()) - min(total.values()) <= (2 if shared else 16)


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abcde"), st.sampled_from(["take", "drop", "end"]))))
def test_whatever_comes_and_goes_everybody_sees_the_sum(steps: list[tuple[int, str, str]]) -> None:
    table = Table(3)
    try:
        processes = [Process(table, index).take("a", "b", "c") for index in range(3)]
        present = [{"a", "b", "c"} for _ in processes]
        running: list[tuple[int, str, carrying]] = []
        for index, name, what in steps:
            process = processes[index]
            if what == "end" and running:
                running.pop(0)[2].release()
            elif what == "drop":
                present[index] ^= {name}
                process.take(*sorted(present[index], reverse=index == 1))
            elif name in present[index]:
                running.append((index, name, carrying(process.engine(name), 10).__enter__()))
        for index, process in enumerate(processes):
            expected = Counter(name for owner, name, _ in running if owner != index and name in present[index])
            assert process.others() == {name: (many, 10 * many) for name, many in expected.items()}
    finally:
        table.close()
