"""What requests show of the engines: which engine, or which pair of them, is at fault. Pure: no IO, and time is an argument.

A leg that fails raises a doubt, and a doubt asks for a probe at once (`probing` does it): a small completion, or for a pair a
small exchange. What a failure was worth is known when its request ends:

* The request was answered another way: the failure counts. `ENOUGH` of them in a row, of different requests, and the engine
  or pair is out.
* A stream that breaks off after its first token can go no other way: it counts as well.
* An engine refused it (4xx) and another took it: only a probe can tell whether the engine refuses everything.
* Nobody could answer it: it may be the request that breaks engines, so it does not count. Only the probe can tell.
* A leg that had KV to fetch says nothing about one engine alone: it counts for the pair. When all pairs of an engine fail, and
  its partners work with others, that engine is at fault, and pairs of it that nobody has tried yet are out too.

What is out gets requests only where no other can serve (engines), or none (pairs). It is probed again and again, at growing
intervals, and comes back with the first probe or request that works.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import inf

from controlplane.fleet.wire import Fault
from frontend_api.formats.openai import Usage
from frontend_api.routing.failures import BROKE_OFF, Failure
from frontend_api.routing.view import Deployment, Engine, Health, View

ENOUGH = 2
"""Requests in a row that fail at an engine or a pair, and are answered another way, until it is out."""
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 10.0
"""Seconds between two probes of what is out: doubled with each probe, until a request works there."""
LONGEST_REST = 60.0
"""The same where probes work, and doubts go on: a long answer that is no stream is silent too."""
DOUBT_SECONDS = 5.0
"""Silence of a leg, while nobody else has heard of its engine either, after which the engine is probed."""
HUNG_PROBES = 2
"""Probes in a row without an answer, after which legs that are silent too are given up where another way is left."""
FORGET_SECONDS = 300.0
"""For which it is remembered how often something was probed that works again."""
TELL_SECONDS = 10.0
"""Between two sentences about one failing engine or pair."""
MOST_FAULTS = 1_000
"""That are told at a time."""


class Trouble:
    """What speaks against an engine, or a pair, since it last worked."""

    __slots__ = (
        "deployment", "failure", "failures", "out", "pause", "probe_at", "probed_silent", "probing", "rest_until", "since",
        "told_at", "turn",
    )  # fmt: skip

    def __init__(self, failure: Failure, deployment: Deployment, now: float, turn: int) -> None:
        self.failure = failure
        """The last one."""
        self.turn = turn
        """When it began, among the pairs that served."""
        self.deployment = deployment
        self.since = now
        self.failures = 0
        """Requests and probes that failed in a row."""
        self.out = False
        self.pause = FIRST_PAUSE
        self.probe_at = now
        """When it is to be probed; inf: no need."""
        self.probing = False
        self.probed_silent = 0
        """Probes in a row that got no answer."""
        self.rest_until = now
        """No earlier probe: one has just worked."""
        self.told_at = -inf
        """When a failing leg was last told of to people."""

    @property
    def engine(self) -> Engine:
        return self.failure.engine

    @property
    def prefill(self) -> Engine | None:
        """None: the trouble is the engine's, not a pair's."""
        return self.failure.prefill


_Subject = tuple[Engine | None, Engine]


class Outcomes:
    """Of one router process. It follows the view: what has left it is forgotten."""

    def __init__(self) -> None:
        self.troubles: dict[_Subject, Trouble] = {}
        """Empty where nothing is wrong: that is all that a good outcome looks at. By (prefill of a pair or None, engine)."""
        self.left_out: tuple[Failure, ...] = ()
        """Why, of each engine and pair that is out."""
        self._busy: set[Engine] = set()
        """Being probed."""
        self._turn = 0
        """Rises with each pair that serves, and each that fails for the first time."""
        self._working: dict[tuple[Engine, Engine], int] = {}
        """Pairs that served since something was wrong, and when last."""
        self._heard: dict[Engine, tuple[int, float]] = {}
        self._deployments: dict[str, Deployment] = {}
        self._news: list[str] = []

    # ---- what requests tell

    def worked(self, engine: Engine, prefill: Engine | None = None, *, whole: bool = True) -> None:
        """A leg gave what it should. `prefill`: with that engine's KV. `whole`: False: its stream has only begun."""
        if not self.troubles:
            return
        if prefill is not None:
            self._turn += 1
            self._working[prefill, engine] = self._turn
        trouble = self.troubles.get((prefill, engine))
        if trouble is not None and (whole or trouble.failure.what != BROKE_OFF):
            del self.troubles[prefill, engine]
            if trouble.out:
                self._back(trouble)
        if not self.troubles:
            self._working.clear()

    def doubt(self, failure: Failure, deployment: Deployment, now: float) -> Trouble:
        """A leg failed: see by a probe whether that is to be expected again."""
        trouble = self._question(failure, deployment, now)
        if now - trouble.told_at >= TELL_SECONDS:
            trouble.told_at = now
            self._news.append(f"{deployment.name}: {failure.sentence(private=True)}")
        return trouble

    def _question(self, failure: Failure, deployment: Deployment, now: float) -> Trouble:
        subject = failure.prefill, failure.engine
        trouble = self.troubles.get(subject)
        if trouble is None:
            self._turn += 1
            trouble = self.troubles[subject] = Trouble(failure, deployment, now, self._turn)
        elif not trouble.out:
            trouble.failure = failure
            if not trouble.probing:
                trouble.probe_at = min(trouble.probe_at, max(now, trouble.rest_until))
        return trouble

    def blame(self, failure: Failure, deployment: Deployment, now: float) -> None:
        """A leg failed, and its request was answered another way."""
        trouble = self.doubt(failure, deployment, now)
        if not trouble.failures:
            trouble.since = now
        trouble.failures += 1
        if trouble.failures >= ENOUGH and not trouble.out:
            if not trouble.probing:
                trouble.probe_at = min(trouble.probe_at, now + LONGEST_PAUSE)
            self._out(trouble, now)

    def suspects(self, engine: Engine, prefill: Engine | None) -> bool:
        """Whether something was wrong there before."""
        return bool(self.troubles) and ((None, engine) in self.troubles or (prefill, engine) in self.troubles)

    # ---- silence

    def look(self, view: View, now: float) -> None:
        """Once a second: which engines have answered anybody, and what can be forgotten."""
        self._heard = {
            engine: seen if (seen := self._heard.get(engine, (-1, now)))[0] == engine.answers else (engine.answers, now)
            for engine in view.engines()
        }
        for subject, trouble in list(self.troubles.items()):
            idle = not trouble.out and not trouble.probing and trouble.probe_at == inf
            if idle and now - trouble.rest_until > FORGET_SECONDS:
                del self.troubles[subject]

    def silent(self, engine: Engine, prefill: Engine | None, deployment: Deployment, since: float, now: float) -> bool:
        """A leg has had no byte since then. Returns whether to give it up: probes get none either, and another way is left."""
        if now - max(since, self._heard.get(engine, (0, 0.0))[1]) < DOUBT_SECONDS:
            return False
        trouble = self.troubles.get((prefill, engine))
        if trouble is None or not trouble.out:
            self._question(Failure(engine, "silent", prefill), deployment, now)
        alone = self.troubles.get((None, engine))
        if alone is not None and alone.out and alone.probed_silent >= HUNG_PROBES:
            reads = engine in deployment.prefill
            pool = deployment.prefill if reads else deployment.answering
            others = any(e.health in (Health.UP, Health.HALF_OPEN) for e in pool if e is not engine)
            return others or (reads and deployment.falls_back)
        if prefill is None or trouble is None or not trouble.out or trouble.probed_silent < HUNG_PROBES:
            return False
        return deployment.falls_back or len(deployment.decode) > 1

    # ---- probes

    def due(self, now: float) -> list[Trouble]:
        """What is to be probed now: each engine by one probe at a time. Call `begin` before anything else is done."""
        return [t for t in self.troubles.values() if t.probe_at <= now and not t.probing and self._free(t)]

    def _free(self, trouble: Trouble) -> bool:
        if trouble.prefill is None:
            return trouble.engine not in self._busy
        if trouble.engine in self._busy or trouble.prefill in self._busy:
            return False
        return not any(self._is_out(engine) for engine in (trouble.prefill, trouble.engine))  # first they alone

    def _is_out(self, engine: Engine) -> bool:
        trouble = self.troubles.get((None, engine))
        return trouble is not None and trouble.out

    def begin(self, trouble: Trouble) -> bool:
        """Whether its engines are free to be probed; then they no longer are."""
        if not self._free(trouble):
            return False
        trouble.probing = True
        trouble.probe_at = inf
        self._busy.update(e for e in (trouble.prefill, trouble.engine) if e is not None)
        return True

    def end(self, trouble: Trouble, now: float, failure: Failure | None, *, unsure: bool = False) -> None:
        """How a probe went. `failure`: None: it worked; of a pair's probe it may be one engine's. `unsure`: it got no answer,
        but the engine wrote other ones."""
        trouble.probing = False
        self._busy.difference_update(e for e in (trouble.prefill, trouble.engine) if e is not None)
        rest, trouble.pause = trouble.pause, min(trouble.pause * 2, LONGEST_REST)
        pause = min(rest, LONGEST_PAUSE)
        trouble.probe_at = inf
        if self.troubles.get((trouble.prefill, trouble.engine)) is not trouble:
            return  # a request has worked meanwhile, or it is gone
        if unsure:
            trouble.probe_at = now + pause
        elif failure is None:
            trouble.rest_until = now + rest
            trouble.failures = trouble.probed_silent = 0
            if trouble.out:
                trouble.out = False
                self._back(trouble)
        elif failure.prefill is trouble.prefill and failure.engine is trouble.engine:
            trouble.probe_at = now + pause
            self._probe_failed(trouble, failure, now)
        else:  # not the pair: one of its engines
            trouble.probe_at = now + pause
            other = self._question(failure, trouble.deployment, now)
            other.probe_at = now + pause
            self._probe_failed(other, failure, now)

    def _probe_failed(self, trouble: Trouble, failure: Failure, now: float) -> None:
        trouble.failure = failure
        trouble.failures += 1
        trouble.probed_silent = trouble.probed_silent + 1 if failure.what == "silent" else 0
        if not trouble.out:
            self._out(trouble, now)

    # ---- out and back

    def _out(self, trouble: Trouble, now: float) -> None:
        trouble.out = True
        if trouble.prefill is not None:
            self._working.pop((trouble.prefill, trouble.engine), None)
        sentence = f"{trouble.deployment.name}: {trouble.failure.sentence(private=True)}"
        if sentence in self._news:
            self._news.remove(sentence)
        self._news.append(f"{sentence} It gets no more of such requests until it works again.")
        if trouble.prefill is None:
            trouble.engine.judge(fails=True)
        else:
            self._spread(trouble, now)
        self._changed()

    def _back(self, trouble: Trouble) -> None:
        who = f"{trouble.engine.spec.role.capitalize()} engine {trouble.engine.spec.name}"
        if trouble.prefill is not None:
            who += f" with KV of prefill engine {trouble.prefill.spec.name}"
        self._news.append(f"{trouble.deployment.name}: {who} works again.")
        if trouble.prefill is None:
            trouble.engine.judge(fails=False)
        self._changed()

    def _spread(self, trouble: Trouble, now: float) -> None:
        """Where an engine's transfers with several partners fail, and these work with others, its other pairs are out too."""
        deployment = self._deployments.get(trouble.deployment.served_name, trouble.deployment)
        for prefill, decode in ((None, trouble.engine), (trouble.prefill, None)):
            at_fault = decode or prefill
            assert at_fault is not None
            pairs = [(p, d) for p in deployment.prefill for d in deployment.decode if at_fault in (p, d)]
            failing = [pair for pair in pairs if self._pair_is_out(pair)]
            if len(failing) < 2 or not self._work_elsewhere(at_fault, failing):
                continue
            for p, d in pairs:
                if not self._pair_is_out((p, d)):
                    failure = Failure(d, trouble.failure.what, p)
                    other = self._question(failure, deployment, now)
                    other.out = True
                    other.failures += 1

    def _pair_is_out(self, pair: tuple[Engine, Engine]) -> bool:
        trouble = self.troubles.get(pair)
        return trouble is not None and trouble.out

    def _work_elsewhere(self, engine: Engine, failing: Iterable[tuple[Engine, Engine]]) -> bool:
        """Whether all partners of an engine's failing pairs have served with others since these pairs began to fail."""
        for pair in failing:
            partner = pair[0] if pair[1] is engine else pair[1]
            since = self.troubles[pair].turn
            if not any(partner in p and engine not in p and turn > since for p, turn in self._working.items()):
                return False
        return True

    def _changed(self) -> None:
        self.left_out = tuple(trouble.failure for trouble in self.troubles.values() if trouble.out)
        for deployment in self._deployments.values():
            self._mark(deployment)

    def _mark(self, deployment: Deployment) -> None:
        ids = {(f.prefill.id, f.engine.id) for f in self.left_out if f.prefill is not None}
        engines = {engine.id for engine in deployment.decode}
        deployment.broken_pairs = deployment.unproved_pairs | {pair for pair in ids if pair[1] in engines}

    def follow(self, view: View) -> None:
        """There is another snapshot."""
        present = set(view.engines())
        self._deployments = view.deployments
        self.troubles = {
            subject: trouble
            for subject, trouble in self.troubles.items()
            if subject[1] in present and (subject[0] is None or subject[0] in present)
        }
        self._working = {pair: turn for pair, turn in self._working.items() if present.issuperset(pair)}
        for trouble in self.troubles.values():
            trouble.deployment = view.deployments.get(trouble.deployment.served_name, trouble.deployment)
        self._changed()

    # ---- what it tells

    def news(self) -> list[str]:
        """What changed since it was last asked, one sentence each."""
        news, self._news = self._news, []
        return news

    def faults(self, engines: Iterable[Engine], now: float) -> tuple[Fault, ...]:
        """All that get no requests, or fewer. A pair whose engine is at fault is not told besides it."""
        told: list[Fault] = []
        gone = {engine for engine in engines if engine.health is Health.DOWN}
        for engine in gone:
            failure = Failure(engine, engine.down_cause)
            told.append(_fault(failure, now - engine.down_since, 1))
        pairs = []
        for trouble in self.troubles.values():
            if not trouble.out or trouble.engine in gone or trouble.prefill in gone:
                continue
            if trouble.prefill is None:
                told.append(_fault(trouble.failure, now - trouble.since, trouble.failures))
            elif not self._is_out(trouble.engine) and not self._is_out(trouble.prefill):
                pairs.append(trouble)
        return (*told, *self._of_pairs(pairs, now))[:MOST_FAULTS]

    def _of_pairs(self, pairs: Collection[Trouble], now: float) -> list[Fault]:
        """One fault per engine that fails with several partners while these work with others; else one per pair."""
        told: list[Fault] = []
        seen: set[Engine] = set()
        for trouble in pairs:
            at_fault = self._engine_at_fault(trouble)
            if at_fault is None:
                told.append(_fault(trouble.failure, now - trouble.since, trouble.failures, pair=True))
            elif at_fault not in seen:
                seen.add(at_fault)
                every = [t for t in pairs if at_fault in (t.prefill, t.engine)]
                since, failures = min(t.since for t in every), sum(t.failures for t in every)
                told.append(_fault(trouble.failure, now - since, failures, at_fault))
        return told

    def _engine_at_fault(self, trouble: Trouble) -> Engine | None:
        deployment = self._deployments.get(trouble.deployment.served_name, trouble.deployment)
        assert trouble.prefill is not None
        candidates = []
        for engine in (trouble.engine, trouble.prefill):
            pairs = [(p, d) for p in deployment.prefill for d in deployment.decode if engine in (p, d)]
            several = len(pairs) > 1 and all(self._pair_is_out(pair) for pair in pairs)
            if several and self._work_elsewhere(engine, pairs):
                candidates.append(engine)
        return candidates[0] if len(candidates) == 1 else None


