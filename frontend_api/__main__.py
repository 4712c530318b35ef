"""`python -m frontend_api`: the router, compiled where that was done. The command line is `command`'s."""

from __future__ import annotations

import sys

from controlplane.fleet import config
from controlplane.fleet.errors import InvalidInput
from frontend_api import compiled


def main() -> int:
    try:
        settings = config.load()
        used = settings.compiled != "never" and compiled.use(settings.cache_path())
        if settings.compiled == "always" and not used:
            raise InvalidInput("TANDEM_COMPILED is always: run `python -m frontend_api.build` first.", field="compiled")
    except InvalidInput as error:
        print(f"frontend_api: {error.message}", file=sys.stderr)
        return 1
    from frontend_api import command  # not before: what it imports may be compiled

    return command.main(compiled=used)


if __name__ == "__main__":
    sys.exit(main())
