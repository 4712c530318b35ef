"""An engine that reads a prompt for a request: what it carries meanwhile, and what its pace teaches. No IO."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from frontend_api.kv.evidence import Prompt
from frontend_api.routing.view import Engine, carrying


class Reader:
    """An engine that is to read a prompt: the load this is while its block lasts, and what its end teaches."""

    __slots__ = ("_ahead", "_began_at", "_clock", "_engine", "_prompt", "_read", "load")

    def __init__(self, engine: Engine, prompt: Prompt | None, clock: Callable[[], float], kv: int) -> None:
        """`kv`: tokens of KV that it needs there."""
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
        self.load = carrying(engine, lacking, kv)

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
