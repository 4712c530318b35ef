"""The loop: read the newest plan, compare it with the engines of this node, act, report.

Level-triggered: every step looks at the whole; messages only hasten. An engine is stopped because a plan that was read does
not hold it, never because somebody is silent.
"""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections.abc import Callable

import msgspec

from controlplane.fleet.errors import Conflict, Unavailable
from controlplane.fleet.model import EngineAssignment, NodeFacts, Observation
from controlplane.fleet.wire import REPORT_EVERY, NodePlan, NodeReport
from workers.claim import CLAIM_SECONDS, Claim, Claimant, already_running
from workers.decide import Action, Held, Kill, Start, Stop, Update, decide
from workers.engine import EngineRun, Pace
from workers.launch import Launcher
from workers.mailbox import LoginRefused, Mailbox
from workers.process import sweep
from workers.record import EngineRecord, Records, write_private

log = logging.getLogger(__name__)

STEP_SECONDS = 1.0
SHORTEST_STEP_SECONDS = 0.05
AFTER_KILL_SECONDS = 5.0
ASK_STANDING_EVERY = 15.0
"""While Redis refuses the login: Redis forgets its users when it restarts, and the control plane makes them again within seconds."""


class Applied(msgspec.Struct, frozen=True):
    """What survives a restart of the agent besides the engines' records."""

    generation: int = 0


