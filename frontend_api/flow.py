"""How one request is served, without IO: a generator that yields the next step and is sent its outcome.

Retry and fallback rules live here, once:

* Before the client has a byte, an engine whose connection fails is taken out and another is tried; after it, never.
* An engine's own refusal of the request (4xx) goes to the client and says nothing about the engine.
* KV params serve one sequence, once: after a decode leg that may have reached an engine they are spent, and older than
  the lease they may point at another prompt's KV. In both cases the prompt is prefilled again.
* An engine that answers that it has too much to do (429, 503) is left alone for a while, and another is tried.
* Where every engine has as many requests as it may, the request waits until one may have room.
* Where only engines are left that could not be reached, no prompt is prefilled for one that takes no connection either.
* A prefill leg that gives no params ends in a fallback to decode alone or in an error, as the deployment's policy says.

Each engine carries the request from before its connection (`carrying`); the prefill engine until decode's first byte, as
its KV is still being read. Closing the generator, in whatever state, gives all load back.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from math import ceil
from types import TracebackType
from typing import NamedTuple

from controlplane.fleet.wire import OnPrefillFailure
from frontend_api.formats.openai import Problem
from frontend_api.http.upstream import Broken
from frontend_api.kv.evidence import Prompt
from frontend_api.routing.choice import Choice, choose, explain_costs
from frontend_api.routing.costs import Weighed, fetched
from frontend_api.routing.loads import Loads
from frontend_api.routing.reason import Reason
from frontend_api.routing.view import Deployment, Engine, Health, carrying
from frontend_api.steps import (
    Began,
    Decode,
    Ended,
    Lost,
    NoRoom,
    Outcome,
    Prefill,
    Prefilled,
    Probe,
    Replied,
    Room,
    Step,
    Wait,
)

LEASE_SECONDS = 30.0
"""For which a prefill engine keeps KV that nobody has fetched (vLLM 0.32). Its own clock tells the end, so ours counts from
the reply."""
LEASE_MARGIN = 5.0
"""Seconds kept back for a slow connection to decode and for what the reply took on its way."""
MAX_LEGS = 6
"""Legs of one request, all kinds together, and probes: after so many nothing more is tried. But what was begun gets its chance: a
probe that went well its prefill leg, and this its decode leg."""
MAX_STRIKES = 2
"""Engines that one request may have reached and got no answer from: it may be the request that breaks them."""
RETRY_AFTER = 2
OVERLOAD = (429, 503)
"""What an engine answers that has too much to do."""


class PassOn(NamedTuple):
    """Give the client the engine's own error."""

    status: int
    body: bytes
    retry_after: int | None = None

    @property
    def final(self) -> bool:
        """It is the request's fault: no other engine would answer otherwise."""
        return self.status < 500 and self.status not in OVERLOAD


Verdict = Problem | PassOn | None
"""None: the client has its answer."""
Flow = Generator[Step, Outcome, Verdict]


class Trace:
    """What happened on the way, for the record and the explanation."""

    __slots__ = ("cause", "decode", "explain", "fallback", "overlap", "prefill", "reason", "stranded", "weighed")

    def __init__(self, *, explain: bool = False) -> None:
        self.explain = explain
        """Weigh the candidates also where tokens are not known and load alone decides."""
        self.prefill: str | None = None
        self.decode: str | None = None
        self.reason = ""
        self.fallback = False
        self.cause = ""
        self.weighed: tuple[Weighed, ...] = ()
        """The candidates of the last choice, as they were then."""
        self.overlap: int | None = None
        """Tokens that the engine which reads the prompt was expected to have; None: not known."""
        self.stranded = 0
        """Prompts whose KV a prefill engine keeps until its lease ends, as no decode engine has ever got its params. (One that
        refuses them, or whose leg is cut, tells the prefill engine.)"""

    def note(self, choice: Choice, prompt: Prompt | None) -> None:
        self.prefill = choice.prefill.id if choice.prefill else None
        self.decode = choice.decode.id if choice.decode else None
        self.reason = choice.reason.value
        self.fallback = choice.fallback
        self.weighed = choice.weighed
        reads = choice.prefill or choice.decode
        if prompt is not None and reads is not None:
            self.overlap = prompt.overlap.get(reads, 0)


