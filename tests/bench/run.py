"""What routers cost on one core, ours and those installed beside it.

All get the same load and the same stub engines, one after the other in rounds, so that what else the machine does hits all
alike; figures are medians over the rounds. CPU is what the scheduler says the router's processes ran. The router has a core to
itself; load generator and engines run on the others.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from tests.bench import load, micro, report, routers
from tests.bench.model import Warmth, body, numbers
from tests.bench.processes import Cores, NotStarted, Usage
from tests.bench.routers import KEY, Bench, Router

CONNECTIONS = 32
MOST = 40_000
"""Requests of one measurement."""
LONGEST = 180.0
"""Seconds after which the sizes that no target is about are left out: the machine is busy, and the figures would say so."""


class Ask(NamedTuple):
    """One kind of request."""

    size: int
    warmth: Warmth
    stream: bool = False

    @property
    def name(self) -> str:
        kind = "33-chunk stream" if self.stream else "unary"
        return f"{kind} {self.size / 1000:g} kB {self.warmth}"

    @property
    def connections(self) -> int:
        return CONNECTIONS if self.size < 100_000 else 8


UNARY = Ask(1_200, Warmth.WARM)
STREAM = Ask(1_200, Warmth.WARM, True)
OTHERS = (
    Ask(200, Warmth.HOT),
    *(Ask(size, warmth) for size in (1_200, 16_000, 128_000) for warmth in Warmth if (size, warmth) != UNARY[:2]),
    *(Ask(size, Warmth.HOT, True) for size in (200, 16_000, 128_000)),
)
LATENCY_AT = (1, 8, 32)


class Plan(NamedTuple):
    """How long a run takes. Seconds of one measurement, and how often."""

    rounds: int
    main: float
    """Of the two kinds of request that the targets are about."""
    other_rounds: int
    others: float
    """Of all other sizes."""
    latency: float
    peers: bool = True


DEFAULT = Plan(rounds=3, main=0.8, other_rounds=1, others=0.25, latency=0.3)
QUICK = Plan(rounds=1, main=0.4, other_rounds=0, others=0.0, latency=0.2)
SMOKE = Plan(rounds=1, main=0.05, other_rounds=0, others=0.0, latency=0.05, peers=False)


class Measurements:
    """Every figure of every round."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, ...], list[float]] = {}
        self.errors: dict[str, int] = {}
        self.failed: dict[str, str] = {}
        """Why a peer fell out."""
        self.left_out: list[str] = []
        """Kinds of request that there was no time for."""

    def add(self, value: float, *where: str) -> None:
        self._found.setdefault(where, []).append(value)

    def fell_out(self, router: str, why: str) -> None:
        """Nothing that was measured of it counts."""
        self.failed[router] = why
        self._found = {where: values for where, values in self._found.items() if where[0] != router}

    def tree(self) -> dict[str, object]:
        """Medians, nested by their names."""
        whole: dict[str, object] = {}
        for where, values in self._found.items():
            at = whole
            for name in where[:-1]:
                at = at.setdefault(name, {})  # type: ignore[assignment]
            at[where[-1]] = round(median(values), 4)
        return whole


