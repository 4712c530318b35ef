"""Run by an engine runtime's interpreter: parses command lines with vLLM's own parser.

Reads a JSON list of argument lists (without interpreter and entry point) from standard input. Prints JSON: per list what
the parser made of it, and the parser's option names.
"""

import dataclasses
import json
import sys

from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser


def plain(value: object) -> object:
    if dataclasses.is_dataclass(value):
        return dataclasses.asdict(value)
    return value if isinstance(value, str | int | float | bool | list | dict | None) else repr(value)


parser = make_arg_parser(FlexibleArgumentParser())
parsed = [{k: plain(v) for k, v in vars(parser.parse_args(argv)).items()} for argv in json.load(sys.stdin)]
options = [list(action.option_strings) for action in parser._actions if action.option_strings]
print(json.dumps({"parsed": parsed, "options": options}, default=repr))
