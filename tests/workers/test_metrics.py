"""An engine's Prometheus page, in vLLM 0.32's words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.fleet.model import EngineLoad, Observation, Phase
from controlplane.fleet.wire import decode, encode
from workers.metrics import read

PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 400.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:cache_config_info{block_size="128",cache_dtype="auto",engine="0",num_gpu_blocks="455",note="a } \\" b"} 1.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 1206.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"} 128.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} 1.5e+03
vllm:prompt_tokens_by_source_created{engine="0",model_name="m",source="local_compute"} 1.79e+09
vllm:generation_tokens_total{engine="0",model_name="m"} 77.0
vllm:generation_tokens_created{engine="0",model_name="m"} 1.79e+09
vllm:nixl_bytes_transferred_bucket{engine="0",le="+Inf",model_name="m"} 3.0
vllm:nixl_bytes_transferred_sum{engine="0",model_name="m"} 7.3728e+06
vllm:nixl_bytes_transferred_count{engine="0",model_name="m"} 3.0
vllm:nixl_xfer_time_seconds_sum{engine="0",model_name="m"} 0.0125
vllm:nixl_xfer_time_seconds_count{engine="0",model_name="m"} 3.0
vllm:nixl_num_failed_transfers_total{engine="0",model_name="m"} 1.0
vllm:nixl_num_failed_notifications_total{engine="0",model_name="m"} 2.0
vllm:nixl_num_kv_expired_reqs_total{engine="0",model_name="m"} 5.0
python_info{implementation="CPython"} 1.0
"""


def test_the_named_figures_are_read_and_ranks_added_up() -> None:
    figures = read(PAGE)
    assert (figures.block_size, figures.kv_blocks) == (128, 455)
    assert figures.load == EngineLoad(
        running=3,
        waiting=4,
        kv_usage=0.5,
        nixl_bytes=7_372_800,
        nixl_seconds=0.0125,
        nixl_transfers=3,
        nixl_failures=3,
        kv_expired=5,
        prompt_tokens_local=1206,
        prompt_tokens_cached=128,
        prompt_tokens_transferred=1500,
        generated_tokens=77,
    )


def test_an_engine_without_nixl_has_zeros() -> None:
    figures = read("vllm:num_requests_running 1.0\n")
    assert figures == (EngineLoad(running=1), None, None)


@given(
    st.sampled_from(["num_requests_running", "kv_cache_usage_perc", "cache_config_info", "generation_tokens_total"]),
    st.text(),
    st.text() | st.sampled_from(["NaN", "+Inf", "1.2.3", "1e999", "-1", "1_0"]),
)
def test_no_page_breaks_it(name: str, labels: str, value: str) -> None:
    for page in (f"vllm:{name}{{{labels}}} {value}\n{labels}", f'vllm:cache_config_info{{block_size="{labels}"}} 1'):
        assert_fits(page)


def assert_fits(page: str) -> None:
    """A report takes the figures."""
    load, block_size, kv_blocks = read(page)
    seen = Observation("e", 1, Phase.WARMING, load=load, block_size=block_size, kv_blocks=kv_blocks)
    assert decode(encode(seen), Observation) == seen


@pytest.mark.parametrize("value", ["9" * 400, "9e99", "1e15"])
@pytest.mark.parametrize("name", ["num_requests_running", "kv_cache_usage_perc", "nixl_xfer_time_seconds_sum"])
def test_huge_figures_fit_into_a_report(name: str, value: str) -> None:
    assert_fits(f"vllm:{name} {value}\n" * 3)
    assert_fits(f'vllm:cache_config_info{{block_size="{value}",num_gpu_blocks="{value}"}} 1')
