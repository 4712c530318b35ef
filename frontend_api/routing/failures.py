"""One leg that gave nothing, in words: short for records and metrics, a sentence for people. Pure."""

from __future__ import annotations

from frontend_api.routing.view import Engine

TRANSFER = "transfer"
"""Stage of a leg that had KV to fetch. The stage of another one is the role of its engine."""
OVERLOAD = (429, 503)
"""What an engine answers that has too much to do."""
KEY_REFUSED = (401, 403)
"""What an engine answers that does not take the router's key."""
BROKE_OFF = "broke-off"
_WORDS = {
    "silent": "did not answer in time",
    "reset": "closed the connection before its answer was whole",
    "stale": "closed the connection before its answer was whole",
    "protocol": "sent an answer that is not valid HTTP/1.1",
    "connect": "refuses connections",
    "connect-timeout": "cannot be reached",
    "no-params": "answered without KV transfer parameters",
    "computed": "computed the prompt itself and took no KV",
    BROKE_OFF: "broke its streams off before they were whole",
    "no-token": "answered a probe without a token",
}


def refuses(status: int) -> bool:
    """Whether an engine that answers so refuses the request itself."""
    return 400 <= status < 500 and status not in OVERLOAD and status not in KEY_REFUSED


class Failure:
    """One leg that gave nothing."""

    __slots__ = ("channel", "engine", "prefill", "what")

    def __init__(self, engine: Engine, what: str, prefill: Engine | None = None, channel: str = "") -> None:
        self.engine = engine
        self.what = what
        """`status-500`, `silent`, `reset` …"""
        self.prefill = prefill
        """Whose KV the engine was to fetch; None: it had none to fetch."""
        self.channel = channel
        """host:port where that KV was to be asked for; empty: not known."""

    @property
    def code(self) -> str:
        """Short and of few kinds: for records and metrics."""
        if self.what == "no-params":
            return self.what
        if self.what == "computed":
            return "decode-computed"
        return f"{TRANSFER if self.prefill is not None else self.engine.spec.role.value}-{self.what}"

    @property
    def is_refusal(self) -> bool:
        return self.what.startswith("status-") and refuses(int(self.what[7:]))

    def sentence(self, *, private: bool = False) -> str:
        """For people. `private`: with the side channel's address, which is no business of clients."""
        what = _WORDS.get(self.what) or f"answered with status {self.what.removeprefix('status-')}"
        text = f"{self.engine.spec.role.capitalize()} engine {self.engine.spec.name} {what}"
        if self.prefill is None:
            return text + "."
        text += f"; it was to fetch KV from prefill engine {self.prefill.spec.name}"
        return f"{text} (side channel {self.channel})." if private and self.channel else text + "."

    def __str__(self) -> str:
        """For records: `transfer-silent p0 d0`."""
        return f"{self.code} {f'{self.prefill.id} ' if self.prefill is not None else ''}{self.engine.id}"
