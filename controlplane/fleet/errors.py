"""The exception tree of all three programs.

    TandemError
    ├── InvalidInput          the caller sent something wrong: names the field and the remedy   400
    │   └── ManagedArgument   a user argument collides with one that Tandem sets itself         400
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


class TandemError(Exception):
    """Root of the tree. `str(error)` is one sentence that says what is wrong and what to do."""

    code = "internal_error"
    status = 500
    retryable = False

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class InvalidInput(TandemError):
    code = "invalid_input"
    status = 400


class ManagedArgument(InvalidInput):
    code = "managed_argument"


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

    def __init__(self, message: str, *, field: str | None = None, generation: int | None = None) -> None:
        super().__init__(message, field=field)
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
