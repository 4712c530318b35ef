"""README and ARCHITECTURE are held to the code. `python -m tests.test_docs` writes the generated parts anew."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from controlplane.deployments.evidence_words import REASONS
from controlplane.fleet import config, lifecycle, wire
from frontend_api.kv import evidence
from frontend_api.kv.evidence import Tokenization
from frontend_api.kv.knowledge import Bound, Knowledge, Trouble
from tests.bench import report

ROOT = Path(__file__).resolve().parent.parent


def lifecycle_part() -> str:
    return f"```mermaid\n{lifecycle.mermaid()}\n```"


def limits_part() -> str:
    rows = [f"| {state} | {limit.seconds:g} s | {limit.awaits} |" for state, limit in lifecycle.LIMITS.items()]
    return "\n".join(["| waiting state | at most | waits for |", "|---|---|---|", *rows])


def config_part() -> str:
    defaults = config.Config()
    rows = []
    for variable in config.VARIABLES:
        default = getattr(defaults, variable.field)
        shown = (
            "" if variable.secret or default == "" else f"`{int(default) if isinstance(default, bool) else default}`"
        )
        name = f"`{variable.name}`" + (", or a file: `…_FILE`" if variable.secret else "")
        rows.append(f"| {name} | {shown} | {variable.help} |")
    return "\n".join(["| variable | default | |", "|---|---|---|", *rows])


def bench_part() -> str:
    return report.markdown(json.loads((ROOT / "tests" / "bench" / "measured.json").read_text()))


PARTS = {
    ("ARCHITECTURE.md", "lifecycle"): lifecycle_part,
    ("ARCHITECTURE.md", "limits"): limits_part,
    ("ARCHITECTURE.md", "bench"): bench_part,
    ("README.md", "config"): config_part,
}


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name}:begin -->\n)(.*?)(\n?<!-- {name}:end -->)", re.DOTALL)


def test_generated_parts_are_those_of_the_code() -> None:
    for (page, name), make in PARTS.items():
        found = _pattern(name).search((ROOT / page).read_text())
        assert found, f"{page} has lost its {name} markers"
        assert found[2] == make(), f"{page}: run `python -m tests.test_docs`"


def test_the_fleet_file_in_architecture_is_one_the_router_takes() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    example = re.search(r"<!-- fleet:begin -->\n```json\n(.*?)```", text, re.DOTALL)
    assert example
    snapshot = wire.decode(example[1], wire.FleetSnapshot)
    assert [e.role for e in snapshot.deployments[0].engines] == ["prefill", "decode"]
    assert snapshot.keys[0].digest


def test_the_readme_tells_every_field_of_routing_with_its_default() -> None:
    text = (ROOT / "README.md").read_text()
    table = text[text.index("### Routing") : text.index("### Keys")]
    told = dict(re.findall(r"^\| `(\w+)` \| `?([^|`]+?)`? \|", table, re.MULTILINE))
    policy = wire.RoutingPolicy()
    real = {field: getattr(policy, field) for field in policy.__struct_fields__}
    assert told == {
        field: "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
        for field, value in real.items()
    }


def test_every_reason_for_a_lower_state_is_told() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    section = text[text.index("## Where KV lies") : text.index("## Several processes")]
    reasons = [*Knowledge, *Trouble, *Bound, *Tokenization, evidence.MISCOUNT, evidence.RANKS, "kv_events_disabled"]
    known = (Knowledge.COMPLETE, Tokenization.SAME)
    assert not [str(reason) for reason in reasons if reason not in known and f"`{reason}`" not in section]
    assert set(REASONS) == {str(reason) for reason in reasons if reason not in known}, "what pages say"


def test_every_reason_leads_to_the_state_that_is_told() -> None:
    """`tests/frontend_api/test_evidence.py` holds the code to the same."""
    told = dict(re.findall(r"`(\w[\w-]+)`(?=[^|\n]*\| ([a-z]+))", (ROOT / "ARCHITECTURE.md").read_text()))
    for reason in {*Knowledge, *Bound, evidence.RANKS} - {Knowledge.COMPLETE}:
        assert told[reason] == "approximate", reason
    for reason in (*Trouble, Tokenization.MISMATCH, evidence.MISCOUNT):
        assert told[reason] == "degraded", reason


def test_every_module_that_architecture_names_is_there() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    rooms = [path.name for path in (ROOT / "frontend_api").iterdir() if path.is_dir()]
    named = re.findall(rf"`((?:{'|'.join(rooms)})/\w*)`", text)
    assert named
    missing = [
        n
        for n in named
        if not (ROOT / "frontend_api" / n).is_dir() and not (ROOT / "frontend_api" / f"{n}.py").is_file()
    ]
    assert not missing


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "ARCHITECTURE.md").read_text().lower()
    section = text[text.index("## dependencies") : text.index("## decisions")]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    missing = [name for requirement in wanted if (name := re.split(r"[\[=]", requirement.lower())[0]) not in section]
    assert not missing


def test_every_make_target_is_explained_in_the_readme() -> None:
    targets = re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    readme = (ROOT / "README.md").read_text()
    assert {"up", "test", "check", "bench", "soak", "clean", "help"} <= set(targets)
    assert not [target for target in targets if f"make {target}" not in readme]


def test_readme_links_lead_somewhere() -> None:
    for page in ("README.md", "ARCHITECTURE.md"):
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / page).read_text()):
            assert (ROOT / link).exists(), f"{page}: {link}"


if __name__ == "__main__":
    for (page, name), make in PARTS.items():
        path = ROOT / page
        path.write_text(
            _pattern(name).sub(lambda m, make=make: m[1] + make() + "\n" + m[3].lstrip("\n"), path.read_text())
        )
