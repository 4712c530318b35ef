"""Follows a server-sent event stream while it is relayed: text, counts, errors and its end are noticed. Pure.

Bytes are relayed untouched, save that an event is held until it is complete (so that an error event of the router's own
never lands in the middle of another), that the router's own fields are taken out, and that counts which only the router asked
for stay with it. Only events with a mark are read.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Raw

from frontend_api.formats.fields import Event
from frontend_api.formats.openai import (
    OWNED_FIELDS,
    UNREADABLE,
    Shape,
    Usage,
    without,
    without_owned,
)

MAX_EVENT = 16 << 20
"""Bytes of one event; a stream with a longer one is broken."""
MAX_FINGERPRINT = 512

_TEXT = {
    Shape.CHAT: b'"delta"',
    Shape.TEXT: b'"text"',
    Shape.RESPONSES: b'.delta"',
    Shape.MESSAGES: b'"content_block_delta"',
    Shape.PLAIN: b"data:",
}
_ENDS = {Shape.RESPONSES: b'"response.', Shape.MESSAGES: b'"message_'}
_LAST = frozenset({"response.completed", "response.incomplete", "response.failed", "message_stop"})
_SAYS = re.compile(rb'"(?:content|text|reasoning_content|reasoning)": ?"')
"""Before the text of most events."""
_TRIES = 8
"""Events of one stream that are looked at for what others may be like."""
_BLANK_LINE = re.compile(rb"(\r?\n\r?\n)")


_event = msgspec.json.Decoder(Event)
_object = msgspec.json.Decoder(dict[str, Raw])


class EventTooLong(Exception):
    """One event is longer than `MAX_EVENT`."""


class EventReader:
    """One stream. Feed it the body as it comes; relay what it returns.

    `unasked`: its counts were asked for by the router, not by the client, who gets the bytes that the engine would have sent
    without: not the event of counts, and the engine's fingerprint, which vLLM moves there, back in the event that ends a
    choice. That one waits for the counts where the fingerprint is not known yet: while other choices go on, they are long in
    coming.

    An event that differs from one without marks in a text without quotes alone has none either: that is seen by comparing,
    which costs a fifth of looking for each mark.
    """

    __slots__ = (
        "_after", "_alike", "_at", "_before", "_end", "_ending", "_held", "_left", "_mark", "_role", "_tries", "_unasked",
        "done", "failed", "fingerprint", "texts", "usage",
    )  # fmt: skip

    def __init__(self, shape: Shape, usage: Usage, *, unasked: bool = False, fingerprint: bytes = b"") -> None:
        self._mark = _TEXT[shape]
        self._role = int(shape is Shape.CHAT)
        self._end = _ENDS.get(shape, b"[DONE]")
        self._held = b""
        self._unasked = unasked
        self._ending: list[bytes] = []
        self._before = self._after = b""
        """What stood before and after the text of an event without marks …"""
        self._at = self._left = 0
        """… of so many bytes …"""
        self._alike = 0
        """… and how many texts it counted for."""
        self._tries = _TRIES
        self.fingerprint = fingerprint
        """The engine's, as JSON; empty: not known."""
        self.usage = usage
        self.texts = 0
        """Events that carry text (a chat's first one carries only the role)."""
        self.done = False
        """Its last event came: `[DONE]` as an exact line, or what the endpoint has instead."""
        self.failed = False
        """The engine reported an error inside the stream."""

    @property
    def over(self) -> bool:
        """No event that may still come is relayed: its last one came, or an error, behind which there is only `[DONE]`."""
        return self.done or self.failed

    @property
    def empty(self) -> bool:
        """It ended without what even an answer of no words has: one event of a choice."""
        return self.done and not self.texts and not self.failed and self._end == b"[DONE]" and self._mark != b"data:"

    @property
    def announced(self) -> bool:
        """Nothing has come yet but what stands before the first token: vLLM writes that also where an error follows."""
        return self.texts <= self._role

    def feed(self, data: bytes) -> bytes:
        """The whole events that are complete now, ready to relay. Raises `EventTooLong`."""
        if self._held:
            data = self._held + data
            self._held = b""
        at = self._at
        if at and data.startswith(self._before) and data.endswith(self._after):
            size = len(data)
            if data.find(b'"', at) == size - self._left and data.find(b"\n", at) == size - 2:
                self.texts += self._alike
                return data
        if data[-2:] != b"\n\n":
            cut = max(data.rfind(b"\n\n") + 2, data.rfind(b"\n\r\n") + 3)
            if cut < 4:  # neither was found (a blank line that early ends no event worth sending alone)
                cut = 0 if data.strip(b"\r\n") else len(data)  # what is left of blank lines belongs to no event
            self._held = data[cut:]
            if len(self._held) > MAX_EVENT:
                raise EventTooLong
            data = data[:cut]
        self.texts += data.count(self._mark)
        if (
            b'"usage"' in data
            or b'"error"' in data
            or b"_transfer_params" in data
            or self._end in data
            or (self._unasked and b'"finish_reason":"' in data)
        ):
            return self._inspect(data)
        if self._tries and data.find(b"\n\n") == len(data) - 2 and (says := _SAYS.search(data)):
            self._tries -= 1
            self._before = data[: says.end()]
            self._after = data[data.index(b'"', says.end()) :]
            self._at, self._left = len(self._before), len(self._after)
            self._alike = data.count(self._mark)
        return data

    def waiting(self) -> bytes:
        """Whole events that were kept back: what is left to relay of a stream that broke."""
        events = b"".join(self._ending)
        self._ending.clear()
        return events

    def _inspect(self, data: bytes) -> bytes:
        if (
            data.find(b"\n\n") == len(data) - 2 and b"\r" not in data and not self.over
        ):  # one event, as most engines send them
            return self._read(data[:-2], b"\n\n")
        parts = _BLANK_LINE.split(data)
        events = []
        for event, end in zip(parts[::2], parts[1::2], strict=False):
            if not self.over:
                events.append(self._read(event, end) if event else end)
            elif not self.done and _payload(event) == b"[DONE]":  # as vLLM ends a stream behind an error
                events.append(self._read(event, end))
        events.append(parts[-1])  # after the last blank line there may be half of another one
        return b"".join(events)

    def _read(self, event: bytes, end: bytes) -> bytes:
        """What there is to relay now. `end`: the blank line after the event."""
        payload = _payload(event)
        if payload == b"[DONE]":
            self.done = True
            return self.waiting() + event + end
        try:
            fields = _event.decode(payload)
        except UNREADABLE:
            return event + end
        self.usage.add(fields.usage)
        for inner in (fields.message, fields.response):
            if isinstance(inner, dict):
                self.usage.add(inner.get("usage"))
        if fields.type in _LAST:
            self.done = True
        if fields.error is not None or fields.type in ("error", "response.failed"):
            self.failed = True
        if fields.kv_transfer_params is not None or fields.ec_transfer_params is not None:
            event = _rebuilt(event, without_owned(payload))
        elif isinstance(fields.response, dict) and any(fields.response.get(name) is not None for name in OWNED_FIELDS):
            outer = _object.decode(payload)
            outer["response"] = Raw(without_owned(bytes(outer["response"])))
            event = _rebuilt(event, msgspec.json.encode(outer))
        if self.failed:
            return self.waiting() + event + end
        return self._as_unasked(event, end, fields) if self._unasked else event + end

    def _as_unasked(self, event: bytes, end: bytes, fields: Event) -> bytes:
        if fields.choices == []:
            if not isinstance(fields.usage, dict):
                return event + end
            self.fingerprint = bytes(fields.system_fingerprint)
            if len(self.fingerprint) > MAX_FINGERPRINT:  # it is kept, and sent with every later stream
                self.fingerprint = b"null"
            self._ending = [_with_fingerprint(ending, self.fingerprint) for ending in self._ending]
            return self.waiting()
        if isinstance(fields.usage, dict):  # the engine gives counts whether asked or not
            self._unasked = False
            return self.waiting() + event + end
        if fields.usage is None:
            event = _rebuilt(event, without(_payload(event), ("usage",)))
        event += end
        if _ends_a_choice(fields.choices):
            if self.fingerprint:
                return _with_fingerprint(event, self.fingerprint)
            self._ending.append(event)
            return b""
        return event


def _payload(event: bytes) -> bytes:
    if b"\n" not in event and event.startswith(b"data:"):
        return event[5:].strip()
    return b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))


def _ends_a_choice(choices: Any) -> bool:
    return isinstance(choices, list) and any(isinstance(c, dict) and c.get("finish_reason") for c in choices)


def _with_fingerprint(event: bytes, fingerprint: bytes) -> bytes:
    """As vLLM writes it: the last field of the event that ends a choice."""
    if fingerprint == b"null" or b'"system_fingerprint"' in event:
        return event
    at = event.rindex(b"}")
    return b'%b,"system_fingerprint":%b%b' % (event[:at], fingerprint, event[at:])


def _rebuilt(event: bytes, payload: bytes) -> bytes:
    lines = [line for line in event.splitlines() if not line.startswith(b"data:")]
    return b"\n".join([*lines, b"data: " + payload])
