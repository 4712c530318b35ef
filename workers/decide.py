"""What an agent has to do so that its node runs just what the plan wants. Pure: no clock, no process, no IO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from controlplane.fleet.model import EngineAssignment
from controlplane.fleet.wire import NodePlan


class Held(NamedTuple):
    """One attempt that this agent holds, as far as the decision needs it."""

    assignment: EngineAssignment
    ended: bool = False
    stopping_for: float | None = None
    """Seconds since it was asked to end."""


class Start(NamedTuple):
    assignment: EngineAssignment


class Update(NamedTuple):
    assignment: EngineAssignment


class Stop(NamedTuple):
    engine: str
    attempt: int


class Kill(NamedTuple):
    engine: str
    attempt: int


class Forget(NamedTuple):
    engine: str
    attempt: int


Action = Start | Update | Stop | Kill | Forget


def decide(plan: NodePlan | None, held: Sequence[Held], *, grace: float) -> list[Action]:
    """What to do so that the node runs just what the plan wants. Pure; without a plan nothing is started or stopped.

    An attempt that ended stays held (and reported) until the plan drops it or wants a newer one; it is never started
    again. A newer attempt waits until the older one's process is gone: both want the same memory.
    """
    actions: list[Action] = []
    wanted = {} if plan is None else {assignment.engine: assignment for assignment in plan.engines}
    for one in held:
        engine, attempt = one.assignment.engine, one.assignment.attempt
        if one.stopping_for is not None and not one.ended:
            if one.stopping_for > grace:
                actions.append(Kill(engine, attempt))
            continue
        if plan is None:
            continue
        want = wanted.get(engine)
        if want is None or want.attempt != attempt:
            actions.append(Forget(engine, attempt) if one.ended else Stop(engine, attempt))
        elif want != one.assignment and not one.ended:
            actions.append(Update(want))
    here = {(one.assignment.engine, one.assignment.attempt) for one in held}
    alive = {one.assignment.engine for one in held if not one.ended}
    for want in wanted.values():
        if (want.engine, want.attempt) not in here and want.engine not in alive:
            actions.append(Start(want))
    return actions
