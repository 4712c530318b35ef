"""`python -m tests.bench [--out FILE] [--quick]`: the router compiled where it was, here (for `micro`) as in its own processes."""

import os

from controlplane.fleet import config
from frontend_api import compiled

settings = config.load()
used = settings.compiled != "never" and compiled.use(settings.cache_path())

from tests.bench import run  # noqa: E402 - what it imports may be compiled

os.environ["TANDEM_COMPILED"] = "always" if used else "never"
run.main(compiled=used)
