"""`python -m frontend_api.build`: compile the router's modules for this Python and put them where `compiled` looks.

Needs a C compiler and Python's header files. Takes no time where it is done. With `--if-possible` a machine that cannot do
it is no failure: the router then runs as Python.
"""

from __future__ import annotations

import argparse
import fcntl
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from controlplane.fleet import config
from controlplane.fleet.errors import InvalidInput
from frontend_api import compiled

_SETTINGS = """
[mypy]
python_version = 3.11
ignore_missing_imports = true
cache_dir = /dev/null
"""
KEPT = 3
"""Builds that stay in the cache, the newest ones: other checkouts may use them."""


class Impossible(Exception):
    """Sentences that say what is missing."""


def build(cache: Path) -> Path:
    """The folder with the compiled modules, made if it is not there. Raises `Impossible`; `OSError` for a full disk."""
    made = compiled.folder(cache)
    made.parent.mkdir(parents=True, exist_ok=True)
    with open(made.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if made.is_dir():
            return made
        _check()
        print("Compiling the router, once for this version of it ...", flush=True)
        began = time.monotonic()
        for left in made.parent.glob("unfinished-*"):  # of one that was killed: we have the lock
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=made.parent, prefix="unfinished-") as work:
            _compile(Path(work)).rename(made)
        print(f"Compiled the router in {time.monotonic() - began:.0f} s", flush=True)
        _forget_old(made.parent)
    return made


def _check() -> None:
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        raise Impossible(f"There is no C compiler: install {compiler}.")
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        version = ".".join(map(str, sys.version_info[:2]))
        raise Impossible(f"The header files of this Python are missing: install python{version}-dev.")


def _compile(work: Path) -> Path:
    """In a copy of the source, as the compiler writes beside it. Returns the folder with what it made."""
    root, copy, made = compiled.PACKAGE.parent, work / "source", work / "made"
    plain = shutil.ignore_patterns("__pycache__")
    shutil.copytree(compiled.PACKAGE, copy / "frontend_api", ignore=plain)
    shutil.copytree(root / "controlplane" / "fleet", copy / "controlplane" / "fleet", ignore=plain)
    shutil.copy(root / "controlplane" / "__init__.py", copy / "controlplane")
    settings = work / "mypy.ini"
    settings.write_text(_SETTINGS)
    sources = [f"frontend_api/{module.replace('.', '/')}.py" for module in compiled.MODULES]
    command = [sys.executable, "-m", "frontend_api.compile", str(settings), str(made), *sources]
    result = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = (result.stdout + result.stderr).strip().splitlines()
        raise Impossible("\n  ".join(["The compiler failed:", *lines[-12:]]))
    return made


def _forget_old(builds: Path) -> None:
    folders = [path for path in builds.iterdir() if path.is_dir()]
    for old in sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m frontend_api.build", description=(__doc__ or "").partition(":")[2])
    parser.add_argument("--if-possible", action="store_true", help="where it cannot be done, say so and succeed")
    given = parser.parse_args()
    try:
        build(config.load().cache_path())
    except InvalidInput as error:
        print(f"frontend_api.build: {error.message}", file=sys.stderr)
        return 1
    except (Impossible, OSError) as error:
        print(f"The router runs uncompiled, which costs CPU and nothing else. {error}", file=sys.stderr)
        return 0 if given.if_possible else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
