"""Why an engine ended, from what it printed: the line that tells the reason, or none. Pure.

A log's last line is seldom the reason: engines print harmless things until they die, and vLLM's front process ends with a
traceback that only points at the one above.
"""

from __future__ import annotations

import re
import signal

LONGEST = 300
"""Characters of the line that are kept."""

_PREFIX = re.compile(
    r"""^(?:\([\w.-]+(?:\ pid=\d+)?\)\s*)*                      # (EngineCore_DP0 pid=71)
    (?:\[[^\]]*\]\s*)?(?:\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S*\s+)?
    (?:(?P<level>TRACE|DEBUG|INFO|NOTICE|WARN|WARNING|ERROR|CRITICAL|FATAL)\b:?\s*)?
    (?:\d\d-\d\d\ \d\d:\d\d:\d\d(?:\.\d+)?\s*)?(?:\[[\w./-]+:\d+\]\s*)?""",
    re.VERBOSE,
)
_HARMLESS = ("TRACE", "DEBUG", "INFO", "NOTICE", "WARN", "WARNING")
_EXCEPTION = re.compile(
    r"(?:[A-Za-z_][\w]*\.)*[A-Z]\w*(?:Error|Exception|Unavailable|Refused|Timeout|Interrupt|Exit|Taken)(?::\s.*)?$"
)
_GOES_ON = re.compile(r"\d+ validation errors? for \S+$")
"""pydantic tells in the next line what is wrong."""
_TRACEBACK = re.compile(
    r"Traceback \(|File \"|[\^~]+$|raise |return |await |During handling|The above exception|EngineCore .*failed"
)
_POINTS_ELSEWHERE = re.compile(
    r"root cause|initialization failed due to|Failed core proc|background (?:process|task) raised|(?:EngineDead|Cancelled)Error"
    r"|^SystemExit|^KeyboardInterrupt|ChildFailedError|RemoteError",
    re.IGNORECASE,
)
_FATAL = re.compile(
    r"out of memory|address already in use|no space left on device|cannot allocate memory|permission denied"
    r"|no such file or directory|no module named|error while loading shared libraries|cannot open shared object"
    r"|^fatal python error|^terminate called|^what\(\):|cuda error|nccl error|driver version is insufficient"
    r"|no cuda gpus are available|segmentation fault|bus error|illegal instruction|exec format error|command not found"
    r"|^[\w./ -]{1,80}: error: |cannot be had",
    re.IGNORECASE,
)


def cause(log: str) -> str:
    """The line that tells why, cut to `LONGEST`; empty where none does."""
    exceptions: list[str] = []
    fatal: list[str] = []
    pointers: list[str] = []
    errors: list[str] = []
    unfinished = False
    for line in log.splitlines():
        match = _PREFIX.match(line)
        assert match is not None  # every part may be missing
        text, level = line[match.end() :].strip(), match["level"]
        if not text or level in _HARMLESS or line.startswith("[tandem]"):
            continue
        if unfinished:
            exceptions[-1] += f": {text}"
        unfinished = False
        if _EXCEPTION.match(text):
            (pointers if _POINTS_ELSEWHERE.search(text) else exceptions).append(text)
            unfinished = exceptions[-1:] == [text] and bool(_GOES_ON.search(text))
        elif _FATAL.search(text):
            fatal.append(text)
        elif level is not None and not _POINTS_ELSEWHERE.search(text) and not _TRACEBACK.match(text):
            errors.append(text)
    for found in (exceptions, fatal, pointers, errors):
        if found:
            return found[-1][:LONGEST]
    return ""


def ending(code: int | None) -> str:
    """How a process ended, in words: by a signal where its exit code is negative. None: nobody knows."""
    if code is None:
        return "Ended by itself; its exit code is unknown, because a former agent process had started it"
    if code >= 0:
        return f"Ended by itself with exit code {code}"
    try:
        name = f"{signal.Signals(-code).name} ({(signal.strsignal(-code) or 'unknown').lower()})"
    except ValueError:
        name = "unknown"
    guard = "; perhaps out of memory, see the system's log" if code == -signal.SIGKILL else ""
    return f"Ended by signal {-code}, {name}{guard}"
