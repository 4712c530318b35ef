"""Counters, gauges and histograms as plain data: added up over processes, written in Prometheus' text format. Pure.

Each metric is declared once, with its labels and its sentence. What every process counts for itself is added up; what every
process sees alike (the engines' events) is told once, by the process that saw the most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

from msgspec import Struct

Labels = tuple[str, ...]
"""Values in the order of the metric's label names."""

WAITS = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
    1_800.0,
    3_600.0,
)
"""Seconds up to the usual limit of an engine's silence, and beyond it, as a deployment may set a longer one."""
STEPS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
         60.0, 120.0, 300.0)  # fmt: skip
"""Seconds between tokens, up to the usual limit of a silence inside a stream."""
MICROSECONDS = (
    5.0,
    10.0,
    20.0,
    40.0,
    60.0,
    100.0,
    150.0,
    250.0,
    500.0,
    1_000.0,
    2_500.0,
    10_000.0,
    100_000.0,
    1_000_000.0,
)


class Metric(NamedTuple):
    labels: tuple[str, ...]
    help: str
    alike: bool = False
    """Every process sees the same: the largest value is told, not the sum."""


class Spread(NamedTuple):
    """A histogram."""

    labels: tuple[str, ...]
    bounds: tuple[float, ...]
    help: str


COUNTERS: dict[str, Metric] = {
    "requests_total": Metric(
        ("deployment", "endpoint", "result"),
        "Requests that ended, each once. result: ok, refused (4xx), failed, truncated (broke after its first byte), "
        "aborted (the client left first). Without deployment: no such model.",
    ),
    "streams_total": Metric(
        ("deployment", "result"),
        "Of requests_total, those whose client got the beginning of a stream: what ttft_seconds counts, and those without a word.",
    ),
    "decisions_total": Metric(
        ("deployment", "reason"), "Routing choices by the reason of the last one of each request."
    ),
    "stranded_total": Metric(
        ("deployment",),
        "Prompts whose KV a prefill engine keeps until its lease ends, as no decode engine ever got it.",
    ),
    "fallbacks_total": Metric(
        ("deployment", "cause"), "Requests that should have been disaggregated and were not, by cause."
    ),
    "leg_failures_total": Metric(
        ("deployment", "engine", "cause"),
        "Requests to engines that failed, by cause (transfer-…: decode's request with KV to fetch), whether or not another engine "
        "then answered. Mistakes of clients do not count.",
    ),
    "tokens_total": Metric(
        ("deployment", "kind"),
        "Tokens that requests used, cut and abandoned ones too; keys are charged the same. prompt, output, cached: as the "
        "engines report them; estimated: of prompt and output, what no engine told of, by the router's own count or estimate; "
        "overlap: of the prompt, what the router expected its engine to have already.",
    ),
    "kv_events_total": Metric(
        ("deployment", "kind"),
        "KV events as the best informed process saw them: batches, gaps, replays, restarts; blocks stored, removed, cleared, "
        "evicted by the router's own limit; and blocks left out, by cause.",
        alike=True,
    ),
    "token_checks_total": Metric(
        ("deployment", "outcome"),
        "Comparisons of the router's token ids with an engine's /tokenize: same, mismatch, unanswered. miscount: an "
        "answer whose count of prompt tokens was not the router's.",
    ),
    "refused_total": Metric(("status",), "Requests refused before a model was looked up: keys, grammar, sizes, paths."),
    "limit_refusals_total": Metric(
        ("limit",), "Requests answered 429 because their key's limit was used up: requests, tokens, concurrency."
    ),
    "limit_fallbacks_total": Metric(
        (), "Requests of limited keys that one process alone judged, by its share, because Redis did not count."
    ),
    "records_written_total": Metric((), "Request records that Redis took."),
    "records_dropped_total": Metric((), "Request records that were lost because Redis is away or slow."),
}
"""By name without `tandem_router_`."""
GAUGES: dict[str, Metric] = {
    "in_flight": Metric(
        ("engine", "role"), "Requests now at an engine; at a prefill engine until decode's first byte."
    ),
    "engine_overloaded": Metric(
        ("engine",),
        "1: it answered lately that it has too much to do, and is used where no other can serve.",
        alike=True,
    ),
    "engine_failing": Metric(
        ("engine",),
        "1: requests or probes to it fail although it accepts connections; it is used only where no other engine can serve.",
        alike=True,
    ),
    "pair_failing": Metric(
        ("prefill", "decode"),
        "1: requests or probes show that KV transfers of this pair fail; it gets no requests.",
        alike=True,
    ),
    "engine_kv_room": Metric(
        ("engine",),
        "KV tokens that a new request can have at the engine at once: what it told last, less what requests took since. "
        "Missing: not known, or older than 5 s.",
        alike=True,
    ),
    "engine_down": Metric(("engine",), "1: the last connection to the engine failed.", alike=True),
    "kv_state": Metric(
        ("deployment", "state"),
        "1: how exact cache-aware routing is: exact, approximate, degraded or blind.",
        alike=True,
    ),
    "kv_trouble": Metric(("deployment", "engine", "why"), "1: why it is not exact; engine *: for all.", alike=True),
    "kv_blocks": Metric(("deployment",), "Different KV blocks in the index.", alike=True),
    "kv_entries": Metric(("deployment",), "(engine, block) entries in the index: what its limit bounds.", alike=True),
    "snapshot_version": Metric(("process",), "Version of the fleet snapshot in force."),
    "client_connections": Metric((), "Open connections of clients."),
    "upstream_connections": Metric((), "Open connections to engines."),
    "waiting": Metric(("deployment",), "Requests that wait now because every engine they could go to is full."),
    "records_waiting": Metric((), "Request records that wait for Redis."),
}
HISTOGRAMS: dict[str, Spread] = {
    "ttft_seconds": Spread(
        ("deployment",),
        WAITS,
        "From the whole request to the first event with text that is relayed. Streams with a first word, however they ended.",
    ),
    "itl_seconds": Spread(
        ("deployment",), STEPS, "Mean time between tokens of one stream; one value per stream of two tokens or more."
    ),
    "longest_gap_seconds": Spread(
        ("deployment",), STEPS, "Longest time between two events with text of one stream; one value per stream."
    ),
    "e2e_seconds": Spread(
        ("deployment",), WAITS, "From the whole request to the end of its answer, if an engine was asked."
    ),
    "queue_seconds": Spread(
        ("deployment",), WAITS, "Waiting because every engine was full; requests that had to, however they ended."
    ),
    "prefill_seconds": Spread(("deployment",), WAITS, "The prefill leg, from its start to its reply."),
    "overhead_microseconds": Spread(
        ("stage",),
        MICROSECONDS,
        "The router's own time before the first byte to an engine. read: key, model, fields; tokenise; limit: asking "
        "for room, limited keys only; choose; send: body, connection; all: their sum.",
    ),
}


