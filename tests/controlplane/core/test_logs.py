from __future__ import annotations

import pytest

from controlplane.deployments import logs
from controlplane.fleet.errors import InvalidInput, NotFound
from controlplane.fleet.wire import log_key
from tests.controlplane.core.scripted import Fleet


def test_the_log_of_every_attempt_can_be_read_also_of_one_that_crashed(fleet: Fleet) -> None:
    agent = fleet.join("a")
    fleet.deploy_ready()
    engine = fleet.engine("decode-0")
    fleet.publisher.logs[log_key("a", engine.id, 1)] = [f"line {i}" for i in range(2000)]
    agent.kill(engine.id)
    fleet.step()
    fleet.until(lambda: fleet.status() == "ready")
    fleet.publisher.logs[log_key("a", engine.id, 2)] = ["again"]
    engine.refresh_from_db()
    newest = logs.tail(engine=engine)
    assert (newest.attempt, newest.lines) == (2, ["again"])
    crashed = logs.tail(engine=engine.id, attempt=1)
    assert (crashed.attempt, len(crashed.lines), crashed.lines[-1]) == (1, 1000, "line 1999")
    fleet.publisher.logs[log_key("a", engine.id, 2)].append("more")
    assert logs.follow(engine=engine, attempt=None, cursor=newest.cursor, wait_seconds=0).lines == ["more"]


def test_an_engine_without_a_place_has_an_empty_log(fleet: Fleet) -> None:
    fleet.deploy()
    fleet.step()
    engine = fleet.engine("decode-0")
    assert logs.tail(engine=engine) == logs.LogChunk(1, [], "0-0", [])
    assert logs.follow(engine=engine, attempt=1, cursor="0-0", wait_seconds=0) == logs.LogChunk(1, [], "0-0", [])
    with pytest.raises(NotFound):
        logs.tail(engine=engine, attempt=4)
    with pytest.raises(NotFound):
        logs.tail(engine="no-such-engine")


@pytest.mark.parametrize("cursor", ["", "$", "1", "1-", "x-1", "1-1 COUNT"])
def test_a_cursor_is_one_that_was_given(fleet: Fleet, cursor: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        logs.follow(engine="e", attempt=None, cursor=cursor, wait_seconds=0)
    assert caught.value.field == "cursor"
