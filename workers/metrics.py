"""From an engine's Prometheus text to the few figures that the control plane needs. Pure.

Only the named lines are looked at: an engine's page has thousands. Series of several data-parallel ranks are added up.
Whatever an engine says, the figures stay within what a report may hold (`fleet.bounds`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import NamedTuple

from msgspec.structs import replace

from controlplane.fleet.model import EngineLoad

_LINE = re.compile(r"^vllm:([a-z_]+)(?:\{(.*)\})? (\d+(?:\.\d+)?(?:e[+-]?\d{1,2})?)$", re.ASCII)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

_MOST = float(1 << 53)

_FIELDS = {
    "num_requests_running": "running",
    "num_requests_waiting": "waiting",
    "nixl_bytes_transferred_sum": "nixl_bytes",
    "nixl_xfer_time_seconds_sum": "nixl_seconds",
    "nixl_xfer_time_seconds_count": "nixl_transfers",
    "nixl_num_failed_transfers_total": "nixl_failures",
    "nixl_num_failed_notifications_total": "nixl_failures",
    "nixl_num_kv_expired_reqs_total": "kv_expired",
    "generation_tokens_total": "generated_tokens",
}
_SOURCES = {
    "local_compute": "prompt_tokens_local",
    "local_cache_hit": "prompt_tokens_cached",
    "external_kv_transfer": "prompt_tokens_transferred",
}


class Figures(NamedTuple):
    load: EngineLoad
    block_size: int | None
    """Tokens in one KV block, where the engine tells it."""
    kv_blocks: int | None = None
    """KV blocks of one rank, likewise."""


def read(text: str) -> Figures:
    """The figures of one `/metrics` page; what is missing there is 0."""
    sums: dict[str, float] = defaultdict(float)
    usage = 0.0
    block_size = kv_blocks = None
    for line in text.splitlines():
        if not line.startswith("vllm:") or (match := _LINE.match(line)) is None:
            continue
        name, labels, value = match[1], match[2] or "", match[3]
        if (field := _FIELDS.get(name)) is not None:
            sums[field] += _figure(value)
        elif name == "prompt_tokens_by_source_total":
            source = dict(_LABEL.findall(labels)).get("source", "")
            if (field := _SOURCES.get(source)) is not None:
                sums[field] += _figure(value)
        elif name == "kv_cache_usage_perc":
            usage = min(max(usage, float(value)), 1.0)
        elif name == "cache_config_info":
            told = dict(_LABEL.findall(labels))
            block_size = _number(told.get("block_size", ""), digits=5) or block_size
            kv_blocks = _number(told.get("num_gpu_blocks", ""), digits=12) or kv_blocks
    seconds = min(sums.pop("nixl_seconds", 0.0), 1e9)
    counts = {field: int(min(value, _MOST)) for field, value in sums.items()}
    load = replace(EngineLoad(kv_usage=usage, nixl_seconds=seconds), **counts)
    return Figures(load, block_size, kv_blocks)


def _figure(text: str) -> float:
    return min(float(text), _MOST)


def _number(text: str, *, digits: int) -> int | None:
    return int(text) if re.fullmatch(r"[1-9][0-9]*", text) and len(text) <= digits else None
