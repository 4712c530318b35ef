"""Follows a server-sent event stream while it is relayed: text, counts, errors and its end are noticed. Pure.

Bytes are relayed untouched, save that an event is held until it is complete (so that an error event of the router's own
never lands in the middle of another) and that the router's own fields are taken out. Only events with a mark are read.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct

from frontend_api.openai import OWNED_FIELDS, Shape, Usage, without_owned

MAX_EVENT = 16 << 20
"""Bytes of one event; a stream with a longer one is broken."""

_TEXT = {
    Shape.CHAT: b'"delta"',
    Shape.TEXT: b'"text"',
    Shape.RESPONSES: b'.delta"',
    Shape.MESSAGES: b'"content_block_delta"',
    Shape.PLAIN: b"data:",
}
_ENDS = {Shape.RESPONSES: b'"response.', Shape.MESSAGES: b'"message_'}
_LAST = frozenset({"response.completed", "response.incomplete", "response.failed", "message_stop"})
_BLANK_LINE = re.compile(rb"(\r?\n\r?\n)")


class _Event(Struct):
    type: Any = None
    usage: Any = None
    error: Any = None
    message: Any = None
    response: Any = None
    kv_transfer_params: Any = UNSET
    ec_transfer_params: Any = UNSET


_event = msgspec.json.Decoder(_Event)
_object = msgspec.json.Decoder(dict[str, Raw])


class EventTooLong(Exception):
    """One event is longer than `MAX_EVENT`."""


class EventReader:
    """One stream. Feed it the body as it comes; relay what it returns."""

    __slots__ = ("_end", "_held", "_mark", "done", "failed", "texts", "usage")

    def __init__(self, shape: Shape, usage: Usage) -> None:
        self._mark = _TEXT[shape]
        self._end = _ENDS.get(shape, b"[DONE]")
        self._held = b""
        self.usage = usage
        self.texts = 0
        """Events that carry text (a chat's first one carries only the role)."""
        self.done = False
        """Its last event came: `[DONE]` as an exact line, or what the endpoint has instead."""
        self.failed = False
        """The engine reported an error inside the stream."""

    @property
    def empty(self) -> bool:
        """It ended without what even an answer of no words has: one event of a choice."""
        return self.done and not self.texts and not self.failed and self._end == b"[DONE]" and self._mark != b"data:"

    def feed(self, data: bytes) -> bytes:
        """The whole events that are complete now, ready to relay. Raises `EventTooLong`."""
        if self._held:
            data = self._held + data
            self._held = b""
        if data[-2:] != b"\n\n":
            cut = max(data.rfind(b"\n\n") + 2, data.rfind(b"\n\r\n") + 3)
            if cut < 4:  # neither was found (a blank line that early ends no event worth sending alone)
                cut = 0
            self._held = data[cut:]
            if len(self._held) > MAX_EVENT:
                raise EventTooLong
            data = data[:cut]
        self.texts += data.count(self._mark)
        if (
            b'"usage"' in data
            or b'"error"' in data
            or b"[DONE]" in data
            or b"_transfer_params" in data
            or self._end in data
        ):
            return self._inspect(data)
        return data

    def _inspect(self, data: bytes) -> bytes:
        parts = _BLANK_LINE.split(data)
        parts[::2] = [self._read(event) if event else event for event in parts[::2]]
        return b"".join(parts)

    def _read(self, event: bytes) -> bytes:
        payload = b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))
        if payload == b"[DONE]":
            self.done = True
            return event
        try:
            fields = _event.decode(payload)
        except msgspec.MsgspecError:
            return event
        self.usage.add(fields.usage)
        for inner in (fields.message, fields.response):
            if isinstance(inner, dict):
                self.usage.add(inner.get("usage"))
        if fields.type in _LAST:
            self.done = True
        if fields.error is not None or fields.type in ("error", "response.failed"):
            self.failed = True
        if fields.kv_transfer_params is not UNSET or fields.ec_transfer_params is not UNSET:
            return _rebuilt(event, without_owned(payload))
        if isinstance(fields.response, dict) and any(name in fields.response for name in OWNED_FIELDS):
            outer = _object.decode(payload)
            outer["response"] = Raw(without_owned(bytes(outer["response"])))
            return _rebuilt(event, msgspec.json.encode(outer))
        return event


def _rebuilt(event: bytes, payload: bytes) -> bytes:
    lines = [line for line in event.splitlines() if not line.startswith(b"data:")]
    return b"\n".join([*lines, b"data: " + payload])
