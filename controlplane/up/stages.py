"""The stages of `make up`, one after the other, and the way back down.

Everything waits in one thread. `Stop`, raised by a signal handler wherever it waits, leads to `Up.stop`.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import msgspec
import redis

from controlplane.fleet.addresses import reachable
from controlplane.fleet.config import Config
from controlplane.fleet.errors import Conflict, Unavailable
from controlplane.fleet.this_node import this_node
from controlplane.up import preflight, redis_server
from controlplane.up.demo import NAME, QUESTION, Answer, Demo
from controlplane.up.first_start import Prepared
from controlplane.up.programs import Program, environment, programs, supervisord
from controlplane.up.screen import Line, Screen
from controlplane.up.state import StateFolder
from controlplane.up.supervisor import Supervisor, tail
from controlplane.up.watch import Watch

CHECKOUT = Path(__file__).resolve().parents[2]
START_SECONDS = 180.0
"""Within this a program must answer, or the start is given up."""
OPEN_FILES = 65_536


class Stop(BaseException):
    """Somebody asked for the end. Not an `Exception`: nothing on the way may take it for an error."""


class Up:
    def __init__(self, config: Config, screen: Screen) -> None:
        self.config = config
        self.screen = screen
        self.state = StateFolder(config.home_path())
        self.supervisor = Supervisor(self.state)
        self.programs: tuple[Program, ...] = ()
        self.environment: dict[str, str] = {}
        self.has_agent = False
        self.redis_url = config.redis_url
        self.web = f"http://{reachable(config.bind)}:{config.web_port}"
        self.openai = f"http://{reachable(config.bind)}:{config.openai_port}"

    def start(self) -> None:
        """From nothing to programs that answer. Raises `TandemError` with a sentence that says what to do."""
        self.look_around()
        self.configure()
        self.supervise()
        self.watch = Watch(self.supervisor, self.programs, self.screen, self.revive)
        self.start_redis()
        self.prepare_database()
        self._begin_all_but_agent()
        self.answering("web", f"{self.web}/api/v1/me")
        self.screen.stage("Dashboard", self.web)
        self.has_agent = True
        self.supervisor.begin("agent")  # now there is somebody to join
        self.answering("router", f"{self.openai}/health")
        self.screen.stage("Router", f"{self.openai}/v1")
        self.watch.look()

    def look_around(self) -> None:
        screen, config, state = self.screen, self.config, self.state
        screen.stage("Tandem", f"{version('tandem')}, Python {platform.python_version()}, state in {state.home}")
        state.prepare()
        state.lock()
        _refuse(preflight.machine(config))
        screen.working("Looking for what an earlier run left behind")
        if found := self.supervisor.sweep(programs(config, state, sys.executable, None, ""), engines_stay=True):
            screen.say(
                f"An earlier run had not stopped: ended its {', '.join(found)}. Its engines are adopted.", "yellow"
            )
        _refuse(preflight.ports(config, redis_server.listen_addresses(config.bind, ())))
        screen.stage(
            "Preflight", f"ports {config.web_port} and {config.openai_port} of {config.bind}, disk and memory are free"
        )

    def configure(self) -> None:
        """Decide on Redis and write what the programs will read."""
        config, state = self.config, self.state
        embedded = None
        if not config.redis_url:
            embedded = redis_server.choose(config, state)
            self.redis_url = embedded.url
            if embedded.moved_from:
                self.screen.say(
                    f"Redis moves to port {embedded.port}: {embedded.moved_from} is taken by "
                    f"{preflight.holder('127.0.0.1', embedded.moved_from)}. Nodes of other machines must join again.",
                    "yellow",
                )
            state.write(state.redis / "redis.conf", redis_server.configuration(embedded, state.redis))
            self._redis_name = f"{embedded.name} on 127.0.0.1:{embedded.port}"
        files = {"REDIS_URL": state.redis_url}
        state.write(state.redis_url, self.redis_url)
        if config.database_url:
            files["DATABASE_URL"] = state.database_url
            state.write(state.database_url, config.database_url)
        if path := os.environ.get("TANDEM_SECRET_KEY_FILE"):
            files["TANDEM_SECRET_KEY"] = Path(path).resolve()
        elif config.secret_key:
            files["TANDEM_SECRET_KEY"] = state.secrets / "secret_key"
            state.write(files["TANDEM_SECRET_KEY"], config.secret_key)
        self.environment = environment(config, state, os.environ, files)
        self.programs = programs(
            config, state, sys.executable, embedded, this_node(config.node_name, config.home_path())
        )

    def supervise(self) -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        open_files = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
        text = supervisord(self.programs, self.state, folder=CHECKOUT, root=os.geteuid() == 0, open_files=open_files)
        self.supervisor.start(text, self.environment)

    def revive(self) -> None:
        """Supervisord does not answer. When it is gone: everything anew, the engines stay.

        Raises `Conflict` when this state folder is not ours any more: two would end each other's programs for ever.
        """
        if not self.state.locked:
            raise Conflict(f"The state folder {self.state.home} was removed while Tandem ran on it.")
        if self.supervisor.alive():
            return
        self.screen.problem("The process supervisor ended unexpectedly; everything is started again.")
        self.supervisor.sweep(self.programs, engines_stay=True)
        self.supervise()
        self._begin_all_but_agent()
        try:
            self._run_first_start()  # for a fresh join token: the new Redis has forgotten the agent
        except Unavailable as error:
            self.screen.problem(error.message)
        self.supervisor.begin("agent")

    def start_redis(self) -> None:
        if self.config.redis_url:
            try:
                info = _redis_info(self.redis_url)
            except redis.RedisError as error:
                raise Unavailable(
                    f"REDIS_URL: the server there does not answer ({type(error).__name__}: {error}). "
                    "Start it or correct the URL; without REDIS_URL Tandem starts a Redis of its own."
                ) from None
            self.screen.stage("Redis", f"yours, {info}")
            with contextlib.suppress(redis.RedisError):
                for warning in preflight.own_redis(_redis_memory(self.redis_url)):
                    self.screen.say(f"    {warning}", "yellow")
            return
        self.supervisor.begin("redis")
        self._await("redis", lambda: bool(_redis_info(self.redis_url)))
        self.screen.stage("Redis", self._redis_name)

    def prepare_database(self) -> None:
        self.screen.working("Preparing the database")
        prepared = self._run_first_start()
        self.screen.working("")
        done = f"{prepared.migrations} migrations applied" if prepared.migrations else "up to date"
        self.screen.stage("Database", f"{prepared.database}, {done}")
        if prepared.admin_password:
            self.screen.stage("First start", "the password below is shown this once")
            self.screen.say(f"    user admin, password {prepared.admin_password}", "bold")
        if prepared.demo_key_made:
            self.screen.say(f"    API key {self.state.read(self.state.demo_key)}", "bold")

    def _run_first_start(self) -> Prepared:
        result = subprocess.run(
            [sys.executable, "-m", "controlplane.up.first_start"],
            cwd=CHECKOUT, env=self.environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        if result.returncode == 0:
            return msgspec.json.decode(result.stdout.splitlines()[-1], type=Prepared)
        log = self.state.logs / "first_start.log"
        self.state.write(log, result.stderr)
        lines = result.stderr.strip().splitlines() or ["it gave no reason"]
        raise Unavailable(f"The database was not prepared: {lines[-1]} (all: {log})")

    def _begin_all_but_agent(self) -> None:
        for program in self.programs:
            if program.name != "agent":
                self.supervisor.begin(program.name)

    def answering(self, name: str, url: str) -> None:
        def answers() -> bool:
            return httpx.get(url, timeout=2.0, trust_env=False).status_code < 500

        self.screen.working(f"Waiting for the {name}")
        self._await(name, answers)
        self.screen.working("")

    def _await(self, name: str, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                if ready():
                    return
            except (httpx.HTTPError, redis.RedisError):
                pass
            if self.watch.hopeless:
                raise Unavailable(f"{', '.join(self.watch.hopeless)} cannot be started; the lines above say why.")
            if time.monotonic() > deadline:
                lines = tail(self.state.logs / f"{name}.log")
                raise Unavailable("\n    ".join([f"{name} does not answer. Its last lines:", *lines]))
            self.watch.pause(0.1)

    def serve_demo(self) -> None:
        """Create the demo once per state folder, await it, ask it. Raises `Unavailable`; the programs run on then."""
        keys = {"manage_key": self.state.read(self.state.manage_key), "demo_key": self.state.read(self.state.demo_key)}
        demo = Demo(web=self.web, openai=self.openai, runtime=self.config.runtime, **keys)
        created = self.state.home / "demo_created"
        try:
            if not demo.ensure(may_create=not created.exists()):
                self.screen.say(f"The demo deployment {NAME} was deleted; it is not made again.", "dim")
                return
            self.state.write(created, "")
            sentence, answer = demo.answer(self._show)
            self.screen.stage("Deployment", f"{NAME}: {sentence}")
            self._tell(answer, keys["demo_key"])
        finally:
            self.watch.more_lines = ()
            self.screen.working("")
            demo.close()

    def _show(self, lines: list[Line], sentence: str) -> None:
        self.watch.more_lines = lines
        self.screen.working(sentence)
        self.watch.pause(0.5)

    def _tell(self, answer: Answer, key: str) -> None:
        say = self.screen.say
        itl = f"{answer.itl * 1000:.0f} ms" if answer.itl is not None else "one token only"
        how = "moved between stand-ins" if self.config.runtime == "sim" else "moved by NIXL"
        moved = f"{_size(answer.bytes_moved)} of KV {how}" if answer.bytes_moved else "no KV transfer seen"
        say("")
        say(f"  {QUESTION}", "dim")
        say(f"  {answer.text}", "bold")
        say(f"  first token {answer.ttft * 1000:.0f} ms · between tokens {itl} · {moved}", "dim")
        say(f"  prefill {answer.prefill} → decode {answer.decode}", "dim")
        say("")
        say(f"  Dashboard   {self.web}")
        say(f"  OpenAI      {self.openai}/v1")
        say("")
        # Temperature 0, as it was asked above: so small a model otherwise answers nonsense.
        question = {"model": NAME, "temperature": 0, "messages": [{"role": "user", "content": QUESTION}]}
        body = msgspec.json.encode(question).decode()
        say(
            f"  curl {self.openai}/v1/chat/completions -H 'Authorization: Bearer {key}' "
            f"-H 'Content-Type: application/json' -d {shlex.quote(body)}"
        )
        say("")

    def stop(self) -> None:
        """Everything down in order, told line by line; at once when asked a second time."""
        if not self.state.locked:
            self.supervisor.abandon()
            return
        if not self.supervisor.started:
            self.state.unlock()
            return
        screen = self.screen
        # Engines that an earlier run kept are this run's to end only once its agent has adopted them.
        stay = self.config.keep_engines or not self.has_agent
        try:
            if self.supervisor.alive():
                screen.say(f"Stopping in order, {'engines go on' if stay else 'engines too'}; again: all at once.")
                self.supervisor.stop(self.programs, lambda name, what: screen.say(f"  {name} {what}", "dim"))
            self.supervisor.sweep(self.programs, engines_stay=stay)
        except (Stop, OSError):
            screen.problem("Ending everything at once.")
            self.supervisor.kill(engines_stay=stay)
        self.state.unlock()
        kept = "the engines go on; the next `make up` adopts them"
        screen.stage("Stopped", kept if self.config.keep_engines else "nothing is left running")


def _refuse(objections: list[str]) -> None:
    if objections:
        raise Conflict("\n  ".join(objections))


def _redis_info(url: str) -> str:
    client = redis.Redis.from_url(url, socket_timeout=3, socket_connect_timeout=3)
    try:
        info = client.info("server")
    finally:
        client.close()
    return f"{info.get('server_name', 'redis').capitalize()} {info.get('valkey_version') or info['redis_version']}"


def _redis_memory(url: str) -> Mapping[str, Any]:
    client = redis.Redis.from_url(url, socket_timeout=3, socket_connect_timeout=3)
    try:
        told: Mapping[str, Any] = client.info("memory")
    finally:
        client.close()
    return told


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
