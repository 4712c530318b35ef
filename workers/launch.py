"""From an assignment to a running process: runtime, model, ports, command. One install per runtime and one fetch per model
at a time on this node, however many engines wait for it.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from controlplane.fleet.errors import RuntimeBroken
from controlplane.fleet.model import EngineAssignment, Phase, Ports, Runtime
from workers import ports
from workers.command import Command
from workers.engine_user import EngineUser
from workers.process import EngineProcess
from workers.runtimes import EngineRuntime
from workers.tokenizer_folder import Tokenizer

Progress = Callable[[str, float | None], None]
"""Told a sentence and, where known, how much is done (0..1)."""
Say = Callable[[Phase, str, float | None], None]


class EnsureRuntime(Protocol):
    def __call__(self, kind: Runtime, *, progress: Progress) -> EngineRuntime: ...


class EnsureModel(Protocol):
    def __call__(self, model: str, *, runtime: EngineRuntime, progress: Progress) -> Path: ...


class EnsureTokenizer(Protocol):
    def __call__(
        self, model: Path, arguments: Sequence[str], *, runtime: EngineRuntime, progress: Progress
    ) -> Tokenizer: ...


class BuildCommand(Protocol):
    def __call__(
        self, assignment: EngineAssignment, *, runtime: EngineRuntime, model_path: Path | None, ports: Ports
    ) -> Command: ...


class Prepared(NamedTuple):
    """What an engine needs before it can be started."""

    runtime: EngineRuntime
    model_path: Path | None
    tokenizer: Tokenizer | None


class Launcher:
    """Prepares and starts engines on one address. Used by every engine's thread at once."""

    def __init__(
        self,
        *,
        address: str,
        span: tuple[int, int],
        ensure_runtime: EnsureRuntime,
        ensure_model: EnsureModel,
        ensure_tokenizer: EnsureTokenizer,
        build: BuildCommand,
        chance: random.Random,
        user: EngineUser | None = None,
    ) -> None:
        self.address = address
        self._span = span
        self._ensure_runtime = ensure_runtime
        self._ensure_model = ensure_model
        self._ensure_tokenizer = ensure_tokenizer
        self._build = build
        self._chance = chance
        self._user = user
        self._guard = threading.Lock()
        self._turns: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._promised: dict[tuple[str, int], Ports] = {}

    def prepare(self, assignment: EngineAssignment, say: Say) -> Prepared:
        """Installs the runtime and fetches the model, telling how far it is.

        Raises `RuntimeBroken` or `ModelUnavailable`.
        """
        spec = assignment.spec

        def installing(text: str, done: float | None) -> None:
            say(Phase.INSTALLING, text, done)

        def fetching(text: str, done: float | None) -> None:
            say(Phase.FETCHING, text, done)

        say(Phase.INSTALLING, f"Preparing the {spec.runtime} engine runtime.", None)
        with self._turn(f"runtime {spec.runtime}"):
            runtime = self._ensure_runtime(spec.runtime, progress=installing)
        if spec.runtime is Runtime.SIM and not (Path(spec.model).is_absolute() and Path(spec.model).is_dir()):
            return Prepared(runtime, None, None)  # it has words of its own
        say(Phase.FETCHING, f"Preparing the model {spec.model}.", None)
        with self._turn(f"model {spec.model}"):
            model = Path(spec.model)
            if spec.runtime is not Runtime.SIM:
                model = self._ensure_model(spec.model, runtime=runtime, progress=fetching)
            tokenizer = self._ensure_tokenizer(model, spec.extra_args, runtime=runtime, progress=fetching)
            return Prepared(runtime, model, tokenizer)

    def choose(self, assignment: EngineAssignment, prepared: Prepared) -> tuple[Ports, Command]:
        """Fresh ports for this attempt, promised to it until `release`, and the command that uses them.

        Raises `Unavailable` when no ports are free, `InvalidInput` when the command cannot be built.
        """
        key = (assignment.engine, assignment.attempt)
        with self._guard:
            promised = {
                port for other, taken in self._promised.items() if other != key for port in ports.numbers(taken)
            }
            chosen = ports.take(self.address, self._span, assignment.spec.role, promised=promised, chance=self._chance)
            self._promised[key] = chosen
        return chosen, self._build(assignment, runtime=prepared.runtime, model_path=prepared.model_path, ports=chosen)

    def start(self, command: Command, folder: Path) -> EngineProcess:
        """Raises `RuntimeBroken` when the runtime's program cannot be executed, `OSError` when the disk is full."""
        try:
            return EngineProcess.launch(command.argv, command.env, folder, user=self._user)
        except OSError as error:
            if error.filename != command.argv[0]:
                raise
            if self._user and isinstance(error, PermissionError):
                raise RuntimeBroken(
                    f"{self._user.name}, as which engines run here, cannot execute {Path(command.argv[0]).resolve()}; remove the "
                    f"folder {Path(command.argv[0]).parent.parent}, and the engine runtime is installed again with the agent's "
                    "Python"
                ) from error
            raise RuntimeBroken(f"{command.argv[0]}: {error.strerror}; the engine runtime is damaged") from error

    def promise(self, engine: str, attempt: int, taken: Ports) -> None:
        """Reserves the ports of an engine that a former agent started."""
        with self._guard:
            self._promised[engine, attempt] = taken

    def release(self, engine: str, attempt: int) -> None:
        with self._guard:
            self._promised.pop((engine, attempt), None)

    @contextmanager
    def _turn(self, what: str) -> Iterator[None]:
        with self._guard:
            turn = self._turns[what]
        with turn:
            yield
