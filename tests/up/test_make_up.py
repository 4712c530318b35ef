"""`make up RUNTIME=sim` as a person meets it: real processes, from nothing to an answer, killed, taken over, stopped.

The tests of this file run in order, on one state folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import random
import re
import shlex
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from controlplane.up.__main__ import ECHO_SECONDS
from controlplane.up.state import StateFolder
from tests.conftest import free_port

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 150
"""Generous: the machine may be busy."""


class MakeUp:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = StateFolder(folder / "h")
        self.web_port, self.openai_port = free_port(), free_port()
        low = random.randrange(20_000, 28_000, 1_000)  # between those of `free_port` and those the system gives
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")} | {
            "TANDEM_HOME": str(self.state.home),
            "TANDEM_CACHE": str(folder / "cache"),
            "TANDEM_WEB_PORT": str(self.web_port),
            "TANDEM_OPENAI_PORT": str(self.openai_port),
            "TANDEM_ENGINE_PORTS": f"{low}-{low + 4000}",
            "RUNTIME": "sim",
            "HF_TOKEN": "hf-hush",
            # Nothing of this goes by a proxy; one that is asked refuses.
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:1"),
            "NO_PROXY": "localhost,127.0.0.0/8",
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.output = folder / "out"

    def run(self, **env: str) -> subprocess.CompletedProcess[str]:
        """For starts that are refused."""
        return subprocess.run(
            [sys.executable, "-m", "controlplane.up"], cwd=ROOT, env=self.env | env, capture_output=True, text=True,
            timeout=SECONDS, check=False,
        )  # fmt: skip

    def start(self, until: str = "Ctrl-C stops everything", **env: str) -> str:
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "controlplane.up"], cwd=ROOT, env=self.env | env, stdin=subprocess.DEVNULL,
                stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        return self.wait_for(until)

    def wait_for(self, text: str) -> str:
        deadline = time.monotonic() + SECONDS
        while text not in (said := self.output.read_text()):
            assert self.process is not None
            assert self.process.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.05)
        return said

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        assert self.process is not None
        return self.process.wait(SECONDS), self.output.read_text()

    def processes(self) -> list[psutil.Process]:
        """Every process of this state folder but `make up` itself: its environment names it, or it works inside."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                home = process.environ().get("TANDEM_HOME") == str(self.state.home)
                inside = self.state.home in Path(process.cwd()).parents
                if (home or inside) and (self.process is None or process.pid != self.process.pid):
                    found.append(process)
        return found

    def find(self, text: str) -> list[psutil.Process]:
        return [p for p in self.processes() if text in " ".join(p.cmdline())]

    def engines(self) -> set[int]:
        return {p.pid for p in self.find("workers.sim")}

    def nothing_is_left(self) -> bool:
        ports = {self.web_port, self.openai_port, int(self.state.read(self.state.redis / "port"))}
        listening = {c.laddr[1] for c in psutil.net_connections("tcp") if c.laddr and c.status == psutil.CONN_LISTEN}
        self.state.lock()  # raises when it is still held
        self.state.unlock()
        sockets = [p for p in self.state.home.rglob("*") if p.is_socket()]
        return not self.processes() and not ports & listening and not sockets


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeUp]:
    up = MakeUp(tmp_path_factory.mktemp("up"))
    yield up
    for process in [
        *up.processes(),
        *([psutil.Process(up.process.pid)] if up.process and up.process.poll() is None else []),
    ]:
        with contextlib.suppress(psutil.Error):
            process.kill()


def test_from_nothing_to_an_answer(up: MakeUp) -> None:
    said = up.start()
    assert "the password below is shown this once" in said
    assert re.search(r"user admin, password \S{20,}", said)
    assert f"Dashboard   http://127.0.0.1:{up.web_port}" in said
    assert f"OpenAI      http://127.0.0.1:{up.openai_port}/v1" in said
    assert re.search(r"first token \d+ ms · between tokens \d+ ms · [\d.]+ [kM]B of KV moved between stand-ins", said)
    assert re.search(r"prefill smollm2-prefill-0-\w+ → decode smollm2-decode-0-\w+", said)


def test_the_printed_curl_line_works(up: MakeUp) -> None:
    (line,) = re.findall(r"^  (curl .*)$", up.output.read_text(), re.MULTILINE)
    _, url, _, authorization, _, kind, _, body = shlex.split(line)
    headers = dict(header.split(": ") for header in (authorization, kind))
    answer = httpx.post(url, headers=headers, content=body, timeout=30)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"]


