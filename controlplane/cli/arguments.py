"""The grammar of `tandem`. argparse answers wrong usage itself, with exit code 2."""

from __future__ import annotations

import argparse

from controlplane.access.limits import BOUNDS
from controlplane.fleet.spec import MAX_REPLICAS
from controlplane.fleet.wire import LOG_MAXLEN, Scope

KINDS = ("deployments", "nodes", "keys", "events")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="tandem",
        description="Deploy and watch disaggregated LLM serving.",
        epilog="TANDEM_URL names the control plane; TANDEM_API_KEY or TANDEM_API_KEY_FILE hold a key with the scope manage.",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    apply = commands.add_parser("apply", help="make deployments what a YAML file says")
    apply.add_argument(
        "-f", "--file", required=True, metavar="FILE", help="YAML, one document or more; -: standard input"
    )
    apply.add_argument("--dry-run", action="store_true", help="show what would change, change nothing")

    _add_yes(apply)

    get = commands.add_parser("get", help="show deployments, nodes, keys or events")
    get.add_argument("kind", choices=KINDS, metavar="|".join(KINDS))
    get.add_argument("name", nargs="?", metavar="NAME", help="only this one (events: of this deployment)")
    get.add_argument("-o", "--output", choices=("table", "yaml", "json"), default="table")

    scale = commands.add_parser("scale", help="change the replicas of a deployment's pools")
    scale.add_argument("name", metavar="NAME")
    for role in ("prefill", "decode", "aggregated"):
        scale.add_argument(f"--{role}", type=_between(0, MAX_REPLICAS), metavar="N")
    _add_yes(scale)

    retry = commands.add_parser("retry", help="try failed engines again now, instead of after their back-off")
    retry.add_argument("target", metavar="DEPLOYMENT[/ENGINE]", help="NAME: all that failed; NAME/decode-0: this one")

    logs = commands.add_parser("logs", help="show the log of an engine, or of all engines of a deployment")
    logs.add_argument("target", metavar="ENGINE|DEPLOYMENT", help="an engine's id, NAME/decode-0, or a deployment")
    logs.add_argument("-f", "--follow", action="store_true", help="go on with new lines, also of later attempts")
    logs.add_argument("--times", action="store_true", help="with the time at which each line came, UTC")
    logs.add_argument("--attempt", type=_between(1, 1 << 31), metavar="N", help="default: the newest")
    logs.add_argument(
        "--lines", type=_between(1, LOG_MAXLEN), default=200, metavar="N", help="of the past (default: 200)"
    )

    delete = commands.add_parser("delete", help="delete a deployment; its engines finish their requests first")
    delete.add_argument("name", metavar="NAME")
    _add_yes(delete)

    keys = commands.add_parser("keys", help="create, list, edit, limit, rotate and revoke API keys").add_subparsers(
        dest="action", required=True, metavar="create|list|edit|limit|rotate|revoke"
    )
    create = keys.add_parser("create", help="the key alone goes to standard output, this once")
    create.add_argument("--name", required=True, help="who uses it")
    create.add_argument("--scope", choices=[scope.value for scope in Scope], default=Scope.INFERENCE)
    create.add_argument("--role", choices=("viewer", "operator", "admin"), help="of a manage key (default: viewer)")
    create.add_argument("--model", action="append", default=[], metavar="SERVED_NAME", help="repeatable; default: all")
    create.add_argument("--expires", default="", metavar="WHEN", help="30d, 12h or 2030-01-31T12:00Z; default: never")
    _add_limits(create)
    listed = keys.add_parser("list", help="all keys with their limits and last use")
    listed.add_argument("-o", "--output", choices=("table", "yaml", "json"), default="table")
    edit = keys.add_parser("edit", help="change a key's models or expiry; what is not named stays")
    edit.add_argument("key", metavar="KEY", help=_KEY)
    models = edit.add_mutually_exclusive_group()
    models.add_argument("--model", action="append", metavar="SERVED_NAME", help="repeatable: these alone")
    models.add_argument("--all-models", action="store_true", help="every model")
    edit.add_argument("--expires", metavar="WHEN", help="30d, 12h, 2030-01-31T12:00Z or never")
    limit = keys.add_parser("limit", help="change what an inference key may use; what is not named stays")
    limit.add_argument("key", metavar="KEY", help=_KEY)
    _add_limits(limit)
    rotate = keys.add_parser(
        "rotate", help="a new secret for the same key; it alone goes to standard output, this once"
    )
    rotate.add_argument("key", metavar="KEY", help=_KEY)
    rotate.add_argument(
        "--overlap",
        default="24h",
        metavar="SPAN",
        help="for which the old secret works: 24h, 30m, 7d, 0 (default: 24h)",
    )
    revoke = keys.add_parser("revoke", help="end a key for ever")
    revoke.add_argument("key", metavar="KEY", help=_KEY)
    for ends in (rotate, revoke):
        _add_yes(ends)

    token = commands.add_parser("join-token", help="a one-time token with which a node joins")
    token.add_argument("--hours", type=_between(1, 168), default=1, metavar="N", help="good for so long (default: 1)")
    token.add_argument(
        "--node",
        default="",
        metavar="NAME",
        help="good for this name only, also if a node had it before (default: any new name)",
    )
    token.add_argument(
        "--address",
        default="",
        metavar="IP",
        help="of the node's engines, if the node reaches the control plane from another",
    )
    _add_yes(token)

    bench = commands.add_parser("bench", help="experiments against the OpenAI endpoint").add_subparsers(
        dest="action", required=True, metavar="prefixes"
    )
    _add_prefixes(bench.add_parser("prefixes", help="do requests go where their KV lies?", allow_abbrev=False))
    return top


