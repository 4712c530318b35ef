"""Events as people read them: repeats are counted in one line, and one deployment does not crowd out the rest."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from controlplane.deployments.history import fair, fold
from controlplane.deployments.models import Event

START = datetime(2026, 1, 1, tzinfo=UTC)


def event(number: int, deployment: str = "demo", engine: str = "demo-decode-0-a", **more: str) -> Event:
    """One a second, the higher number later."""
    values = {"kind": "exit", "new_state": "failed", "message": "decode-0: it exited.", "actor": "tandem", **more}
    at = START + timedelta(seconds=number)
    return Event(pk=number, at=at, deployment_name=deployment, engine_id=engine, **values)


def test_a_crash_loop_is_two_lines_with_their_number_and_time() -> None:
    events = []
    for attempt in range(7):
        events.append(event(40 * attempt, kind="start", new_state="starting", message="decode-0: Starts."))
        events.append(event(40 * attempt + 9, message=f"decode-0: exited with code 1 after {attempt} s."))
    exited, started = fold(reversed(events))
    assert (exited.event.pk, exited.times, exited.seconds) == (249, 7, 240.0)
    assert (started.event.pk, started.times, started.seconds) == (240, 7, 240.0)


def test_another_engine_another_state_and_what_people_do_are_lines_of_their_own() -> None:
    events = [
        event(5),
        event(4, engine="demo-decode-1-b"),
        event(3, kind="prove", new_state="ready", message="decode-0: Serving."),
        event(2, engine="", actor="ada", kind="scaled", message="demo: pools.decode.replicas 2 → 3."),
        event(1, engine="", actor="ada", kind="scaled", message="demo: pools.decode.replicas 1 → 2."),
    ]
    assert [h.times for h in fold(events)] == [1] * 5


def test_one_deployment_never_fills_the_list_while_others_have_something_to_tell() -> None:
    noisy = [event(100 - i, "noisy", f"noisy-decode-{i}") for i in range(30)]
    quiet = [event(9, "quiet", "quiet-decode-0"), event(8, "still", "still-decode-0")]
    shown = [h.event.deployment_name for h in fair(fold([*noisy, *quiet]), limit=12, each=4)]
    assert shown == ["noisy"] * 10 + ["quiet", "still"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz")), max_size=40), st.integers(1, 15))
def test_nothing_is_lost_or_invented(made: list[tuple[str, str]], limit: int) -> None:
    events = [event(i, name, f"{name}-{said}", message=said) for i, (name, said) in enumerate(made)][::-1]
    folded = fold(events)
    assert sum(h.times for h in folded) == len(events)
    assert {h.event.message for h in folded} == {e.message for e in events}
    shown = fair(folded, limit=limit, each=4)
    assert len(shown) == min(limit, len(folded))
    assert [h.event.pk for h in shown] == sorted((h.event.pk for h in shown), reverse=True)
