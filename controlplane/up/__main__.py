"""`python -m controlplane.up`: what `make up` runs. Settings, signals and the exit code; the work is in `stages`."""

from __future__ import annotations

import signal
import sys
import time
from types import FrameType

from controlplane.fleet import config as settings
from controlplane.fleet import program
from controlplane.fleet.errors import InvalidInput, TandemError, Unavailable
from controlplane.up.screen import Screen
from controlplane.up.stages import Stop, Up

ECHO_SECONDS = 1.0
"""`make` hands on a signal that its whole process group was sent: it comes twice, and means one."""


class Signals:
    """The first one raises `Stop` wherever the program waits. While all is being stopped another one raises it again."""

    def __init__(self) -> None:
        self.came = False
        self._last = 0.0
        self.again_raises = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or in the background of a script
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        echo, self._last = now - self._last < ECHO_SECONDS, now
        if not self.came or (self.again_raises and not echo):
            self.came = True
            raise Stop


def main() -> int:
    program.begin("make up")
    program.keep_files_private()
    signals = Signals()
    screen = Screen()
    try:
        up = Up(settings.load(), screen)
    except InvalidInput as error:
        screen.close()
        screen.problem(error.message)
        return 2
    code = 0
    try:
        up.start()
        try:
            up.serve_demo()
        except Unavailable as error:
            screen.problem(error.message)
            screen.say(f"The rest runs on; {up.web} shows what is the matter.")
        screen.say(
            f"Ctrl-C stops everything{', but the engines: they go on' if up.config.keep_engines else ''}.", "dim"
        )
        while True:
            up.watch.pause(1.0)
    except Stop:
        pass
    except TandemError as error:
        screen.problem(error.message)
        code = 1
    except OSError as error:  # a full disk, most likely
        where = f" ({error.filename})" if error.filename else ""
        screen.problem(f"{error.strerror or error}{where}: put this right and type `make up` again.")
        code = 1
    finally:
        signals.came = True
        screen.close()
        signals.again_raises = True
        up.stop()
    return code


if __name__ == "__main__":
    sys.exit(main())
