"""The model store with the real runtime: a model out of a Python package, and one from a hub (on loopback)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from controlplane.fleet.errors import ModelUnavailable
from tests.real.hub import FILES, Hub
from workers import models
from workers.runtimes import EngineRuntime


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield hub


@pytest.fixture
def fetch(runtime: EngineRuntime, tmp_path: Path) -> Callable[..., Path]:
    def fetch(model: str = "hub:org/name", token: str = "") -> Path:
        return models.ensure(
            model, runtime=runtime, cache=tmp_path, hf_token=token, progress=lambda sentence, fraction: None
        )

    return fetch


def test_the_packages_model_is_complete_and_plain(model_path: Path) -> None:
    config = json.loads((model_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "float32"
    assert "quantization_config" not in config
    assert (model_path / "model.safetensors").stat().st_size > 500_000_000
    assert "im_start" in (model_path / "chat_template.jinja").read_text()


def test_a_hubs_model_is_fetched_without_other_formats(hub: Hub, fetch: Callable[..., Path]) -> None:
    folder = fetch(token="hf_token-of-the-test")
    found = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert found == {"config.json", "model.safetensors", "tokenizer.json", ".complete"}
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert hub.tokens == {"Bearer hf_token-of-the-test"}
    log = folder.with_name(folder.name + ".log").read_text()
    assert "hf_token-of-the-test" not in log
    asked = len(hub.asked)
    assert fetch() == folder
    assert len(hub.asked) == asked


def test_without_a_token_none_is_sent(hub: Hub, fetch: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "of somebody else")
    fetch()
    assert hub.tokens == {""}


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (401, "GatedRepo", "gated: accept its terms .* HF_TOKEN"),
        (403, "GatedRepo", "gated: accept its terms .* HF_TOKEN"),
        (404, "RepoNotFound", "check the name, or set HF_TOKEN"),
        (401, "", "check the name, or set HF_TOKEN"),
        (404, "RevisionNotFound", "no revision main of org/name"),
        (503, "", "answered 503"),
    ],
)
def test_what_the_hub_refuses_is_said_with_its_remedy(
    hub: Hub, fetch: Callable[..., Path], status: int, code: str, said: str
) -> None:
    hub.refuse = (status, code)
    with pytest.raises(ModelUnavailable, match=said):
        fetch()


def test_a_broken_download_goes_on_where_it_stopped(hub: Hub, fetch: Callable[..., Path]) -> None:
    hub.break_after = 14_000_000  # the client keeps what it has in steps of 10 MB
    try:
        folder = fetch()
    except ModelUnavailable:
        folder = fetch()
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert any("model.safetensors bytes=" in line and "bytes=0-" not in line for line in hub.asked)


def test_without_a_network_the_remedy_is_named(fetch: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelUnavailable, match=r"HTTPS_PROXY.*/FOLDER"):
        fetch()
