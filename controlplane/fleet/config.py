"""Settings of all programs: each variable once, typed, with its help line. README's table is held to this by a test.

A secret may also be given as a file: `NAME_FILE`. Nonsense is refused at start, naming the variable.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from controlplane.fleet.errors import InvalidInput

Port = Annotated[int, Meta(ge=1, le=65535)]
PortOrAuto = Annotated[int, Meta(ge=0, le=65535)]


class Config(Struct, frozen=True, kw_only=True):
    """One value per environment variable; `VARIABLES` maps the names."""

    home: str = ".tandem"
    cache: str = ""
    bind: str = "127.0.0.1"
    web_port: Port = 8000
    openai_port: Port = 8080
    cors_origins: str = "*"
    redis_port: PortOrAuto = 0
    routers: Annotated[int, Meta(ge=1, le=64)] = 1
    kv_index_blocks: Annotated[int, Meta(ge=1_000)] = 4_000_000
    runtime: Literal["auto", "sim", "cpu", "gpu"] = "auto"
    keep_engines: bool = False
    redis_url: str = ""
    database_url: str = ""
    secret_key: str = ""
    allowed_hosts: str = ""
    public_url: str = ""
    node_name: str = ""
    node_address: str = ""
    join_token: str = ""
    engine_ports: Annotated[str, Meta(pattern=r"^\d+-\d+$")] = "21000-24999"
    engine_cpus: Annotated[int, Meta(ge=0)] = 0
    hf_token: str = ""
    url: str = "http://127.0.0.1:8000"
    api_key: str = ""
    key: str = ""
    compiled: Literal["auto", "never", "always"] = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def home_path(self) -> Path:
        return Path(self.home).expanduser().resolve()

    def cache_path(self) -> Path:
        """Runtimes and models, shared by all checkouts of this user."""
        if self.cache:
            return Path(self.cache).expanduser().resolve()
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return (Path(base) / "tandem").resolve()

    def engine_port_range(self) -> tuple[int, int]:
        low, _, high = self.engine_ports.partition("-")
        return int(low), int(high)


class Variable(NamedTuple):
    name: str
    field: str
    help: str
    secret: bool = False


VARIABLES = (
    Variable("TANDEM_HOME", "home", "State folder: database, secrets, logs, engine records."),
    Variable(
        "TANDEM_CACHE",
        "cache",
        "Engine runtimes, models and the compiled router; default: `tandem` in the user's cache folder.",
    ),
    Variable("TANDEM_BIND", "bind", "Address that the web server and the router listen on."),
    Variable("TANDEM_WEB_PORT", "web_port", "Port of the dashboard and REST API."),
    Variable("TANDEM_OPENAI_PORT", "openai_port", "Port of the OpenAI-compatible endpoint."),
    Variable(
        "TANDEM_CORS_ORIGINS",
        "cors_origins",
        "Web pages that may use the OpenAI-compatible endpoint: `*`, `none`, or origins as https://chat.example.com, comma "
        "separated.",
    ),
    Variable("TANDEM_REDIS_PORT", "redis_port", "Port of the embedded Redis; 0 chooses one and remembers it."),
    Variable("TANDEM_ROUTERS", "routers", "Router processes that share the OpenAI port."),
    Variable(
        "TANDEM_KV_INDEX_BLOCKS",
        "kv_index_blocks",
        "KV blocks, counted once per engine, that a router process remembers of one deployment: 40 to 130 bytes each.",
    ),
    Variable("RUNTIME", "runtime", "Engine runtime of this machine's node and of the demo: auto, sim, cpu or gpu."),
    Variable("KEEP_ENGINES", "keep_engines", "1: engines go on when `make up` stops, and are adopted by the next."),
    Variable("REDIS_URL", "redis_url", "Redis or Valkey to use instead of the embedded one.", True),
    Variable("DATABASE_URL", "database_url", "PostgreSQL to use instead of SQLite.", True),
    Variable(
        "TANDEM_SECRET_KEY", "secret_key", "Django's signing key; default: generated into the state folder.", True
    ),
    Variable("TANDEM_ALLOWED_HOSTS", "allowed_hosts", "Host names the dashboard answers to, comma separated."),
    Variable("TANDEM_PUBLIC_URL", "public_url", "The dashboard's https URL behind a proxy; turns secure cookies on."),
    Variable("TANDEM_NODE_NAME", "node_name", "This node's name; default: the host name."),
    Variable("TANDEM_NODE_ADDRESS", "node_address", "Private address that this node's engines listen on."),
    Variable("TANDEM_JOIN_TOKEN", "join_token", "One-time token for `python -m workers --join URL`.", True),
    Variable("TANDEM_ENGINE_PORTS", "engine_ports", "Port range from which engines take theirs."),
    Variable("TANDEM_ENGINE_CPUS", "engine_cpus", "Threads of one CPU engine; 0: chosen from the cores."),
    Variable("HF_TOKEN", "hf_token", "Access token for models of a hub; handed on by environment only.", True),
    Variable("TANDEM_URL", "url", "Control plane that the `tandem` command talks to."),
    Variable("TANDEM_API_KEY", "api_key", "Manage key of the `tandem` command.", True),
    Variable("TANDEM_KEY", "key", "Inference key of `tandem bench`.", True),
    Variable(
        "TANDEM_COMPILED",
        "compiled",
        "Whether the router runs compiled: auto (where `python -m frontend_api.build` did its work), never or always.",
    ),
    Variable("TANDEM_LOG_LEVEL", "log_level", "debug, info, warning or error."),
)

_BOOLEANS = {"": False, "0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}


def load(environ: Mapping[str, str] | None = None) -> Config:
    """The settings as this environment gives them.

    Raises `InvalidInput` naming the variable and what it takes.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, object] = {}
    for variable in VARIABLES:
        text = environ.get(variable.name)
        if variable.secret and not text and (path := environ.get(variable.name + "_FILE")):
            try:
                text = Path(path).read_text().strip()
            except OSError as error:
                raise InvalidInput(f"{variable.name}_FILE: {path}: {error.strerror}", field=variable.name) from None
        if text is None or (text == "" and variable.field != "keep_engines"):
            continue
        if variable.field == "keep_engines":
            if text.lower() not in _BOOLEANS:
                raise InvalidInput(f"{variable.name}: write 1 or 0", field=variable.name)
            values[variable.field] = _BOOLEANS[text.lower()]
            continue
        values[variable.field] = text
    try:
        return msgspec.convert(values, Config, strict=False)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        field = path.rstrip("`")
        variable = next(v for v in VARIABLES if v.field == field)
        shown = "" if variable.secret else f" (it is {values.get(field)!r})"
        raise InvalidInput(f"{variable.name}: {message}{shown}. {variable.help}", field=variable.name) from None