def test_everything_listens_on_loopback_alone(up: MakeUp) -> None:
    addresses = {c.laddr.ip for p in up.processes() for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert addresses == {"127.0.0.1"}


def test_no_secret_is_in_an_argument_vector_or_a_log(up: MakeUp) -> None:
    secrets = [path.read_text().strip() for path in up.state.secrets.iterdir()] + [
        (up.state.home / "secret_key").read_text()
    ]
    secrets += re.findall(r"password (\S{20,})", up.output.read_text())
    secrets = [secret for secret in [*secrets, "hf-hush"] if secret]
    assert len(secrets) >= 6
    told = [" ".join(p.cmdline()) for p in up.processes()]
    told += [path.read_text(errors="replace") for path in up.state.logs.iterdir()]
    told += [up.state.supervisor_config.read_text()]
    assert not [secret for secret in secrets for text in told if secret in text]


def test_only_the_agent_and_its_supervisor_hold_the_hubs_token(up: MakeUp) -> None:
    holders = [" ".join(p.cmdline()) for p in up.processes() if p.environ().get("HF_TOKEN")]
    assert sorted("agent" if "workers --join" in argv else argv.split()[2] for argv in holders) == [
        "agent", "supervisor.supervisord",
    ]  # fmt: skip


def test_every_file_of_the_state_folder_is_the_owners_alone(up: MakeUp) -> None:
    assert not [
        path for path in [up.state.home, *up.state.home.rglob("*")] if path.exists() and path.stat().st_mode & 0o077
    ]


def test_a_second_one_is_told_what_to_do(up: MakeUp, tmp_path: Path) -> None:
    same_folder = up.run(TANDEM_WEB_PORT=str(free_port()), TANDEM_OPENAI_PORT=str(free_port()))
    assert same_folder.returncode == 1
    assert f"Tandem already runs on {up.state.home}" in same_folder.stdout
    same_ports = up.run(TANDEM_HOME=str(tmp_path / "other"))
    assert same_ports.returncode == 1
    assert (
        f"Port {up.web_port} is taken by another Tandem, the one of the state folder {up.state.home}"
        in same_ports.stdout
    )
    assert "make up TANDEM_OPENAI_PORT=" in same_ports.stdout
    nonsense = up.run(TANDEM_WEB_PORT="eighty")
    assert nonsense.returncode == 2
    assert "TANDEM_WEB_PORT" in nonsense.stdout
    assert httpx.get(f"http://127.0.0.1:{up.openai_port}/health", timeout=10).status_code == 200  # not disturbed


def test_a_program_that_dies_is_started_again_and_that_is_said(up: MakeUp) -> None:
    (beat,) = up.find("celery.beat:Scheduler")
    beat.kill()
    up.wait_for("beat ended")
    deadline = time.monotonic() + SECONDS
    while not (found := up.find("celery.beat:Scheduler")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert found[0].pid != beat.pid


def test_after_its_own_violent_death_the_next_one_takes_over(up: MakeUp) -> None:
    engines = up.engines()
    assert len(engines) == 2
    up.signal(signal.SIGKILL)
    up.end()
    assert httpx.get(f"http://127.0.0.1:{up.openai_port}/health", timeout=10).status_code == 200  # it went on
    said = up.start(KEEP_ENGINES="1")
    assert "An earlier run had not stopped" in said
    assert "password" not in said
    assert "-H 'Authorization: Bearer tdm-" in said  # the key, unlike the password, is shown at each start
    assert up.engines() == engines


def test_engines_go_on_when_they_are_to_be_kept(up: MakeUp) -> None:
    engines = up.engines()
    up.signal(signal.SIGINT)
    code, said = up.end()
    assert code == 0
    assert "the engines go on" in said
    assert {p.pid for p in up.processes()} == engines


def test_a_start_that_fails_says_why_and_leaves_kept_engines_alone(up: MakeUp) -> None:
    engines = up.engines()
    refused = up.run(REDIS_URL="redis://:hush@127.0.0.1:1/0")
    assert refused.returncode == 1
    assert "REDIS_URL: the server there does not answer" in refused.stdout
    assert "hush" not in refused.stdout + refused.stderr
    refused = up.run(DATABASE_URL="postgres://tandem:hush@127.0.0.1:1/tandem")
    assert refused.returncode == 1
    assert "✗ The database was not prepared: DATABASE_URL: " in refused.stdout
    assert "hush" not in refused.stdout + refused.stderr
    assert {p.pid for p in up.processes()} == engines


def test_sigterm_stops_everything_in_order_and_leaves_nothing(up: MakeUp) -> None:
    engines = up.engines()
    up.start()
    assert up.engines() == engines  # adopted
    up.signal(signal.SIGTERM)
    code, said = up.end()
    assert code == 0
    stopped = re.findall(r"^  (\w+) stopped in", said, re.MULTILINE)
    assert stopped == ["router", "agent", "beat", "controller", "web", "redis"]
    assert "nothing is left running" in said
    assert up.nothing_is_left()


def test_asked_twice_it_ends_at_once(up: MakeUp) -> None:
    up.start()
    (web,) = up.find("controlplane.web")
    agent = next(p for p in up.find("-m workers") if "--join" in p.cmdline())
    for process in (web, agent):
        process.suspend()  # it will not stop by being asked
    up.signal(signal.SIGTERM)
    up.signal(signal.SIGTERM)  # as `make` hands on what its whole process group was sent: one wish, told twice
    assert "Ending everything at once" not in up.wait_for("agent stopping")
    while "Ending everything at once" not in up.output.read_text():
        up.signal(signal.SIGTERM)
        time.sleep(ECHO_SECONDS + 0.1)
    code, _ = up.end()
    assert code == 0
    assert up.nothing_is_left()


def test_the_demo_is_not_forced_on_those_who_deleted_it(up: MakeUp) -> None:
    up.start(until="Dashboard")
    url = f"http://127.0.0.1:{up.web_port}/api/v1/deployments/smollm2"
    manage = {"Authorization": f"Bearer {up.state.read(up.state.manage_key)}"}
    assert httpx.delete(url, headers=manage, timeout=30).is_success
    up.signal(signal.SIGTERM)
    up.end()
    assert "smollm2 was deleted; it is not made again" in up.start()
    up.signal(signal.SIGTERM)
    up.end()


def test_closing_its_terminal_stops_everything(up: MakeUp) -> None:
    master, slave = pty.openpty()
    up.process = subprocess.Popen(
        [sys.executable, "-m", "controlplane.up"], cwd=ROOT, env=up.env | {"TERM": "xterm"}, stdin=slave, stdout=slave,
        stderr=slave, start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(slave)
    shown = b""
    while b"Ctrl-C stops everything" not in shown:
        shown += os.read(master, 65536)  # raises when it ends first
    assert b"controller" in shown
    os.close(master)
    up.process.wait(SECONDS)
    assert up.nothing_is_left()