class Reader:
    """An engine that is to read a prompt: the load this is while its block lasts, and what its end teaches."""

    __slots__ = ("_ahead", "_began_at", "_clock", "_engine", "_prompt", "_read", "load")

    def __init__(self, engine: Engine, prompt: Prompt | None, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._prompt = prompt
        self._clock = clock
        self._read = False
        lacking = 0
        if prompt is not None:
            lacking = prompt.lacking(engine)
            self._ahead = engine.queued + engine.others_queued + lacking
            self._began_at = clock()
            prompt.sent(engine, self._began_at)
        self.load = carrying(engine, lacking)

    def __enter__(self) -> carrying:
        return self.load.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.load.release()
        if self._prompt is not None and not self._read:
            self._prompt.failed(self._engine)

    def read(self, *, learn: bool, announced: bool = False) -> None:
        """The prompt is computed, or its answer is `announced`. `learn`: the time until now is the prompt's alone."""
        self.load.computed()
        self._read = True
        if self._prompt is not None and not announced:
            now = self._clock()
            self._prompt.computed(self._engine, now)
            if learn:
                self._engine.read.learn(self._ahead, now - self._began_at, now)


class Serving:
    """One request: what it wants, and what it has tried so far.

    `alone`: why it must not be disaggregated. `clock`: monotonic seconds. `prompt`: its tokens and where they lie, if known.
    `session`: what it shares with those that are to go the same way. `loads`: of the other routers, to be looked at again
    where engines have limits. `queued`: others wait already, it is to wait behind them.
    """

    __slots__ = (
        "alone", "avoid", "clock", "deployment", "fresh", "legs", "loads", "prompt", "queued", "session", "struck", "trace",
        "verdict",
    )  # fmt: skip

    def __init__(
        self,
        deployment: Deployment,
        alone: Reason | None,
        trace: Trace,
        clock: Callable[[], float],
        prompt: Prompt | None = None,
        session: bytes | None = None,
        loads: Loads | None = None,
        queued: bool = False,
    ) -> None:
        self.deployment = deployment
        self.alone = alone
        self.trace = trace
        self.clock = clock
        self.prompt = prompt
        self.session = session
        self.loads = loads
        self.queued = queued
        self.avoid: set[Engine] = set()
        self.fresh = False
        """On new connections only: a kept one had ended, and others may have too."""
        self.struck: set[Engine] = set()
        """Reached, as far as one can know, and without an answer since."""
        self.legs = 0
        self.verdict: Verdict = None
        """What the client hears if nothing more can be tried."""

    def steps(self) -> Flow:
        """Its legs. Closed at any time, it gives all load back."""
        trace = self.trace
        while self.legs < MAX_LEGS and len(self.struck) < MAX_STRIKES:
            if self.queued:
                trace.reason, trace.prefill, trace.decode = Reason.ENGINES_FULL.value, None, None
                told = yield Wait(self.alone is not None)
                if not isinstance(told, Room):
                    assert isinstance(told, NoRoom)
                    return Problem(429, "engines_busy", told.message, None, RETRY_AFTER)
                if told.deployment is None:
                    trace.reason = Reason.NO_ENGINE.value
                    return no_engine(self.deployment)
                self.deployment, self.prompt, self.queued = told.deployment, told.prompt, False
            choice = self._choose()
            if choice.reason is Reason.ENGINES_FULL:
                self.queued = True
                continue
            if choice.decode is None:
                if self.verdict is not None:  # the record keeps the choice that failed
                    return self.verdict
                trace.reason = choice.reason.value
                return no_engine(self.deployment)
            if choice.fallback:
                if self.deployment.routing.on_prefill_failure is OnPrefillFailure.FAIL:
                    trace.reason = choice.reason.value
                    return self.verdict or no_prefill(self.deployment, choice.reason)
                trace.cause = trace.cause or choice.reason.value
            trace.note(choice, self.prompt)
            if trace.explain:
                trace.weighed = explain_costs(self.deployment, choice, now=self.clock(), avoid=self.avoid)
            if choice.prefill is None:
                over = yield from self._one_leg(choice.decode)
            else:
                over = yield from self._two_legs(choice.prefill, choice.decode)
            if over:
                return self.verdict
        return self.verdict or no_engine(self.deployment)

    def _one_leg(self, engine: Engine) -> Generator[Step, Outcome, bool]:
        """Returns whether the request is over, with `verdict`; so does the next."""
        reader = Reader(engine, self.prompt, self.clock)
        with reader:
            if self._crowded(engine):
                self.queued = True
                return False
            self.legs += 1
            outcome = yield Decode(engine, None, self.fresh)
            if isinstance(outcome, Began):
                in_background = self.alone is Reason.BACKGROUND  # it is answered as soon as it is queued
                engine.answered()
                reader.read(learn=outcome.token and not outcome.whole, announced=not outcome.token or in_background)
                if not outcome.whole:
                    self._ended(engine, outcome, (yield None))
                self.verdict = None
                return True
        return self._gave_nothing(engine, outcome)

    def _two_legs(self, prefill: Engine, decode: Engine) -> Generator[Step, Outcome, bool]:
        if decode.health is Health.DOWN:
            self.legs += 1
            with carrying(decode):
                outcome = yield Probe(decode)
            if outcome is not None:
                return self._gave_nothing(decode, outcome)
            decode.accepts()
        reader = Reader(prefill, self.prompt, self.clock)
        with reader, carrying(decode) as writing:  # decode is sure to be needed: count it at once
            if self._crowded(prefill, decode):
                self.queued = True
                return False
            self.legs += 1
            outcome = yield Prefill(prefill, self.fresh)
            if not isinstance(outcome, Prefilled):
                over = self._gave_nothing(prefill, outcome)
                if not over:
                    self.trace.cause = _cause(outcome)
                return over
            prefill.answered()
            self.struck.discard(prefill)
            reader.read(learn=True)
            if outcome.params is None:
                self.alone = Reason.PREFILL_FAILED
                if self.deployment.routing.on_prefill_failure is OnPrefillFailure.FAIL:
                    self.trace.reason = self.alone.value
                    message = "The prefill engine answered without KV parameters."
                    self.verdict = Problem(502, "prefill_failed", message)
                    return True
                self.trace.cause = "no-params"
                return False
            return (yield from self._hand_over(outcome, prefill, decode, reader, writing))

    def _hand_over(
        self, prefilled: Prefilled, prefill: Engine, decode: Engine, reader: Reader, writing: carrying
    ) -> Generator[Step, Outcome, bool]:
        """The decode leg, on one engine after another as long as the params can be used."""
        trace, prompt, clock = self.trace, self.prompt, self.clock
        trace.stranded += 1
        while clock() - prefilled.at < LEASE_SECONDS - LEASE_MARGIN:
            self.legs += 1
            trace.decode = decode.id
            sent_at = clock()
            if prompt is not None:
                prompt.sent(decode, sent_at)
            trace.stranded -= 1
            answer = yield Decode(decode, prefilled.params, self.fresh)
            if isinstance(answer, Lost) and not answer.sent:
                trace.stranded += 1
            if isinstance(answer, Began):
                decode.answered()
                reader.load.release()
                if prompt is not None and answer.token:
                    prompt.computed(decode, clock())
                if not answer.whole:
                    if prompt is not None and answer.token:
                        now = clock()
                        decode.pull.learn(fetched(decode, prompt), now - sent_at - decode.step.pace, now)
                    self._ended(decode, answer, (yield None))
                self.verdict = None
                return True
            over = self._gave_nothing(decode, answer)
            if prompt is not None:
                prompt.failed(decode)
            if over:
                return True
            if not isinstance(answer, Lost) or answer.sent:
                break  # the params may be spent
            if self.legs >= MAX_LEGS:
                break
            again = self._choose(prefill)
            if again.fallback or again.decode is None:
                break
            decode = again.decode
            writing.move(decode)
        return False

    def _choose(self, prefill: Engine | None = None) -> Choice:
        """`prefill`: it has read the prompt already. Then `alone` is no matter."""
        return choose(
            self.deployment,
            now=self.clock(),
            alone=self.alone if prefill is None else None,
            avoid=self.avoid,
            prefill=prefill,
            prompt=self.prompt,
            session=self.session,
        )

    def _crowded(self, *taken: Engine) -> bool:
        """Whether an engine just taken is over its limit, as another router took it at the same moment."""
        limit = self.deployment.routing.max_in_flight
        if limit is None:
            return False
        if self.loads is not None:
            self.loads.look(self.clock())
        return any(engine.load > limit for engine in taken)

    def _gave_nothing(self, engine: Engine, outcome: Outcome) -> bool:
        """Draw the consequences of a leg. Returns whether no other engine would answer otherwise."""
        if _struck(outcome):
            self.struck.add(engine)
        if isinstance(outcome, Lost) and outcome.kind is Broken.STALE:
            self.fresh = True
        verdict = self.verdict = _after(outcome, engine, self.avoid, self.clock())
        return isinstance(verdict, PassOn) and verdict.final

    def _ended(self, engine: Engine, began: Began, outcome: Outcome) -> None:
        if isinstance(outcome, Ended):
            now = self.clock()
            engine.step.learn(outcome.steps, outcome.seconds, now)
            if not began.token and outcome.steps and self.prompt is not None:
                self.prompt.computed(engine, now)  # not when it was announced: it may have waited for long


def _after(outcome: Outcome, engine: Engine, avoid: set[Engine], now: float) -> Problem | PassOn:
    """Draw the consequences of a leg that gave nothing. Returns what the client hears if no other engine helps."""
    if isinstance(outcome, Replied):
        if outcome.status in (401, 403):
            avoid.add(engine)
            return Problem(502, "engine_refused", "An engine does not accept the router's key.", None, RETRY_AFTER)
        avoid.add(engine)
        if not 400 <= outcome.status < 600:  # a 304 would have no body, a redirect is none of the client's business
            return Problem(502, "engine_error", f"An engine answered with status {outcome.status}.", None, RETRY_AFTER)
        if outcome.status in OVERLOAD:
            engine.overloaded(now, outcome.retry_after)
            return PassOn(outcome.status, outcome.body, max(ceil(engine.retry_at - now), 1))
        engine.answered()
        return PassOn(outcome.status, outcome.body)
    assert isinstance(outcome, Lost)
    if outcome.kind is not Broken.STALE:
        avoid.add(engine)
        if outcome.kind is not Broken.SILENT:
            engine.failed(now, hangs=outcome.kind is Broken.CONNECT_TIMEOUT)
    if outcome.kind is Broken.SILENT:
        return Problem(504, "engine_timeout", "The engine did not answer in time.")
    return Problem(503, "engine_unreachable", "The engine could not be reached; try again.", None, RETRY_AFTER)


def _struck(outcome: Outcome) -> bool:
    if isinstance(outcome, Lost):
        return outcome.sent  # also on a kept connection: an engine that the request killed closes it like any other
    return isinstance(outcome, Replied) and outcome.status >= 500 and outcome.status not in OVERLOAD


def _cause(outcome: Outcome) -> str:
    if isinstance(outcome, Replied):
        return f"prefill-status-{outcome.status}"
    assert isinstance(outcome, Lost)
    return f"prefill-{outcome.kind.value}"


def no_engine(deployment: Deployment) -> Problem:
    says = deployment.status or "No engine is ready."
    return Problem(503, "no_engine", f"{deployment.served_name} cannot serve now. {says}", None, RETRY_AFTER)


def no_prefill(deployment: Deployment, reason: Reason) -> Problem:
    says = deployment.status or "No prefill engine is ready."
    if reason is Reason.PAIRS_BROKEN:
        says = "The KV transfer between every prefill and decode engine failed its probe."
    return Problem(503, "no_prefill", f"{deployment.served_name} cannot serve now. {says}", None, RETRY_AFTER)
