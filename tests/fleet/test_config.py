"""Settings: each variable once, nonsense refused by name, secrets also from files and never shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.fleet import addresses, config
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
        ("TANDEM_HOME", "~nobody-of-this-name/x"),
        ("TANDEM_HOME", "/dev/null"),
        ("TANDEM_HOME", "/dev/null/x"),
        ("TANDEM_HOME", "x" * 300),
        ("TANDEM_CACHE", "/dev/null"),
        ("TANDEM_CACHE", "a\udcffb"),
        ("TANDEM_BIND", "tandem.example.com"),
        ("TANDEM_NODE_ADDRESS", "0.0.0.0"),
        ("TANDEM_NODE_ADDRESS", "::1"),
        ("TANDEM_NODE_NAME", "Node_1"),
        ("TANDEM_PUBLIC_URL", "https://example.com/tandem"),
        ("TANDEM_URL", "localhost:8000"),
        ("TANDEM_ALLOWED_HOSTS", "https://example.com"),
        ("TANDEM_ENGINE_PORTS", "9-5"),
        ("TANDEM_ENGINE_USER", "root"),
        ("TANDEM_ENGINE_USER", "0"),
        ("TANDEM_ENGINE_USER", "a b"),
        ("TANDEM_ENGINE_USER", "-1"),
        ("TANDEM_ENGINE_USER", str(2**32 - 1)),
        ("TANDEM_ENGINE_CPUS", "-1"),
        ("TANDEM_ENGINE_CPUS", "9" * 400),
        ("TANDEM_API_KEY", "tdm-a b"),
        ("TANDEM_KEY", "tdm-\u00e9"),
        ("TANDEM_JOIN_TOKEN", "a\nb"),
        ("HF_TOKEN", "hf_\x7f"),
        ("REDIS_URL", "localhost:6379"),
        ("DATABASE_URL", "mysql://h/db"),
    ],
)
def test_nonsense_is_refused_by_the_variables_name(name: str, value: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        config.load({name: value})
    assert caught.value.field == name
    assert str(caught.value).startswith(f"{name}: ")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("variable", [v for v in VARIABLES if v.secret], ids=lambda v: v.name)
def test_a_secret_may_be_a_file_and_the_variable_itself_wins(variable: config.Variable, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    in_file, direct = {
        "REDIS_URL": ("redis://from-file/0", "redis://direct/0"),
        "DATABASE_URL": ("postgres://from-file/db", "postgres://direct/db"),
    }.get(variable.name, ("from-file", "direct"))
    path.write_text(in_file + "\n")
    assert getattr(config.load({variable.name + "_FILE": str(path)}), variable.field) == in_file
    both = {variable.name: direct, variable.name + "_FILE": str(path)}
    assert getattr(config.load(both), variable.field) == direct


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file or directory"),
        ("folder", "Is a directory"),
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"\xff\xfe", "not UTF-8 text"),
        (b"hf_hush hush", "copy it again"),
    ],
)
def test_a_secret_file_that_cannot_be_used_is_named(content: bytes | str | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "it"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        path.mkdir()
    with pytest.raises(InvalidInput) as refused:
        config.load({"HF_TOKEN_FILE": str(path)})
    assert refused.value.message.startswith("HF_TOKEN")
    assert says in refused.value.message
    assert "hush" not in refused.value.message


def test_the_state_folder_is_made_and_narrowed(tmp_path: Path) -> None:
    for home in (tmp_path / "new" / "one", tmp_path / "wide"):
        (tmp_path / "wide").mkdir(mode=0o755, exist_ok=True)
        assert Config(home=str(home)).made_home() == home
        assert home.stat().st_mode & 0o777 == 0o700
        assert not list(home.iterdir())
    with pytest.raises(InvalidInput, match="TANDEM_HOME: /proc/x cannot be used"):
        Config(home="/proc/x").made_home()


@given(
    name=st.sampled_from([v.name for v in VARIABLES] + [v.name + "_FILE" for v in VARIABLES if v.secret]),
    text=st.text(st.characters(exclude_characters="\0"), max_size=60),
)
def test_any_text_in_any_variable_is_a_value_or_one_sentence(name: str, text: str) -> None:
    try:
        read = config.load({name: text})
    except InvalidInput as error:
        refused = error
    else:
        read.home_path(), read.cache_path(), read.engine_port_range()
        return
    assert refused.message.startswith(name.removesuffix("_FILE"))
    assert len(refused.message.splitlines()) == 1
    refused.message.encode()
    assert addresses.visible(refused.message)
    secret = next(v.secret for v in VARIABLES if v.name == name.removesuffix("_FILE")) and not name.endswith("_FILE")
    assert not (secret and len(text) > 8 and text in refused.message)


def test_only_secrets_have_a_file_form(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("sim")
    assert config.load({"RUNTIME_FILE": str(path)}).runtime == "auto"


def test_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Config().cache_path() == tmp_path / "tandem"
    assert Config(cache=str(tmp_path / "c")).cache_path() == tmp_path / "c"
    assert Config(home=str(tmp_path / "h")).home_path() == tmp_path / "h"
