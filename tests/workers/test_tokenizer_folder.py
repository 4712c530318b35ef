"""A tokenizer as its engine has it, with a stand-in for the runtime's interpreter. `tests/real` asks the real one."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from controlplane.fleet import tokenizer_files
from controlplane.fleet.model import Runtime
from workers import tokenizer_folder
from workers.cache_folder import MARKER
from workers.runtimes import EngineRuntime
from workers.tokenizer_folder import Options, Tokenizer, read_files, read_options

FAKE = """#!/bin/sh
here=$(dirname "$0")
echo "$*" >> "$here/calls"
if [ -e "$here/fails" ]; then echo "tandem:error It is a tokenizer in Python."; exit 1; fi
echo '{"effective": 1}' > "$4/tokenizer.json"
echo '{"bos_token": "<s>", "chat_template": "old"}' > "$4/tokenizer_config.json"
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "additional_chat_templates").mkdir(parents=True)
    contents = {
        "tokenizer.json": "{}", "tokenizer_config.json": "{}", "special_tokens_map.json": "{}", "config.json": "{}",
        "chat_template.jinja": "its own", "additional_chat_templates/tool_use.jinja": "tools", "model.safetensors": "weights",
    }  # fmt: skip
    for name, content in contents.items():
        (folder / name).write_text(content)
    return folder


Ensure = Callable[..., Tokenizer]


@pytest.fixture
def ensure(tmp_path: Path) -> Ensure:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(FAKE)
    python.chmod(0o755)

    def ensure(model: Path, *arguments: str, kind: Runtime = Runtime.CPU, version: str = "1") -> Tokenizer:
        runtime = EngineRuntime(kind=kind, python=python, version=version)
        return tokenizer_folder.ensure(
            model, arguments, runtime=runtime, cache=tmp_path / "cache", progress=lambda sentence, done: None
        )

    return ensure


def test_what_is_copied_is_for_its_user_alone(model: Path, tmp_path: Path, ensure: Ensure) -> None:
    """A file that an option names may be so; what is made of it is never wider."""
    template = tmp_path / "mine.jinja"
    template.write_text("a secret prompt")
    template.chmod(0o600)
    before = os.umask(0o022)
    try:
        made = ensure(model, "--chat-template", str(template), "--chat-template-content-format", "string")
    finally:
        os.umask(before)
    assert (made.folder / "chat_template.jinja").read_text() == "a secret prompt"
    assert len(list(made.folder.rglob("*"))) > 4
    files = [path for path in (made.folder, *made.folder.rglob("*")) if path.name != MARKER]
    assert not [path for path in files if path.stat().st_mode & 0o077]


def calls(tmp_path: Path) -> list[str]:
    file = tmp_path / "bin" / "calls"
    return file.read_text().splitlines() if file.exists() else []


def test_what_the_loader_makes_of_it_counts_and_the_models_folder_stays(
    ensure: Ensure, model: Path, tmp_path: Path
) -> None:
    before = {path: path.read_bytes() for path in model.rglob("*") if path.is_file()}
    made = ensure(model)
    assert made.folder.parent == tmp_path / "cache" / "tokenizers"
    files = read_files(made.folder)
    assert json.loads(files["tokenizer.json"]) == {"effective": 1}
    assert files["chat_template.jinja"] == b"its own"
    assert set(files) == {
        "tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"
    }  # fmt: skip
    assert made.digest == tokenizer_files.digest(files)
    assert {path: path.read_bytes() for path in model.rglob("*") if path.is_file()} == before


def test_it_is_made_once_per_content(ensure: Ensure, model: Path, tmp_path: Path) -> None:
    first = ensure(model)
    assert ensure(model) == first
    (model / "model.safetensors").write_text("other weights")
    assert ensure(model) == first
    assert len(calls(tmp_path)) == 1
    changes: list[Callable[[], object]] = [
        lambda: (model / "chat_template.jinja").write_text("another"),
        lambda: (model / "tokenizer.json").write_text('{"x": 1}'),
        lambda: (model / "vocab.json").write_text("{}"),
    ]
    seen = {first.folder}
    for change in changes:
        change()
        seen.add(ensure(model).folder)
    seen.add(ensure(model, version="2").folder)
    assert len(seen) == 5


