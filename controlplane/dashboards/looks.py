"""How every state looks: a word, a shape and a tone, always the three together. Pure tables, no markup.

A tone is a meaning (`static/css/tokens.css` gives it a colour); the shape tells states apart where colours do not.
"""

from __future__ import annotations

from typing import NamedTuple

from controlplane.fleet.lifecycle import State
from controlplane.fleet.status import Status
from controlplane.nodes.presence import Presence


class Look(NamedTuple):
    word: str
    shape: str
    """A key of `SHAPES` in `templatetags/tandem.py`."""
    tone: str
    """ok, wait, warn, bad or off."""
    moving: bool = False
    """Something is under way: the shape breathes."""


ENGINE: dict[State, Look] = {
    State.PENDING: Look("Pending", "dashed", "wait"),
    State.PLACED: Look("Placed", "fifth", "wait", True),
    State.INSTALLING: Look("Installing", "quarter", "wait", True),
    State.FETCHING: Look("Fetching", "third", "wait", True),
    State.STARTING: Look("Starting", "half", "wait", True),
    State.WARMING: Look("Warming", "most", "wait", True),
    State.READY: Look("Ready", "disc", "ok"),
    State.UNHEALTHY: Look("Unhealthy", "triangle", "warn"),
    State.LOST: Look("Lost", "slashed", "warn"),
    State.DRAINING: Look("Draining", "lower", "wait", True),
    State.STOPPING: Look("Stopping", "frame", "wait", True),
    State.STOPPED: Look("Stopped", "square", "off"),
    State.FAILED: Look("Failed", "cross", "bad"),
}

DEPLOYMENT: dict[Status, Look] = {
    Status.STOPPED: Look("Stopped", "square", "off"),
    Status.WAITING: Look("Waiting", "dashed", "wait"),
    Status.STARTING: Look("Starting", "half", "wait", True),
    Status.READY: Look("Ready", "disc", "ok"),
    Status.SCALING: Look("Scaling", "most", "wait", True),
    Status.DEGRADED: Look("Degraded", "half", "warn"),
    Status.FAILED: Look("Failed", "cross", "bad"),
    Status.NOT_SERVING: Look("Not serving", "slashed", "bad"),
    Status.DELETING: Look("Deleting", "frame", "wait", True),
}

NODE: dict[Presence, Look] = {
    Presence.REPORTING: Look("Reporting", "disc", "ok"),
    Presence.SILENT: Look("Silent", "triangle", "warn"),
    Presence.LOST: Look("Lost", "cross", "bad"),
    Presence.NEVER: Look("Never reported", "dashed", "wait"),
}

CHANGE: dict[str, Look] = {
    "scaled": Look("Scaled", "frame", "wait"),
    "changed": Look("Changed", "frame", "wait"),
    "created": Look("Created", "frame", "wait"),
    "deleting": Look("Deleting", "frame", "wait"),
    "deleted": Look("Deleted", "square", "off"),
    "retry-asked": Look("Retry asked for", "frame", "wait"),
    "report-refused": Look("Report refused", "triangle", "warn"),
    "report-read": Look("Report read", "disc", "ok"),
    "joined": Look("Joined", "frame", "wait"),
    "taken-over": Look("Taken over", "triangle", "warn"),
    "cut-off": Look("Cut off", "cross", "bad"),
}


def of_event(kind: str, new_state: str) -> Look:
    """An engine's event looks like the state it led to; any other like a change of intent."""
    if new_state in tuple(State):
        return ENGINE[State(new_state)]._replace(moving=False)
    return CHANGE.get(kind, Look("Change", "frame", "wait"))


SEVERITY = (
    Status.FAILED,
    Status.NOT_SERVING,
    Status.DEGRADED,
    Status.WAITING,
    Status.STARTING,
    Status.SCALING,
    Status.DELETING,
    Status.READY,
    Status.STOPPED,
)
"""Worst first: the order of lists sorted by status."""
