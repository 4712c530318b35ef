"""What the router tells about itself: records for the Redis stream, its status each second, Prometheus text.

Nothing here ever makes a request wait: records go into a bounded queue, and what does not fit is dropped and counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from time import monotonic, time

from controlplane.fleet.wire import CacheState, RequestRecord, RouterStatus
from frontend_api.kv.evidence import Cache, Evidence
from frontend_api.limits.windows import Bound
from frontend_api.observe import figures
from frontend_api.observe.account import STAGES
from frontend_api.observe.figures import MICROSECONDS, STEPS, WAITS, Figures, Histogram
from frontend_api.observe.shared import Slots
from frontend_api.routing.outcomes import Outcomes
from frontend_api.routing.view import Health, View

QUEUE = 20_000
"""Records that may wait for Redis."""
BATCH = 1_000
TOGETHER = 32
"""Finished requests that are counted in one go: one at a time costs far more, as little of what it takes is in the CPU's
caches."""
KEY_EVERY = 60.0
"""Seconds between two notes of one key's use."""
KEY_TOLD = 15.0
"""Seconds for which such a note is told: the control plane may miss a status."""
_NOTHING: Counter[str] = Counter()


class _Times:
    """The histograms of one deployment."""

    __slots__ = ("e2e", "gap", "itl", "prefill", "queue", "ttft")

    def __init__(self, histograms: dict[str, figures.Series], deployment: str) -> None:
        self.ttft = figures.series(histograms, "ttft_seconds", deployment)
        self.itl = figures.series(histograms, "itl_seconds", deployment)
        self.gap = figures.series(histograms, "longest_gap_seconds", deployment)
        self.e2e = figures.series(histograms, "e2e_seconds", deployment)
        self.prefill = figures.series(histograms, "prefill_seconds", deployment)
        self.queue = figures.series(histograms, "queue_seconds", deployment)