class Agent:
    """Everything one node runs. `one_step` is the loop's body, for tests too."""

    def __init__(
        self,
        node: str,
        *,
        mailbox: Mailbox,
        records: Records,
        launcher: Launcher,
        facts: Callable[[], NodeFacts],
        claimant: Claimant | None = None,
        why_over: Callable[[], str] = lambda: "",
        pace: Pace = Pace(),  # noqa: B008 (frozen)
        chance: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.node = node
        self._mailbox = mailbox
        self._records = records
        self._launcher = launcher
        self._facts = facts
        self._claimant = claimant
        self._claimed_at = -REPORT_EVERY
        self._why_over = why_over
        self._refused_at: float | None = None
        self._outdone = False
        self.unfit = ""
        """Why this agent cannot go on: its engines here are to be ended."""
        self._pace = pace
        self._chance = chance or random.SystemRandom()
        self._clock = clock
        self._id = secrets.token_hex(8)
        self._sequence = 0
        self._applied_file = records.root.parent / "applied.json"
        self._applied = self._read_applied()
        self._plan: NodePlan | None = None
        self._runs: dict[tuple[str, int], EngineRun] = {}
        self._woken = threading.Event()
        self._report_due = True
        self._reported: object = None
        self._reported_at = 0.0
        self._trouble = ""
        self._leaving = False

    def wake(self) -> None:
        """Makes the next step happen at once. Called from any thread."""
        self._woken.set()

    def report_now(self) -> None:
        self._report_due = True
        self.wake()

    def engine_pids(self) -> set[int]:
        return {run.pid for run in list(self._runs.values()) if run.pid is not None}

    def runs(self) -> list[EngineRun]:
        return list(self._runs.values())

    def await_claim(self, sleep: Callable[[float], None]) -> None:
        """Until no other agent is this node, or Redis does not answer: then the claim is made when it does.

        Raises `Conflict` when another stays it; what a copy of its state folder left running here is ended.
        """
        waited = 0.0
        while (other := self._rival()) is not None:
            if waited > 1.5 * CLAIM_SECONDS:
                self._yield_to(other)
                if not other.is_here:
                    self.recover()
                    self.stop_all()
                raise Conflict(self.unfit)
            waited += 1.0
            sleep(1.0)

    def give_up(self, why: str) -> None:
        """Ends the loop. Called from any thread."""
        self.unfit = self.unfit or why
        self.wake()

    def _yield_to(self, other: Claim) -> None:
        self._outdone = True
        self.give_up(already_running(self.node, other))

    def _rival(self) -> Claim | None:
        """Who has the claim, if not this agent; asked now and then."""
        now = self._clock()
        if self._claimant is None or now - self._claimed_at < REPORT_EVERY:
            return None
        try:
            rival = self._claimant.renew()
        except Unavailable:
            return None
        if rival is None:
            self._claimed_at = now
        return rival

    def recover(self) -> None:
        """Takes in what former agent processes left behind: running engines, and attempts that have ended."""
        attempts = list(self._records.attempts())
        newest = dict(attempts)
        for engine, attempt in attempts:
            record = self._records.load(engine, attempt)
            if record is None or (record.pid is None and not record.ended):
                sweep(self._records.folder(engine, attempt).resolve())  # the agent ended between start and record
            elif not record.ended or newest[engine] == attempt:
                self._hold(record).adopt()

    def run(self, stopping: threading.Event) -> None:
        """Steps until told to stop. A step that fails is logged, and the next one is tried."""
        while not stopping.is_set() and not self.unfit:
            try:
                self.one_step()
            except Exception:
                log.exception("A step of the agent failed. Engines keep running.")
            stopping.wait(SHORTEST_STEP_SECONDS)
            self._woken.wait(STEP_SECONDS)
            self._woken.clear()

    def one_step(self) -> None:
        """Gather, decide, apply, report."""
        if (rival := self._rival()) is not None:
            self._yield_to(rival)
            return
        trouble = self._gather_plan()
        now = self._clock()
        held = [
            Held(run.assignment, run.ended, None if run.stopping_since is None else now - run.stopping_since)
            for run in self._runs.values()
        ]
        for action in decide(self._plan, held, grace=self._pace.grace):
            try:
                self._apply(action)
            except Exception:
                log.exception("%s failed; the other engines are seen to.", type(action).__name__)
        unreported = self._report()
        self._tell_trouble(trouble or unreported)

    def stop_all(self) -> None:
        """Ends every engine: asks, waits the grace, kills. Reports what is left, if Redis still answers."""
        self._leaving = True
        for run in self.runs():
            run.stop("its agent stops")
        self._await_ends(self._pace.grace)
        for run in self.runs():
            run.kill()
        self._await_ends(AFTER_KILL_SECONDS)
        self._report_due = True
        self._report()

    def _await_ends(self, seconds: float) -> None:
        until = self._clock() + seconds
        while any(not run.ended for run in self.runs()) and self._clock() < until:
            self._woken.wait(0.2)
            self._woken.clear()

    def _gather_plan(self) -> str:
        """Keeps the newest plan. Returns what is wrong, or nothing."""
        try:
            plan = self._mailbox.read_plan()
        except LoginRefused as error:
            self._ask_standing()
            return error.message
        except Unavailable as error:
            return error.message
        self._refused_at = None
        if plan is None or plan.node != self.node or plan.generation < self._applied:
            return ""  # none yet, or an older one that comes late
        self._plan = plan
        if plan.generation > self._applied:
            self._applied = plan.generation
            return self._note_applied(plan)
        return ""

    def _ask_standing(self) -> None:
        """Gives up where the login is refused because this machine is the node no more: its engines here are nobody's."""
        now = self._clock()
        if self._refused_at is None:
            self._refused_at = now
        elif now - self._refused_at >= ASK_STANDING_EVERY:
            self._refused_at = now
            if why := self._why_over():
                self._outdone = True
                self.give_up(
                    f"{why} This machine's access and engines have ended. To use it again, remove the folder agents/{self.node} "
                    "from its TANDEM_HOME and let it join with a new token (as another TANDEM_NODE_NAME if that one is taken)."
                )

    def _note_applied(self, plan: NodePlan) -> str:
        try:
            write_private(self._applied_file, msgspec.json.encode(Applied(plan.generation)))
            self._records.prune({assignment.engine for assignment in plan.engines} | {key[0] for key in self._runs})
        except OSError as error:
            return f"{self._applied_file.parent} cannot be written ({error.strerror}); make room. Engines keep running."
        return ""

    def _apply(self, action: Action) -> None:
        if isinstance(action, Start):
            self._start(action.assignment)
            return
        if isinstance(action, Update):
            self._runs[action.assignment.engine, action.assignment.attempt].update(action.assignment)
            return
        key = (action.engine, action.attempt)
        if isinstance(action, Stop):
            self._runs[key].stop()
        elif isinstance(action, Kill):
            self._runs[key].kill()
        else:
            del self._runs[key]

    def _start(self, assignment: EngineAssignment) -> None:
        known = self._records.load(assignment.engine, assignment.attempt)
        if known is not None and known.ended:
            self._hold(known)  # (engine, attempt) names one process for ever
            return
        self._hold(EngineRecord(assignment=assignment)).start()

    def _hold(self, record: EngineRecord) -> EngineRun:
        run = EngineRun(
            record,
            records=self._records,
            launcher=self._launcher,
            changed=self.wake,
            pace=self._pace,
            chance=self._chance,
        )
        self._runs[record.assignment.engine, record.assignment.attempt] = run
        return run

    def _report(self) -> str:
        """Writes the report when something changed or the beat is due. Returns what is wrong, or nothing."""
        if self._outdone:
            return ""  # the other agent's reports are the node's
        observations = tuple(run.observation() for run in self._runs.values())
        seen = (self._applied, tuple(map(_lasting, observations)))
        now = self._clock()
        if not self._report_due and seen == self._reported and now - self._reported_at < REPORT_EVERY:
            return ""
        self._sequence += 1
        report = NodeReport(
            node=self.node,
            agent=self._id,
            sequence=self._sequence,
            plan_generation=self._applied,
            holds_plan=self._plan is not None,
            facts=self._facts(),
            engines=observations,
            sent_at=time.time(),
            leaving=self._leaving,
        )
        try:
            self._mailbox.write_report(report)
        except Unavailable as error:
            return error.message
        self._report_due, self._reported, self._reported_at = False, seen, now
        return ""

    def _tell_trouble(self, trouble: str) -> None:
        """Once when it begins, once when it ends."""
        if trouble != self._trouble:
            if trouble:
                log.warning("%s", trouble)
            else:
                log.info("Plans are read and reports are written again.")
        self._trouble = trouble

    def _read_applied(self) -> int:
        try:
            return msgspec.json.decode(self._applied_file.read_bytes(), type=Applied).generation
        except (OSError, msgspec.DecodeError):
            return 0


def _lasting(observation: Observation) -> Observation:
    """Without what moves all the time and can wait for the beat."""
    return msgspec.structs.replace(observation, load=None, progress=None)
