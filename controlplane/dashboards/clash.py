"""Two people change the same thing: who comes second sees both versions side by side and chooses. Nothing typed is lost.

An editing form carries what it was made from: the generation (where there is one) and, as JSON, the values of its own fields.
So a change of something else (a pool scaled while the routing is edited) is no clash.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from controlplane.access import audit
from controlplane.deployments.services import changes_between


class Difference(NamedTuple):
    label: str
    theirs: Any
    mine: Any
    """None: the default, or nothing."""
    by_them: bool
    by_me: bool


class Clash(NamedTuple):
    who: str
    at: datetime | None
    differences: list[Difference]
    labelled: bool
    """The labels are words for people, not fields of a document."""


def seen(values: Mapping[str, Any]) -> str:
    """What a form was made from, for its hidden field."""
    return json.dumps(values, sort_keys=True, default=lambda at: f"{at:%F %R} UTC")


def was_seen(text: str) -> dict[str, Any] | None:
    """What `seen` wrote; None: the form carries nothing of the kind."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def clash(
    base: Mapping[str, Any],
    theirs: Mapping[str, Any],
    mine: Mapping[str, Any],
    *,
    target: str,
    labels: Mapping[str, str] | None = None,
) -> Clash | None:
    """How two versions made from the same `base` differ; None: nobody else changed it, or both mean the same.

    `target`: what the audit trail calls the thing.
    """
    by_them = {change.field for change in changes_between(base, theirs)}
    differ = changes_between(theirs, mine)
    if not by_them or not differ:
        return None
    by_me = {change.field for change in changes_between(base, mine)}
    last = audit.last_change(target)
    rows = [
        Difference((labels or {}).get(c.field, c.field), c.old, c.new, c.field in by_them, c.field in by_me)
        for c in differ
    ]
    return Clash(last.actor if last else "somebody", last.at if last else None, rows, labels is not None)
