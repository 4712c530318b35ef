"""How `tandem get` shows things: tables for people, YAML and JSON for programs. Ages are told against this machine's clock."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from controlplane.fleet.model import Role
from controlplane.nodes.clock import WORTH_SAYING

Row = dict[str, Any]


class Column(NamedTuple):
    title: str
    cell: Callable[[Row], str]
    fold: bool = False
    """Long sentences wrap; everything else stays in one line."""


def _age(moment: str | None) -> str:
    if moment is None:
        return "never"
    seconds = max(0, int((datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()))
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def _pools(row: Row) -> str:
    ready, wanted = row["condition"]["ready"], row["condition"]["wanted"]
    return " ".join(f"{role} {ready.get(role, 0)}/{wanted[role]}" for role in Role if role in wanted)


def _attempt(row: Row) -> str:
    if not row["failures"]:
        return str(row["attempt"])
    failed = f"{row['attempt']}, {row['failures']} failed in a row"
    if row["retry_at"] is None:
        return failed
    left = (datetime.fromisoformat(row["retry_at"]) - datetime.now(UTC)).total_seconds()
    return f"{failed}, again in {max(left, 0):.0f}s"


def _distrust(row: Row) -> str:
    if row["cut_off"]:
        return ", cut off"
    return ", reports cannot be read" if row["report_error"] else ""


def _clock(row: Row) -> str:
    offset = row["clock_offset"]
    return "" if offset is None or abs(offset) < WORTH_SAYING else f", clock {offset:+.0f}s"


def _hardware(row: Row) -> str:
    facts = row["facts"]
    if facts is None:
        return ""
    gpus = f"{len(facts['gpus'])} × {facts['gpus'][0]['name']}, " if facts["gpus"] else ""
    return f"{gpus}{facts['cpus']} CPUs, {_gib(facts['memory_bytes'])}"


def _key_state(row: Row) -> str:
    if row["revoked_at"]:
        return "revoked"
    state = "active"
    if row["expires_at"] is not None:
        left = datetime.fromisoformat(row["expires_at"]) - datetime.now(UTC)
        if left.total_seconds() <= 0:
            return "expired"
        state = f"{left.days}d left"
    return f"{state}, two secrets" if row["old_secret_works_until"] else state


def limits(row: Row) -> str:
    """What a key may use: `60 req/min, 20000 tok/min, 4 at a time, priority 5`; empty: all it wants."""
    parts = [
        f"{row[field]} {unit}"
        for field, unit in (
            ("requests_per_minute", "req/min"),
            ("tokens_per_minute", "tok/min"),
            ("concurrency", "at a time"),
            ("silence_seconds", "s to the first byte"),
            ("gap_seconds", "s between tokens"),
        )
        if row[field] is not None
    ]
    return ", ".join(parts + ([f"priority {row['priority']}"] if row["priority"] else []))


COLUMNS: dict[str, tuple[Column, ...]] = {
    "deployments": (
        Column("NAME", lambda r: r["name"]),
        Column("MODEL", lambda r: r["document"]["model"]),
        Column("POOLS", _pools),
        Column("STATUS", lambda r: r["condition"]["status"] + (f", cache {r['cache']['state']}" if r["cache"] else "")),
        Column("AGE", lambda r: _age(r["created_at"])),
        Column("", lambda r: r["condition"]["sentence"], fold=True),
    ),
    "engines": (
        Column("ENGINE", lambda r: r["id"]),
        Column("STATE", lambda r: r["state"]),
        Column("SINCE", lambda r: _age(r["since"])),
        Column("NODE", lambda r: r["node"] or ""),
        Column("RUNTIME", lambda r: "stand-in" if r["runtime"] == "sim" else r["runtime"]),
        Column("IN FLIGHT", lambda r: "" if r["in_flight"] is None else str(r["in_flight"])),
        Column("ATTEMPT", _attempt),
        Column("", lambda r: r["reason"], fold=True),
    ),
    "nodes": (
        Column("NAME", lambda r: r["name"]),
        Column("STATUS", lambda r: r["status"] + (", cordoned" if r["cordoned"] else "") + _distrust(r) + _clock(r)),
        Column("ADDRESS", lambda r: r["address"]),
        Column("ENGINES", lambda r: str(r["engines"])),
        Column("REPORT", lambda r: "never" if r["last_report_age"] is None else f"{r['last_report_age']:.0f}s ago"),
        Column("HARDWARE", _hardware, fold=True),
    ),
    "keys": (
        Column("ID", lambda r: r["id"]),
        Column("NAME", lambda r: r["name"], fold=True),
        Column("SCOPE", lambda r: r["scope"]),
        Column("ROLE", lambda r: r["role"] or ""),
        Column("MODELS", lambda r: ", ".join(r["models"]) or "all", fold=True),
        Column("LIMITS", limits, fold=True),
        Column("STATE", _key_state),
        Column("USED", lambda r: _age(r["last_used_at"])),
        Column("BY", lambda r: r["created_by"], fold=True),
    ),
    "events": (
        Column("AT (UTC)", lambda r: r["at"][:19].replace("T", " ")),
        Column("DEPLOYMENT", lambda r: r["deployment"]),
        Column("ENGINE", lambda r: r["engine"]),
        Column("EVENT", lambda r: r["kind"]),
        Column("BY", lambda r: r["actor"]),
        Column("", lambda r: r["message"], fold=True),
    ),
}


def show(kind: str, items: Sequence[Row], output: str, *, single: bool) -> None:
    """Print rows. YAML of deployments is the documents that `tandem apply` takes."""
    if output == "json":
        print(json.dumps(items[0] if single and items else {"items": items}, indent=2, ensure_ascii=False))
    elif output == "yaml":
        rows = [item["document"] for item in items] if kind == "deployments" else items
        print(yaml.safe_dump_all(rows, sort_keys=False, allow_unicode=True), end="")
    else:
        console = Console(soft_wrap=False, highlight=False)
        _print(console, kind, items)
        if kind == "deployments" and single:
            console.print()
            _print(console, "engines", items[0]["engines"])
            for notice in items[0]["notices"]:
                console.print(Text(notice, style="yellow"))


def _print(console: Console, kind: str, items: Sequence[Row]) -> None:
    if not items:
        console.print(f"No {kind}.")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS[kind]:
        table.add_column(column.title, overflow="fold", no_wrap=not column.fold)
    for item in items:
        table.add_row(*(Text(column.cell(item)) for column in COLUMNS[kind]))
    if not console.is_terminal:  # a pipe has no width: nothing is folded or cut for it
        console.width = 10_000
    console.print(table)
