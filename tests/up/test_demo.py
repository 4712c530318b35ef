"""The demo against a control plane and a router of the test's own: created once, awaited, asked, measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from controlplane.fleet import spec
from controlplane.fleet.errors import Unavailable
from controlplane.up import demo
from controlplane.up.demo import Demo, document, is_ours_for_another_runtime
from controlplane.up.screen import Line

STORED = spec.document(spec.parse(document("sim")))


def test_the_demo_is_a_valid_deployment_on_every_runtime() -> None:
    for runtime in ("auto", "sim", "cpu", "gpu"):
        assert spec.parse(document(runtime)).disaggregated


@pytest.mark.parametrize(
    ("stored", "runtime", "follows"),
    [
        (STORED, "sim", False),
        (STORED, "auto", True),
        (STORED | {"max_model_len": 4096}, "auto", False),
        (STORED | {"pools": {"prefill": {"replicas": 1}, "decode": {"replicas": 2}}}, "auto", False),
    ],
)
def test_it_follows_the_runtime_until_somebody_changes_it(stored: dict[str, Any], runtime: str, follows: bool) -> None:
    assert is_ours_for_another_runtime(stored, runtime) is follows


class World:
    """A control plane, a router and one decode engine, answering what the test says."""

    def __init__(self) -> None:
        self.deployment: dict[str, Any] | None = None
        self.put: list[dict[str, Any]] = []
        self.router = 200
        self.moved = 1000.0
        self.shown: list[tuple[list[Line], str]] = []
        self.then: Callable[[], None] = lambda: None
        self.demo = Demo(web="http://web", openai="http://router", manage_key="m", demo_key="d", runtime="sim")
        transport = httpx.MockTransport(self.handle)
        for client in ("_rest", "_openai", "_engines"):
            getattr(self.demo, client)._transport = transport

    def handle(self, request: httpx.Request) -> httpx.Response:
        if request.url.host == "web":
            assert request.headers["authorization"] == "Bearer m"
            if request.method == "PUT":
                self.put.append(json.loads(request.content))
                return httpx.Response(201, json={})
            missing = httpx.Response(404, json={"error": {"message": "there is no such deployment"}})
            return missing if self.deployment is None else httpx.Response(200, json=self.deployment)
        if request.url.host == "router":
            assert request.headers["authorization"] == "Bearer d"
            if self.router != 200:
                return httpx.Response(self.router, json={"error": {"message": "no engine is ready"}})
            self.moved += 46_080
            frames = [{"choices": [{"delta": {"content": word}}]} for word in ("Par", "is", ".")]
            text = "".join(f"data: {json.dumps(frame)}\n\n" for frame in frames) + "data: [DONE]\n\n"
            return httpx.Response(200, text=text, headers={"x-tandem-prefill": "p0", "x-tandem-decode": "d0"})
        return httpx.Response(200, text=f'vllm:nixl_bytes_transferred_sum{{engine="0"}} {self.moved}\nvllm:other 1\n')

    def show(self, lines: list[Line], sentence: str) -> None:
        self.shown.append((lines, sentence))
        assert len(self.shown) < 50
        self.then()

    def engines(self, status: str, state: str, failures: int = 0, **observation: Any) -> None:
        seen = {"address": "10.0.0.1", "ports": {"http": 21000}} | observation
        engine = {
            "id": "d0", "name": "decode-0", "role": "decode", "state": state, "reason": "because", "failures": failures,
            "since": "2026-11-29T12:00:00Z", "observation": seen,
        }  # fmt: skip
        self.deployment = {
            "document": STORED, "condition": {"status": status, "sentence": f"it is {status}"}, "engines": [engine],
        }  # fmt: skip


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.demo.close()


def test_it_is_created_once_and_left_alone_after(world: World) -> None:
    assert world.demo.ensure(may_create=True)
    assert world.put == [document("sim")]
    assert not world.demo.ensure(may_create=False)
    world.engines("ready", "ready")
    assert world.demo.ensure(may_create=False)
    assert len(world.put) == 1


def test_the_answer_is_measured_where_it_happens(world: World) -> None:
    world.engines("ready", "ready")
    sentence, answer = world.demo.answer(world.show)
    assert (sentence, answer.text, answer.prefill, answer.decode) == ("it is ready", "Paris.", "p0", "d0")
    assert answer.bytes_moved == 46_080
    assert answer.ttft > 0
    assert answer.itl is not None


def test_progress_is_shown_while_engines_come_up(world: World) -> None:
    world.engines("starting", "installing", progress=0.4, pid=7)
    world.then = lambda: world.engines("ready", "ready")
    world.demo.answer(world.show)
    (((line,), sentence),) = world.shown
    assert (line.name, line.state, line.detail, line.pid) == ("smollm2 decode-0", "installing", "because", 7)
    assert sentence == "it is starting"


def test_a_state_from_before_a_restart_is_not_believed(world: World) -> None:
    """The database still says ready; the router cannot reach the engines; then the loop notices and starts them anew."""
    world.engines("ready", "ready")
    world.router = 503
    story = iter([("failed", "failed"), ("starting", "starting"), ("ready", "ready")])

    def then() -> None:
        status, state = next(story)
        world.engines(status, state)
        world.router = 200 if status == "ready" else 503

    world.then = then
    assert world.demo.answer(world.show)[1].text == "Paris."
    assert len(world.shown) == 3


def test_a_router_that_never_answers_is_told_in_its_own_words(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PATIENCE", 0.0)
    world.engines("ready", "ready")
    world.router = 503
    with pytest.raises(Unavailable, match="The router answered 503: no engine is ready"):
        world.demo.answer(world.show)


def test_an_engine_that_fails_again_and_again_ends_the_wait(world: World) -> None:
    """Failures of earlier runs do not count."""
    failures = 5
    world.engines("failed", "failed", failures)

    def then() -> None:
        nonlocal failures
        failures += 1
        world.engines("failed", "failed", failures)

    world.then = then
    with pytest.raises(Unavailable, match="smollm2 decode-0 failed 8 times: because"):
        world.demo.answer(world.show)
    assert len(world.shown) == 3


@pytest.mark.parametrize(
    ("status", "says"),
    [
        ("stopped", "stopped or deleted meanwhile"),
        ("deleting", "stopped or deleted meanwhile"),
        ("not-serving", "smollm2: it is not-serving"),
    ],
)
def test_a_deployment_that_somebody_stops_is_not_awaited(world: World, status: str, says: str) -> None:
    world.engines(status, "stopped")
    with pytest.raises(Unavailable, match=says):
        world.demo.answer(world.show)
