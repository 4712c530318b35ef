"""Settings of all programs: each variable once, typed, with its help line. README's table is held to this by a test.

A secret may also be given as a file: `NAME_FILE`. Every value either works in its one form (`addresses`) or is refused at
start, in one sentence that names the variable and shows no secret.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct, inspect

from controlplane.fleet import addresses
from controlplane.fleet.errors import InvalidInput
from controlplane.fleet.wire import checked_node_name

T = TypeVar("T")
MOST_BYTES = 1 << 16
"""Of a value, also of one in a file."""

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
    kv_index_blocks: Annotated[int, Meta(ge=1_000, le=1 << 40)] = 4_000_000
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
    engine_ports: str = "21000-24999"
    engine_user: str = ""
    engine_cpus: Annotated[int, Meta(ge=0, le=4096)] = 0
    hf_token: str = ""
    url: str = "http://127.0.0.1:8000"
    api_key: str = ""
    key: str = ""
    compiled: Literal["auto", "never", "always"] = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def home_path(self) -> Path:
        """Raises `InvalidInput` naming the variable."""
        return _named("TANDEM_HOME", _folder, self.home)

    def made_home(self) -> Path:
        """The state folder, made if it is missing, for its user alone. Raises `InvalidInput` naming the variable."""
        path = self.home_path()
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            if path.stat().st_uid == os.geteuid():  # a volume may be somebody else's, and be written as a group's
                path.chmod(0o700)
            tempfile.TemporaryFile(dir=path).close()
        except OSError as error:
            raise InvalidInput(
                f"TANDEM_HOME: {path} cannot be used: {error.strerror}. Make it a folder of this user with room on its disk, or "
                "set TANDEM_HOME to another one.",
                field="TANDEM_HOME",
            ) from None
        return path

    def cache_path(self) -> Path:
        """Runtimes and models, shared by all checkouts of this user. Raises `InvalidInput` naming the variable."""
        if self.cache:
            return _named("TANDEM_CACHE", _folder, self.cache)
        base = os.environ.get("XDG_CACHE_HOME", "")
        if not base.startswith("/"):
            try:
                base = str(Path.home() / ".cache")
            except RuntimeError:
                raise InvalidInput(
                    "TANDEM_CACHE: this user has no home folder for engine runtimes and models; set it to a folder for them",
                    field="TANDEM_CACHE",
                ) from None
        return _named("TANDEM_CACHE", _folder, f"{base}/tandem")

    def openai_url(self, reached: str) -> str:
        """Base URL of the OpenAI endpoint, as programs elsewhere reach it. `reached`: host (with port) by which whoever asks
        reached the control plane; it counts where the router listens on every address.

        Behind TANDEM_PUBLIC_URL the proxy serves /v1 too, unless that URL names the web server's own port.
        """
        public = urlsplit(self.public_url or f"http://{reached}")
        if self.public_url and public.port != self.web_port:
            return f"{self.public_url}/v1"
        everywhere = self.public_url or self.bind in ("0.0.0.0", "::")
        host = (public.hostname or "127.0.0.1") if everywhere else self.bind
        return f"http://{addresses.bracketed(host)}:{self.openai_port}/v1"

    def engine_port_range(self) -> tuple[int, int]:
        low, _, high = self.engine_ports.partition("-")
        return int(low), int(high)


def _folder(text: str) -> Path:
    """An absolute path where a folder is or can be."""
    try:
        path = Path(text).expanduser().resolve()
        there = next(one for one in (path, *path.parents) if one.exists())
        usable = there.is_dir()
    except RuntimeError:
        raise InvalidInput(
            f"{text:.200} begins with ~, and that user has no home folder; write an absolute path"
        ) from None
    except OSError as error:
        raise InvalidInput(f"{text:.200} cannot be used: {error.strerror}; write the path of another folder") from None
    if not usable:
        raise InvalidInput(f"{text:.200}: {there} is a file; write the path of a folder")
    return path


def _folder_text(text: str) -> str:
    _folder(text)
    return text


def _node_name(text: str) -> str:
    try:
        return checked_node_name(text)
    except InvalidInput as error:
        raise InvalidInput(error.message.removeprefix("name: ")) from None


def _user(text: str) -> str:
    """The name or number of a user, whether this machine has it or not."""
    if text.isascii() and text.isdecimal() and len(text) < 11 and 0 < int(text) < 2**32 - 1:
        return str(int(text))
    if text == "root" or not re.fullmatch(r"[a-z_][a-z0-9_.-]{0,31}", text, re.IGNORECASE | re.ASCII):
        raise InvalidInput("write the name or number of a user that is not root")
    return text


def _switch(text: str) -> str:
    if text.lower() not in _BOOLEANS:
        raise InvalidInput("write 1 or 0")
    return _BOOLEANS[text.lower()]


_BOOLEANS = {"0": "0", "false": "0", "no": "0", "off": "0", "1": "1", "true": "1", "yes": "1", "on": "1"}


class Variable(NamedTuple):
    name: str
    field: str
    help: str
    secret: bool = False
    check: Callable[[str], str] | None = None
    """Gives a value's one form; raises `InvalidInput` with a sentence."""


