"""A model's tokenizer as the engine will have it, in a small folder of its own: what routers read, here and on other machines.

The runtime's interpreter says what the engine's loader makes of the model's files, and the engine's own options (another
tokenizer, another chat template) are followed where they name files of this node. It lies in `<cache>/tokenizers/`, once per
content; nothing is ever written into a model's folder. Without it an engine starts all the same.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from controlplane.fleet import tokenizer_files
from controlplane.fleet.errors import Unavailable
from controlplane.fleet.model import Runtime
from workers.cache_folder import Progress, Site, StepFailed, clean_environment, make_once
from workers.engine_user import EngineUser, read_made, temporary_folder
from workers.record import write_private
from workers.runtimes import EngineRuntime

log = logging.getLogger(__name__)

_SCRIPT = Path(__file__).parent / "model_store" / "effective_tokenizer.py"
_SOURCES = (
    *tokenizer_files.NAMES,
    f"{tokenizer_files.TEMPLATES}/*.jinja",
    *("vocab.*", "merges.txt", "added_tokens.json", "*.model", "*.tiktoken", "*.py"),
)
"""Everything that decides what a loader makes of a model's folder; Python files where the user trusts the model's code."""
_OTHERS = ("tekken.json", "tokenizer.model.v*")
"""Of models whose prompts vLLM makes by code of its own."""
_BYTES = 256 << 20


class Options(NamedTuple):
    """The engine's options that change its tokens."""

    tokenizer: str = ""
    chat_template: str = ""
    content_format: str = ""
    template_kwargs: str = ""
    """A JSON object."""
    trust_remote_code: bool = False


class Tokenizer(NamedTuple):
    folder: Path
    digest: str
    """Of its files; empty: they are not known to be the engine's, and go to no other machine."""


_VALUED = ("--tokenizer", "--chat-template", "--chat-template-content-format", "--default-chat-template-kwargs")


def read_options(arguments: Sequence[str]) -> Options:
    """Of an engine's further arguments; the last of two equal ones counts, as in vLLM."""
    values: dict[str, str] = {}
    for at, argument in enumerate(arguments):
        name, given, value = argument.partition("=")
        name = name.replace("_", "-")
        if name in _VALUED:
            values[name] = value if given else "".join(arguments[at + 1 : at + 2])
        elif name in ("--trust-remote-code", "--no-trust-remote-code"):
            values["--trust-remote-code"] = "yes" if name == "--trust-remote-code" else ""
    tokenizer, template, content_format, template_kwargs = (values.get(name, "") for name in _VALUED)
    return Options(
        tokenizer, template, content_format, template_kwargs, trust_remote_code=bool(values.get("--trust-remote-code"))
    )


def ensure(
    model: Path,
    arguments: Sequence[str],
    *,
    runtime: EngineRuntime,
    cache: Path,
    progress: Progress,
    user: EngineUser | None = None,
) -> Tokenizer:
    """The tokenizer of the engine that loads this model with these arguments. Where its files cannot be had, it is the
    model's folder, unproved; what `progress` raises ends the work. `user`: whom the runtime's
    interpreter runs as, as it may run the model's code."""
    options = read_options(arguments)
    source = Path(options.tokenizer) if options.tokenizer.startswith("/") else model
    try:
        if any(any(source.glob(pattern)) for pattern in _OTHERS):
            return Tokenizer(source, "")
        template = _template(options)
        inputs = _digest_of_inputs(source, template, options, runtime)
        folder = cache / "tokenizers" / inputs
        make_once(
            folder,
            lambda site: _build(site, source, template, options, runtime, user),
            what=f"the tokenizer of {model.name}",
            progress=progress,
            needs_bytes=_BYTES,
        )
        files = read_files(folder)
        return Tokenizer(folder, tokenizer_files.digest(files) if "tokenizer.json" in files else "")
    except (StepFailed, Unavailable, OSError, ValueError) as error:
        said = next((line for line in getattr(error, "lines", ()) if line.startswith("tandem:error ")), str(error))
        log.warning("Routers read the tokenizer of %s as it lies there: %s", source, said.removeprefix("tandem:error "))
        return Tokenizer(source, "")


def read_files(folder: Path) -> dict[str, bytes]:
    """A folder's files by their names. Raises `OSError`."""
    paths = [folder / name for name in tokenizer_files.NAMES]
    paths += folder.glob(f"{tokenizer_files.TEMPLATES}/*.jinja")
    found = {str(path.relative_to(folder)): path for path in paths if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if tokenizer_files.belongs(name)}


def _template(options: Options) -> str | None:
    """The chat template that the options give. Raises `OSError`. A template that is no file of an absolute path is left to
    the router's own check."""
    return Path(options.chat_template).read_text() if options.chat_template.startswith("/") else None


def _digest_of_inputs(source: Path, template: str | None, options: Options, runtime: EngineRuntime) -> str:
    whole = hashlib.sha256(repr((runtime.kind, runtime.version, template, options)).encode())
    whole.update(_SCRIPT.read_bytes())
    for path in sorted({path for pattern in _SOURCES for path in source.glob(pattern)}):
        whole.update(f"{path.name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()[:24]


def _build(
    site: Site,
    source: Path,
    template: str | None,
    options: Options,
    runtime: EngineRuntime,
    user: EngineUser | None,
) -> None:
    site.folder.chmod(0o700)  # what is copied may be for this user alone
    for name, content in read_files(source).items():
        (site.folder / name).parent.mkdir(exist_ok=True)
        write_private(site.folder / name, content)
    if runtime.kind is not Runtime.SIM:
        site.report(f"Reading the tokenizer of {source.name}.")
        _load(site, source, options, runtime, user)
        (site.folder / "special_tokens_map.json").unlink(missing_ok=True)  # the script has put them in one place
    if template is not None:
        _use(template, site.folder)
    told: dict[str, object] = {}
    if options.content_format in ("openai", "string"):
        told["content_format"] = options.content_format
    if options.template_kwargs:
        told["chat_template_kwargs"] = json.loads(options.template_kwargs)
    if told:
        write_private(site.folder / tokenizer_files.OPTIONS, json.dumps(told, ensure_ascii=False).encode())
    for path in site.folder.rglob("*"):  # also what the script has written
        path.chmod(0o700 if path.is_dir() else 0o600)


def _load(site: Site, source: Path, options: Options, runtime: EngineRuntime, user: EngineUser | None) -> None:
    """Lets the engine's loader write what it makes of the files."""
    made = Path(temporary_folder(user)) if user else site.folder
    argv = [str(runtime.python), "-I", str(_SCRIPT), str(source), str(made)]
    argv += ["--trust-remote-code"] if options.trust_remote_code else []
    env = user.environment(clean_environment()) if user else clean_environment()
    env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        site.run(argv, env=env, cwd=made, user=user)
        if user:
            for name in ("tokenizer.json", "tokenizer_config.json"):
                write_private(site.folder / name, read_made(made / name, user, most=_BYTES))
    finally:
        if user:
            shutil.rmtree(made, ignore_errors=True)


def _use(template: str, folder: Path) -> None:
    """A template given to the engine counts instead of all that come with the model."""
    shutil.rmtree(folder / tokenizer_files.TEMPLATES, ignore_errors=True)
    write_private(folder / "chat_template.jinja", template.encode())
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_bytes()) if path.is_file() else {}
    config.pop("chat_template", None)
    write_private(path, json.dumps(config, ensure_ascii=False).encode())
