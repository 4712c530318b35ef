"""The figures of a run as text: for the terminal, and as the table of ARCHITECTURE.md. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

Figures = Mapping[str, Any]
UNARY, STREAM = "unary 1.2 kB warm", "33-chunk stream 1.2 kB warm"
FULL = 0.95
"""Share of its core from which on the router, not the load, bounds its requests per second."""
PEER, FLOOR = "vllm-router cache_aware", "nginx"
OUR = "tandem kv"


def value(figures: Figures, *where: str) -> float | None:
    """One figure; None: it was not measured."""
    at: Any = figures
    for name in where:
        if not isinstance(at, Mapping) or name not in at:
            return None
        at = at[name]
    return float(at)


class Target(NamedTuple):
    """What was asked for, and what came of it. `bound`, `aim`: None where the peer they come from was not measured."""

    name: str
    measured: float | None
    bound: float | None
    aim: float | None
    unit: str
    at_least: bool = False

    @property
    def verdict(self) -> str:
        if self.measured is None or self.bound is None:
            return "not measured"
        if self._reaches(self.aim):
            return "aim reached"
        return "met" if self._reaches(self.bound) else "missed"

    def _reaches(self, bound: float | None) -> bool:
        if bound is None or self.measured is None:
            return False
        return self.measured >= bound if self.at_least else self.measured <= bound


def targets(figures: Figures) -> list[Target]:
    """Issue 3's table, on one core, with keys, records, kv mode and KV events on."""

    def cpu(router: str, ask: str, times: float) -> float | None:
        found = value(figures, "routers", router, "cpu_us", ask)
        return None if found is None else found * times

    def added(router: str, which: str) -> float | None:
        return value(figures, "routers", router, which, "1")

    micro = figures["micro"]
    entries = micro["bytes_per_entry"].values()
    return [
        Target(
            "CPU per unary request, 1.2 kB, warm", cpu(OUR, UNARY, 1), cpu(PEER, UNARY, 0.5), cpu(FLOOR, UNARY, 2), "µs"
        ),
        Target(
            "CPU per 33-chunk stream, 1.2 kB, warm",
            cpu(OUR, STREAM, 1),
            cpu(PEER, STREAM, 0.6),
            cpu(FLOOR, STREAM, 1),
            "µs",
        ),
        Target("added latency, 1 connection, p50", added(OUR, "added_p50_ms"), 0.5, added(FLOOR, "added_p50_ms"), "ms"),
        Target("added latency, 1 connection, p99", added(OUR, "added_p99_ms"), 2.0, added(FLOOR, "added_p99_ms"), "ms"),
        Target(
            "choose among 64 engines, 100-block prompt", micro["choose_us_64_engines_100_blocks"]["all"], 60, 25, "µs"
        ),
        Target("events into the index", micro["blocks_per_second"], 200_000, 500_000, "blocks/s", True),
        Target("memory per (engine, block) entry", max(entries), 150, 60, "B"),
        Target(
            "added by two legs over their sum",
            value(figures, "routers", "tandem two legs", "added_by_two_legs_ms"),
            1.0,
            0.3,
            "ms",
        ),
    ]


def _shown(number: float | None, unit: str = "") -> str:
    if number is None:
        return "–"
    digits = f"{number:,.0f}" if abs(number) >= 100 else f"{number:.1f}" if abs(number) >= 10 else f"{number:.2f}"
    return f"{digits} {unit}".strip()


def _rows(figures: Figures) -> Iterator[list[str]]:
    yield [
        "router", "unary 1.2 kB warm: CPU µs", "requests/s", "33-chunk stream: CPU µs",
        "added p50 / p99 ms, 1 connection", "8 connections", "32 connections", "memory MiB",
    ]  # fmt: skip
    for name in figures["routers"]:
        at = ("routers", name)
        latency = [
            f"{_shown(value(figures, *at, 'added_p50_ms', n))} / {_shown(value(figures, *at, 'added_p99_ms', n))}"
            for n in ("1", "8", "32")
        ]
        if name == "direct":
            latency = [
                f"({_shown(value(figures, *at, 'p50_ms', n))} / {_shown(value(figures, *at, 'p99_ms', n))})"
                for n in ("1", "8", "32")
            ]
        rate = value(figures, *at, "per_second", UNARY) or value(figures, *at, "per_second", "32 connections")
        held = value(figures, *at, "core_used", UNARY)
        yield [
            name,
            _shown(value(figures, *at, "cpu_us", UNARY)),
            ("≥ " if held is not None and held < FULL else "") + _shown(rate),
            _shown(value(figures, *at, "cpu_us", STREAM)),
            *latency,
            _shown(value(figures, *at, "memory_mib")),
        ]


