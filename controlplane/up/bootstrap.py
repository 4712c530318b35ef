"""The checkout's virtual environment, for `make`: made, kept in step with the pins, made anew after an interruption.

Runs with any Python from 3.11 on and the standard library alone, before anything is installed:
`python bootstrap.py` for the product, `python bootstrap.py dev` for tests and checks too. With `--this-python` an environment of
another Python is made anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
VENV = CHECKOUT / ".venv"
UNFINISHED = VENV / ".tandem-unfinished"
"""There from the first moment until all is installed: what an interruption leaves behind is not trusted."""
OLD = ".venv.old-"
"""An environment that is being removed: it has another name first, so that half of it is never taken for a whole one."""


class Refused(Exception):
    """A sentence that says what to do."""


def ensure(extra: str, *, this_python: bool = False) -> None:
    """Make the environment hold what pyproject.toml and constraints.txt ask for. Takes no time when it does. With
    `this_python` it is also made anew when another Python than the running one made it.

    Raises `Refused`; `OSError` for a full disk or a folder that cannot be written.
    """
    with _only_one():
        for old in CHECKOUT.glob(f"{OLD}*"):
            _remove(old)
        if not _usable(this_python):
            _create()
        wanted = _digest()
        if any(_stamped(e)[:1] == [wanted] for e in {extra, "dev"}):
            return
        UNFINISHED.touch()
        _install(extra)
        for old in VENV.glob(".tandem-installed-*"):
            old.unlink()
        _stamp(extra).write_text("\n".join([wanted, *sorted(_packages())]))
        UNFINISHED.unlink()


def _stamp(extra: str) -> Path:
    return VENV / f".tandem-installed-{extra or 'product'}"


def _stamped(extra: str) -> list[str]:
    """Of what pins the environment was made, and after that what then was in it; empty: never."""
    try:
        return _stamp(extra).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _packages() -> set[str]:
    """What can be imported: no names that change with a version, as somebody may have tried another one."""
    names = {path.name for path in VENV.glob("lib/python3*/site-packages/*")}
    return {
        name for name in names if not name.startswith("__") and not name.endswith((".dist-info", ".egg-info", ".pth"))
    }


def _digest() -> str:
    texts = [(CHECKOUT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    return hashlib.sha256(b"\0".join([*texts, str(CHECKOUT).encode()])).hexdigest()


def _usable(this_python: bool) -> bool:
    """It is whole, was made at this place, and its Python still runs, is new enough, and the one that was asked for."""
    try:
        cfg = (VENV / "pyvenv.cfg").read_text(errors="replace")
    except OSError:
        return False
    if UNFINISHED.exists() or not {name for e in ("", "dev") for name in _stamped(e)[1:]} <= _packages():
        return False
    made = re.search(r"^command = .*$", cfg, re.MULTILINE)
    if made and not made[0].endswith(str(VENV)):  # the checkout was moved: its scripts point nowhere
        return False
    ask = "import sys, pip; print(sys.version_info >= (3, 11), *sys.version_info[:3], sys.base_prefix)"
    try:
        run = subprocess.run([VENV / "bin" / "python", "-c", ask], capture_output=True, text=True, check=False)
    except OSError:
        return False
    told = run.stdout.strip().split(" ", 4)
    if run.returncode or told[0] != "True":
        return False
    if this_python and told[1:] != [*map(str, sys.version_info[:3]), sys.base_prefix]:
        _say(
            f"The virtual environment .venv is of Python {'.'.join(told[1:4])} in {told[4]}; another one was asked for"
        )
        return False
    return True


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        with contextlib.suppress(FileNotFoundError):  # somebody else removes it too
            shutil.rmtree(path)


def _discard() -> None:
    if os.path.lexists(VENV):
        old = CHECKOUT / f"{OLD}{os.getpid()}"
        VENV.rename(old)
        _remove(old)


def _create() -> None:
    _discard()
    version = ".".join(map(str, sys.version_info[:3]))
    _say(f"Making the virtual environment .venv with Python {version}")
    VENV.mkdir()
    UNFINISHED.touch()
    result = _venv()
    lacking = importlib.util.find_spec("ensurepip") is None  # Debian has it in a package of its own
    package = f"python3.{sys.version_info[1]}-venv"
    if result.returncode and lacking and os.geteuid() == 0 and shutil.which("apt-get"):
        _say(f"This Python lacks its venv module; installing {package}")
        subprocess.run(["apt-get", "install", "-y", "-qq", package], capture_output=True, check=False)
        result = _venv()
    if result.returncode:
        _discard()
        free = shutil.disk_usage(CHECKOUT).free >> 20
        remedy = (
            f"On Debian and Ubuntu install what is missing with `apt-get install {package}`, or name another Python: "
            "make up PYTHON=/path/to/python"
            if lacking
            else f"The disk of {CHECKOUT} has {free} MiB free; make room if that is too little, and type the same again."
        )
        said = _told((result.stderr or result.stdout).splitlines())
        raise Refused(f"{sys.executable} cannot make a virtual environment. {remedy}\n{said}")


def _venv() -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "venv", VENV], capture_output=True, text=True, check=False)


def _install(extra: str) -> None:
    target = f"{CHECKOUT}[{extra}]" if extra else str(CHECKOUT)
    command: list[str | Path] = [
        VENV / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--progress-bar", "off",
        "--constraint", CHECKOUT / "constraints.txt", "--editable", target,
    ]  # fmt: skip
    started = time.monotonic()
    lines: list[str] = []
    seen: set[str] = set()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            lines.append(line.rstrip())
            if found := re.match(r"(?:Collecting|Requirement already satisfied:) ([A-Za-z0-9._-]+)", line):
                seen.add(found[1].lower())
                _progress(f"  package {len(seen)}: {found[1]}")
            elif line.startswith("Installing collected packages"):
                _progress("  writing them to disk")
    _progress("")
    if pip.returncode:
        log = VENV / "pip.log"
        with contextlib.suppress(OSError):  # a full disk
            log.write_text("\n".join(lines))
        raise Refused(
            f"{_told(lines)}\nThe packages could not be installed. Without network, point PIP_INDEX_URL at a mirror or "
            "PIP_FIND_LINKS at a folder of wheels; with a full disk, make room; then type the same again: it starts clean. "
            f"All that pip said is in {log}"
        )
    _say(f"Installed {len(seen)} packages in {time.monotonic() - started:.0f} s")


def _told(lines: list[str]) -> str:
    """What a failed program said last, without the trace of a crash: its last line names it."""
    words = [line for line in lines if line.strip() and not line.startswith((" ", "Traceback", "During handling"))]
    return "\n".join(words[-6:])


@contextlib.contextmanager
def _only_one() -> Iterator[None]:
    """Two `make` at once in one checkout: the second waits."""
    with open(CHECKOUT / "pyproject.toml") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            _say("Another make prepares this checkout's environment; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


_last_progress = 0.0


def _progress(text: str) -> None:
    """One line that is rewritten; without a terminal a line each few seconds."""
    global _last_progress
    if sys.stdout.isatty():
        print(f"\r\x1b[K{text}", end="", flush=True)
    elif text and time.monotonic() - _last_progress > 5:
        _last_progress = time.monotonic()
        print(text, flush=True)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    try:
        ensure("dev" if "dev" in sys.argv else "", this_python="--this-python" in sys.argv)
    except Refused as refusal:
        sys.exit(str(refusal))
    except PermissionError as error:
        sys.exit(
            f"{error.filename}: this user may not use it. Make a checkout of your own, or give this one to this user."
        )
    except OSError as error:
        sys.exit(
            f"{error.filename or CHECKOUT}: {error.strerror}. Put this right and type the same again: it starts clean."
        )
    except KeyboardInterrupt:
        sys.exit("Interrupted. The next make starts clean.")
