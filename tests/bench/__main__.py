"""`python -m tests.bench [--out FILE] [--quick]`: the router compiled where it was, here (for `micro`) as in its own processes."""

from controlplane.fleet import config
from frontend_api import compiled

used = compiled.use(config.load().cache_path())

from tests.bench import run  # noqa: E402 - what it imports may be compiled

run.main(compiled=used)
