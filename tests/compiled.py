"""`pytest -p tests.compiled tests/frontend_api`: the router in the tests' own process is the compiled one."""

from __future__ import annotations

from controlplane.fleet import config
from frontend_api import build, compiled

build.build(config.load().cache_path())
assert compiled.use(config.load().cache_path())
