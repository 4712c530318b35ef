"""The bench runs and tells all it should. How fast anything is, no test says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.bench import model, report, routers, run

ROOT = Path(__file__).parents[2]


def test_a_short_run_has_every_row_of_ours_and_no_failed_request(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "tests.bench", "--smoke", "--out", str(out)]
    environment = {**os.environ, "TANDEM_CACHE": str(tmp_path), "http_proxy": "http://127.0.0.1:1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
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
    assert unmeasured == {name for name in unmeasured if name.startswith("CPU per")}  # no peer to measure against
    assert len(unmeasured) == 2
    assert figures["left_out"] == []
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
            again = [a == b for a, b in zip(fields["messages"], json.loads(other)["messages"], strict=True)]
            assert (
                again == {"hot": [True, True], "warm": [True, True], "shared": [True, False], "cold": [False]}[warmth]
            )


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


def _figures(**others: Any) -> dict[str, Any]:
    """Those measured last, but for `others`."""
    measured: dict[str, Any] = json.loads((ROOT / "tests" / "bench" / "measured.json").read_text())
    return {**measured, "left_out": [], "own_core": True, "missing": {}, "errors": {}, **others}


def test_what_was_not_measured_or_is_not_the_routers_doing_is_said() -> None:
    routers_used = {"nginx": {"per_second": {report.UNARY: 44_680.0}, "core_used": {report.UNARY: 0.83}}}
    for figures, says in (
        (_figures(routers=routers_used), "≥ 44,680"),
        (_figures(own_core=False), "One core for all"),
        (_figures(left_out=["unary 128 kB cold"]), "Left out, as the machine is slow or busy: unary 128 kB cold."),
        (_figures(missing={"nginx": "not installed"}), "nginx: not measured (not installed)."),
        (_figures(errors={"nginx": 1_200}), "nginx: 1,200 requests failed."),
    ):
        for made in (report.text, report.markdown):
            assert says in made(figures)
            assert says not in made(_figures(routers={}))


def test_a_peer_that_stops_answering_leaves_no_figure_and_ends_no_run() -> None:
    bench = SimpleNamespace(plain=[SimpleNamespace(url="http://127.0.0.1:1")])
    ours, peer = routers.Router("tandem kv", 1, 1), routers.Router("nginx", 2, 2)
    going = run.Run(run.SMOKE, [ours, peer], bench)  # type: ignore[arg-type]

    def measure(router: routers.Router) -> None:
        going.found.add(1.0, router.name, "memory_mib")
        if router is peer:
            raise ConnectionRefusedError("refused")

    going._each(measure)
    assert going.found.failed == {"nginx": "it stopped answering: refused"}
    going._each(measure)
    assert going.found.tree() == {"tandem kv": {"memory_mib": 1.0}}


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.bench", "--out", str(tmp_path / "missing" / "figures.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "No such file or directory" in done.stderr
