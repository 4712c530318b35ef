"""`python -m frontend_api.build`: compile the router's modules for this Python and put them where `compiled` looks.

Needs a C compiler and Python's header files. Takes no time where it is done. With `--if-possible` a machine that cannot do
it is no failure: the router then runs as Python.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from controlplane.fleet import config, program
from controlplane.fleet.errors import InvalidInput
from frontend_api import compiled

_SETTINGS = """
[mypy]
python_version = 3.11
ignore_missing_imports = true
cache_dir = /dev/null
"""
KEPT = 8
"""Builds that stay in the cache, the newest ones: other checkouts may use them."""


class Impossible(Exception):
    """Sentences that say what is missing."""


def build(cache: Path) -> Path:
    """The folder with the compiled modules, made if it is not there. Raises `Impossible`; `OSError` for a full disk."""
    made = compiled.folder(cache)
    if compiled.whole(made):  # the cache may be another user's
        return made
    _check()
    made.parent.mkdir(parents=True, exist_ok=True)
    with open(made.parent / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("The router is being compiled already; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if compiled.whole(made):
            return made
        print("Compiling the router, once for this version of it ...", flush=True)
        began = time.monotonic()
        for left in made.parent.glob("unfinished-*"):  # of one that was killed: we have the lock
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=made.parent, prefix="unfinished-", ignore_cleanup_errors=True) as name:
            source = Path(name) / "source"
            _copy(source)
            made = compiled.folder(cache, source)  # of what is compiled, whatever somebody saves meanwhile
            new = _compile(source)
            for file in compiled.files(new).values():  # nor may a power cut leave a folder with empty files
                with file.open("rb") as written:
                    os.fsync(written.fileno())
            shutil.rmtree(made, ignore_errors=True)  # half of one
            new.rename(made)
        print(f"Compiled the router in {time.monotonic() - began:.0f} s", flush=True)
        _forget_old(made.parent)
    return made


def _check() -> None:
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        package = "gcc" if compiler.endswith("-gcc") else compiler  # no package is named as Debian's Python names it
        raise Impossible(f"There is no C compiler: install {package}.")
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        version = ".".join(map(str, sys.version_info[:2]))
        raise Impossible(f"The header files of this Python are missing: install python{version}-dev.")


def _copy(source: Path) -> None:
    """The compiler writes beside what it compiles."""
    root = compiled.PACKAGE.parent
    for package in ("frontend_api", "controlplane/fleet"):
        shutil.copytree(root / package, source / package, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    shutil.copy(root / "controlplane" / "__init__.py", source / "controlplane")


def _compile(source: Path) -> Path:
    """The folder with what was made of it."""
    made, settings = source / "made", source / "mypy.ini"
    settings.write_text(_SETTINGS)
    sources = [f"frontend_api/{module.replace('.', '/')}.py" for module in compiled.MODULES]
    command = [sys.executable, "-m", "frontend_api.compile", str(settings), str(made), *sources]
    result = subprocess.run(command, cwd=source, capture_output=True, text=True, errors="replace", check=False)
    if result.returncode:
        lines = [line for line in (result.stdout + result.stderr).splitlines() if ": warning: " not in line]
        raise Impossible("\n  ".join([f"The compiler failed ({result.returncode}):", *lines[-12:]]))
    return made


def _forget_old(builds: Path) -> None:
    folders = [path for path in builds.iterdir() if path.is_dir()]
    for old in sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)


def main() -> int:
    program.begin("frontend_api.build")
    parser = argparse.ArgumentParser(
        prog="python -m frontend_api.build", description="Compile the router's modules for this Python."
    )
    parser.add_argument("--if-possible", action="store_true", help="where it cannot be done, say so and succeed")
    given = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):  # `make` hands them to us alone: the compiler has to end too
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, signal.default_int_handler)
    try:
        settings = config.load()
        if given.if_possible and settings.compiled == "never":
            return 0
        build(settings.cache_path())
    except InvalidInput as error:
        print(f"frontend_api.build: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted. The next build starts clean.", file=sys.stderr)
        return 130
    except (Impossible, OSError) as error:
        if given.if_possible and settings.compiled != "always":
            print(f"The router runs uncompiled, which costs CPU and nothing else. {_sentence(error)}", file=sys.stderr)
            return 0
        print(f"The router could not be compiled. {_sentence(error)}", file=sys.stderr)
        return 1
    return 0


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else f"{error.strerror}."
    return str(error)


if __name__ == "__main__":
    sys.exit(main())
