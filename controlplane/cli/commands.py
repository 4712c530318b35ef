"""What each command of `tandem` does: call REST, print the answer. Results go to stdout, remarks to stderr."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from controlplane.access.expiry import parse_expiry, parse_overlap
from controlplane.access.limits import BOUNDS, parse_limit
from controlplane.cli import tables
from controlplane.cli.client import Client, Refused
from controlplane.cli.logs import show_logs
from controlplane.fleet.errors import InvalidInput, TandemError


def apply(client: Client, arguments: argparse.Namespace) -> int:
    """Every document is sent, also after one was refused; any refusal makes the exit code 1."""
    refused = 0
    for document in _documents(arguments.file):
        name = document["name"]
        try:
            answer = client.call("PUT", "deployments", name, body=document, dry_run="1")
            if not arguments.dry_run:
                _agree(arguments, answer["stops"])
                answer = client.call("PUT", "deployments", name, body=document)
        except (Refused, NotAgreed) as error:
            refused += 1
            for sentence in error.sentences:
                print(f"tandem: {name}: {sentence}", file=sys.stderr)
        else:
            print("\n".join(_applied(name, answer)))
    return 1 if refused else 0


def _documents(file: str) -> list[dict[str, Any]]:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except OSError as error:
        raise InvalidInput(f"{file}: {error.strerror}", field="-f") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{file} is not YAML: {' '.join(str(error).split())}", field="-f") from None
    if not documents:
        raise InvalidInput(f"{file} has no document in it", field="-f")
    for number, document in enumerate(documents, 1):
        if not isinstance(document, dict) or not isinstance(document.get("name"), str) or not document["name"]:
            raise InvalidInput(f"{file}, document {number}: name is missing; nothing was sent", field="name")
    return documents


def _applied(name: str, answer: dict[str, Any]) -> list[str]:
    would = "would be " if answer["dry_run"] else ""
    if answer["created"]:
        return [f"{name}: {would}created"]
    if not answer["changes"]:
        return [f"{name}: unchanged"]
    engines = "; its engines are replaced" if answer["needs_new_engines"] else ""
    changes = [f"  {c['field']}: {_short(c['old'])} -> {_short(c['new'])}" for c in answer["changes"]]
    stops = [f"  {answer['stops']}"] if answer["dry_run"] and answer["stops"] else []
    return [f"{name}: {would}changed{engines}", *changes, *stops]


class NotAgreed(TandemError):
    """Somebody was asked and did not say yes, or nobody could be asked."""


def _agree(arguments: argparse.Namespace, stops: str) -> None:
    """Ask before something stops. Raises `NotAgreed`: nothing was changed."""
    if not stops or arguments.yes:
        return
    if not sys.stdin.isatty():
        raise NotAgreed(f"{stops} Nothing was changed; add --yes if you mean it")
    print(stops, file=sys.stderr)
    print("Go on? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise NotAgreed("nothing was changed")


def _short(value: Any) -> str:
    return str(yaml.safe_dump(value, default_flow_style=True, width=10_000)).removesuffix("\n...\n").strip()


def get(client: Client, arguments: argparse.Namespace) -> int:
    kind, name = arguments.kind, arguments.name
    if kind == "events":
        answer = client.call("GET", "deployments", name, "events") if name else client.call("GET", "events")
    elif kind == "keys" or name is None:
        answer = client.call("GET", kind)
        if name is not None:
            answer["items"] = [key for key in answer["items"] if name in (key["id"], key["name"])]
            if not answer["items"]:
                raise Refused(f"there is no key {name}", status=404)
    else:
        answer = {"items": [client.call("GET", kind, name)]}
    tables.show(kind, answer["items"], arguments.output, single=name is not None and kind != "events")
    return 0


def scale(client: Client, arguments: argparse.Namespace) -> int:
    wanted = {role: getattr(arguments, role) for role in ("prefill", "decode", "aggregated")}
    wanted = {role: replicas for role, replicas in wanted.items() if replicas is not None}
    if not wanted:
        raise InvalidInput("say which pool: --prefill N, --decode N or --aggregated N")
    if len(wanted) == 1:
        ((role, replicas),) = wanted.items()
        change = partial(
            client.call, "POST", "deployments", arguments.name, "scale", body={"role": role, "replicas": replicas}
        )
    else:  # both or neither
        pools = {role: {"replicas": replicas} for role, replicas in wanted.items()}
        change = partial(client.call, "PATCH", "deployments", arguments.name, body={"pools": pools})
    _agree(arguments, change(dry_run="1")["stops"])
    change()
    print(f"{arguments.name}: scaled to {' and '.join(f'{n} {role}' for role, n in wanted.items())}")
    return 0


def retry(client: Client, arguments: argparse.Namespace) -> int:
    name, _, engine = arguments.target.partition("/")
    found = client.call("GET", "deployments", name, "engines")["items"]
    engines = [engine] if engine else [e["name"] for e in found if e["state"] == "failed"]
    if not engines:
        print(f"{name}: no engine has failed", file=sys.stderr)
    for each in engines:
        client.call("POST", "deployments", name, "engines", each, "retry")
        print(f"{name}/{each}: is tried again now")
    return 0


def delete(client: Client, arguments: argparse.Namespace) -> int:
    _agree(arguments, client.call("DELETE", "deployments", arguments.name, dry_run="1")["stops"])
    answer = client.call("DELETE", "deployments", arguments.name)
    print(f"{answer['name']}: {answer['sentence']}")
    return 0


def keys(client: Client, arguments: argparse.Namespace) -> int:
    return _KEY_ACTIONS[arguments.action](client, arguments)


def _create_key(client: Client, arguments: argparse.Namespace) -> int:
    expires = parse_expiry(arguments.expires)
    body = {"name": arguments.name, "scope": arguments.scope, "models": arguments.model, **_limits(arguments)}
    if arguments.role:
        body["role"] = arguments.role
    if expires:
        body["expires_at"] = expires.isoformat()
    _show_secret(client.call("POST", "keys", body=body))
    return 0


def _list_keys(client: Client, arguments: argparse.Namespace) -> int:
    tables.show("keys", client.call("GET", "keys")["items"], arguments.output, single=False)
    return 0


def _key_id(client: Client, key: str) -> str:
    """The id of the key that is written by its id, or by a name that no other key has. Raises `InvalidInput`."""
    known = client.call("GET", "keys")["items"]
    if any(one["id"] == key for one in known):
        return key
    named = [one["id"] for one in known if one["name"] == key and one["revoked_at"] is None]
    if len(named) > 1:
        raise InvalidInput(f"several keys are named {key}: write the id of the one, {' or '.join(named)}")
    return str(named[0]) if named else key


def _limit_key(client: Client, arguments: argparse.Namespace) -> int:
    changes = _limits(arguments)
    if not changes:
        names = ", ".join(f"--{field.replace('_', '-')}" for field in BOUNDS)
        raise InvalidInput(f"say what to change: {names}")
    key = client.call("PATCH", "keys", _key_id(client, arguments.key), body=changes)
    print(f"{key['id']} ({key['name']}): {tables.limits(key) or 'unlimited'}")
    return 0


def _edit_key(client: Client, arguments: argparse.Namespace) -> int:
    changes: dict[str, Any] = {}
    if arguments.model or arguments.all_models:
        changes["models"] = arguments.model or []
    if arguments.expires is not None:
        until = None if arguments.expires == "never" else parse_expiry(arguments.expires)
        changes["expires_at"] = until and until.isoformat()
    if not changes:
        raise InvalidInput("say what to change: --model, --all-models, --expires")
    key = client.call("PATCH", "keys", _key_id(client, arguments.key), body=changes)
    expires = key["expires_at"][:16].replace("T", " ") + " UTC" if key["expires_at"] else "never"
    print(f"{key['id']} ({key['name']}): models {', '.join(key['models']) or 'all'}, expires {expires}")
    return 0


def _rotate_key(client: Client, arguments: argparse.Namespace) -> int:
    body = {"overlap_seconds": parse_overlap(arguments.overlap)}
    if not body["overlap_seconds"]:
        _agree(arguments, "The old secret ends at once: its clients are refused until they have the new one.")
    key = client.call("POST", "keys", _key_id(client, arguments.key), "rotate", body=body)
    until = key["old_secret_works_until"]
    told = f"works until {until[:16].replace('T', ' ')} UTC" if until else "has stopped working"
    print(f"The old secret {told}.", file=sys.stderr)
    _show_secret(key)
    return 0


def _revoke_key(client: Client, arguments: argparse.Namespace) -> int:
    named = _key_id(client, arguments.key)
    _agree(arguments, client.call("DELETE", "keys", named, dry_run="1")["stops"])
    key = client.call("DELETE", "keys", named)
    print(f"{key['id']} ({key['name']}): revoked")
    return 0


def _limits(arguments: argparse.Namespace) -> dict[str, Any]:
    """The limits that were given. Raises `InvalidInput`."""
    given = {field: getattr(arguments, field) for field in BOUNDS}
    return {
        field: parse_limit(text, field, unlimited="write none") for field, text in given.items() if text is not None
    }


def _show_secret(key: dict[str, Any]) -> None:
    print(f"Key {key['id']} ({key['name']}), shown this once:", file=sys.stderr)
    print(key["key"])


_KEY_ACTIONS = {
    "create": _create_key,
    "list": _list_keys,
    "edit": _edit_key,
    "limit": _limit_key,
    "rotate": _rotate_key,
    "revoke": _revoke_key,
}


def join_token(client: Client, arguments: argparse.Namespace) -> int:
    if arguments.node and arguments.node in [node["name"] for node in client.call("GET", "nodes")["items"]]:
        _agree(
            arguments,
            f"Whoever joins with this token is {arguments.node}: the machine that is {arguments.node} now loses its access, and "
            "its engines start anew.",
        )
    body = {"hours": arguments.hours, "node": arguments.node, "address": arguments.address}
    answer = client.call("POST", "join-tokens", body={name: value for name, value in body.items() if value})
    print(
        f"On the node, within {answer['hours']} h, with this token in TANDEM_JOIN_TOKEN:\n"
        f"  .venv/bin/python -m workers --join {answer['join_url']}",
        *filter(None, [answer["note"]]),
        sep="\n",
        file=sys.stderr,
    )
    print(answer["token"])
    return 0


COMMANDS: dict[str, Callable[[Client, argparse.Namespace], int]] = {
    "apply": apply,
    "get": get,
    "scale": scale,
    "retry": retry,
    "logs": show_logs,
    "delete": delete,
    "keys": keys,
    "join-token": join_token,
}
