"""`python -m frontend_api`: the router, compiled where that was done. The command line is `command`'s."""

from __future__ import annotations

import os
import sys

from controlplane.fleet import config, program
from controlplane.fleet.errors import InvalidInput
from frontend_api import compiled


def main() -> int:
    program.begin("frontend_api")
    program.keep_files_private()
    try:
        settings = config.load()
        used = settings.compiled != "never" and _use(settings)
        if settings.compiled == "always" and not used:
            raise InvalidInput("TANDEM_COMPILED is always: run `python -m frontend_api.build` first.", field="compiled")
    except InvalidInput as error:
        print(f"frontend_api: {error.message}", file=sys.stderr)
        return 1
    try:
        from frontend_api import command  # not before: what it imports may be compiled
    except ImportError as error:
        if not used:
            raise
        made = compiled.folder(settings.cache_path())
        print(f"frontend_api: {made} does not load: delete it and compile again ({error}).", file=sys.stderr)
        if settings.compiled == "always":
            return 1
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "TANDEM_COMPILED": "never"})  # noqa: S606
    return command.main(compiled=used)


def _use(settings: config.Config) -> bool:
    try:
        return compiled.use(settings.cache_path())
    except (OSError, InvalidInput):  # a cache that this user may not read, or no home to have one in
        return False


if __name__ == "__main__":
    sys.exit(main())
