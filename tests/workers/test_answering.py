"""When an engine is asked whether it answers: only while nothing else shows that it does."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from controlplane.fleet.model import EngineAssignment, EngineLoad
from tests.workers.conftest import assignment, until
from workers import answering
from workers.answering import AnswerCheck
from workers.probe import Unanswered


class Scene:
    """A clock, and an engine whose answers are prepared."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.asked: list[float] = []
        self.failure: Unanswered | None = None
        self.assignment: EngineAssignment = assignment("d")
        self.load = EngineLoad()
        self.check: AnswerCheck = None  # type: ignore[assignment]

    def monotonic(self) -> float:
        return self.now

    def run(self, seconds: int, **moves: int) -> None:
        """Looks each second. `moves`: counters that rise by so much each time."""
        for _ in range(seconds):
            self.now += 1
            self.load = replace(self.load, **{name: getattr(self.load, name) + by for name, by in moves.items()})
            self.check.advance(self.assignment, "http://e", self.load)
            until(lambda: not self.check._busy)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    scene = Scene()

    class Client:
        def __init__(self, url: str, secret: str) -> None: ...

        def __enter__(self) -> Client:
            return self

        def __exit__(self, *_: object) -> None: ...

        def answer(self, model: str, *, timeout: float) -> None:
            scene.asked.append(scene.now)
            if scene.failure is not None:
                raise scene.failure

    monkeypatch.setattr(answering, "EngineClient", Client)
    monkeypatch.setattr(answering, "time", SimpleNamespace(monotonic=scene.monotonic))
    scene.check = AnswerCheck(every=30, changed=lambda: None)
    return scene


def test_an_idle_engine_is_asked_from_time_to_time(scene: Scene) -> None:
    scene.run(100)
    assert [later - 1_000 for later in scene.asked] == [31, 61, 91], "30 s after the first look"


def test_an_engine_whose_counters_rise_is_not_asked(scene: Scene) -> None:
    scene.run(100, generated_tokens=7)
    assert scene.asked == []
    scene.run(30)
    assert len(scene.asked) == 1


def test_requests_that_are_only_taken_prove_nothing(scene: Scene) -> None:
    scene.run(31, running=1)
    assert len(scene.asked) == 1


def test_one_that_routers_blame_is_asked_whatever_its_counters_say(scene: Scene) -> None:
    scene.assignment = replace(scene.assignment, doubted=True)
    scene.run(12, generated_tokens=7)
    assert len(scene.asked) == 2


def test_one_refusal_is_asked_again_soon_and_a_second_is_a_verdict(scene: Scene) -> None:
    scene.failure = Unanswered("/v1/completions answered 500", status=500)
    scene.run(31)
    assert (len(scene.asked), scene.check.trouble) == (1, "")
    scene.run(5)
    assert (
        scene.check.trouble == "It says that it is healthy, but a test completion failed: /v1/completions answered 500"
    )
    scene.failure = None
    scene.run(5)
    assert scene.check.trouble == ""


@pytest.mark.parametrize(("moves", "trouble"), [({}, True), ({"prompt_tokens_local": 512}, False)])
def test_a_slow_answer_is_a_verdict_only_where_nothing_else_moves(
    scene: Scene, moves: dict[str, int], trouble: bool
) -> None:
    scene.assignment = replace(scene.assignment, doubted=True)
    scene.failure = Unanswered("/v1/completions gave no answer in time", in_time=False)
    scene.run(20, **moves)
    assert bool(scene.check.trouble) is trouble
