"""`/metrics`: the vLLM 0.32 names that Tandem reads, in Prometheus text form.

Names, labels, help texts and buckets are those of `v1/metrics/loggers.py`, `v1/metrics/buckets.py` and
`kv_connector/v1/nixl/stats.py`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TypeVar

REQUEST_LATENCY = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
TIME_TO_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
INTER_TOKEN_LATENCY = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
NIXL_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
NIXL_BYTES = tuple(float(2 ** (10 + i)) for i in range(1, 25, 2))
NIXL_DESCRIPTORS = (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000)
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")


def request_tokens(max_model_len: int) -> tuple[float, ...]:
    """1-2-5 steps up to the longest prompt."""
    steps = [float(m * 10**e) for e in range(len(str(max_model_len))) for m in (1, 2, 5)]
    return tuple(step for step in steps if step <= max_model_len)


def _number(value: float) -> str:
    return repr(float(value)) if value != float("inf") else "+Inf"


class Value:
    """A gauge, or a counter (then `kind` is counter and `_total` is part of its sample's name)."""

    def __init__(self, name: str, kind: str, help: str, labels: str, series: Sequence[str] = ("",)) -> None:
        self._head = f"# HELP {name} {help}\n# TYPE {name} {kind}\n"
        if kind == "counter":
            self._head = f"# HELP {name}_total {help}\n# TYPE {name}_total counter\n"
            name += "_total"
        self._names = {key: f"{name}{{{labels}{',' if key else ''}{key}}}" for key in series}
        self.values = dict.fromkeys(series, 0.0)

    def add(self, amount: float, series: str = "") -> None:
        self.values[series] += amount

    def set(self, value: float, series: str = "") -> None:
        self.values[series] = value

    def text(self) -> str:
        return self._head + "".join(f"{self._names[key]} {_number(value)}\n" for key, value in self.values.items())


class Histogram:
    def __init__(self, name: str, help: str, labels: str, buckets: Sequence[float]) -> None:
        self._head = f"# HELP {name} {help}\n# TYPE {name} histogram\n"
        self._name, self._labels = name, labels
        self._bounds = [*map(float, buckets), float("inf")]
        self._counts = [0] * len(self._bounds)
        self.sum = 0.0

    @property
    def count(self) -> int:
        return sum(self._counts)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def text(self) -> str:
        lines, running = [self._head], 0
        for bound, count in zip(self._bounds, self._counts, strict=True):
            running += count
            lines.append(f'{self._name}_bucket{{{self._labels},le="{_number(bound)}"}} {_number(running)}\n')
        lines.append(f"{self._name}_count{{{self._labels}}} {_number(running)}\n")
        lines.append(f"{self._name}_sum{{{self._labels}}} {_number(self.sum)}\n")
        return "".join(lines)


_M = TypeVar("_M", Value, Histogram)


class Metrics:
    """All series of one engine. NIXL's exist only when the engine has the connector, as in vLLM."""

    def __init__(
        self, model_name: str, max_model_len: int, *, nixl: bool, block_size: int = 16, kv_blocks: int = 0
    ) -> None:
        quoted = model_name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        labels = f'engine="0",model_name="{quoted}"'
        self._all: list[Value | Histogram] = []

        def keep(metric: _M) -> _M:
            self._all.append(metric)
            return metric

        def gauge(name: str, help: str, series: Sequence[str] = ("",)) -> Value:
            return keep(Value(f"vllm:{name}", "gauge", help, labels, series))

        def counter(name: str, help: str, series: Sequence[str] = ("",)) -> Value:
            return keep(Value(f"vllm:{name}", "counter", help, labels, series))

        def histogram(name: str, help: str, buckets: Sequence[float]) -> Histogram:
            return keep(Histogram(f"vllm:{name}", help, labels, buckets))

        cache = f'block_size="{block_size}",cache_dtype="auto",enable_prefix_caching="True",engine="0"'
        cache += f',num_gpu_blocks="{kv_blocks}"'
        keep(Value("vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig", cache)).set(1)
        tokens = request_tokens(max_model_len)
        self.running = gauge("num_requests_running", "Number of requests in model execution batches.")
        self.waiting = gauge("num_requests_waiting", "Number of requests waiting to be processed.")
        self.waiting_by_reason = gauge(
            "num_requests_waiting_by_reason",
            "Number of waiting requests by reason.",
            ('reason="capacity"', 'reason="deferred"'),
        )
        self.kv_usage = gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.")
        self.prefix_queries = counter(
            "prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens."
        )
        self.prefix_hits = counter("prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.")
        self.external_queries = counter(
            "external_prefix_cache_queries", "External prefix cache queries, in terms of number of queried tokens."
        )
        self.external_hits = counter(
            "external_prefix_cache_hits", "External prefix cache hits, in terms of number of cached tokens."
        )
        self.preemptions = counter("num_preemptions", "Cumulative number of preemption from the engine.")
        self.prompt_tokens = counter("prompt_tokens", "Number of prefill tokens processed.")
        self.prompt_tokens_by_source = counter(
            "prompt_tokens_by_source",
            "Number of prompt tokens by source.",
            tuple(f'source="{source}"' for source in SOURCES),
        )
        self.prompt_tokens_cached = counter(
            "prompt_tokens_cached", "Number of cached prompt tokens (local + external)."
        )
        self.generation_tokens = counter("generation_tokens", "Number of generation tokens processed.")
        self.request_success = counter(
            "request_success",
            "Count of successfully processed requests.",
            tuple(f'finished_reason="{reason}"' for reason in FINISH_REASONS),
        )
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Number of prefill tokens processed.", tokens)
        self.request_generation_tokens = histogram(
            "request_generation_tokens", "Number of generation tokens processed.", tokens
        )
        self.ttft = histogram(
            "time_to_first_token_seconds", "Histogram of time to first token in seconds.", TIME_TO_FIRST_TOKEN
        )
        self.itl = histogram(
            "inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", INTER_TOKEN_LATENCY
        )
        self.e2e = histogram(
            "e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", REQUEST_LATENCY
        )
        self.queue_time = histogram(
            "request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", REQUEST_LATENCY
        )
        self.prefill_time = histogram(
            "request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", REQUEST_LATENCY
        )
        self.decode_time = histogram(
            "request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", REQUEST_LATENCY
        )
        self.nixl = NixlMetrics(labels) if nixl else None
        if self.nixl:
            self._all += self.nixl.all()

    def text(self) -> bytes:
        return "".join(metric.text() for metric in self._all).encode()


class NixlMetrics:
    def __init__(self, labels: str) -> None:
        self.seconds = Histogram(
            "vllm:nixl_xfer_time_seconds",
            "Histogram of transfer duration for NIXL KV Cache transfers.",
            labels,
            NIXL_SECONDS,
        )
        self.post_seconds = Histogram(
            "vllm:nixl_post_time_seconds",
            "Histogram of transfer post time for NIXL KV Cache transfers.",
            labels,
            (0.001, *NIXL_SECONDS),
        )
        self.bytes = Histogram(
            "vllm:nixl_bytes_transferred",
            "Histogram of bytes transferred per NIXL KV Cache transfers.",
            labels,
            NIXL_BYTES,
        )
        self.descriptors = Histogram(
            "vllm:nixl_num_descriptors",
            "Histogram of number of descriptors per NIXL  KV Cache transfers.",
            labels,
            NIXL_DESCRIPTORS,
        )

        def counter(name: str, help: str) -> Value:
            return Value(f"vllm:nixl_num_{name}", "counter", help, labels)

        self.failed_transfers = counter(
            "failed_transfers",
            "Number of failed NIXL KV Cache transfers, including handshake and notification failures.",
        )
        self.failed_notifications = counter("failed_notifications", "Number of failed NIXL KV Cache notifications.")
        self.expired = counter("kv_expired_reqs", "Number of requests that had their KV expire.")
        self.notified_after_expiry = counter(
            "notifications_after_expiry",
            "Number of completion notifications for requests that were no longer tracked.",
        )

    def all(self) -> list[Value | Histogram]:
        return [
            self.seconds, self.post_seconds, self.bytes, self.descriptors, self.failed_transfers,
            self.failed_notifications, self.expired, self.notified_after_expiry,
        ]  # fmt: skip
