"""`python -m workers [--join URL]`: one node's agent, until SIGTERM or SIGINT.

On that it ends its engines, unless KEEP_ENGINES=1: then they go on, and the next agent adopts them.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
from msgspec.structs import replace

from controlplane.fleet import program
from controlplane.fleet.config import Config, load
from controlplane.fleet.errors import Conflict, TandemError
from controlplane.fleet.model import EngineAssignment, GpuFacts, NodeFacts, Ports, Runtime
from controlplane.fleet.this_node import agents_folder
from workers import command, engine_user, hardware, models, runtimes, tokenizer_folder
from workers.agent import Agent
from workers.app import WakeWorker
from workers.claim import Claimant
from workers.engine_user import EngineUser
from workers.join import Identity, identify, why_over
from workers.launch import Launcher, Progress
from workers.logs import LogShipper, Source
from workers.mailbox import RedisMailbox, connect
from workers.record import Records, private_folder
from workers.tokenizer_shelf import TokenizerShelf
from workers.which_node import LOCK, choose_name, refuse_forsaken_engines

log = logging.getLogger("workers")

ADDRESS_GONE_SECONDS = 10.0


def main() -> int:
    program.begin("workers")
    program.keep_files_private()
    parser = argparse.ArgumentParser(prog="python -m workers", description="The agent of one Tandem node.")
    parser.add_argument(
        "--join", metavar="URL", default="", help="control plane to join; the token is in TANDEM_JOIN_TOKEN"
    )
    url = parser.parse_args().join
    try:
        config = load()
        logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        for chatty in ("httpx", "httpcore", "kombu", "celery"):
            logging.getLogger(chatty).setLevel(logging.WARNING)
        agents = agents_folder(config.made_home())
        user = engine_user.chosen(config)
        name = choose_name(config.node_name, config.made_home(), hostname=socket.gethostname())
        folder = private_folder(agents / name)
        with lock(folder, name):
            stopping = catch_signals()
            refuse_forsaken_engines(agents, name, sleep=until(stopping))
            identity = identify(
                folder,
                name=name,
                control_plane=url,
                token=config.join_token,
                address=partial(hardware.choose_address, config.node_address),
                sleep=until(stopping),
            )
            Node(config, folder, identity, user).run(stopping)
    except TandemError as error:
        print(error.message, file=sys.stderr)
        return 1
    return 0


@contextlib.contextmanager
def lock(folder: Path, name: str) -> Iterator[None]:
    """Holds the node's lock file. Raises `Conflict` while another agent does: two would fight over the same engines."""
    with (folder / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise Conflict(
                f"An agent of node {name} already runs with this state folder (pid {file.read().strip() or 'unknown'}); "
                "stop it, or set another TANDEM_NODE_NAME or TANDEM_HOME."
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def catch_signals() -> threading.Event:
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    return stopping


def until(stopping: threading.Event) -> Callable[[float], None]:
    """A sleep that ends the program, cleanly, when it is told to stop meanwhile."""

    def sleep(seconds: float) -> None:
        if stopping.wait(seconds):
            sys.exit(0)

    return sleep


def offered(wanted: str, able: tuple[Runtime, ...]) -> tuple[Runtime, ...]:
    """The runtimes that this node takes engines of: what it is able to run, or of that only RUNTIME and the stand-in."""
    return tuple(kind for kind in able if wanted in ("auto", kind) or kind is Runtime.SIM)


class Node:
    """The parts of one agent process, put together from its settings."""

    def __init__(self, config: Config, folder: Path, identity: Identity, user: EngineUser | None) -> None:
        self._config = config
        self._user = user
        engine_user.warn_of_root(user)
        self._cache = config.cache_path()
        self._address = hardware.choose_address(config.node_address, identity.control_plane)
        if identity.address and identity.address != self._address:
            log.warning(
                "Engines would listen on %s, and this node joined with %s: no engine here is used until it joins again, with a "
                "token in TANDEM_JOIN_TOKEN (or set TANDEM_NODE_ADDRESS).",
                self._address,
                identity.address,
            )
        self._threads = config.engine_cpus or max(1, len(os.sched_getaffinity(0)) // 2)
        redis = connect(identity.redis_url)
        self._redis_password = str(redis.get_connection_kwargs().get("password") or "")
        self._facts = hardware.FactsWatch(self._read_facts)
        launcher = Launcher(
            address=self._address,
            span=config.engine_port_range(),
            ensure_runtime=self._ensure_runtime,
            ensure_model=self._ensure_model,
            ensure_tokenizer=partial(tokenizer_folder.ensure, cache=self._cache, user=user),
            build=self._build,
            chance=random.SystemRandom(),
            user=user,
        )
        self._claimant = Claimant(identity.name, redis, lock=folder / LOCK)
        self.agent = Agent(
            identity.name,
            mailbox=RedisMailbox(identity.name, redis),
            records=Records(folder / "engines"),
            launcher=launcher,
            facts=self._facts,
            claimant=self._claimant,
            why_over=partial(why_over, identity),
        )
        self._shipper = LogShipper(identity.name, connect(identity.redis_url), self._logs)
        self._shelf = TokenizerShelf(identity.name, connect(identity.redis_url), self._tokenizers)
        self._worker = WakeWorker(identity.name, identity.redis_url, self.agent.wake, self.agent.report_now)

    def run(self, stopping: threading.Event) -> None:
        """Serves until told to stop; then ends the engines, unless they are to be kept.

        Raises `Conflict` where another agent is this node, or the node's address is gone: then its engines here are ended.
        """
        self.agent.await_claim(until(stopping))
        self.agent.recover()
        self._shipper.start()
        self._shelf.start(stopping)
        self._worker.start()
        loop = threading.Thread(target=self.agent.run, args=(stopping,), name="agent")
        loop.start()
        log.info("Node %s runs engines on %s.", self.agent.node, self._address)
        while loop.is_alive() and not stopping.wait(1):
            pass
        stopping.set()
        self.agent.wake()
        loop.join()
        if self._config.keep_engines and not self.agent.unfit:
            log.info("Engines keep running (KEEP_ENGINES=1).")
        else:
            self.agent.stop_all()
        self._worker.stop()
        self._shipper.flush()
        self._claimant.release()
        end_installers()
        if self.agent.unfit:
            raise Conflict(self.agent.unfit)

    def _read_facts(self) -> NodeFacts:
        pids = self.agent.engine_pids() if hasattr(self, "agent") else set()
        if not hardware.has_address(self._address):
            self._look_for_address()
        facts = hardware.read_facts(self._address, disk=self._cache, engine_pids=pids, runtimes=self._offered)
        runs_as = engine_user.name_of(self._user)
        return replace(facts, engine_ports=self._config.engine_port_range(), engine_user=runs_as)

    def _look_for_address(self) -> None:
        time.sleep(ADDRESS_GONE_SECONDS)  # an interface that is restarted
        if not hardware.has_address(self._address):
            self.agent.give_up(
                f"This node's address {self._address} is gone, so nobody reaches its engines: start the agent again (a service "
                "manager does). It takes the address of now; if that is another one, it has to join again, with a token."
            )

    def _offered(self, gpus: tuple[GpuFacts, ...]) -> tuple[Runtime, ...]:
        return offered(self._config.runtime, runtimes.installable(gpus))

    def _ensure_runtime(self, kind: Runtime, *, progress: Progress) -> runtimes.EngineRuntime:
        runtime = runtimes.ensure(kind, cache=self._cache, progress=progress)
        if self._user and kind is not Runtime.SIM:
            self._user.let_read(runtime.python.parent.parent)
        return runtime

    def _ensure_model(self, model: str, *, runtime: runtimes.EngineRuntime, progress: Progress) -> Path:
        folder = models.ensure(
            model, runtime=runtime, cache=self._cache, hf_token=self._config.hf_token, progress=progress
        )
        if self._user:
            self._user.let_read(folder)
        return folder

    def _build(
        self, assignment: EngineAssignment, *, runtime: runtimes.EngineRuntime, model_path: Path | None, ports: Ports
    ) -> command.Command:
        return command.build(
            assignment,
            runtime=runtime,
            model_path=model_path,
            address=self._address,
            ports=ports,
            facts=self._facts(),
            cpu_threads=self._threads,
            home=self._user.home if self._user else None,
        )

    def _tokenizers(self) -> dict[str, Path]:
        seen = [run.observation() for run in self.agent.runs() if not run.ended]
        return {one.tokenizer: Path(one.tokenizer_folder) for one in seen if one.tokenizer}

    def _logs(self) -> list[Source]:
        secrets = (self._config.hf_token, self._redis_password)
        return [run.log_source(secrets) for run in self.agent.runs()]


def end_installers() -> None:
    """Ends what an interrupted installation or download still runs: they are in the agent's own session, engines are not."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(child.pid) == os.getsid(0):
                child.terminate()


if __name__ == "__main__":
    sys.exit(main())