def _sizes(figures: Figures) -> Iterator[list[str]]:
    routers = [name for name in figures["routers"] if name != "direct"]
    asks = list(dict.fromkeys(ask for name in routers for ask in figures["routers"][name].get("cpu_us", {})))
    yield ["CPU µs per request", *routers]
    for ask in asks:
        yield [ask, *(_shown(value(figures, "routers", name, "cpu_us", ask)) for name in routers)]


def _verdicts(figures: Figures) -> Iterator[list[str]]:
    yield ["measure", "measured", "asked for", "aim", "verdict"]
    for target in targets(figures):
        sign = "≥" if target.at_least else "≤"
        asked = (_shown(bound) if bound is None else f"{sign} {_shown(bound)}" for bound in (target.bound, target.aim))
        yield [target.name, _shown(target.measured, target.unit), *asked, target.verdict]


def _micro(figures: Figures) -> Iterator[list[str]]:
    micro = figures["micro"]
    choice = micro["choose_us_64_engines_100_blocks"]
    yield ["part of the router alone", "best of some tries"]
    yield [
        "choose among 64 engines, 100 blocks: hash, match, weigh",
        " + ".join(_shown(choice[p]) for p in ("hash", "match", "weigh")) + " µs",
    ]
    for size, found in micro["tokenise"].items():
        times = ", ".join(_shown(found[name]) for name in ("again_us", "warm_us", "cold_us"))
        yield [f"token ids of {size}: the same again, segments known, all new", f"{times} µs"]
    for case, weight in micro["bytes_per_entry"].items():
        yield [f"memory per entry: {case}", _shown(weight, "B")]


def _markdown(rows: Iterator[list[str]]) -> str:
    head, *rest = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rest))


def _plain(rows: Iterator[list[str]]) -> str:
    lines = list(rows)
    widths = [max(len(line[n]) for line in lines) for n in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if n == 0 else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def _notes(figures: Figures) -> Iterator[str]:
    used = (value(figures, "routers", name, "core_used", UNARY) for name in figures["routers"])
    if any(share is not None and share < FULL for share in used):
        yield "≥: the router's core was not full; the load, or what else ran, was the bound."
    if not figures["own_core"]:
        yield "One core for all: the router shares it with load and engines, so that rates and latencies are theirs as well."
    if figures["left_out"]:
        yield f"Left out, as the machine is slow or busy: {', '.join(figures['left_out'])}."
    for name, why in figures["missing"].items():
        yield f"{name}: not measured ({why})."
    for name, count in figures["errors"].items():
        yield f"{name}: {count:,} requests failed."


def _said(figures: Figures) -> str:
    return (
        f"Measured {figures['date']} on {figures['machine']}; our router {'' if figures['compiled'] else 'not '}compiled; "
        f"{figures['connections']} connections; medians of rounds in which the routers took turns. Load average of the machine "
        f"over five minutes, this run included: {figures['load_average']}."
    )


def text(figures: Figures) -> str:
    """For a terminal."""
    tables = (_plain(rows(figures)) for rows in (_rows, _sizes, _micro, _verdicts))
    return "\n\n".join((_said(figures), *tables, "\n".join(_notes(figures)))).rstrip()


def markdown(figures: Figures) -> str:
    """For ARCHITECTURE.md."""
    tables = (_markdown(rows(figures)) for rows in (_verdicts, _rows, _sizes, _micro))
    return "\n\n".join((_said(figures), *tables, "\n".join(f"* {note}" for note in _notes(figures)))).rstrip()
