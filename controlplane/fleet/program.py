"""How each of our programs begins: its files are its user's alone, and of a failure that nobody foresaw a person sees one
sentence and where the trace is, never the trace itself."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import traceback
from functools import partial
from io import TextIOWrapper
from types import TracebackType

from controlplane.fleet.errors import TandemError


def begin(program: str) -> None:
    """From now on: what is not caught ends this program with exit code 1 and a sentence on stderr, and no output fails on a
    character that the terminal does not know. First of all in a program, before what reads the environment is imported."""
    sys.excepthook = partial(_tell, program)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def keep_files_private() -> None:
    """From now on whatever this program and its children write is for its user alone."""
    os.umask(0o077)


def _tell(program: str, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    with contextlib.suppress(OSError):  # nobody reads it any more
        print(f"{program}: {_sentence(error, trace)}", file=sys.stderr)


def _sentence(error: BaseException, trace: TracebackType | None) -> str:
    if isinstance(error, TandemError):
        return error.message
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, OSError) and error.strerror:
        what = f"{error.strerror}{f': {error.filename}' if error.filename else ''}."
    else:
        what = f"this is a defect of Tandem ({type(error).__name__})."
    return f"{what} {_written(error, trace)}".rstrip()


def _written(error: BaseException, trace: TracebackType | None) -> str:
    """Where the trace is now: a file of this user alone, as it may hold more than others should read."""
    try:
        handle, path = tempfile.mkstemp(prefix="tandem-trace-", suffix=".txt")
        with os.fdopen(handle, "w", errors="replace") as file:
            file.writelines(traceback.format_exception(type(error), error, trace))
    except OSError:
        return ""
    return f"The trace is in {path}"