class Histogram(Struct):
    """Values by bucket, the last one without a bound, and their sum. Counting is inlined where requests end: see `Telemetry`."""

    counts: list[int]
    total: float = 0.0


Series = dict[Labels, Histogram]


class Figures(Struct):
    """Everything one router process counts. Counters and histograms outlive a restart of the process; gauges do not."""

    counters: dict[str, dict[Labels, int]]
    histograms: dict[str, Series]
    gauges: dict[str, dict[Labels, int]]


def counters() -> dict[str, Counter[Labels]]:
    return {name: Counter() for name in COUNTERS}


def gauges() -> dict[str, Counter[Labels]]:
    return {name: Counter() for name in GAUGES}


def histograms() -> dict[str, Series]:
    return {name: {} for name in HISTOGRAMS}


def series(histograms: Mapping[str, Series], name: str, *labels: str) -> Histogram:
    """The histogram of these labels, made if it is not there."""
    found = histograms[name].get(labels)
    if found is None:
        found = histograms[name][labels] = Histogram([0] * (len(HISTOGRAMS[name].bounds) + 1))
    return found


def added(parts: Iterable[Figures]) -> Figures:
    """Several processes' figures as one's."""
    counts, levels, spreads = counters(), gauges(), histograms()
    for part in parts:
        _merge(COUNTERS, counts, part.counters)
        _merge(GAUGES, levels, part.gauges)
        for name, series in part.histograms.items():
            into = spreads[name]
            for labels, histogram in series.items():
                sum_ = into.setdefault(labels, Histogram([0] * len(histogram.counts)))
                sum_.counts = [a + b for a, b in zip(sum_.counts, histogram.counts, strict=True)]
                sum_.total += histogram.total
    return Figures({**counts}, spreads, {**levels})


def _merge(
    metrics: Mapping[str, Metric], into: Mapping[str, Counter[Labels]], part: Mapping[str, Mapping[Labels, int]]
) -> None:
    for name, values in part.items():
        sums = into[name]
        if metrics[name].alike:
            for key, value in values.items():
                sums[key] = max(value, sums[key])
        else:
            sums.update(values)


def text(figures: Figures) -> bytes:
    """Prometheus' text format."""
    return ("\n".join(_lines(figures)) + "\n").encode()


def _lines(figures: Figures) -> Iterator[str]:
    for kind, metrics, values in (("counter", COUNTERS, figures.counters), ("gauge", GAUGES, figures.gauges)):
        for name, metric in metrics.items():
            whole = yield from _head(name, kind, metric.help)
            for key, value in values[name].items() if metric.labels else [((), values[name].get((), 0))]:
                yield f"{whole}{_braced(metric.labels, key)} {value}"
    for name, spread in HISTOGRAMS.items():
        whole = yield from _head(name, "histogram", spread.help)
        bounds = (*map(str, spread.bounds), "+Inf")
        for key, histogram in figures.histograms[name].items():
            for bound, count in zip(bounds, accumulate(histogram.counts), strict=True):
                yield f"{whole}_bucket{_braced((*spread.labels, 'le'), (*key, bound))} {count}"
            yield f"{whole}_sum{_braced(spread.labels, key)} {histogram.total:.9g}"
            yield f"{whole}_count{_braced(spread.labels, key)} {sum(histogram.counts)}"


def _head(name: str, kind: str, help: str) -> Generator[str, None, str]:
    whole = f"tandem_router_{name}"
    yield f"# HELP {whole} {help}"
    yield f"# TYPE {whole} {kind}"
    return whole


def _braced(labels: tuple[str, ...], key: Labels) -> str:
    inner = ",".join(f'{label}="{_escaped(part)}"' for label, part in zip(labels, key, strict=True))
    return f"{{{inner}}}" if inner else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
