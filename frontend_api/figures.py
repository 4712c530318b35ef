"""Counters, gauges and histograms as plain data: added up over processes, written in Prometheus' text format. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from msgspec import Struct

Labels = tuple[str, ...]
"""Values in the order of the metric's label names."""

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
MICROSECONDS = (20.0, 40.0, 60.0, 100.0, 150.0, 250.0, 500.0, 1_000.0, 2_500.0, 10_000.0, 100_000.0)

COUNTERS: dict[str, tuple[str, ...]] = {
    "requests_total": ("deployment", "endpoint", "result"),
    "decisions_total": ("deployment", "reason"),
    "fallbacks_total": ("deployment", "cause"),
    "tokens_total": ("deployment", "kind"),
    "kv_events_total": ("deployment", "kind"),
    "refused_total": ("status",),
    "records_written_total": (),
    "records_dropped_total": (),
}
"""Name (without `tandem_router_`) -> label names."""
GAUGES: dict[str, tuple[str, ...]] = {
    "in_flight": ("engine", "role"),
    "engine_down": ("engine",),
    "kv_state": ("deployment", "state"),
    "kv_trouble": ("deployment", "engine", "why"),
    "kv_blocks": ("deployment",),
    "kv_entries": ("deployment",),
    "snapshot_version": ("process",),
    "client_connections": (),
    "upstream_connections": (),
    "records_waiting": (),
}
HISTOGRAMS: dict[str, tuple[float, ...]] = {
    "ttft_seconds": SECONDS,
    "itl_seconds": SECONDS,
    "longest_gap_seconds": SECONDS,
    "e2e_seconds": SECONDS,
    "prefill_seconds": SECONDS,
    "overhead_microseconds": MICROSECONDS,
}
"""Name -> upper bounds of the buckets."""


class Histogram(Struct):
    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Figures(Struct):
    """Everything one router process counts. Counters and histograms outlive a restart of the process; gauges do not."""

    counters: dict[str, dict[Labels, int]]
    histograms: dict[str, Histogram]
    gauges: dict[str, dict[Labels, int]]


def counters() -> dict[str, Counter[Labels]]:
    return {name: Counter() for name in COUNTERS}


def gauges() -> dict[str, Counter[Labels]]:
    return {name: Counter() for name in GAUGES}


def histograms() -> dict[str, Histogram]:
    return {name: Histogram(bounds, [0] * (len(bounds) + 1)) for name, bounds in HISTOGRAMS.items()}


def added(parts: Iterable[Figures]) -> Figures:
    """The sum of several processes' figures."""
    counts, levels, spreads = counters(), gauges(), histograms()
    for part in parts:
        for name, counter in part.counters.items():
            counts[name].update(counter)
        for name, gauge in part.gauges.items():
            levels[name].update(gauge)
        for name, histogram in part.histograms.items():
            into = spreads[name]
            into.counts = [a + b for a, b in zip(into.counts, histogram.counts, strict=True)]
            into.total += histogram.total
    return Figures({**counts}, spreads, {**levels})


def text(figures: Figures) -> bytes:
    """Prometheus' text format."""
    return ("\n".join(_lines(figures)) + "\n").encode()


def _lines(figures: Figures) -> Iterator[str]:
    for name, labels in COUNTERS.items():
        yield from _series(name, "counter", labels, figures.counters[name])
    for name, labels in GAUGES.items():
        yield from _series(name, "gauge", labels, figures.gauges[name])
    for name, histogram in figures.histograms.items():
        whole = f"tandem_router_{name}"
        yield f"# TYPE {whole} histogram"
        for bound, count in zip((*map(str, histogram.bounds), "+Inf"), accumulate(histogram.counts), strict=True):
            yield f'{whole}_bucket{{le="{bound}"}} {count}'
        yield f"{whole}_sum {histogram.total:.9g}"
        yield f"{whole}_count {sum(histogram.counts)}"


def _series(name: str, kind: str, labels: tuple[str, ...], values: Mapping[Labels, int]) -> Iterator[str]:
    whole = f"tandem_router_{name}"
    yield f"# TYPE {whole} {kind}"
    for key, value in values.items():
        inner = ",".join(f'{label}="{_escaped(part)}"' for label, part in zip(labels, key, strict=True))
        yield f"{whole}{{{inner}}} {value}" if inner else f"{whole} {value}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
