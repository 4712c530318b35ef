"""How one request is served, without IO: a generator that yields the next step and is sent its outcome.

Retry and fallback rules live here, once:

* Before the client has a byte, another engine is tried where one fails; after it, never. Who is at fault `outcomes` decides.
* An engine's own refusal of the request (4xx) goes to the client and says nothing about the engine. What a prefill engine
  alone refuses, or decode only with KV to fetch, is the router's affair: decode is asked with the client's own body.
* KV params serve one sequence, once: after a decode leg that may have reached an engine they are spent, and older than
  the lease they may point at another prompt's KV. In both cases the prompt is prefilled again.
* An engine that answers that it has too much to do (429, 503) is left alone for a while, and another is tried.
* Where every engine has as many requests as it may, the request waits until one may have room.
* Where only engines are left that could not be reached, no prompt is prefilled for one that takes no connection either.
* Policy `fallback`: however the prefill leg or the hand-over fails, the last that is tried is a decode engine that computes
  the prompt itself, be it the one that has just failed with KV to fetch. Policy `fail`: an error that names both engines.

Each engine carries the request from before its connection (`carrying`); the prefill engine until decode's first byte, as
its KV is still being read. Closing the generator, in whatever state, gives all load back.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

from frontend_api.formats.openai import Problem, side_channel
from frontend_api.http.upstream import Broken
from frontend_api.kv.evidence import Prompt
from frontend_api.routing.choice import Choice, choose, explain_costs
from frontend_api.routing.costs import Need, fetched
from frontend_api.routing.failures import BROKE_OFF, OVERLOAD, Failure
from frontend_api.routing.loads import Loads
from frontend_api.routing.outcomes import Outcomes
from frontend_api.routing.reader import Reader
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
from frontend_api.trace import Trace
from frontend_api.verdicts import RETRY_AFTER, PassOn, Verdict, is_refusal, no_engine, no_prefill, verdict

LEASE_SECONDS = 30.0
"""For which a prefill engine keeps KV that nobody has fetched (vLLM 0.32). Its own clock tells the end, so ours counts from
the reply."""
LEASE_MARGIN = 5.0
"""Seconds kept back for a slow connection to decode and for what the reply took on its way."""
MAX_LEGS = 6
"""Legs of one request, all kinds together, and probes: after so many nothing more is tried. But what was begun gets its chance: a
probe that went well its prefill leg, this its decode leg, and a hand-over that failed decode alone."""
MAX_STRIKES = 2
"""Engines, well until then, that one request may have reached and got no answer from: it may be the request that breaks them."""
_ELSEWHERE_UNKNOWN = (Reason.STORED_RESPONSE, Reason.RELAYED)
"""Their 404 may be of a response or a path that is not there."""
_OUT_ALREADY = frozenset(("connect", "connect-timeout", *(f"status-{status}" for status in OVERLOAD)))
"""Failures that `Engine.health` deals with."""
_UNREACHED = (Broken.CONNECT, Broken.CONNECT_TIMEOUT)
NOTHING = Need()
"""Of KV."""

Flow = Generator[Step, Outcome, Verdict]


class Serving:
    """One request: what it wants, and what it has tried so far.

    `alone`: why it must not be disaggregated. `clock`: monotonic seconds. `prompt`: its tokens and where they lie, if known.
    `session`: what it shares with those that are to go the same way. `loads`: of the other routers, to be looked at again
    where engines have limits. `queued`: others wait already, it is to wait behind them. `outcomes`: told how each leg went.
    `need`: of KV.
    """

    __slots__ = (
        "alone", "at", "avoid", "clock", "deployment", "fresh", "given", "legs", "loads", "need", "outcomes", "planned", "prompt",
        "queued", "session", "source", "struck", "trace", "unable", "verdict",
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
        outcomes: Outcomes | None = None,
        need: Need = NOTHING,
    ) -> None:
        self.deployment = deployment
        self.alone = alone
        self.trace = trace
        self.clock = clock
        self.prompt = prompt
        self.session = session
        self.loads = loads
        self.queued = queued
        self.outcomes = outcomes if outcomes is not None else Outcomes()
        self.need = need
        self.avoid: set[Engine] = set()
        self.unable: set[Engine] = set()
        """Of these: not reached, or without an answer though they had no KV to fetch."""
        self.given: dict[Engine, Engine] = {}
        """Decode engines that gave nothing with KV to fetch -> whose KV that was."""
        self.fresh = False
        """On new connections only: a kept one had ended, and others may have too."""
        self.struck: set[Engine] = set()
        """Reached, as far as one can know, and without an answer since."""
        self.legs = 0
        self.at: Engine | None = None
        """Whom the leg in motion asks …"""
        self.source: Engine | None = None
        """… and whose KV that engine is to fetch."""
        self.planned = ""
        """The reason of the choice before somebody refused the request."""
        self.verdict: Verdict = None
        """What the client hears if nothing more can be tried."""

    def steps(self) -> Flow:
        """Its legs. Closed at any time, it gives all load back."""
        trace = self.trace
        while self.legs < MAX_LEGS and len(self.struck) < MAX_STRIKES:
            if self.queued and (problem := (yield from self._wait())) is not None:
                return problem
            choice = self._choose()
            if choice.reason is Reason.ENGINES_FULL:
                self.queued = True
                continue
            if choice.decode is None:
                if self.verdict is None:
                    trace.reason = choice.reason.value
                break  # the record keeps the choice that failed
            if choice.fallback:
                if not self.deployment.falls_back:
                    trace.reason = choice.reason.value
                    trace.left_out = self.outcomes.left_out
                    return self.verdict or no_prefill(self.deployment, choice.reason, self.outcomes.left_out)
                trace.cause = trace.cause or choice.reason.value
            self._note(choice)
            if choice.prefill is None:
                over = yield from self._one_leg(choice.decode)
            else:
                over = yield from self._two_legs(choice.prefill, choice.decode)
            if over:
                return self.verdict
        return (yield from self._last_resort())

    def _wait(self) -> Generator[Step, Outcome, Problem | None]:
        """In line, until there may be room. Returns what the client hears where there is none."""
        trace = self.trace
        trace.reason, trace.prefill, trace.decode = Reason.ENGINES_FULL.value, None, None
        told = yield Wait(self.alone is not None)
        if not isinstance(told, Room):
            assert isinstance(told, NoRoom)
            return Problem(429, "engines_busy", told.message, None, RETRY_AFTER)
        if told.deployment is None:
            trace.reason = Reason.NO_ENGINE.value
            return no_engine(self.deployment)
        self.deployment, self.prompt, self.queued = told.deployment, told.prompt, False
        return None

    def _last_resort(self) -> Flow:
        """Nothing is left of what was planned: decode computes the prompt itself, as the policy promises."""
        while self.deployment.falls_back and self.trace.cause:
            left = [engine for engine in self.given if engine not in self.unable]
            if left:  # rather than others, as it may be the request that breaks engines
                engine = min(left, key=lambda engine: (engine.health is not Health.UP, engine.load))
                choice = Choice(None, engine, Reason.TRANSFER_FAILED, fallback=True)
            elif self._tried_enough() or (yield from self._died_of_it()):
                break
            else:
                self.alone = Reason.PREFILL_FAILED
                choice = self._choose()
                if choice.reason is Reason.ENGINES_FULL:
                    if (problem := (yield from self._wait())) is not None:
                        return problem
                    continue
            if choice.decode is None:
                break
            self._note(choice)
            if (yield from self._one_leg(choice.decode, has_room=True)):
                return self.verdict
            self.unable.add(choice.decode)
        return self.verdict or no_engine(self.deployment)

    def _tried_enough(self) -> bool:
        """Whether no further engine is to compute the prompt and answer it."""
        answering = self.deployment.answering
        return len(self.unable.intersection(answering)) >= min(MAX_STRIKES, len(answering))

    def _died_of_it(self) -> Generator[Step, Outcome, bool]:
        """Whether an engine that failed on this request takes no connection now."""
        for failure in self.trace.tried:
            if failure.what != Broken.SILENT.value and failure.engine in self.struck:
                with carrying(failure.engine):
                    outcome = yield Probe(failure.engine)
                if outcome is not None:
                    return True
        return False

    def _note(self, choice: Choice) -> None:
        trace = self.trace
        trace.note(choice, self.prompt)
        if self.outcomes.left_out:
            trace.left_out = self.outcomes.left_out
        if trace.explain:
            trace.weighed = explain_costs(self.deployment, choice, now=self.clock(), avoid=self.avoid, need=self.need)

    def _one_leg(self, engine: Engine, *, has_room: bool = False) -> Generator[Step, Outcome, bool]:
        """Returns whether the request is over, with `verdict`; so does the next. `has_room`: it had this request just now."""
        reader = Reader(engine, self.prompt, self.clock, self._kv_at(engine, answers=True))
        with reader:
            if not has_room and self._crowded(engine):
                self.queued = True
                return False
            self.legs += 1
            self.at, self.source, self.trace.params = engine, None, None
            outcome = yield Decode(engine, None, self.fresh)
            if isinstance(outcome, Began):
                in_background = self.alone is Reason.BACKGROUND  # it is answered as soon as it is queued
                self._answered(engine, whole=outcome.whole)
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
        reader = Reader(prefill, self.prompt, self.clock, self._kv_at(prefill, answers=False))
        writer = carrying(decode, kv=self._kv_at(decode, answers=True))
        with reader, writer as writing:  # decode is sure to be needed: count it at once
            if self._crowded(prefill, decode):
                self.queued = True
                return False
            self.legs += 1
            self.at, self.source = prefill, None
            outcome = yield Prefill(prefill, self.fresh)
            if not isinstance(outcome, Prefilled):
                return (yield from self._not_prefilled(prefill, decode, outcome))
            prefill.answered()
            self.struck.discard(prefill)
            reader.read(learn=True)
            if outcome.params is None:
                failure = Failure(prefill, "no-params")
                self._failed(failure, reading=True)
                self.alone = Reason.PREFILL_FAILED
                if not self.deployment.falls_back:
                    self.trace.reason = self.alone.value
                    self.verdict = Problem(503, "prefill_failed", failure.sentence(), None, RETRY_AFTER)
                    return True
                return False
            if self.outcomes.troubles:
                self.outcomes.worked(prefill)
            return (yield from self._hand_over(outcome, prefill, decode, reader, writing))

    def _not_prefilled(self, prefill: Engine, decode: Engine, outcome: Outcome) -> Generator[Step, Outcome, bool]:
        """The prefill leg gave nothing: another one may, or decode answers alone."""
        refused = is_refusal(outcome)
        self._gave_nothing(prefill, outcome, reading=True)
        if self.deployment.falls_back:
            if refused:
                self.alone = Reason.PREFILL_FAILED
            return False
        if isinstance(outcome, Replied) and self.trace.tried:
            self.verdict = Problem(503, "prefill_failed", self.trace.tried[-1].sentence(), None, RETRY_AFTER)
        if not refused:
            return False
        # Is it the client's mistake? Decode is asked for one token, which nobody sees.
        self.legs += 1
        self.at = decode
        told = yield Prefill(decode, self.fresh, keep=False)
        if is_refusal(told):
            return self._refused(told)
        if isinstance(told, Prefilled):
            self._answered(decode)
        return False

    def _hand_over(
        self, prefilled: Prefilled, prefill: Engine, decode: Engine, reader: Reader, writing: carrying
    ) -> Generator[Step, Outcome, bool]:
        """The decode leg, on one engine after another as long as the params can be used."""
        trace, prompt, clock = self.trace, self.prompt, self.clock
        trace.stranded += 1
        trace.params = prefilled.params
        while clock() - prefilled.at < LEASE_SECONDS - LEASE_MARGIN:
            self.legs += 1
            trace.decode = decode.id
            trace.block_size = decode.spec.block_size
            sent_at = clock()
            if prompt is not None:
                prompt.sent(decode, sent_at)
            trace.stranded -= 1
            self.at, self.source = decode, prefill
            answer = yield Decode(decode, prefilled.params, self.fresh)
            if isinstance(answer, Lost) and not answer.sent:
                trace.stranded += 1
            if isinstance(answer, Began):
                self._answered(decode, whole=answer.whole)
                reader.load.release()
                writing.computed()
                if prompt is not None and answer.token:
                    prompt.computed(decode, clock())
                if answer.whole:
                    self._taken(prefill, decode)
                else:
                    if prompt is not None and answer.token:
                        now = clock()
                        decode.pull.learn(fetched(decode, prompt), now - sent_at - decode.step.pace, now)
                    try:
                        self._ended(decode, answer, (yield None))
                    finally:  # also where the client has read the last event and left
                        self._taken(prefill, decode)
                self.verdict = None
                return True
            over = self._gave_nothing(decode, answer, prefill)
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
        if prefill is None and self.given and self.alone is None:
            # from another prefill engine, if there is one: the KV of this one may be what failed
            choice = self._choose_without(self.avoid.union(self.given.values()), None)
            if choice.prefill is not None:
                return choice
        return self._choose_without(self.avoid, prefill)

    def _choose_without(self, avoid: set[Engine], prefill: Engine | None) -> Choice:
        return choose(
            self.deployment,
            now=self.clock(),
            alone=self.alone if prefill is None else None,
            avoid=avoid,
            prefill=prefill,
            prompt=self.prompt,
            session=self.session,
            need=self.need,
        )

    def _kv_at(self, engine: Engine, *, answers: bool) -> int:
        return self.need.at(engine, self.prompt, answers=answers)

    def _crowded(self, *taken: Engine) -> bool:
        """Whether an engine just taken is over its limit, as another router took it at the same moment."""
        limit = self.deployment.routing.max_in_flight
        if limit is None:
            return False
        if self.loads is not None:
            self.loads.look(self.clock())
        return any(engine.load > limit for engine in taken)

    def silent(self, since: float, now: float) -> bool:
        """The leg in motion has had no byte since then. Returns whether to give it up: another way is left."""
        if self.at is None:
            return False
        return self.outcomes.silent(self.at, self.source, self.deployment, since, now)

    # ---- what the legs show

    def _answered(self, engine: Engine, *, whole: bool = True) -> None:
        """Its good answer is there, or begins. What failed on the way to it was no fault of the request."""
        engine.answered()
        if self.outcomes.troubles:
            self.outcomes.worked(engine, whole=whole)
        for failure in self.trace.tried:
            self._blame(failure)

    def _blame(self, failure: Failure) -> None:
        if (
            failure.is_refusal
        ):  # a client may find fields that only the prefill leg's body makes wrong: a probe has to tell
            self.outcomes.doubt(failure, self.deployment, self.clock())
        elif failure.what not in _OUT_ALREADY:
            self.outcomes.blame(failure, self.deployment, self.clock())

    def _taken(self, prefill: Engine, decode: Engine) -> None:
        """An answer with KV to fetch is over: was it fetched?"""
        trace = self.trace
        if trace.look_at_counts():
            self._blame(Failure(decode, "computed", prefill, side_channel(trace.params or b"")))
        elif self.outcomes.troubles:
            self.outcomes.worked(decode, prefill)

    def _failed(self, failure: Failure, *, reading: bool) -> None:
        """Keep in mind, for the record and for when the request is answered another way."""
        self.trace.tried += (failure,)
        if reading or failure.prefill is not None:
            self.trace.cause = failure.code

    def _gave_nothing(
        self, engine: Engine, outcome: Outcome, prefill: Engine | None = None, *, reading: bool = False
    ) -> bool:
        """Draw the consequences of a leg. `prefill`: whose KV it had to fetch. `reading`: it was to read the prompt for another
        engine. Returns whether no other engine would answer otherwise."""
        now = self.clock()
        if isinstance(outcome, Lost) and outcome.kind is Broken.STALE:
            self.struck.add(engine)  # an engine that the request killed closes a kept connection like any other
            self.fresh = True
            self.verdict = verdict(outcome, None, engine, now)
            return False
        refused = is_refusal(outcome)
        if refused and not reading and not self._others_may_take(outcome, engine, prefill):
            return self._refused(outcome)
        if _struck(outcome) and not self.outcomes.suspects(engine, prefill):
            self.struck.add(engine)
        what = f"status-{outcome.status}" if isinstance(outcome, Replied) else "connect"
        if isinstance(outcome, Lost):
            what = outcome.kind.value
        params = self.trace.params if prefill is not None else None
        failure = Failure(engine, what, prefill, side_channel(params) if params is not None else "")
        self._failed(failure, reading=reading)
        reached = not isinstance(outcome, Lost) or outcome.kind not in _UNREACHED
        if refused:
            self.planned = self.planned or self.trace.reason
        elif isinstance(outcome, Replied) and outcome.status in OVERLOAD:
            engine.overloaded(now, outcome.retry_after)
        elif reached:
            self.outcomes.doubt(failure, self.deployment, now)
        if isinstance(outcome, Replied):
            if outcome.status not in OVERLOAD and outcome.status < 600:
                engine.answered()
        elif not reached or (prefill is None and what != Broken.SILENT.value):  # a transfer's break may be not its own
            engine.failed(now, hangs=what == Broken.CONNECT_TIMEOUT.value, cause=what)
        if refused and prefill is not None:
            self.alone = Reason.TRANSFER_FAILED
        else:
            self.avoid.add(engine)
            if prefill is not None and reached:
                self.given[engine] = prefill
            else:
                self.unable.add(engine)
        self.verdict = verdict(outcome, failure, engine, now)
        return False

    def _others_may_take(self, outcome: Outcome, engine: Engine, prefill: Engine | None) -> bool:
        """Whether an answering engine's refusal may be its own affair: with KV to fetch it may be that of the KV; and a model that
        it does not know is one that the router knows."""
        if prefill is not None:
            return self.deployment.falls_back
        if not isinstance(outcome, Replied) or outcome.status != 404 or self.alone in _ELSEWHERE_UNKNOWN:
            return False
        answering = self.deployment.answering
        if any(f.what == "status-404" and f.prefill is None and f.engine in answering for f in self.trace.tried):
            return False  # two do not know it
        return any(other is not engine and other not in self.avoid for other in answering)

    def _refused(self, outcome: Outcome) -> bool:
        """The request is refused by who answers it: it is the client's mistake, and nobody else's."""
        assert isinstance(outcome, Replied)
        trace = self.trace
        if self.planned:
            trace.reason, trace.fallback, trace.cause = self.planned, False, ""
            trace.tried = tuple(f for f in trace.tried if not f.is_refusal)
        if self.at is not None:
            self.at.answered()
        self.verdict = PassOn(outcome.status, outcome.body)
        return True

    def _ended(self, engine: Engine, began: Began, outcome: Outcome) -> None:
        if isinstance(outcome, Ended):
            now = self.clock()
            engine.step.learn(outcome.steps, outcome.seconds, now)
            if outcome.error:  # it may be the request's
                self.outcomes.doubt(Failure(engine, BROKE_OFF), self.deployment, now)
            elif not outcome.whole:
                self.outcomes.blame(Failure(engine, BROKE_OFF), self.deployment, now)
            elif self.outcomes.troubles:
                self.outcomes.worked(engine)
            if not began.token and outcome.steps and self.prompt is not None:
                self.prompt.computed(engine, now)  # not when it was announced: it may have waited for long


def _struck(outcome: Outcome) -> bool:
    if isinstance(outcome, Lost):
        return outcome.sent
    return isinstance(outcome, Replied) and outcome.status >= 500 and outcome.status not in OVERLOAD
