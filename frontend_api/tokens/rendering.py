"""One rendering of a template: the time and the room that it has, and what takes of them."""

from __future__ import annotations

from collections.abc import ItemsView, KeysView, Mapping, ValuesView
from time import perf_counter, thread_time
from typing import Any

from jinja2.runtime import Context, Undefined
from jinja2.utils import Namespace

ROOM = 8 << 20
ROOM_PER_CHARACTER = 32
ROOM_PER_ITEM = 64 << 10
"""Characters that a rendering may make, copy or look through: so many, and so many for each of the conversation's, and for each
message, tool and document."""
SECONDS = 0.05
SECONDS_PER_ITEM = 0.0001
"""CPU time of a rendering."""


class TooMuch(Exception):
    """The template takes more time or room than any conversation needs."""


class Rendering(Context):
    """One rendering, and what it may still take."""

    def allow(self, messages: list[dict[str, Any]], others: int) -> None:
        """`others`: tools and documents."""
        items = len(messages) + others
        self._messages: list[dict[str, Any]] | None = messages
        self.room = ROOM + ROOM_PER_ITEM * items
        self._seconds = SECONDS + SECONDS_PER_ITEM * items
        self._began_at = 0.0
        self.until = perf_counter() + self._seconds

    def take(self, room: int) -> None:
        self.room -= room
        if self.room < 0:
            self.want()

    def want(self) -> None:
        """The room is used up: what the conversation's characters give is reckoned only now, as few need it."""
        messages, self._messages = self._messages, None
        self.room += ROOM_PER_CHARACTER * sum(_long(message["content"]) for message in messages or ())
        if self.room < 0:
            raise TooMuch

    def look(self) -> None:
        """The time is over by the clock on the wall: raises unless it was spent elsewhere. The thread's own is asked for the first
        time now, so the first time is forgiven."""
        now = thread_time()
        left = self._seconds - (now - self._began_at) if self._began_at else self._seconds
        self._began_at = self._began_at or now
        if left <= 0:
            raise TooMuch
        self.until = perf_counter() + left

    def weigh(self, value: Any, times: int = 1) -> None:
        """Take room for reading all of a value, as often as it holds a part. `times`: that it is read."""
        kind = type(value)
        if kind is str:
            self.take((len(value) >> 3) * times if times == 1 else len(value) * times)
            return
        if value is None or kind is int or kind is bool or isinstance(value, Undefined):
            return
        waiting = [value]
        while waiting:
            value = waiting.pop()
            if isinstance(value, str):
                self.take((len(value) + 1) * times)
            elif isinstance(value, list | tuple | KeysView | ValuesView | ItemsView):
                self.take((len(value) + 1) * times)
                waiting.extend(value)
            elif isinstance(value, Mapping):
                self.take((2 * len(value) + 1) * times)
                waiting.extend(value)
                waiting.extend(value.values())
            elif isinstance(value, Namespace):  # its attributes are written with it
                waiting.append(object.__getattribute__(value, "_Namespace__attrs"))
            else:
                self.take(8 * times)
            if perf_counter() > self.until:
                self.look()

    def text(self, value: Any) -> str:
        self.weigh(value)
        return str(value)


def _long(content: Any) -> int:
    if isinstance(content, str):
        return len(content)
    return sum(len(part.get("text") or "") for part in content or ())
