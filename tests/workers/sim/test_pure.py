"""Small pure parts: faults by name, modelled time, JSON to a schema, params read, events on the wire."""

from __future__ import annotations

import msgspec
import pytest

from workers.sim.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from workers.sim.faults import FAULTS, Faults, UnknownFault
from workers.sim.latency import Pace
from workers.sim.metrics import Histogram, Metrics, request_tokens
from workers.sim.schema import example, script
from workers.sim.transfer import remote_of


def test_every_fault_can_be_set_at_start() -> None:
    assert Faults(FAULTS).names() == sorted(FAULTS)


def test_faults_change_whole_or_not_at_all() -> None:
    faults = Faults(["events-connect"])
    faults.set(["hang", "crash-after-2"])
    assert faults.names() == ["events-connect", "hang", "crash-after-2"]
    for wrong in (["http-500", "nope"], ["events-off"], ["crash-after-0"], ["crash-after-x"]):
        with pytest.raises(UnknownFault, match=wrong[-1]):
            faults.set(wrong)
    assert "hang" in faults
    assert not faults.crash_due()
    assert faults.crash_due()
    faults.set([])
    assert faults.names() == ["events-connect"]


def test_a_step_holds_prefill_and_decode_together() -> None:
    pace = Pace(1000.0, 0.01)
    assert pace.step_seconds(0, 0) == 0
    assert pace.step_seconds(500, 0) == 0.5
    assert pace.step_seconds(0, 7) == 0.01
    assert pace.step_seconds(500, 7) == pytest.approx(0.51)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (None, {}),
        ({"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}, {"a": "text", "b": 1}),
        ({"enum": ["x", "y"]}, "x"),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, True),
        ({"type": ["number", "null"]}, 1.0),
        ({"type": "array", "items": {"const": 3}, "minItems": 1}, [3]),
        ({"type": "array", "items": {"const": 3}}, []),
        ({"type": "null"}, None),
    ],
)
def test_example_fits_its_schema(schema: object, value: object) -> None:
    assert example(schema) == value
    assert msgspec.json.decode("".join(script(schema))) == value


REMOTE: dict[str, object] = {
    "do_remote_prefill": True,
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "h",
    "remote_port": 1,
    "remote_block_ids": [[1, 2], [3]],
}


@pytest.mark.parametrize("change", [{"remote_port": "x"}, {"remote_block_ids": 5}, {"remote_block_ids": ["a"]}])
def test_nonsense_params_are_no_params(change: dict[str, object]) -> None:
    assert remote_of(REMOTE | change) is None


def test_params_read() -> None:
    remote = remote_of(REMOTE | {"remote_prefill_cached_tokens": 7, "remote_port": "21"})
    assert remote
    assert (remote.block_ids, remote.port, remote.cached_tokens) == ((1, 2, 3), 21, 7)
    assert remote_of(None) is remote_of({}) is None


def test_events_as_vllm_encodes_them() -> None:
    stored = BlockStored([5], None, [1, 2], 2, None, "GPU", None, [None], 0, "full_attention")
    batch = EventBatch(1.5, [stored, BlockRemoved([5], "GPU", 0), AllBlocksCleared()])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch)) == [
        1.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [5],
                "parent_block_hash": None,
                "token_ids": [1, 2],
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [None],
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            },
            {"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU", "group_idx": 0},
            {"type": "AllBlocksCleared"},
        ],
        0,
    ]


def test_histogram_counts_up_to_its_bounds() -> None:
    histogram = Histogram("h", "help", 'a="b"', (1, 2))
    for value in (0.5, 1, 1.5, 9):
        histogram.observe(value)
    assert histogram.text().splitlines()[2:] == [
        'h_bucket{a="b",le="1.0"} 2.0',
        'h_bucket{a="b",le="2.0"} 3.0',
        'h_bucket{a="b",le="+Inf"} 4.0',
        'h_count{a="b"} 4.0',
        'h_sum{a="b"} 12.0',
    ]


def test_metrics_text_escapes_the_model_name() -> None:
    assert b'model_name="a\\"b/c"' in Metrics('a"b/c', 100, nixl=True).text()
    assert b"nixl" not in Metrics("m", 100, nixl=False).text()
    assert request_tokens(100) == (1, 2, 5, 10, 20, 50, 100)
