"""What the person at the terminal sees: a line per stage, and below it one line per process, kept current.

Without a terminal the same facts are printed as plain lines, each when it changes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

_STYLES = {
    "running": "green", "ready": "green", "starting": "yellow", "stopping": "yellow", "stopped": "dim",
    "failed": "red", "gave up": "red", "retrying": "red", "ended": "red", "unhealthy": "red", "lost": "red",
}  # fmt: skip


PROGRESS_SECONDS = 5.0


class Line(NamedTuple):
    """One process or engine."""

    name: str
    state: str
    detail: str = ""
    """What it listens on, what it awaits."""
    pid: int = 0
    since: float = 0.0
    """Unix seconds."""

    def plain(self) -> str:
        pid = f" (process {self.pid})" if self.pid else ""
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.name} {self.state}{pid}{detail}"


class Screen:
    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console(highlight=False, markup=False, emoji=False)
        self._live: Live | None = None
        self._clock = clock
        self._lines: dict[str, Line] = {}
        self._told: dict[str, tuple[Line, float]] = {}
        self._work = Spinner("dots")
        self._working = ""
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()

    def stage(self, name: str, text: str) -> None:
        """Something is done and stays on the screen."""
        self._print(Text.assemble(("✓ ", "green"), (f"{name:<12}", "bold"), text))

    def say(self, text: str, style: str = "") -> None:
        self._print(Text(text, style))

    def problem(self, text: str) -> None:
        self._print(Text.assemble(("✗ ", "bold red"), text))

    def working(self, text: str) -> None:
        """What goes on now; replaced by the next call. Empty: nothing."""
        if self._live is None and text and text != self._working:
            self._print(Text(f"  {text}"))
        self._working = text
        self._refresh()

    def lines(self, lines: Iterable[Line]) -> None:
        """All processes and engines, as they are now."""
        self._lines = {line.name: line for line in lines}
        if self._live is None:
            for line in self._lines.values():
                self._tell(line)
        self._refresh()

    def _tell(self, line: Line) -> None:
        """Print a line when it changed; mere progress not oftener than each `PROGRESS_SECONDS`."""
        before, at = self._told.get(line.name, (Line(line.name, "stopped"), 0.0))
        if (line.state, line.pid) == (before.state, before.pid) and (
            line.detail == before.detail or line.state == "stopped" or self._clock() - at < PROGRESS_SECONDS
        ):
            return
        self._told[line.name] = line, self._clock()
        self._print(Text(f"  {line.plain()}"))

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(OSError):
                live.stop()
        self._lines = {}

    def _print(self, text: Text) -> None:
        # Never wrapped by us: a line that is meant to be pasted must come out whole. A terminal that was closed, or a pipe
        # that nobody reads any more, is no reason to leave programs running.
        with contextlib.suppress(OSError):
            self._console.print(text, soft_wrap=True)

    def _refresh(self) -> None:
        if self._live is None:
            return
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        for line in self._lines.values():
            table.add_row(
                Text(f"  {line.name}"),
                Text(line.state, _STYLES.get(line.state, "cyan")),
                Text(str(line.pid or ""), "dim"),
                Text(_ago(line.since), "dim"),
                Text(line.detail, overflow="ellipsis", no_wrap=True),
            )
        parts: list[Table | Spinner] = [table]
        if self._working:
            self._work.update(text=Text(self._working))
            parts.append(self._work)
        with contextlib.suppress(OSError):
            self._live.update(Group(*parts), refresh=True)


def _ago(since: float) -> str:
    if not since:
        return ""
    seconds = int(max(0.0, time.time() - since))
    if seconds < 120:
        return f"{seconds} s"
    if seconds < 7200:
        return f"{seconds // 60} min"
    return f"{seconds // 3600} h"