VARIABLES = (
    Variable("TANDEM_HOME", "home", "State folder: database, secrets, logs, engine records.", check=_folder_text),
    Variable(
        "TANDEM_CACHE",
        "cache",
        "Engine runtimes, models and the compiled router; default: `tandem` in the user's cache folder.",
        check=_folder_text,
    ),
    Variable(
        "TANDEM_BIND", "bind", "Address that the web server and the router listen on.", check=addresses.ip_address
    ),
    Variable("TANDEM_WEB_PORT", "web_port", "Port of the dashboard and REST API."),
    Variable("TANDEM_OPENAI_PORT", "openai_port", "Port of the OpenAI-compatible endpoint."),
    Variable(
        "TANDEM_CORS_ORIGINS",
        "cors_origins",
        "Web pages that may use the OpenAI-compatible endpoint: `*`, `none`, or origins as https://chat.example.com, comma "
        "separated.",
        check=addresses.origins,
    ),
    Variable("TANDEM_REDIS_PORT", "redis_port", "Port of the embedded Redis; 0 chooses one and remembers it."),
    Variable("TANDEM_ROUTERS", "routers", "Router processes that share the OpenAI port."),
    Variable(
        "TANDEM_KV_INDEX_BLOCKS",
        "kv_index_blocks",
        "KV blocks, counted once per engine, that a router process remembers of one deployment: 40 to 130 bytes each.",
    ),
    Variable("RUNTIME", "runtime", "Engine runtime of this machine's node and of the demo: auto, sim, cpu or gpu."),
    Variable(
        "KEEP_ENGINES",
        "keep_engines",
        "1: engines keep running when `make up` stops, and the next one adopts them.",
        check=_switch,
    ),
    Variable(
        "REDIS_URL", "redis_url", "Redis or Valkey to use instead of the embedded one.", True, check=addresses.redis_url
    ),
    Variable(
        "DATABASE_URL",
        "database_url",
        "PostgreSQL to use instead of SQLite in the state folder.",
        True,
        check=addresses.database_url,
    ),
    Variable(
        "TANDEM_SECRET_KEY", "secret_key", "Django's signing key; default: generated into the state folder.", True
    ),
    Variable(
        "TANDEM_ALLOWED_HOSTS",
        "allowed_hosts",
        "Host names the dashboard answers to, comma separated.",
        check=addresses.host_names,
    ),
    Variable(
        "TANDEM_PUBLIC_URL",
        "public_url",
        "The dashboard's URL behind a proxy; https turns secure cookies on.",
        check=addresses.web_url,
    ),
    Variable("TANDEM_NODE_NAME", "node_name", "This node's name; default: the host name.", check=_node_name),
    Variable(
        "TANDEM_NODE_ADDRESS",
        "node_address",
        "Private address that this node's engines listen on.",
        check=addresses.node_address,
    ),
    Variable(
        "TANDEM_JOIN_TOKEN",
        "join_token",
        "One-time token for `python -m workers --join URL`.",
        True,
        check=addresses.key,
    ),
    Variable("TANDEM_ENGINE_PORTS", "engine_ports", "Ports for engines: LOW-HIGH.", check=addresses.port_range),
    Variable(
        "TANDEM_ENGINE_USER",
        "engine_user",
        "User (name or number) that an agent of root runs its engines as; default: the agent's own.",
        check=_user,
    ),
    Variable("TANDEM_ENGINE_CPUS", "engine_cpus", "Threads of one CPU engine; 0: chosen from the cores."),
    Variable(
        "HF_TOKEN",
        "hf_token",
        "Access token for models of a hub; handed on by environment only.",
        True,
        check=addresses.key,
    ),
    Variable("TANDEM_URL", "url", "Control plane that the `tandem` command talks to.", check=addresses.web_url),
    Variable("TANDEM_API_KEY", "api_key", "Manage key of the `tandem` command.", True, check=addresses.key),
    Variable("TANDEM_KEY", "key", "Inference key of `tandem bench`.", True, check=addresses.key),
    Variable(
        "TANDEM_COMPILED",
        "compiled",
        "Whether the router runs compiled: auto (where `python -m frontend_api.build` did its work), never or always.",
    ),
    Variable("TANDEM_LOG_LEVEL", "log_level", "debug, info, warning or error."),
)


def load(environ: Mapping[str, str] | None = None) -> Config:
    """The settings as this environment gives them.

    Raises `InvalidInput` naming the variable and what it takes.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, str] = {}
    for variable in VARIABLES:
        text = environ.get(variable.name, "")
        if variable.secret and not text and (path := environ.get(variable.name + "_FILE")):
            text = _named(variable.name + "_FILE", secret_file, path)
        if text:
            values[variable.field] = _named(
                variable.name, variable.check or str, _named(variable.name, addresses.visible, text)
            )
    try:
        return msgspec.convert(values, Config, strict=False)
    except msgspec.ValidationError as error:
        field = str(error).partition(" - at `$.")[2].rstrip("`")
        variable = next(v for v in VARIABLES if v.field == field)
        shown = "" if variable.secret else f", not {values[field]!r:.60}"
        raise InvalidInput(f"{variable.name}: write {_takes(field)}{shown}", field=variable.name) from None


def _takes(field: str) -> str:
    """What a variable without a check of its own takes, in words."""
    kind = next(f.type for f in inspect.type_info(Config).fields if f.name == field)  # type: ignore[attr-defined]
    if isinstance(kind, inspect.LiteralType):
        *some, last = map(str, kind.values)
        return f"{', '.join(some)} or {last}"
    return f"a whole number from {kind.ge} to {kind.le}"


def _named(name: str, check: Callable[[str], T], text: str) -> T:
    try:
        return check(text)
    except InvalidInput as error:
        raise InvalidInput(f"{name}: {error.message}", field=name) from None


def secret_file(path: str) -> str:
    """The text of a secret's file, without space around it. Raises `InvalidInput`."""
    try:
        with open(addresses.visible(path), "rb") as file:
            text = file.read(MOST_BYTES + 1).decode().strip()
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"{path}: it is not UTF-8 text") from None
    if not text:
        raise InvalidInput(f"{path} is empty; write the value into it, or unset the variable")
    return text
