"""What an agent leaves for the control plane can be read there, whatever its engines say of themselves."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from controlplane.fleet import wire
from controlplane.fleet.model import EngineLoad, NodeFacts, Observation, PairProof, Phase
from controlplane.fleet.wire import NodeReport
from workers.mailbox import RedisMailbox

FACTS = NodeFacts("10.0.0.1", "h", 2, 1, 1, 1, 1)
WELL = Observation(
    "well", 1, Phase.WARMING, progress=0.5, load=EngineLoad(running=1), pairs=(PairProof("p", 1, True, "ok"),)
)


@pytest.mark.parametrize(
    "said",
    [
        {"progress": 1.5},
        {"load": EngineLoad(running=-1)},
        {"load": EngineLoad(nixl_bytes=1 << 70)},
        {"kv_ranks": 20_000},
        {"block_size": 0},
        {"max_model_len": -1},
        {"pairs": (PairProof("p", 1, False, "x", bytes_moved=-5), *WELL.pairs)},
    ],
)
def test_an_engine_that_says_what_no_report_may_hold_costs_its_node_nothing(
    redis_url: str, said: dict[str, Any]
) -> None:
    client = redis.Redis.from_url(redis_url)
    odd = Observation("odd", 1, Phase.WARMING, pid=7, detail="It answers.", **{"pairs": WELL.pairs, **said})
    RedisMailbox("x", client).write_report(NodeReport("x", "agent", 1, 0, FACTS, (WELL, odd)))
    data = client.get(wire.report_key("x"))
    assert isinstance(data, bytes)
    well, cleaned = wire.decode(data, NodeReport).engines
    assert well == WELL
    assert (cleaned.engine, cleaned.pid, cleaned.detail, cleaned.pairs) == ("odd", 7, "It answers.", WELL.pairs)


def test_a_sound_report_is_sent_as_it_is(redis_url: str) -> None:
    client = redis.Redis.from_url(redis_url)
    report = NodeReport("x", "agent", 1, 0, FACTS, (WELL,))
    RedisMailbox("x", client).write_report(report)
    assert client.get(wire.report_key("x")) == wire.encode(report)
