"""Settings: each variable once, nonsense refused by name, secrets also from files and never shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.fleet import config
from controlplane.fleet.config import VARIABLES, Config
from controlplane.fleet.errors import InvalidInput


def test_every_field_has_one_variable_and_a_help_line() -> None:
    assert sorted(v.field for v in VARIABLES) == sorted(Config.__struct_fields__)
    assert len({v.name for v in VARIABLES}) == len(VARIABLES)
    assert all(v.help.endswith(".") for v in VARIABLES)


def test_nothing_set_is_the_defaults() -> None:
    assert config.load({}) == Config()
    assert config.load({v.name: "" for v in VARIABLES}) == Config()


def test_values_are_typed() -> None:
    read = config.load({"TANDEM_WEB_PORT": "81", "KEEP_ENGINES": "yes", "RUNTIME": "sim", "TANDEM_ENGINE_PORTS": "5-9"})
    assert (read.web_port, read.keep_engines, read.runtime, read.engine_port_range()) == (81, True, "sim", (5, 9))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TANDEM_WEB_PORT", "eighty"),
        ("TANDEM_WEB_PORT", "0"),
        ("TANDEM_WEB_PORT", "65536"),
        ("RUNTIME", "tpu"),
        ("KEEP_ENGINES", "maybe"),
        ("TANDEM_ENGINE_PORTS", "5000"),
        ("TANDEM_ROUTERS", "0"),
        ("TANDEM_KV_INDEX_BLOCKS", "999"),
        ("TANDEM_LOG_LEVEL", "loud"),
    ],
)
def test_nonsense_is_refused_by_the_variables_name(name: str, value: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        config.load({name: value})
    assert caught.value.field == name
    assert str(caught.value).startswith(name)


@pytest.mark.parametrize("variable", [v for v in VARIABLES if v.secret], ids=lambda v: v.name)
def test_a_secret_may_be_a_file_and_the_variable_itself_wins(variable: config.Variable, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("from-file\n")
    assert getattr(config.load({variable.name + "_FILE": str(path)}), variable.field) == "from-file"
    both = {variable.name: "direct", variable.name + "_FILE": str(path)}
    assert getattr(config.load(both), variable.field) == "direct"


def test_a_secret_file_that_is_missing_names_variable_and_path(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"HF_TOKEN_FILE: .*nowhere"):
        config.load({"HF_TOKEN_FILE": str(tmp_path / "nowhere")})


def test_only_secrets_have_a_file_form(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("sim")
    assert config.load({"RUNTIME_FILE": str(path)}).runtime == "auto"


def test_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Config().cache_path() == tmp_path / "tandem"
    assert Config(cache=str(tmp_path / "c")).cache_path() == tmp_path / "c"
    assert Config(home=str(tmp_path / "h")).home_path() == tmp_path / "h"