class Telemetry:
    """Counters of one router process and its queue of records.

    `slots`, `index`: where the processes behind one port see each other's figures; what a process that died had counted
    is carried on by the one that takes its place.
    """

    def __init__(
        self, router: str, started_at: float, *, keep_records: bool = True, slots: Slots | None = None, index: int = 0
    ) -> None:
        self.router = router
        self.started_at = started_at
        self._keep_records = keep_records
        self._slots = slots
        self._index = index
        self._ended: list[tuple[RequestRecord, Sequence[float]]] = []
        """Not counted yet."""
        self._queue: deque[RequestRecord] = deque()
        self._results: Counter[str] = Counter()
        counters = figures.counters()
        histograms = figures.histograms()
        before = slots.read(index) if slots is not None else None
        if before is not None:
            histograms = before.histograms
            for name, counter in before.counters.items():
                counters[name].update(counter)
        self._gauges = figures.gauges()
        self._figures = Figures({**counters}, histograms, {**self._gauges})
        self._requests = counters["requests_total"]
        self._decisions = counters["decisions_total"]
        self._fallbacks = counters["fallbacks_total"]
        self._stranded = counters["stranded_total"]
        self._leg_failures = counters["leg_failures_total"]
        self._tokens = counters["tokens_total"]
        self._kv_events = counters["kv_events_total"]
        self._kv_seen: dict[str, tuple[Cache, Counter[str]]] = {}
        self._refused = counters["refused_total"]
        self._token_checks = counters["token_checks_total"]
        self._limit_refusals = counters["limit_refusals_total"]
        self._limit_fallbacks = counters["limit_fallbacks_total"]
        self._keys_seen: dict[str, float] = {}
        self._written = counters["records_written_total"]
        self._dropped = counters["records_dropped_total"]
        self._streams = counters["streams_total"]
        self._times: dict[str, _Times] = {}
        self._overheads = [figures.series(histograms, "overhead_microseconds", stage) for stage in ("all", *STAGES)]

    def record(self, record: RequestRecord, stages: Sequence[float] = ()) -> None:
        """One finished request: it is counted, and its record queued, by and by. `stages`: of `overhead_us`, in microseconds,
        as `STAGES` names them."""
        self._ended.append((record, stages))
        if len(self._ended) >= TOGETHER:
            self._count_ended()

    def _count_ended(self) -> None:
        ended, self._ended = self._ended, []
        for record, stages in ended:
            self._count(record, stages)

    def _count(self, record: RequestRecord, stages: Sequence[float]) -> None:
        deployment = record.deployment
        self._requests[deployment, record.endpoint, record.result] += 1
        self._results[record.result] += 1
        if record.reason:
            self._decisions[deployment, record.reason] += 1
        if record.fallback:
            self._fallbacks[deployment, record.fallback_cause] += 1
        for failure in record.tried:
            cause, *_, engine = failure.split(" ")
            self._leg_failures[deployment, engine, cause] += 1
        if record.stranded:
            self._stranded[(deployment,)] += record.stranded
        if record.prompt_tokens:
            self._tokens[deployment, "prompt"] += record.prompt_tokens
        if record.output_tokens:
            self._tokens[deployment, "output"] += record.output_tokens
        if record.cached_tokens:
            self._tokens[deployment, "cached"] += record.cached_tokens
        if record.estimated_tokens:
            self._tokens[deployment, "estimated"] += record.estimated_tokens
        if record.overlap_tokens:
            self._tokens[deployment, "overlap"] += record.overlap_tokens
        if record.stream:
            self._streams[deployment, record.result] += 1
        if deployment:
            self._time(record, stages)
        if record.key:
            self.note_key(record.key, record.at)
        if not self._keep_records:
            return
        if len(self._queue) >= QUEUE:
            self._dropped[()] += 1
        else:
            self._queue.append(record)

    def _time(self, record: RequestRecord, stages: Sequence[float]) -> None:
        times = self._times.get(record.deployment)
        if times is None:
            times = self._times[record.deployment] = _Times(self._figures.histograms, record.deployment)
        if record.ttft is not None:
            _observe(times.ttft, WAITS, record.ttft)
            if record.itl_mean is not None:
                _observe(times.itl, STEPS, record.itl_mean)
            if record.longest_gap is not None:
                _observe(times.gap, STEPS, record.longest_gap)
        if record.prefill_seconds is not None:
            _observe(times.prefill, WAITS, record.prefill_seconds)
        if record.queue_seconds is not None:
            _observe(times.queue, WAITS, record.queue_seconds)
        if record.overhead_us:
            _observe(times.e2e, WAITS, record.e2e)
            for histogram, microseconds in zip(self._overheads, (record.overhead_us, *stages), strict=False):
                histogram.counts[bisect_left(MICROSECONDS, microseconds)] += 1
                histogram.total += microseconds

    def count_refused(self, status: int) -> None:
        """Count a request that got no further than the door."""
        self._refused[str(status),] += 1

    def count_token_check(self, deployment: str, outcome: str) -> None:
        """Count one comparison of token ids with an engine's."""
        self._token_checks[deployment, outcome] += 1

    def count_limited(self, bound: Bound) -> None:
        """Count a request that its key's limits refused."""
        self._limit_refusals[bound.name.lower(),] += 1

    def count_limit_fallback(self) -> None:
        self._limit_fallbacks[()] += 1

    def note_key(self, key: str, at: float) -> None:
        """A key was used. `at`: seconds since 1970."""
        if not 0 <= at - self._keys_seen.get(key, 0.0) < KEY_EVERY:  # nor where the clock was set back
            self._keys_seen[key] = at

    # ---- to Redis

    def batch(self) -> list[RequestRecord]:
        """The oldest waiting records. They are gone from the queue: `settle` says what became of them."""
        self._count_ended()
        queue = self._queue
        return [queue.popleft() for _ in range(min(BATCH, len(queue)))]

    def put_back(self, records: Sequence[RequestRecord]) -> None:
        """A batch that Redis did not take: it is the next one again."""
        self._queue.extendleft(reversed(records))

    @property
    def waiting(self) -> bool:
        """Records wait."""
        self._count_ended()
        return bool(self._queue)

    def settle(self, count: int, *, written: bool) -> None:
        (self._written if written else self._dropped)[()] += count

    @property
    def written(self) -> int:
        return self._written[()]

    @property
    def dropped(self) -> int:
        self._count_ended()
        return self._dropped[()]

    def status(self, view: View, evidence: Evidence, outcomes: Outcomes) -> RouterStatus:
        caches = {
            deployment.name: cache
            for name, cache in evidence.caches.items()
            if (deployment := view.deployments.get(name)) is not None
        }
        self._count_ended()
        now = time()
        self._keys_seen = {key: at for key, at in self._keys_seen.items() if 0 <= now - at < KEY_EVERY}
        return RouterStatus(
            router=self.router,
            snapshot_version=view.version,
            in_flight={engine.id: engine.in_flight for engine in view.engines() if engine.in_flight},
            requests=dict(self._results),
            keys_seen={key: at for key, at in self._keys_seen.items() if now - at < KEY_TOLD},
            started_at=self.started_at,
            faults=outcomes.faults(view.engines(), monotonic()),
            caches={name: _told(cache) for name, cache in caches.items()},
        )

    # ---- to Prometheus

    def share(
        self, view: View, evidence: Evidence, *, clients: int, upstream: int, waiting: Iterable[tuple[str, int]] = ()
    ) -> None:
        """Bring the gauges up to date and show this process's figures to the others. Once a second. `waiting`: how many
        requests wait for room, by served name."""
        self._count_ended()
        gauges = self._gauges
        for gauge in gauges.values():
            gauge.clear()
        for engine in view.engines():
            gauges["in_flight"][engine.id, engine.spec.role] = engine.in_flight
            gauges["engine_overloaded"][engine.id,] = int(engine.health is Health.OVERLOADED)
            if (room := engine.known_room) is not None:
                gauges["engine_kv_room"][engine.id,] = max(room, 0)
            gauges["engine_down"][engine.id,] = int(engine.health is Health.DOWN)
            gauges["engine_failing"][engine.id,] = int(engine.fails)
        for present in view.deployments.values():
            for pair in present.broken_pairs - present.unproved_pairs:
                gauges["pair_failing"][pair] = 1
        for cache in evidence.caches.values():
            name = cache.name
            state, reasons = cache.standing()
            gauges["kv_state"][name, state] = 1
            for who, why in reasons.items():
                gauges["kv_trouble"][name, who, why] = 1
            gauges["kv_blocks"][name,] = len(cache.index)
            gauges["kv_entries"][name,] = cache.index.entries
            counts = cache.counts()
            before, seen = self._kv_seen.get(name, (cache, _NOTHING))
            for kind, more in (counts - (seen if before is cache else _NOTHING)).items():
                self._kv_events[name, kind] += more
            self._kv_seen[name] = cache, counts
        if view.version >= 0:  # before, nobody knows who is there
            self._forget_others({deployment.name for deployment in view.deployments.values()})
            engines = {engine.id for engine in view.engines()}
            for labels in [labels for labels in self._leg_failures if labels[1] not in engines]:
                del self._leg_failures[labels]
        gauges["snapshot_version"][str(self._index),] = view.version
        gauges["client_connections"][()] = clients
        gauges["upstream_connections"][()] = upstream
        gauges["records_waiting"][()] = len(self._queue)
        for served, many in waiting:
            deployment = view.deployments.get(served)
            gauges["waiting"][deployment.name if deployment is not None else served,] = many
        if self._slots is not None:
            self._slots.write(self._index, self._figures)

    def _forget_others(self, deployments: set[str]) -> None:
        """Drop the series of deployments that are gone."""
        present = deployments | {""}
        for kinds, every in (
            (figures.COUNTERS, self._figures.counters),
            (figures.HISTOGRAMS, self._figures.histograms),
        ):
            for name, series in every.items():
                if kinds[name].labels[:1] == ("deployment",):
                    for labels in [labels for labels in series if labels[0] not in present]:
                        del series[labels]
        for name in self._times.keys() - present:
            del self._times[name]
        for name in self._kv_seen.keys() - present:
            del self._kv_seen[name]

    def text(
        self, view: View, evidence: Evidence, *, clients: int, upstream: int, waiting: Iterable[tuple[str, int]] = ()
    ) -> bytes:
        """The figures of all processes behind the port; the others' are up to a second old."""
        self.share(view, evidence, clients=clients, upstream=upstream, waiting=waiting)
        others = self._slots.others(self._index) if self._slots is not None else []
        return figures.text(figures.added([self._figures, *others]))


def _told(cache: Cache) -> CacheState:
    state, reasons = cache.standing()
    return CacheState(state, dict(reasons), cache.prompts, cache.short_prompts, cache.short_block)


def _observe(histogram: Histogram, bounds: tuple[float, ...], value: float) -> None:
    histogram.counts[bisect_left(bounds, value)] += 1
    histogram.total += value
