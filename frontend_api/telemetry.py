"""What the router tells about itself: records for the Redis stream, its status each second, Prometheus text.

Nothing here ever makes a request wait: records go into a bounded queue, and what does not fit is dropped and counted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from time import time

from controlplane.fleet.wire import CacheState, RequestRecord, RouterStatus, encode
from frontend_api import figures
from frontend_api.evidence import Cache, Evidence
from frontend_api.figures import MICROSECONDS, STEPS, WAITS, Figures, observe
from frontend_api.shared import Slots
from frontend_api.view import Health, View
from frontend_api.windows import Bound

QUEUE = 20_000
"""Records that may wait for Redis."""
BATCH = 1_000
KEY_EVERY = 60.0
"""Seconds between two notes of one key's use."""
KEY_TOLD = 15.0
"""Seconds for which such a note is told: the control plane may miss a status."""
_NO_STAGES: Mapping[str, float] = {}
_NOTHING: Counter[str] = Counter()
_ALL = ("all",)


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
        self._ttft = histograms["ttft_seconds"]
        self._itl = histograms["itl_seconds"]
        self._gap = histograms["longest_gap_seconds"]
        self._e2e = histograms["e2e_seconds"]
        self._prefill = histograms["prefill_seconds"]
        self._overhead = histograms["overhead_microseconds"]
        self._queue_wait = histograms["queue_seconds"]

    def record(self, record: RequestRecord, stages: Mapping[str, float] = _NO_STAGES) -> None:
        """Count one finished request and queue its record. `stages`: of `overhead_us`, in microseconds."""
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
        if record.cached_tokens:
            self._tokens[deployment, "cached"] += record.cached_tokens
        if record.overlap_tokens:
            self._tokens[deployment, "overlap"] += record.overlap_tokens
        if record.stream:
            self._streams[deployment, record.result] += 1
        labels = (deployment,)
        if record.ttft is not None:
            observe(self._ttft, WAITS, labels, record.ttft)
            if record.itl_mean is not None:
                observe(self._itl, STEPS, labels, record.itl_mean)
            if record.longest_gap is not None:
                observe(self._gap, STEPS, labels, record.longest_gap)
        if record.prefill_seconds is not None:
            observe(self._prefill, WAITS, labels, record.prefill_seconds)
        if record.queue_seconds is not None:
            observe(self._queue_wait, WAITS, labels, record.queue_seconds)
        if record.overhead_us:
            observe(self._e2e, WAITS, labels, record.e2e)
            observe(self._overhead, MICROSECONDS, _ALL, record.overhead_us)
            for stage, microseconds in stages.items():
                observe(self._overhead, MICROSECONDS, (stage,), microseconds)
        if record.key:
            self.note_key(record.key, record.at)
        if not self._keep_records:
            return
        if len(self._queue) >= QUEUE:
            self._dropped[()] += 1
        else:
            self._queue.append(record)

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
        if at - self._keys_seen.get(key, 0.0) >= KEY_EVERY:
            self._keys_seen[key] = at

    # ---- to Redis

    def batch(self) -> list[bytes]:
        """The oldest waiting records, encoded. They are gone from the queue: `settle` says what became of them."""
        queue = self._queue
        return [encode(queue.popleft()) for _ in range(min(BATCH, len(queue)))]

    def settle(self, count: int, *, written: bool) -> None:
        (self._written if written else self._dropped)[()] += count

    @property
    def written(self) -> int:
        return self._written[()]

    @property
    def dropped(self) -> int:
        return self._dropped[()]

    def status(self, view: View, evidence: Evidence) -> RouterStatus:
        standings = {
            deployment.name: cache.standing()
            for name, cache in evidence.caches.items()
            if (deployment := view.deployments.get(name)) is not None
        }
        now = time()
        self._keys_seen = {key: at for key, at in self._keys_seen.items() if now - at < KEY_EVERY}
        return RouterStatus(
            router=self.router,
            snapshot_version=view.version,
            in_flight={engine.id: engine.in_flight for engine in view.engines() if engine.in_flight},
            requests=dict(self._results),
            keys_seen={key: at for key, at in self._keys_seen.items() if now - at < KEY_TOLD},
            started_at=self.started_at,
            caches={name: CacheState(s.state, dict(s.reasons)) for name, s in standings.items()},
        )

    # ---- to Prometheus

    def share(
        self, view: View, evidence: Evidence, *, clients: int, upstream: int, waiting: Iterable[tuple[str, int]] = ()
    ) -> None:
        """Bring the gauges up to date and show this process's figures to the others. Once a second. `waiting`: how many
        requests wait for room, by served name."""
        gauges = self._gauges
        for gauge in gauges.values():
            gauge.clear()
        for engine in view.engines():
            gauges["in_flight"][engine.id, engine.spec.role] = engine.in_flight
            gauges["engine_down"][engine.id,] = int(engine.health is Health.DOWN)
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
        for name in self._kv_seen.keys() - present:
            del self._kv_seen[name]

    def text(
        self, view: View, evidence: Evidence, *, clients: int, upstream: int, waiting: Iterable[tuple[str, int]] = ()
    ) -> bytes:
        """The figures of all processes behind the port; the others' are up to a second old."""
        self.share(view, evidence, clients=clients, upstream=upstream, waiting=waiting)
        others = self._slots.others(self._index) if self._slots is not None else []
        return figures.text(figures.added([self._figures, *others]))
