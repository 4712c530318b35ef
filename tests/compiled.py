"""`pytest -p tests.compiled tests/frontend_api`: the router in the tests' own process is the compiled one."""

from __future__ import annotations

from pathlib import Path

from controlplane.fleet import config
from frontend_api import build, compiled

CACHE = config.load().cache_path()
APART = (
    "test_bench.py", "test_compiled.py", "test_differential.py", "test_limits_shared.py", "test_process.py", "test_standins.py",
    "test_defects.py",
)  # fmt: skip
"""Their routers are processes of their own, which are compiled in every run; the last one changes code, which cannot be compiled."""

build.build(CACHE)
assert compiled.use(CACHE)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if collection_path.name in APART else None
