"""The checkout's virtual environment, for `make`: made, kept in step with the pins, made anew after an interruption.

Runs with any Python from 3.11 on and the standard library alone, before anything is installed:
`python bootstrap.py` for the product, `python bootstrap.py dev` for tests and checks too.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
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
"""There while pip works: what it leaves behind when it is interrupted is not trusted."""


class Refused(Exception):
    """A sentence that says what to do."""


def ensure(extra: str) -> None:
    """Make the environment hold what pyproject.toml and constraints.txt ask for. Takes no time when it does.

    Raises `Refused`.
    """
    with _only_one():
        if not _usable():
            _create()
        wanted = _digest()
        if any(_stamp(e).is_file() and _stamp(e).read_text() == wanted for e in {extra, "dev"}):
            return
        UNFINISHED.touch()
        _install(extra)
        for old in VENV.glob(".tandem-installed-*"):
            old.unlink()
        _stamp(extra).write_text(wanted)
        UNFINISHED.unlink()


def _stamp(extra: str) -> Path:
    return VENV / f".tandem-installed-{extra or 'product'}"


def _digest() -> str:
    texts = [(CHECKOUT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    return hashlib.sha256(b"\0".join([*texts, str(CHECKOUT).encode()])).hexdigest()


def _usable() -> bool:
    """It is whole, was made at this place, and its Python still runs and is new enough."""
    if UNFINISHED.exists() or not (VENV / "bin" / "python").exists():
        return False
    made = re.search(r"^command = .*$", (VENV / "pyvenv.cfg").read_text(), re.MULTILINE)
    if made and not made[0].endswith(str(VENV)):  # the checkout was moved: its scripts point nowhere
        return False
    check = "import sys, importlib.util as u; sys.exit(sys.version_info < (3, 11) or u.find_spec('pip') is None)"
    return subprocess.run([VENV / "bin" / "python", "-c", check], capture_output=True, check=False).returncode == 0


def _create() -> None:
    shutil.rmtree(VENV, ignore_errors=True)
    version = ".".join(map(str, sys.version_info[:3]))
    _say(f"Making the virtual environment .venv with Python {version}")
    result = _venv()
    if result.returncode and os.geteuid() == 0 and shutil.which("apt-get"):
        package = f"python3.{sys.version_info[1]}-venv"
        _say(f"This Python lacks its venv module; installing {package}")
        subprocess.run(["apt-get", "install", "-y", "-qq", package], capture_output=True, check=False)
        result = _venv()
    if result.returncode:
        shutil.rmtree(VENV, ignore_errors=True)
        raise Refused(
            f"{sys.executable} cannot make a virtual environment. On Debian and Ubuntu install what is missing with "
            f"`apt-get install python3.{sys.version_info[1]}-venv`, or name another Python: make up PYTHON=/path/to/python\n"
            + (result.stderr or result.stdout).strip()[-500:]
        )


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
        tail = "\n".join(line for line in lines[-12:] if line)
        raise Refused(
            f"{tail}\nThe packages could not be installed. Without network, point PIP_INDEX_URL at a mirror or PIP_FIND_LINKS "
            "at a folder of wheels; with a full disk, make room; then type the same again: it starts clean."
        )
    _say(f"Installed {len(seen)} packages in {time.monotonic() - started:.0f} s")


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
        ensure(sys.argv[1] if len(sys.argv) > 1 else "")
    except Refused as refusal:
        sys.exit(str(refusal))
    except PermissionError as error:
        sys.exit(
            f"{error.filename}: this user may not use it. Make a checkout of your own, or give this one to this user."
        )
    except KeyboardInterrupt:
        sys.exit("Interrupted. The next make starts clean.")
