"""The router's modules as `python -m frontend_api.build` has compiled them, if it has: the same code at less CPU.

They lie in the user's cache, in a folder named by what they were made of, so that they can never be older than the source
beside them: a changed source is run as Python until it is compiled anew.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).parent
MODULES = (
    "exchange", "flow", "gate", "legs", "steps", "trace", "verdicts",
    "formats.openai", "formats.sse",
    "http.cors", "http.heads", "http.outbox", "http.passing", "http.reading", "http.server", "http.upstream",
    "kv.blocks", "kv.chains", "kv.contents", "kv.debt", "kv.evidence", "kv.index", "kv.names", "kv.predict", "kv.sequence",
    "limits.answers", "limits.reserve", "limits.use", "limits.windows",
    "observe.account",
    "routing.choice", "routing.costs", "routing.failures", "routing.gossip", "routing.loads", "routing.outcomes",
    "routing.rates", "routing.reader", "routing.reason", "routing.view", "routing.waiting",
    "tokens.kept", "tokens.lanes", "tokens.prompts", "tokens.segments", "tokens.store", "tokens.tokenizer",
)  # fmt: skip
"""What runs for each request, each chunk and each event. No classes of msgspec are in them: it has to make those itself."""
COMPILER = "mypy==2.4.1"
"""Whose mypyc does it."""
LIBRARY = "tandem_router"
"""All of them, compiled. What takes a module's place only points into it."""
SUFFIX: str = sysconfig.get_config_var("EXT_SUFFIX")


def folder(cache: Path, root: Path = PACKAGE.parent) -> Path:
    """Where the compiled modules of this source lie for this Python, once they are made."""
    digest = hashlib.sha256(f"{COMPILER} {SUFFIX} {sys.version}".encode())
    folders = root / "frontend_api", root / "controlplane" / "fleet"
    for source in sorted(source for folder in folders for source in folder.rglob("[!.]*.py")):
        digest.update(b"%b\0%b\0" % (bytes(source.relative_to(root)), source.read_bytes()))
    return cache / "router" / digest.hexdigest()[:20]


def files(made: Path) -> dict[str, Path]:
    """What such a folder has, by the name it is imported under."""
    names = [*(f"frontend_api.{module}" for module in MODULES), f"{LIBRARY}__mypyc"]
    return {name: made / (name.replace(".", "/") + SUFFIX) for name in names}


def whole(made: Path) -> bool:
    """All or nothing: compiled code that meets an uncompiled neighbour crashes."""
    return all(file.is_file() for file in files(made).values())


def use(cache: Path) -> bool:
    """From now on import what is compiled; whether it is. Call it before any of `MODULES` is imported."""
    made = folder(cache)
    if not whole(made):
        return False
    with suppress(OSError):
        os.utime(made)  # what is in use is not old
    sys.meta_path.insert(0, _Finder(files(made)))
    return True


class _Finder(MetaPathFinder):
    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self._files.get(name)
        return spec_from_file_location(name, file, loader=ExtensionFileLoader(name, str(file))) if file else None
