"""One engine attempt from its assignment to its end, in a thread of its own: a slow or hung engine delays no other.

Walks install → fetch → start → warm, then probes until the process has ended. It starts its process once (again only when
a port was snatched away before the engine could bind it) and never decides whether it is wanted: the agent does.
"""

from __future__ import annotations

import logging
import random
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from controlplane.fleet.errors import TandemError
from controlplane.fleet.model import EngineAssignment, EngineLoad, Observation, Phase, Role
from workers.answering import AnswerCheck
from workers.launch import Launcher
from workers.logs import Source, lines
from workers.obituary import cause, ending
from workers.pairs import PairProver
from workers.ports import is_free, numbers
from workers.probe import EngineClient, Identity, Unanswered
from workers.process import EngineProcess, boot_id, sweep
from workers.recent import LastMinute
from workers.record import EngineRecord, Records, note, tail

log = logging.getLogger(__name__)

PORT_TRIES = 3
STARTS_AGAIN = "a port was already in use; the engine starts again with other ports"
EXIT_SEEN_WITHIN = 0.2
"""Seconds."""
FAILURES_TO_UNHEALTHY = 3
LAST_WORDS_BYTES = 128 << 10
"""Of its log, searched for why it ended: tracebacks of several processes are long."""


class Pace(Struct, frozen=True):
    """Seconds between looks."""

    starting: float = 0.3
    running: float = 2.0
    completion: float = 30.0
    """Without a sign that the engine answers, until it is asked for a token."""
    grace: float = 20.0
    """From SIGTERM to SIGKILL."""