def _add_prefixes(command: argparse.ArgumentParser) -> None:
    command.epilog = (
        "Needs two ready engines that read prompts. The key comes from TANDEM_KEY, TANDEM_KEY_FILE or --key-file; "
        "a router without keys needs none. "
        "Exit status: 0 it works, 3 it does not, 4 nothing was shown, 1 the experiment failed."
    )
    command.add_argument("--url", help="the OpenAI endpoint (default: TANDEM_BIND and TANDEM_OPENAI_PORT)")
    command.add_argument("--key-file", metavar="FILE", help="holds a key of scope inference")
    command.add_argument("--model", default="", metavar="SERVED_NAME", help="default: the only one there is")
    for name, low, high, default, says in (
        ("prefixes", 2, 1_000, 12, "different prefixes"),
        ("words", 16, 100_000, 1_500, "words of each"),
        ("repeats", 2, 100, 6, "times that each is asked"),
        ("tail-words", 1, 10_000, 24, "fresh words at the end of each prompt"),
    ):
        command.add_argument(
            f"--{name}", type=_between(low, high), default=default, metavar="N", help=f"{says} ({default})"
        )
    command.add_argument(
        "--seed", type=_between(0, (1 << 31) - 1), metavar="N", help="the same words again; default: new ones"
    )
    command.add_argument("--json", action="store_true", help="everything that was seen, as JSON")


def _add_yes(command: argparse.ArgumentParser) -> None:
    command.add_argument("-y", "--yes", action="store_true", help="do not ask, also where service stops")


_KEY = "its name, or its id (of tdm-ID-… the part in the middle)"
_LIMIT_HELP = {
    "requests_per_minute": "in any minute",
    "tokens_per_minute": "prompt and output, in any minute",
    "concurrency": "requests at a time",
    "priority": "the higher is served first when all engines are full",
    "silence_seconds": "longest wait for an engine's first byte, instead of the deployment's",
    "gap_seconds": "longest silence inside a stream, instead of the deployment's",
}


def _add_limits(command: argparse.ArgumentParser) -> None:
    for field, (low, high) in BOUNDS.items():
        none = "" if field == "priority" else ", or none"
        command.add_argument(
            f"--{field.replace('_', '-')}", metavar="N", help=f"{_LIMIT_HELP[field]} ({low} to {high}{none})"
        )


class _between:
    """argparse type: a whole number from low to high."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high

    def __call__(self, text: str) -> int:
        if not text.isascii() or not text.isdigit() or not self.low <= int(text) <= self.high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {self.low} to {self.high}")
        return int(text)