def test_a_chat_template_given_to_the_engine_replaces_all_others(ensure: Ensure, model: Path, tmp_path: Path) -> None:
    given = tmp_path / "given.jinja"
    given.write_text("given")
    files = read_files(ensure(model, "--chat-template", str(given)).folder)
    assert files["chat_template.jinja"] == b"given"
    assert not any(name.startswith("additional") for name in files)
    assert json.loads(files["tokenizer_config.json"]) == {"bos_token": "<s>"}
    given.write_text("given anew")
    assert read_files(ensure(model, f"--chat_template={given}").folder)["chat_template.jinja"] == b"given anew"
    assert read_files(ensure(model, "--chat-template", "{{ literal }}").folder)["chat_template.jinja"] == b"its own"


def test_how_the_template_is_used_is_told_beside_it(ensure: Ensure, model: Path, tmp_path: Path) -> None:
    kwargs = '{"enable_thinking": false}'
    made = ensure(model, "--default-chat-template-kwargs", kwargs, "--chat-template-content-format=string")
    told = json.loads(read_files(made.folder)["tandem.json"])
    assert told == {"content_format": "string", "chat_template_kwargs": {"enable_thinking": False}}
    assert "tandem.json" not in read_files(ensure(model, "--chat-template-content-format", "auto").folder)
    assert ensure(model, "--default-chat-template-kwargs", "{no json") == Tokenizer(model, "")


def test_another_tokenizer_given_to_the_engine_is_read(ensure: Ensure, model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text("{}")
    files = read_files(ensure(model, "--tokenizer", str(other), "--trust-remote-code").folder)
    assert set(files) == {"tokenizer.json", "tokenizer_config.json"}
    assert calls(tmp_path)[-1].split()[2:] == [str(other), calls(tmp_path)[-1].split()[3], "--trust-remote-code"]


def test_a_stand_in_reads_the_files_as_they_are(ensure: Ensure, model: Path, tmp_path: Path) -> None:
    made = ensure(model, kind=Runtime.SIM)
    assert read_files(made.folder) == read_files(model)
    assert calls(tmp_path) == []
    (model / "tokenizer.json").unlink()
    assert ensure(model, kind=Runtime.SIM).digest == "", "there is nothing to offer"


def test_where_no_loader_helps_the_models_folder_is_told_unproved(
    ensure: Ensure, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "bin" / "fails").touch()
    with caplog.at_level(logging.WARNING):
        assert ensure(model) == Tokenizer(model, "")
    assert "It is a tokenizer in Python." in caplog.text
    (tmp_path / "bin" / "fails").unlink()
    assert ensure(model).digest, "it is tried again"
    assert ensure(model, "--chat-template", "/nowhere/at/all.jinja") == Tokenizer(model, "")
    (model / "tekken.json").touch()
    assert ensure(model) == Tokenizer(model, "")


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ([], Options()),
        (["--chat-template", "/a", "--tokenizer=/b"], Options("/b", "/a")),
        (["--chat_template=/a", "--chat-template", "/c"], Options("", "/c")),
        (["--chat-template"], Options()),
        (["--trust-remote-code"], Options(trust_remote_code=True)),
        (["--trust-remote-code", "--no-trust-remote-code"], Options()),
        (["--tokenizer-mode", "slow", "--chat-template-content-format", "openai"], Options(content_format="openai")),
        (["--default-chat-template-kwargs={}", "--default-chat-template-kwargs.x", "1"], Options(template_kwargs="{}")),
    ],
)
def test_options(arguments: list[str], options: Options) -> None:
    assert read_options(arguments) == options