class EngineRun:
    """One attempt. Methods are called from the agent's thread; the walk itself is in `_run`."""

    def __init__(
        self,
        record: EngineRecord,
        *,
        records: Records,
        launcher: Launcher,
        changed: Callable[[], None],
        pace: Pace,
        chance: random.Random,
    ) -> None:
        self._record = record
        self._records = records
        self._launcher = launcher
        self._changed = changed
        self._pace = pace
        self._pairs = PairProver(record.pairs, proved=self._note_pairs, chance=chance)
        self._lock = threading.RLock()
        self._nudge = threading.Event()
        self._answers = AnswerCheck(every=pace.completion, changed=self._nudge.set)
        self._process: EngineProcess | None = None
        self._phase = Phase.EXITED if record.ended else Phase.WARMING if record.warmed else Phase.STARTING
        self._detail = record.detail
        self._progress: float | None = None
        self._identity: Identity | None = None
        self._load: EngineLoad | None = None
        self._last_minute = LastMinute()
        self.stopping_since: float | None = None
        """On the monotonic clock."""
        self._why = ""

    @property
    def assignment(self) -> EngineAssignment:
        return self._record.assignment

    @property
    def folder(self) -> Path:
        return self._records.folder(self.assignment.engine, self.assignment.attempt)

    @property
    def ended(self) -> bool:
        return self._record.ended

    @property
    def pid(self) -> int | None:
        """Of a process that lives."""
        return self._process.pid if self._process is not None and not self.ended else None

    def start(self) -> None:
        """Begins the attempt anew."""
        self._phase, self._detail = Phase.INSTALLING, "The agent has accepted it."
        self._spawn()

    def adopt(self) -> None:
        """Goes on with what a former agent process left: its running engine, or how it ended."""
        record = self._record
        if record.ended:
            return
        if record.pid is not None:
            self._process = EngineProcess.adopt(record.pid, record.start_ticks, record.boot, self.folder)
        if self._process is None:
            sweep(self.folder.resolve())
            self._end("It ended while no agent was running, so its exit code is unknown.")
            return
        if record.ports is not None:
            self._launcher.promise(self.assignment.engine, self.assignment.attempt, record.ports)
        self._detail = "Found running after a restart of the agent."
        self._spawn()
        if record.address and record.address != self._launcher.address:
            self.stop(
                f"this node's address is {self._launcher.address} now, and the engine listens on {record.address}"
            )

    def update(self, assignment: EngineAssignment) -> None:
        """Takes in what may change while an engine runs: its peers, and what is doubted."""
        with self._lock:
            if assignment == self._record.assignment or self.ended:
                return
            self._record.assignment = assignment
            self._save()
        self._pairs.keep_only(assignment.peers)
        self._nudge.set()

    def stop(self, why: str = "it is no longer wanted") -> None:
        """Asks the process to end; an attempt that has none yet ends at once."""
        with self._lock:
            if self.ended or self.stopping_since is not None:
                return
            self.stopping_since = time.monotonic()
            self._why = why
            if self._process is None:
                self._end(f"Not started: {why}.")
                return
            self._say(Phase.STOPPING, f"Stops: {why}.", None)
            self._process.terminate()
        self._nudge.set()

    def kill(self) -> None:
        """Ends the process and its helpers at once."""
        process = self._process
        if process is not None and not self.ended:
            process.kill()
            self._nudge.set()

    def observation(self) -> Observation:
        with self._lock:
            record, identity = self._record, self._identity or Identity("", None, None, None)
            return Observation(
                engine=record.assignment.engine,
                attempt=record.assignment.attempt,
                phase=self._phase,
                detail=self._detail,
                progress=self._progress,
                pid=record.pid,
                exit_code=record.exit_code,
                stopped=record.stopped,
                address=record.address,
                ports=record.ports,
                version=identity.version,
                block_size=identity.block_size,
                kv_blocks=identity.kv_blocks,
                max_model_len=identity.max_model_len,
                kv_events=identity.kv_events,
                kv_ranks=identity.kv_ranks,
                command=record.command,
                model_folder=record.model_folder,
                tokenizer_folder=record.tokenizer_folder,
                tokenizer=record.tokenizer,
                started_at=record.started_at,
                load=self._load,
                pairs=self._pairs.proofs(),
            )

    def log_source(self, secrets: tuple[str, ...]) -> Source:
        """Its log, and what must never be seen in it besides `secrets`."""
        own = (self.assignment.secret, *(peer.secret for peer in self.assignment.peers))
        return Source(self.assignment.engine, self.assignment.attempt, self.folder, self.ended, (*own, *secrets))

    def _spawn(self) -> None:
        threading.Thread(
            target=self._run, name=f"{self.assignment.engine}#{self.assignment.attempt}", daemon=True
        ).start()

    def _run(self) -> None:
        try:
            if self._process is not None:
                self._watch(self._process)
            else:
                self._boot()
        except TandemError as error:
            self._end(error.message)
        except Exception as error:
            log.exception("%s failed in the agent.", self.assignment.engine)
            self.kill()  # nobody would watch it any more
            sweep(self.folder.resolve())
            if isinstance(error, OSError):
                self._end(
                    f"The node cannot write {error.filename or self._records.root}: {error.strerror}. Make room for it."
                )
            else:
                self._end(f"The agent failed ({type(error).__name__}). See the agent's log.")
        finally:
            self._launcher.release(self.assignment.engine, self.assignment.attempt)

    def _boot(self) -> None:
        self._records.save(self._record)
        prepared = self._launcher.prepare(self.assignment, self._say)
        for again in range(PORT_TRIES):
            chosen, command = self._launcher.choose(self.assignment, prepared)
            with self._lock:
                if self.stopping_since is not None:
                    self._end(f"Stopped: {self._why}.")
                    return
                record = self._record
                record.ports, record.command, record.address = chosen, command.argv, self._launcher.address
                record.pid, record.model_folder = None, str(prepared.model_path or "")
                if (read := prepared.tokenizer) is not None:
                    record.tokenizer_folder, record.tokenizer = str(read.folder), read.digest
                self._records.save(record)
                self._process = process = self._launcher.start(command, self.folder)
                record.pid, record.start_ticks, record.boot = process.pid, process.ticks, boot_id()
                record.started_at = time.time()
                self._save()
                self._say(Phase.STARTING, "Starting: it loads the model.", None)
            last = again == PORT_TRIES - 1
            if not self._watch(process, retry_ports=not last):
                return
            self._note(STARTS_AGAIN)

    def _watch(self, process: EngineProcess, *, retry_ports: bool = False) -> bool:
        """Probes until the process has ended. True: it lost a port before it answered, and shall be started again."""
        record = self._record
        assert record.ports is not None
        failures = 0
        with EngineClient(f"http://{record.address}:{record.ports.http}", self.assignment.secret) as client:
            while process.running():
                try:
                    self._probe(client)
                    failures = 0
                except Unanswered as error:
                    failures += 1
                    if record.warmed and failures >= FAILURES_TO_UNHEALTHY:
                        self._say(Phase.UNHEALTHY, f"It does not answer its health check: {error}", None)
                    elif not record.warmed and self._complains_of_a_port():
                        process.kill()  # vLLM's threads die of it one by one; the process would hang for ever
                self._pause(process, self._pace.running if record.warmed else self._pace.starting)
        sweep(process.folder)
        if retry_ports and not record.warmed and self.stopping_since is None and self._lost_a_port():
            return True
        self._end(self._obituary(process), process.exit_code)
        return False

    def _pause(self, process: EngineProcess, seconds: float) -> None:
        until = time.monotonic() + seconds
        while process.running() and (left := until - time.monotonic()) > 0:
            if self._nudge.wait(min(left, EXIT_SEEN_WITHIN)):
                break
        self._nudge.clear()

    def _probe(self, client: EngineClient) -> None:
        """One look. Raises `Unanswered`."""
        if self.stopping_since is not None:
            return
        client.health()
        if self._identity is None:
            self._introduce(client)
        try:
            self._load = self._last_minute.of(client.figures().load, time.monotonic())
        except Unanswered:
            self._load = None  # it serves; only the figures are missing
        self._answers.advance(self.assignment, client.url, self._load)
        if self._answers.trouble:
            self._say(Phase.UNHEALTHY, self._answers.trouble, None)
            return
        self._say(Phase.WARMING, "Answers completions.", None)
        if self.assignment.spec.role is Role.DECODE and self._identity is not None:
            self._pairs.advance(self.assignment, client.url, self._identity)

    def _introduce(self, client: EngineClient) -> None:
        """The first time that this agent process talks with the engine: a completion, or an adopted one's authenticated answer."""
        try:
            if not self._record.warmed:
                client.answer(self.assignment.spec.served_name, max_tokens=2)
            identity = client.identity(self.assignment.spec.extra_args)
        except Unanswered as error:
            if not self._record.warmed:
                self._say(Phase.STARTING, f"It runs, but cannot serve yet: {error}", None)
            raise
        with self._lock:
            self._identity = identity
            self._record.warmed = True
            self._save()

    def _note_pairs(self) -> None:
        with self._lock:
            if not self.ended:
                self._record.pairs = self._pairs.proofs()
                self._save()
        self._changed()

    def _say(self, phase: Phase, detail: str, progress: float | None) -> None:
        with self._lock:
            if self.ended or (self.stopping_since is not None and phase is not Phase.STOPPING):
                return
            moved = phase is not self._phase
            if moved or _without_numbers(detail) != _without_numbers(self._detail):
                self._note(detail)
            self._phase, self._detail, self._progress = phase, detail, progress
        if moved:
            self._changed()

    def _end(self, detail: str, exit_code: int | None = None) -> None:
        with self._lock:
            if self.ended:
                return
            self._pairs.close()
            self._record.ended, self._record.exit_code, self._record.detail = True, exit_code, detail
            self._record.stopped = self.stopping_since is not None
            self._phase, self._detail, self._progress, self._load = Phase.EXITED, detail, None, None
            self._note(detail)
            self._save()
        self._changed()

    def _save(self) -> None:
        """Writes the record, where that can fail without harm: a full disk is no reason to end an engine."""
        try:
            self._records.save(self._record)
        except OSError as error:
            log.error("%s: its record cannot be written: %s", self.assignment.engine, error.strerror)

    def _note(self, text: str) -> None:
        log.info("%s #%d: %s", self.assignment.engine, self.assignment.attempt, text)
        try:
            note(self.folder, text)
        except OSError as error:
            log.error("%s: its log cannot be written: %s", self.assignment.engine, error.strerror)

    def _complains_of_a_port(self) -> bool:
        since_start = tail(self.folder, 4096).rpartition(STARTS_AGAIN)[2]
        return "address already in use" in since_start.lower()

    def _lost_a_port(self) -> bool:
        return self._complains_of_a_port() or not all(
            is_free(self._record.address, port) for port in numbers(self._record.ports)
        )

    def _obituary(self, process: EngineProcess) -> str:
        code = process.exit_code
        if self.stopping_since is not None:
            return f"Stopped: {self._why}."
        if not self._record.warmed and self._complains_of_a_port():
            return "It ended: a port was already in use."
        log = tail(self.folder, LAST_WORDS_BYTES).rpartition(STARTS_AGAIN)[2]
        said = cause("\n".join(lines(log.encode(), (self.assignment.secret,))))
        return f"{ending(code)}: “{said}”." if said else f"{ending(code)}."


def _without_numbers(text: str) -> str:
    """So that a download's growing percentage is one line of the log, not a hundred."""
    return re.sub(r"[\d.,]+", "", text)
