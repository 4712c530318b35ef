"""The bench runs and tells all it should. How fast anything is, no test says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.bench import model, report, routers, run

ROOT = Path(__file__).parents[2]


def test_a_short_run_has_every_row_of_ours_and_no_failed_request(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "tests.bench", "--smoke", "--out", str(out)]
    environment = {**os.environ, "TANDEM_CACHE": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(out.read_text())
    assert set(figures["routers"]) == {"direct", *routers.OURS}
    assert figures["errors"] == {} == figures["missing"]
    for name in routers.OURS:
        row = figures["routers"][name]
        assert set(row["cpu_us"]) == {run.UNARY.name, run.STREAM.name} == {report.UNARY, report.STREAM}
        assert set(row["added_p50_ms"]) == set(row["added_p99_ms"]) == {"1", "8", "32"}
        assert row["memory_mib"] > 0
        assert all(cost > 0 for cost in row["cpu_us"].values())
    unmeasured = {target.name for target in report.targets(figures) if target.verdict == "not measured"}
    assert unmeasured == {"CPU per unary request, 1.2 kB", "CPU per 33-chunk stream"}  # no peer to measure against
    for row in routers.OURS:
        assert row in done.stdout


def test_bodies_have_their_size_and_are_as_new_as_they_say() -> None:
    for size in routers.SIZES:
        for warmth in model.Warmth:
            made = model.body(size, warmth, stream=True)
            one, other = made.whole(100_000_000), made.whole(100_000_001)
            assert abs(len(one) - size) < 20
            fields = json.loads(one)
            assert fields["stream"] is True
            assert (one == other) is (warmth is model.Warmth.HOT)
            if warmth is model.Warmth.SHARED:
                assert fields["messages"][0] == json.loads(other)["messages"][0]


def test_a_verdict_is_no_better_than_its_figures() -> None:
    def verdict(measured: float | None, bound: float | None, aim: float | None, *, at_least: bool = False) -> str:
        return report.Target("", measured, bound, aim, "", at_least).verdict

    assert verdict(5, 10, 5) == "aim reached"
    assert verdict(5, 10, 4) == "met"
    assert verdict(5, 10, None) == "met"
    assert verdict(11, 10, 5) == "missed"
    assert verdict(11, None, 20) == "not measured"
    assert verdict(None, 10, 5) == "not measured"
    assert verdict(5, 10, 20, at_least=True) == "missed"
    assert verdict(30, 10, 20, at_least=True) == "aim reached"
