"""Which programs `make up` runs, with which arguments and environment, and the supervisord configuration that holds them.

Pure. Secrets travel by `NAME_FILE` variables; none is in an argument vector or in the configuration.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from controlplane.fleet.addresses import bracketed, reachable
from controlplane.fleet.config import VARIABLES, Config
from controlplane.up.redis_server import EmbeddedRedis
from controlplane.up.state import StateFolder

ENGINE_STOP_SECONDS = 60
"""An agent first ends its engines."""
DRAIN_SECONDS = 30
"""How long the router lets running streams go on."""


class Program(NamedTuple):
    """One supervised process. Started in the order of the tuple that holds them, stopped in the order of `stops`."""

    name: str
    argv: tuple[str, ...]
    stops: int
    """Lower stops earlier."""
    listens: str = ""
    """For people."""
    stop_seconds: int = 15
    environment: Mapping[str, str] = {}

    @property
    def module(self) -> str:
        """The Python module it runs; empty for another binary."""
        return self.argv[2] if self.argv[1:2] == ("-m",) else ""


def programs(
    config: Config, state: StateFolder, python: str, redis: EmbeddedRedis | None, node_name: str
) -> tuple[Program, ...]:
    """All programs of this machine in starting order.

    They stop from the outside in: the router takes no new request and finishes the running ones, the agent ends the
    engines, then nothing is left to reconcile or to show.
    """
    web_address = f"{bracketed(config.bind)}:{config.web_port}"
    level = config.log_level
    no_hub = {"HF_TOKEN": "", "HF_TOKEN_FILE": ""}
    result = [
        Program(
            "web",
            (python, "-m", "controlplane.web"),
            stops=50,
            listens=f"http://{web_address}",
            environment=no_hub,
        ),
        Program(
            "controller",
            (
                python, "-m", "celery", "-A", "controlplane.celery", "worker", "--queues", "control", "--pool", "threads",
                "--concurrency", "2", "--hostname", f"controller@{node_name}", "--without-gossip", "--without-mingle",
                "--without-heartbeat", "--loglevel", level,
            ),
            stops=40,
            listens="queue control",
            stop_seconds=20,
            environment=no_hub,
        ),
        # Not the worker's --beat: that is a child of the worker, which a killed worker leaves behind, beating for ever.
        # Not the default scheduler: its file survives crashes only sometimes, and one entry a second needs no memory.
        Program(
            "beat",
            (
                python, "-m", "celery", "-A", "controlplane.celery", "beat", "--scheduler", "celery.beat:Scheduler",
                "--pidfile", "", "--loglevel", "warning" if level == "info" else level,
            ),
            stops=30,
            listens="each second, to the controller",
            environment=no_hub,
        ),
        Program(
            "router",
            (python, "-m", "frontend_api", "--drain-seconds", str(DRAIN_SECONDS)),
            stops=10,
            listens=f"http://{bracketed(config.bind)}:{config.openai_port}/v1",
            stop_seconds=DRAIN_SECONDS + 5,
            environment=no_hub,
        ),
        Program(
            "agent",
            (python, "-m", "workers", "--join", f"http://{reachable(config.bind)}:{config.web_port}"),
            stops=20,
            listens=f"queue node.{node_name}",
            stop_seconds=ENGINE_STOP_SECONDS,
            # It reaches Redis as any node does: as the user that joining gave it.
            environment={
                "REDIS_URL_FILE": "", "DATABASE_URL_FILE": "", "TANDEM_SECRET_KEY_FILE": "",
                "TANDEM_JOIN_TOKEN_FILE": str(state.join_token),
            },
        ),
    ]  # fmt: skip
    if redis is not None:
        listens = ", ".join(f"{address}:{redis.port}" for address in redis.addresses)
        conf = state.redis / "redis.conf"
        result.insert(
            0, Program("redis", (str(redis.binary), str(conf)), stops=60, listens=listens, environment=no_hub)
        )
    return tuple(result)


def environment(
    config: Config, state: StateFolder, inherited: Mapping[str, str], files: Mapping[str, Path]
) -> dict[str, str]:
    """What all programs share: the caller's environment, absolute folders, and secrets by file alone.

    `files` maps the name of a secret variable to the file that holds it now. The hub's token is the exception: it stays in
    the environment, is never written down, and only the agent keeps it.
    """
    result = {name: value for name, value in inherited.items() if not name.startswith("SUPERVISOR_")}
    for variable in VARIABLES:
        if variable.secret and variable.name != "HF_TOKEN":
            result.pop(variable.name, None)
            result.pop(f"{variable.name}_FILE", None)
    result.pop("MAKEFLAGS", None)
    result.pop("MAKELEVEL", None)
    result |= {f"{name}_FILE": str(path) for name, path in files.items()}
    result |= {
        "TANDEM_HOME": str(state.home),
        "TANDEM_CACHE": str(config.cache_path()),
        "DJANGO_SETTINGS_MODULE": "controlplane.settings",
        "PYTHONUNBUFFERED": "1",
    }
    return result


def supervisord(programs: Iterable[Program], state: StateFolder, *, folder: Path, root: bool, open_files: int) -> str:
    """The configuration file. `folder` is where the programs run (the checkout); `open_files` the limit they are given."""
    sections = [
        f"""\
[supervisord]
nodaemon=true
silent=true
minfds={open_files}
directory={_escaped(str(folder))}
pidfile={_escaped(str(state.supervisor_pid))}
logfile={_escaped(str(state.logs / "supervisord.log"))}
logfile_maxbytes=2MB
logfile_backups=1
{"user=root" if root else ""}

[unix_http_server]
file={_escaped(str(state.supervisor_socket))}
chmod=0600

[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface
"""
    ]
    for program in programs:
        settings = ",".join(f'{name}="{_escaped(value)}"' for name, value in program.environment.items())
        # Supervisord stops the highest priority first. A process group is never signalled as one: engines are in sessions
        # of their own, and ending them is the agent's work.
        sections.append(
            f"""\
[program:{program.name}]
command={_escaped(shlex.join(program.argv))}
environment={settings}
priority={1000 - program.stops}
autostart=false
autorestart=true
startsecs=5
startretries=3
stopsignal=TERM
stopwaitsecs={program.stop_seconds}
stopasgroup=false
killasgroup=false
redirect_stderr=true
stdout_logfile={_escaped(str(state.logs / program.name))}.log
stdout_logfile_maxbytes=10MB
stdout_logfile_backups=3
"""
        )
    return "\n".join(sections)


def _escaped(text: str) -> str:
    """Supervisord expands %(name)s everywhere."""
    return text.replace("%", "%%")
