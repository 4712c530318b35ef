"""The exception tree of all three programs.

    TandemError
    ├── InvalidInput          the caller sent something wrong: names the field and the remedy   400
    │   ├── ManagedArgument   a user argument collides with one that Tandem sets itself         400
    │   └── AdminArgument     a user argument that only an admin may give                       403
    ├── Forbidden             the caller is known but may not do this                           403
    ├── NotFound              no such thing, or not for this caller                             404
    ├── Conflict              the thing changed meanwhile, or the name is taken                 409
    ├── IllegalTransition     an event that a lifecycle state does not know (a defect)          500
    └── Unavailable           a part that is needed is not there now; trying again may help     503
        ├── RuntimeBroken     the engine runtime cannot be installed or started on this node    503
        └── ModelUnavailable  the model cannot be fetched or prepared on this node              503

Each error carries `code` (stable, machine readable), `status` (HTTP), `retryable` and, where one input field is
to blame, `field`. They become HTTP once, at the edge.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class TandemError(Exception):
    """Root of the tree. `str(error)` is one sentence that says what is wrong and what to do."""

    code = "internal_error"
    status = 500
    retryable = False

    def __init__(self, message: str, *, field: str | None = None, names_first: bool = False) -> None:
        """`names_first`: after its field the sentence begins with a name, which keeps its case."""
        super().__init__(message)
        self.message = message
        self.field = field
        self.names_first = names_first

    @property
    def sentence(self) -> str:
        """The message without its leading field name: what stands at the field itself."""
        said = self.message.removeprefix(f"{self.field}: ")
        return said if self.names_first else said[:1].upper() + said[1:]

    @property
    def sentences(self) -> tuple[str, ...]:
        """All that is wrong: of most errors the one message."""
        return (self.message,)


class InvalidInput(TandemError):
    """`problems`: all that is wrong, each an error of its own; the first of them is this one's own message and field."""

    code = "invalid_input"
    status = 400

    def __init__(self, message: str, *, field: str | None = None, problems: Sequence[InvalidInput] = ()) -> None:
        super().__init__(message, field=field)
        self.problems = tuple(problems) or (self,)

    @property
    def sentences(self) -> tuple[str, ...]:
        return tuple(problem.message for problem in self.problems)


class ManagedArgument(InvalidInput):
    code = "managed_argument"


class AdminArgument(InvalidInput):
    """An option of engines that only an admin may give."""

    code = "admin_argument"
    status = 403


class Problems:
    """Collects what is wrong with one input, so that all of it is told at once, one problem a field."""

    def __init__(self) -> None:
        self._found: dict[str | None, InvalidInput] = {}

    def __len__(self) -> int:
        return len(self._found)

    def add(self, said: str, field: str) -> None:
        """`field`: dotted; empty: the whole input."""
        self._note(InvalidInput(f"{field or 'document'}: {said}", field=field or None))

    @contextmanager
    def part(self) -> Iterator[None]:
        """A check of its own: what it raises is noted, and the next check follows."""
        try:
            yield
        except InvalidInput as error:
            for problem in error.problems:
                self._note(problem)

    def _note(self, problem: InvalidInput) -> None:
        self._found.setdefault(problem.field, problem)

    def fields(self) -> set[str]:
        return {field or "" for field in self._found}

    def raise_any(self) -> None:
        """Raises the first problem with all of them, or nothing."""
        if self._found:
            first, *_ = found = list(self._found.values())
            raise type(first)(first.message, field=first.field, problems=found)


class Forbidden(TandemError):
    code = "forbidden"
    status = 403


class NotFound(TandemError):
    code = "not_found"
    status = 404


class Conflict(TandemError):
    """`generation`: the present one of the deployment that changed meanwhile."""

    code = "conflict"
    status = 409

    def __init__(
        self, message: str, *, field: str | None = None, generation: int | None = None, names_first: bool = False
    ) -> None:
        super().__init__(message, field=field, names_first=names_first)
        self.generation = generation


class IllegalTransition(TandemError):
    code = "illegal_transition"


class Unavailable(TandemError):
    code = "unavailable"
    status = 503
    retryable = True


class RuntimeBroken(Unavailable):
    code = "runtime_broken"


class ModelUnavailable(Unavailable):
    code = "model_unavailable"