class Run:
    def __init__(self, plan: Plan, up: list[Router], bench: Bench) -> None:
        self._plan = plan
        self._up = up
        self._direct = [int(engine.url.rpartition(":")[2]) for engine in bench.plain]
        self._number = numbers()
        self._began = time.monotonic()
        self.found = Measurements()

    def all(self) -> Measurements:
        plan = self._plan
        for _ in range(plan.rounds):
            for ask in (UNARY, STREAM):
                self._each(partial(self._cpu, ask=ask, seconds=plan.main))
            for connections in LATENCY_AT:
                direct = self._latency("direct", self._direct, connections)
                self.found.add(direct.rate, "direct", "per_second", f"{connections} connections")
                self._each(partial(self._added, connections=connections, direct=direct))
        for _ in range(plan.other_rounds):
            for ask in OTHERS:
                if time.monotonic() - self._began < LONGEST:
                    self._each(partial(self._cpu, ask=ask, seconds=plan.others))
                else:
                    self.found.left_out.append(ask.name)
        self._each(lambda router: self.found.add(Usage(router.pid).memory_mib(), router.name, "memory_mib"))
        return self.found

    def _each(self, measure: Callable[[Router], None]) -> None:
        """All that run, by turns; a peer that no longer does falls out."""
        for router in tuple(self._up):
            try:
                measure(router)
            except OSError as error:
                why = f"it stopped answering: {error or type(error).__name__}"
                if router.name in routers.OURS:
                    raise SystemExit(f"{router.name}: {why}") from error
                self._up.remove(router)
                self.found.fell_out(router.name, why)

    def _load(
        self, name: str, ports: Sequence[int], ask: Ask, seconds: float, connections: int, most: int = MOST
    ) -> load.Load:
        result = load.run(
            ports,
            body(ask.size, ask.warmth, stream=ask.stream),
            self._number,
            seconds=seconds,
            most=most,
            connections=connections,
            stream=ask.stream,
            key=KEY,
        )
        if result.errors:
            self.found.errors[name] = self.found.errors.get(name, 0) + result.errors
        return result

    def _cpu(self, router: Router, ask: Ask, seconds: float) -> None:
        self._load(router.name, [router.port], ask, seconds / 10, ask.connections, most=2 * ask.connections)
        usage = Usage(router.pid)
        before = usage.cpu_seconds()
        result = self._load(router.name, [router.port], ask, seconds, ask.connections)
        ran = usage.cpu_seconds() - before
        self.found.add(ran / max(result.requests, 1) * 1e6, router.name, "cpu_us", ask.name)
        if not ask.stream:
            self.found.add(result.rate, router.name, "per_second", ask.name)
            self.found.add(ran / result.seconds, router.name, "core_used", ask.name)

    def _latency(self, name: str, ports: Sequence[int], connections: int) -> load.Load:
        self._load(name, ports, UNARY, 0.02, connections, most=2 * connections)
        result = self._load(name, ports, UNARY, self._plan.latency, connections)
        self.found.add(result.p50_ms, name, "p50_ms", str(connections))
        self.found.add(result.p99_ms, name, "p99_ms", str(connections))
        return result

    def _added(self, router: Router, connections: int, direct: load.Load) -> None:
        """Over direct, in the same round."""
        result = self._latency(router.name, [router.port], connections)
        self.found.add(result.p50_ms - direct.p50_ms, router.name, "added_p50_ms", str(connections))
        self.found.add(result.p99_ms - direct.p99_ms, router.name, "added_p99_ms", str(connections))
        if connections == 1 and router.name == "tandem two legs":  # the stub takes as long for either leg
            self.found.add(result.p50_ms - 2 * direct.p50_ms, router.name, "added_by_two_legs_ms")


def machine() -> str:
    """In words that name no host."""
    cpu = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    cores = len(os.sched_getaffinity(0))
    return f"{cores} core{'s' if cores > 1 else ''} of {cpu}, Linux, Python {platform.python_version()}"


def measured(plan: Plan, only: frozenset[str], *, compiled: bool) -> dict[str, object]:
    """Start what is there, measure, stop it. `compiled`: the router is, here and in its own processes."""
    routers.environment()
    began = time.monotonic()
    cores = Cores.shared_out()
    said = machine()
    os.sched_setaffinity(0, cores.others)
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-bench-")))
        stack.callback(shutil.rmtree, os.environ["TANDEM_HOME"], ignore_errors=True)
        bench = Bench(folder, cores, stack)
        up: list[Router] = []
        wanted = {**routers.OURS, **(routers.PEERS if plan.peers else {})}
        for name, start in wanted.items():
            if only and name not in only:
                continue
            try:
                up.append(stack.enter_context(start(bench)))
            except NotStarted as error:
                if name in routers.OURS:
                    raise
                missing[name] = str(error)
        found = Run(plan, up, bench).all()
    return {
        "machine": said,
        "own_core": not cores.router & cores.others,
        "compiled": compiled,
        "date": time.strftime("%Y-%m-%d"),
        "connections": CONNECTIONS,
        "seconds": round(time.monotonic() - began),
        "load_average": round(os.getloadavg()[1], 1),
        "routers": found.tree(),
        "errors": found.errors,
        "missing": missing | found.failed,
        "left_out": found.left_out,
        "micro": micro.measured(brief=plan is not DEFAULT),
    }


def main(*, compiled: bool) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--quick", action="store_true", help="well under a minute, and rough")
    length.add_argument("--smoke", action="store_true", help="seconds, no peers: shows only that the bench works")
    parser.add_argument("--only", action="append", default=[], metavar="ROUTER", help="these alone (may be repeated)")
    given = parser.parse_args()
    plan = SMOKE if given.smoke else QUICK if given.quick else DEFAULT
    if given.out:
        try:
            given.out.touch()
        except OSError as error:
            parser.error(f"--out {given.out}: {error.strerror}")
    figures = measured(plan, frozenset(given.only), compiled=compiled)
    if given.out:
        given.out.write_text(json.dumps(figures, indent=2) + "\n")
    print(report.text(figures))
    if any(name in routers.OURS or name == "direct" for name in figures["errors"]):  # type: ignore[attr-defined]
        raise SystemExit("some requests failed: the figures mean nothing")