def _fault(
    failure: Failure, seconds: float, failures: int, at_fault: Engine | None = None, *, pair: bool = False
) -> Fault:
    engine, prefill = at_fault or failure.engine, failure.prefill
    return Fault(
        engine=engine.id,
        attempt=engine.spec.attempt,
        cause=failure.code,
        reason=failure.sentence(private=True),
        seconds=seconds,
        failures=failures,
        prefill=prefill.id if pair and prefill is not None else "",
        prefill_attempt=prefill.spec.attempt if pair and prefill is not None else 0,
    )


def computed_itself(usage: Usage, cached_at_prefill: int | None, block_size: int | None) -> bool:
    """Whether an engine that had KV to fetch shows by its counts that it computed the prompt itself.

    vLLM counts what it computed in whole blocks (`created`), save for text completions; that says it at once. Else it is known
    only where the engine says that it had nothing cached: vLLM 0.32 repeats prefill's figure there (`cached_at_prefill`, None
    if the params do not tell), so that a zero of prefill's proves nothing.
    """
    block = block_size or LONGEST_BLOCK
    if usage.prompt is None or usage.prompt < block:
        return False
    if usage.created is not None and usage.created >= block and 2 * usage.created > usage.prompt:
        return True
    return usage.cached == 0 and cached_at_prefill != 0


LONGEST_BLOCK = 128
"""Tokens of a KV block where nobody tells its size."""
