"""`tandem`: the command line. It talks to REST and knows nothing of Django or the database, so that it starts at once and
runs anywhere; `tandem bench` talks to the OpenAI endpoint instead. Keys come from TANDEM_API_KEY (bench: TANDEM_KEY) or a
file, never from an argument.

Exit codes: 0 done, 1 refused or failed (a sentence for each thing that is wrong on stderr), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from controlplane.cli import commands, prefixes
from controlplane.cli.arguments import parser
from controlplane.cli.client import Client
from controlplane.fleet import config, program
from controlplane.fleet.errors import InvalidInput, TandemError

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    program.begin("tandem")
    arguments = parser().parse_args(argv)
    try:
        settings = config.load()
        talks_rest = arguments.command in commands.COMMANDS
        if talks_rest and not settings.api_key:
            raise InvalidInput("set TANDEM_API_KEY_FILE (or TANDEM_API_KEY) to a key with the scope manage")
    except InvalidInput as error:
        return _complain(error.message, USAGE)
    try:
        if not talks_rest:
            return prefixes.run(settings, arguments)
        with Client(settings.url, settings.api_key) as client:
            code = commands.COMMANDS[arguments.command](client, arguments)
            print(end="", flush=True)
            return code
    except TandemError as error:
        named = error.field and error.field not in error.message
        first, *more = error.sentences
        return _complain(f"{error.field}: {first}" if named else first, FAILED, *more)
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # no trace at interpreter exit either
        if isinstance(error, BrokenPipeError):  # the reader of a pipe, `| head`, has gone
            return OK
        return _complain(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", FAILED)


def _complain(sentence: str, code: int, *more: str) -> int:
    for said in (sentence, *more):
        print(f"tandem: {said}", file=sys.stderr)
    return code
