"""Events as people read them: what repeats stands in one line, and no deployment crowds out the others. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from controlplane.access.roles import SYSTEM
from controlplane.deployments.models import Event


class Happening(NamedTuple):
    """An event, with those before it that say the same."""

    event: Event
    """The newest of them."""
    times: int = 1
    seconds: float = 0.0
    """From the first of them to the newest."""


def fold(events: Iterable[Event]) -> list[Happening]:
    """Newest first, as they came. Of one engine, what the loop said before in the same words (numbers aside) is counted there.

    What people did is never folded: each of their changes is another.
    """
    found: dict[object, Happening] = {}
    for event in events:
        key = _same(event)
        if (newer := found.get(key)) is None:
            found[key] = Happening(event)
        else:
            seconds = (newer.event.at - event.at).total_seconds()
            found[key] = newer._replace(times=newer.times + 1, seconds=seconds)
    return list(found.values())


def _same(event: Event) -> object:
    if not event.engine_id or event.actor != SYSTEM.name:
        return event.pk
    return event.engine_id, event.kind, event.new_state, re.sub(r"\d+", "#", event.message)


def fair(happenings: Sequence[Happening], *, limit: int, each: int) -> list[Happening]:
    """The newest, at most `limit`; more than `each` of one deployment only where the others have no more to tell."""
    taken: Counter[str] = Counter()
    first: list[Happening] = []
    rest: list[Happening] = []
    for happening in happenings:
        name = happening.event.deployment_name
        taken[name] += 1
        (first if taken[name] <= each else rest).append(happening)
    chosen = (first + rest)[:limit]
    return sorted(chosen, key=lambda happening: -happening.event.pk)
