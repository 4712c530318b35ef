"""A folder in the shared cache that is built once, whoever comes first: engine runtimes and prepared models.

Several agents and several checkouts share one cache. A folder counts only with its marker, which is written last: what
an interrupted build left behind is never used. The lock is handed to the child processes of a build, so that it lasts as
long as anything still writes there.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from controlplane.fleet import config
from controlplane.fleet.errors import Unavailable
from workers.engine_user import EngineUser, as_user

Progress = Callable[[str, float | None], None]
"""Takes a sentence and the share done (0..1, None: unknown). What it raises ends the build."""

MARKER = ".complete"
_POLL_SECONDS = 0.5


class StepFailed(Exception):
    """A child process of a build ended badly. `lines`: the end of what it said."""

    def __init__(self, exit_code: int, lines: list[str]) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code
        self.lines = lines


class Site:
    """One build in progress: the folder, its log, and the way to run the build's child processes."""

    def __init__(self, folder: Path, lock: IO[str], progress: Progress) -> None:
        self.folder = folder
        self.log = _beside(folder, "log")
        self._lock = lock
        self._progress = progress

    def report(self, sentence: str, fraction: float | None = None) -> None:
        """Tell the caller, and those who wait for the same folder."""
        _beside(self.folder, "progress").write_text(json.dumps([sentence, fraction]))
        self._progress(sentence, fraction)

    def run(
        self,
        argv: list[str],
        *,
        env: Mapping[str, str],
        on_line: Callable[[str], None] | None = None,
        cwd: Path | None = None,
        user: EngineUser | None = None,
    ) -> None:
        """Run one step to its end; its output goes to the log, and line by line to `on_line`.

        `env` is the whole environment. A step of another `user` works in `cwd` and does not hold the lock. Raises `StepFailed`.
        """
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(argv)}\n")
            log.flush()
            process = subprocess.Popen(
                argv, env=dict(env), cwd=cwd or self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, pass_fds=() if user else (self._lock.fileno(),), **as_user(user),
            )  # fmt: skip
            try:
                last: list[str] = []
                for line in _lines(process.stdout):
                    log.write(line + "\n")
                    last = [*last[-19:], line]
                    if on_line is not None:
                        on_line(line)
            except BaseException:
                process.kill()
                raise
            finally:
                code = process.wait()
            if code:
                raise StepFailed(code, last)


def _lines(stream: IO[bytes] | None) -> Iterator[str]:
    """Lines as they come; a progress bar's carriage returns end lines too."""
    assert stream is not None
    rest = b""
    while chunk := os.read(stream.fileno(), 65536):
        *whole, rest = re.split(rb"[\r\n]+", rest + chunk)
        yield from (line.decode(errors="replace") for line in whole if line.strip())
    if rest.strip():
        yield rest.decode(errors="replace")


def clean_environment() -> dict[str, str]:
    """This process's environment for a build step: without Tandem's settings and secrets, and without what would point an
    interpreter at other environments. Proxies, mirrors and certificates stay."""
    ours = {name for v in config.VARIABLES for name in (v.name, v.name + "_FILE")}
    strangers = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_TARGET", "PIP_PREFIX", "PIP_USER"}
    return {name: value for name, value in os.environ.items() if name not in ours | strangers}


def is_complete(folder: Path) -> bool:
    return (folder / MARKER).is_file()


def make_once(
    folder: Path,
    build: Callable[[Site], None],
    *,
    what: str,
    progress: Progress,
    needs_bytes: int,
    resume: bool = False,
) -> None:
    """Return when `folder` is complete, having built it with `build` if nobody else has.

    `what` names it in sentences; `needs_bytes` of disk space are asked for first; with `resume` a build goes on from what
    an interrupted one left, otherwise it starts clean. Raises what `build` raises, and `Unavailable` when the cache cannot
    be written or the disk is too full.
    """
    if is_complete(folder):
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(folder, what, progress) as lock:
            if is_complete(folder):
                return
            _build(folder, build, Site(folder, lock, progress), what=what, needs_bytes=needs_bytes, resume=resume)
    except OSError as error:
        raise Unavailable(
            f"{what}: {error.strerror or error} ({error.filename or folder}). TANDEM_CACHE names another cache folder."
        ) from error


def _build(
    folder: Path, build: Callable[[Site], None], site: Site, *, what: str, needs_bytes: int, resume: bool
) -> None:
    if not resume:
        shutil.rmtree(folder, ignore_errors=True)
    free = shutil.disk_usage(folder.parent).free
    present = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) if folder.exists() else 0
    if free + present < needs_bytes:
        raise Unavailable(
            f"{what} needs {_gib(needs_bytes)} on the disk of {folder.parent}, which has {_gib(free)} free. Make room, or "
            f"set TANDEM_CACHE to a folder on a larger disk."
        )
    folder.mkdir(exist_ok=True)
    site.log.unlink(missing_ok=True)
    try:
        build(site)
        marker = folder / (MARKER + ".new")
        marker.write_text(json.dumps({"made_at": time.time()}))
        os.replace(marker, folder / MARKER)
    except BaseException:
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        _beside(folder, "progress").unlink(missing_ok=True)


@contextmanager
def _exclusive(folder: Path, what: str, progress: Progress) -> Iterator[IO[str]]:
    """The right to build `folder`; while another process has it, its progress is passed on."""
    with _beside(folder, "lock").open("a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                sentence, fraction = _progress_of_other(folder)
                progress(f"Another Tandem process is preparing {what}: {sentence}", fraction)
                time.sleep(_POLL_SECONDS)
        yield lock


def _progress_of_other(folder: Path) -> tuple[str, float | None]:
    try:
        sentence, fraction = json.loads(_beside(folder, "progress").read_text())
        return str(sentence), fraction
    except (OSError, ValueError):
        return "waiting for it.", None


def _beside(folder: Path, kind: str) -> Path:
    return folder.with_name(f"{folder.name}.{kind}")


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
