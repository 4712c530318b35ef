"""What the router tells about itself: records to the Redis stream, its status each second, Prometheus text.

Nothing here ever makes a request wait: records go into a bounded queue, and what does not fit is dropped and counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from itertools import accumulate

from controlplane.fleet.wire import RequestRecord, RouterStatus, encode
from frontend_api.view import View

QUEUE = 20_000
"""Records that may wait for Redis."""
BATCH = 1_000

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_MICROSECONDS = (20.0, 40.0, 60.0, 100.0, 150.0, 250.0, 500.0, 1_000.0, 2_500.0, 10_000.0, 100_000.0)


class Histogram:
    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> Iterable[str]:
        yield f"# TYPE {name} histogram"
        for bound, total in zip((*map(str, self._bounds), "+Inf"), accumulate(self._counts), strict=True):
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum:.9g}"
        yield f"{name}_count {sum(self._counts)}"


class Telemetry:
    """Counters of one router process and its queue of records."""

    def __init__(self, router: str, started_at: float, *, keep_records: bool = True) -> None:
        self.router = router
        self.started_at = started_at
        self.dropped = 0
        self.written = 0
        self._keep_records = keep_records
        self._queue: deque[RequestRecord] = deque()
        self._requests: Counter[tuple[object, ...]] = Counter()
        self._results: Counter[str] = Counter()
        self._decisions: Counter[tuple[object, ...]] = Counter()
        self._fallbacks: Counter[tuple[object, ...]] = Counter()
        self._refused: Counter[tuple[object, ...]] = Counter()
        self._tokens: Counter[tuple[object, ...]] = Counter()
        self._ttft = Histogram(_SECONDS)
        self._itl = Histogram(_SECONDS)
        self._gap = Histogram(_SECONDS)
        self._e2e = Histogram(_SECONDS)
        self._prefill = Histogram(_SECONDS)
        self._overhead = Histogram(_MICROSECONDS)

    def record(self, record: RequestRecord) -> None:
        """Count one finished request and queue its record."""
        deployment = record.deployment
        self._requests[deployment, record.endpoint, record.result] += 1
        self._results[record.result] += 1
        if record.reason:
            self._decisions[deployment, record.reason] += 1
        if record.fallback:
            self._fallbacks[deployment, record.fallback_cause] += 1
        if record.prompt_tokens:
            self._tokens[deployment, "prompt"] += record.prompt_tokens
        if record.output_tokens:
            self._tokens[deployment, "output"] += record.output_tokens
        if record.ttft is not None:
            self._ttft.add(record.ttft)
        if record.itl_mean is not None:
            self._itl.add(record.itl_mean)
        if record.longest_gap is not None:
            self._gap.add(record.longest_gap)
        if record.prefill_seconds is not None:
            self._prefill.add(record.prefill_seconds)
        if record.overhead_us:
            self._overhead.add(record.overhead_us)
            self._e2e.add(record.e2e)
        if not self._keep_records:
            return
        if len(self._queue) >= QUEUE:
            self.dropped += 1
        else:
            self._queue.append(record)

    def count_refused(self, status: int) -> None:
        """Count a request that got no further than the door."""
        self._refused[status,] += 1

    # ---- to Redis

    def batch(self) -> list[bytes]:
        """The oldest waiting records, encoded. They are gone from the queue: a batch that cannot be written is dropped."""
        queue = self._queue
        return [encode(queue.popleft()) for _ in range(min(BATCH, len(queue)))]

    def status(self, view: View) -> RouterStatus:
        return RouterStatus(
            router=self.router,
            snapshot_version=view.version,
            in_flight={engine.id: engine.in_flight for engine in view.engines() if engine.in_flight},
            requests=dict(self._results),
            started_at=self.started_at,
        )

    # ---- Prometheus

    def text(self, view: View, *, clients: int, upstream: int) -> bytes:
        """Everything in Prometheus' text format. All figures are of this process, since it started."""
        lines: list[str] = []
        _series(lines, "tandem_router_requests_total", "counter", ("deployment", "endpoint", "result"), self._requests)
        _series(lines, "tandem_router_decisions_total", "counter", ("deployment", "reason"), self._decisions)
        _series(lines, "tandem_router_fallbacks_total", "counter", ("deployment", "cause"), self._fallbacks)
        _series(lines, "tandem_router_tokens_total", "counter", ("deployment", "kind"), self._tokens)
        _series(lines, "tandem_router_refused_total", "counter", ("status",), self._refused)
        _series(lines, "tandem_router_records_written_total", "counter", (), {(): self.written})
        _series(lines, "tandem_router_records_dropped_total", "counter", (), {(): self.dropped})
        for name, histogram in (
            ("ttft_seconds", self._ttft),
            ("itl_seconds", self._itl),
            ("longest_gap_seconds", self._gap),
            ("e2e_seconds", self._e2e),
            ("prefill_seconds", self._prefill),
            ("overhead_microseconds", self._overhead),
        ):
            lines.extend(histogram.lines("tandem_router_" + name))
        loads: dict[tuple[object, ...], int] = {
            (e.id, e.spec.role.value, e.health.value): e.in_flight for e in view.engines()
        }
        _series(lines, "tandem_router_in_flight", "gauge", ("engine", "role", "health"), loads)
        _series(lines, "tandem_router_snapshot_version", "gauge", (), {(): view.version})
        _series(lines, "tandem_router_client_connections", "gauge", (), {(): clients})
        _series(lines, "tandem_router_upstream_connections", "gauge", (), {(): upstream})
        _series(lines, "tandem_router_records_waiting", "gauge", (), {(): len(self._queue)})
        return ("\n".join(lines) + "\n").encode()


def _series(
    lines: list[str], name: str, kind: str, labels: tuple[str, ...], values: Mapping[tuple[object, ...], int]
) -> None:
    lines.append(f"# TYPE {name} {kind}")
    for key, value in values.items():
        inner = ",".join(f'{label}="{_escaped(str(part))}"' for label, part in zip(labels, key, strict=True))
        lines.append(f"{name}{{{inner}}} {value}" if inner else f"{name} {value}")


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
