"""One request in motion: drives `flow` with real legs, relays the answer, and tells what became of it.

It holds no rule about retries or fallbacks; it does what the flow says and reports how that went. Whatever happens (answer,
refusal, client gone, defect) it ends exactly once: legs cancelled, load given back, one record written.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from controlplane.fleet.errors import InvalidInput
from controlplane.fleet.wire import Affinity, Result
from frontend_api import flow, steps
from frontend_api.formats import openai
from frontend_api.formats.openai import Ask, Endpoint, Problem
from frontend_api.http import passing
from frontend_api.http.reading import Request
from frontend_api.http.server import ClientConnection
from frontend_api.http.upstream import Broken, Leg, probe
from frontend_api.kv.evidence import Cache, Prompt, Standing
from frontend_api.legs import AnswerLeg, FreeingLeg, PrefillLeg
from frontend_api.limits import answers, charges
from frontend_api.limits.answers import Refusal
from frontend_api.limits.charges import BYTES_PER_TOKEN
from frontend_api.limits.use import Hold
from frontend_api.observe import explain
from frontend_api.observe.account import Account, Used
from frontend_api.observe.decisions import Kept
from frontend_api.routing.costs import Need
from frontend_api.routing.outcomes import DOUBT_SECONDS
from frontend_api.routing.view import Deployment
from frontend_api.routing.waiting import Place
from frontend_api.tokens import lanes
from frontend_api.trace import Trace
from frontend_api.verdicts import Verdict

if TYPE_CHECKING:
    from frontend_api.gate import Router

log = logging.getLogger(__name__)

_T = TypeVar("_T")


FINISH_SECONDS = 0.5
"""For which a prefill leg goes on when its client has left. A leg that is cut just when its engine has finished leaves KV behind
that nobody can free before the lease ends, as its params are lost on the way."""
FREE_SECONDS = 2.0
"""For which a decode engine may take to refuse such KV."""


class Exchange:
    """A request to one of the engines' endpoints."""

    def __init__(
        self,
        router: Router,
        connection: ClientConnection,
        request: Request,
        request_id: bytes,
        endpoint: Endpoint,
        ask: Ask,
        deployment: Deployment,
    ) -> None:
        self.router = router
        self.connection = connection
        self.request = request
        self.request_id = request_id
        self.endpoint = endpoint
        self.account = Account(request.received_at)
        self._ask = ask
        self._size = len(request.body)
        self._deployment = deployment
        self._explain = request.headers.get(b"x-tandem-explain") == b"1"
        self.leg: Leg | None = None
        self._slow = False
        self.held_back = False
        """The client was slow at some time: the stream's pace is not the engine's."""
        self._over = False
        self.left = False
        """Its client has left; the KV that is being made for it is to be freed."""
        self._timer: asyncio.TimerHandle | None = None
        """Ends that."""
        self._taking: Result | None = None
        """Of a reply that is whole, while its client takes the rest of it."""
        self._used: Used | None = None
        """Once that is settled."""
        self._work: asyncio.Future[Any] | None = None
        watched = self.account.began_at < router.decisions.watched_until
        self._trace = Trace(explain=self._explain or watched)
        self._cache: Cache | None = None
        self._standing: Standing | None = None
        self._prompt: Prompt | None = None
        self._flow: flow.Flow | None = None
        self._serving: flow.Serving | None = None
        self._tokens: array[int] | None = None
        """Kept while it may have to wait: what the engines have of them changes."""
        self._tokenizer = ""
        """Whose tokens these are: the deployment's may change meanwhile."""
        self._place: Place | None = None
        self._hold: Hold | None = None
        """Of a limited key."""
        self._headers = b"x-request-id: %b\r\n%b" % (request_id, passing.up(request.headers))
        self._target = request.path + b"?" + request.query if request.query else request.path

    # ---- the flow

    def start(self) -> None:
        self.connection.exchange = self
        self.router.exchanges.add(self)
        cache = self._cache = self.router.evidence.of(self._deployment)
        tokens = None
        if cache is not None and cache.tokens is not None and self.endpoint.generates:
            tokens = cache.tokens.at_once(self.endpoint, self.request.body)
            self._tokenizer = cache.tokenizer
        if tokens is None or isinstance(tokens, array):
            self._route(tokens)
        else:
            self._after(lanes.start(len(self.request.body), tokens.ids), self._route)

    def _after(self, work: asyncio.Future[_T], then: Callable[[_T], None]) -> None:
        """Go on with what comes of the work, unless the request is over by then."""

        def go_on(work: asyncio.Future[_T]) -> None:
            self._work = None
            if self._over:
                return
            try:
                then(work.result())
            except (Exception, asyncio.CancelledError):
                log.exception("defect in the router")
                self.crashed()

        self._work = work
        work.add_done_callback(go_on)

    def _route(self, tokens: array[int] | None) -> None:
        """Begin the flow, once the key has room for it. `tokens`: of the prompt; None: not known."""
        self.account.tokenised()
        key = self.request.key
        if key is None or not key.limited:
            self._serve(tokens)
            return
        known = None if tokens is None else len(tokens)
        try:
            estimate = charges.estimate(self.endpoint, self.request.body, known, key.tokens_per_minute)
        except InvalidInput as error:
            self._refuse(error)
            return
        self._hold = Hold(key, estimate, lambda refusal: self._admitted(refusal, tokens))
        self.router.limits.reserve(self._hold)

    def _admitted(self, refusal: Refusal | None, tokens: array[int] | None) -> None:
        self.account.admitted()
        hold = self._hold
        assert hold is not None
        if refusal is not None:
            self._finish(answers.problem(hold.key, refusal, self._deployment.served_name))
            return
        try:
            self._serve(tokens)
        except Exception:
            log.exception("defect in the router")
            self.crashed()

    def _serve(self, tokens: array[int] | None) -> None:
        cache = self._cache
        if cache is not None:
            self._standing = self.router.decisions.standing(cache, self.account.tokenised_at)
            self._prompt = self._look_up(cache, tokens)
        router, deployment, alone = self.router, self._deployment, self._ask.alone
        queued = False
        if deployment.routing.max_in_flight is not None:
            self._tokens = tokens
            queued = router.waiting.before(deployment, alone=alone is not None, priority=self._priority)
        if router.loads.shared:
            router.loads.refresh(monotonic())
        self._trace.usage = self.account.usage
        serving = self._serving = flow.Serving(
            deployment,
            alone,
            self._trace,
            monotonic,
            self._prompt,
            self._session(),
            router.loads,
            queued,
            router.outcomes,
            self._need(),
        )
        self._flow = serving.steps()
        self.advance(None)

    def _need(self) -> Need:
        if not self.endpoint.generates:
            return flow.NOTHING
        prompt, limit = self._prompt, self._ask.limit
        tokens = prompt.tokens if prompt is not None else len(self.request.body) // BYTES_PER_TOKEN
        usual = self._deployment.answer_tokens
        return Need(tokens, usual if limit is None or limit > usual else limit)

    def _look_up(self, cache: Cache | None, tokens: array[int] | None) -> Prompt | None:
        """What the engines have of it now; None: its tokens are not known, or not those of this tokenizer."""
        if cache is None or tokens is None or cache.tokenizer != self._tokenizer:
            return None
        return cache.prompt(tokens, self._ask.salt)

    def _session(self) -> bytes | None:
        """What the request has in common with those that are to go the same way."""
        affinity = self._deployment.routing.affinity
        if affinity is Affinity.NONE:
            return None
        session = self.request.headers.get(b"x-session-id")
        if not session and affinity is Affinity.USER and (user := openai.user_of(self.endpoint, self._ask)):
            session = user.encode("utf-8", "surrogatepass")
        return session or None

    def advance(self, outcome: steps.Outcome) -> None:
        """Tell the flow how its last step went, and take its next."""
        if self._over or self._flow is None:
            return
        if self.left:
            self._end_left(outcome.params if isinstance(outcome, steps.Prefilled) else None)
            return
        try:
            step = self._flow.send(outcome)
            if isinstance(step, steps.Wait):
                self._wait(step)
            elif step is not None:
                self._start(step)
        except StopIteration as stop:
            self._finish(stop.value)
        except InvalidInput as error:
            self._refuse(error)
        except Exception:
            log.exception("defect in the router")
            self.crashed()

    def _start(self, step: steps.Prefill | steps.Decode | steps.Probe) -> None:
        self.leg = None
        if self._place is not None:
            self._stop_waiting()
        self.account.chosen()
        if isinstance(step, steps.Probe):
            self._after(asyncio.get_running_loop().create_task(probe(step.engine)), self._probed)
            return
        pool = self.router.upstreams.pool(step.engine)
        body = self.request.body
        if isinstance(step, steps.Prefill):
            receiver: PrefillLeg | AnswerLeg = PrefillLeg(self, keeps=step.keep)
            body = openai.prefill_body(self.endpoint, body, keep=step.keep)
        else:
            receiver = AnswerLeg(self, step.engine, fetches=step.params is not None)
            body = openai.answer_body(body, self._ask.metering, step.params)
        method = self.endpoint.method
        self.leg = pool.start(receiver, self._target, self._headers, body, method=method, fresh=step.fresh)

    def _probed(self, broken: Broken | None) -> None:
        self.advance(steps.Lost(broken, False) if broken is not None else None)

    # ---- waiting for room

    @property
    def _priority(self) -> int:
        key = self.request.key
        return key.priority if key is not None else 0

    def _wait(self, step: steps.Wait) -> None:
        self.leg = None
        if self._place is not None:
            return  # there was no room: it stays where it stands
        policy = self._deployment.routing
        waiting = self.router.waiting
        waited = self.account.queue_seconds or 0.0  # and it was sent, and its engine gave nothing
        self._place = waiting.join(self._deployment, self, alone=step.alone, priority=self._priority, waited=waited)
        if self._place is None:
            self.account.waited(0.0)
            self.advance(
                steps.NoRoom(f"All engines are busy, and {policy.queue_limit} requests wait already; try again.")
            )

    def room(self, deployment: Deployment | None) -> None:
        if deployment is not None:
            self._deployment = deployment
            cache = self._cache = self.router.evidence.of(deployment)
            self._prompt = self._look_up(cache, self._tokens)
        self.advance(steps.Room(deployment, self._prompt))

    def no_room(self) -> None:
        self._stop_waiting()
        seconds = self._deployment.routing.queue_seconds
        self.advance(steps.NoRoom(f"All engines are busy: none had room within {seconds:g} seconds; try again."))

    def _stop_waiting(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            self.router.waiting.leave(place)
            self.account.waited(monotonic() - place.since - place.waited)

    def _refuse(self, error: InvalidInput) -> None:
        self._close_flow()
        self._finish(Problem(400, error.code, error.message, error.field))

    def crashed(self) -> None:
        """A defect of the router's own: the client is told, and nothing stays behind."""
        if self._over:
            return
        self._close_flow()
        if self.left:
            self._end(499, Result.ABORTED)
            return
        problem = Problem(500, "internal_error", "The router failed; its log has the reason.")
        if self.account.streamed:
            self.connection.send(openai.error_event(problem, self.endpoint.shape), last=True)
            self._end(200, Result.TRUNCATED)
        else:
            self._finish(problem)

    @property
    def metered(self) -> bool:
        """Whether the router asks for the stream's counts and the client did not."""
        return bool(self._ask.metering)

    # ---- the client's connection

    def client_gone(self, *, cut: bool = False) -> None:
        if self._over or self.left:
            return
        if not cut and self._leave():
            return
        self._close_flow()
        reader = self.account.reader
        if reader is not None and reader.done and not self._slow:  # clients close when they have read the last event
            self._end(200, self.account.result(self.endpoint))
        elif cut and (self.account.streamed or self._taking is not None):
            self._end(200, Result.TRUNCATED)
        else:
            self._end(499, Result.ABORTED)

    def _leave(self) -> bool:
        """The client has left: see to it that no KV stays behind. False: nobody keeps any."""
        leg, trace = self.leg, self._trace
        if leg is None:
            return False
        prefilling = isinstance(leg.receiver, PrefillLeg) and leg.receiver.keeps and leg.connection is not None
        unheard = isinstance(leg.receiver, AnswerLeg) and trace.params is not None and leg.connection is None
        if not prefilling and not unheard:
            return False
        self.left = True
        self.account.ended_at = perf_counter()
        self._settle(499, Result.ABORTED)
        if prefilling:
            self._timer = asyncio.get_running_loop().call_later(FINISH_SECONDS, self._end_left)
        else:
            leg.cancel()
            self._end_left(trace.params)
        return True

    def _end_left(self, params: bytes | None = None) -> None:
        """What the client has left behind is over. `params`: of KV that no decode engine has got."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        decode = next((e for e in self._deployment.answering if e.id == self._trace.decode), None)
        if params is None or decode is None:
            self._close_flow()
            self._trace.stranded += params is not None
            self._end(499, Result.ABORTED)
            return
        body = openai.freeing_body(self._deployment.served_name, params)
        self._timer = asyncio.get_running_loop().call_later(FREE_SECONDS, self.freed)
        self.leg = self.router.upstreams.pool(decode).start(FreeingLeg(self), b"/v1/completions", self._headers, body)

    def freed(self, *, done: bool = False) -> None:
        """A decode engine has refused the KV, or not."""
        if self._over:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._close_flow()
        if not done:
            self._trace.stranded += 1
        self._end(499, Result.ABORTED)

    def _close_flow(self) -> None:
        if self._flow is not None:
            self._flow.close()

    def client_slow(self) -> None:
        self._slow = self.held_back = True
        if self.leg is not None:
            self.leg.pause()

    def client_ready(self) -> None:
        self._slow = False
        if self._taking is not None:
            self._end(200, self._taking)
        elif self.leg is not None:
            self.leg.resume()

    # ---- once a second

    def check(self, now: float) -> None:
        """Give up on an engine that has been silent for too long. `now`: monotonic."""
        leg = self.leg
        if leg is None or self._slow or leg.connection is None:
            return
        key, routing = self.request.key, self._deployment.routing
        if self.account.streamed:
            own, limit = key.gap_seconds if key is not None else None, routing.gap_seconds
        else:
            own, limit = key.silence_seconds if key is not None else None, routing.silence_seconds
        if own is not None:
            limit = own
        if now - leg.last_byte_at > limit:
            leg.give_up(Broken.SILENT)
        elif now - leg.last_byte_at > DOUBT_SECONDS and self._serving is not None:
            hung = self._serving.silent(leg.last_byte_at, now)
            if hung and not self.account.streamed:
                leg.give_up(Broken.SILENT)

    # ---- the answer

    def answer_headers(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        lines = [passing.down(headers), b"x-request-id: %b\r\n" % self.request_id]
        if self._hold is not None:
            lines.append(self._hold.headers)
        if self._explain:
            lines.append(self._explanation())
        return b"".join(lines)

    def _explanation(self) -> bytes:
        self._trace.look_at_counts()
        account, mode = self.account, self._deployment.routing.mode
        return explain.headers(self._trace, mode, self._cache, self._prompt, account.overhead_us, account.stages())

    def relay(self, data: bytes, last: bool, framed: bytes) -> None:
        """Whole events for the client. `last`: the answer ends with them. `framed`: the same as one chunk, or empty."""
        self.connection.send(data, last=last, framed=framed)
        if self._slow and self.leg is not None:
            self.leg.pause()

    def _finish(self, verdict: Verdict) -> None:
        connection = self.connection
        if verdict is None:
            result = self.account.result(self.endpoint)
            if self._slow and connection.keep(self):
                self._taking = result
            else:
                self._end(200, result)
            return
        status = verdict.status
        if isinstance(verdict, Problem):
            extra = self._explanation() if self._explain else b""
            if self._hold is not None:
                extra += self._hold.headers
            self.router.reply_problem(connection, verdict, self.endpoint.shape, self.request_id, extra)
        else:
            body = openai.shaped_error(status, verdict.body, self.endpoint.shape)
            headers = b"content-type: application/json\r\n" + self.answer_headers([])
            if verdict.retry_after is not None:
                headers += b"retry-after: %d\r\n" % verdict.retry_after
            connection.reply(status, headers, body)
        self._end(status, Result.REFUSED if status < 500 else Result.FAILED)

    def _end(self, status: int, result: Result) -> None:
        self._over = True
        if self._work is not None:
            self._work.cancel()
        self.router.exchanges.discard(self)
        self._stop_waiting()
        self._tokens = None
        leg, self.leg = self.leg, None
        if leg is not None:
            leg.cancel()
        if self.connection.exchange is self:
            self.connection.exchange = None
        used = self._used or self._settle(status, result)
        key = self.request.key
        account, trace, prompt = self.account, self._trace, self._prompt
        record = account.record(
            self.request_id.decode(),
            self._deployment.name,
            self.endpoint,
            key.id if key else "",
            trace,
            status,
            result,
            used,
        )
        serving = self._serving
        if result is Result.OK and used.output and serving is not None and serving.at is not None:
            serving.at.wrote(used.output)
        stages = account.stages()
        self.router.telemetry.record(record, stages)
        tokens = prompt.tokens if prompt is not None else None
        counted = account.usage.prompt
        if prompt is not None and counted is not None:
            if counted != tokens and prompt.current:
                self._miscounted(prompt.tokens, counted)
            cached = account.usage.cached  # the rest it has computed itself, and is to tell of
            if cached is not None and trace.decode is not None and trace.prefill is None and self._cache is not None:
                self._cache.counted(trace.decode, counted - cached)
        self.router.decisions.add(
            Kept(
                record,
                trace,
                self._deployment,
                self._standing,
                tokens,
                stages,
                prompt.below_block if prompt is not None else 0,
            )
        )

    def _miscounted(self, tokens: int, counted: int) -> None:
        """The engine had another number of prompt tokens."""
        engine, cache = self._trace.decode, self._cache
        if engine is not None and cache is not None:
            self.router.telemetry.count_token_check(cache.name, "miscount")
            if cache.miscounted(engine, monotonic()):
                text = "%s of %s counted %d prompt tokens in a request to %s; the router had %d."
                log.warning(text, engine, cache.name, counted, self.endpoint.path, tokens)

    def _settle(self, status: int, result: Result) -> Used:
        """Count what the request has used; its key is charged that."""
        account, hold, prompt = self.account, self._hold, self._prompt
        used = account.counted
        if used is None and hold is not None:
            used = account.used(self.endpoint, result, status, hold.estimate, hold.tokens)
        elif used is None:
            tokens = prompt.tokens if prompt is not None else None
            guess = charges.guess(self.endpoint, self._size, tokens, self._ask.limit)
            used = account.used(self.endpoint, result, status, guess, guess.prompt + guess.output)
        self._used = used
        if hold is not None:
            self._hold = None
            self.router.limits.settle(hold, used.total, counts=status < 500 or account.streamed)
        return used
