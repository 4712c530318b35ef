"""A real web process with a database and a Redis of its own, and `tandem` pointed at it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from controlplane.cli import main
from tests.controlplane.cli.tandem_web import Web


@pytest.fixture(scope="session")
def web(tmp_path_factory: pytest.TempPathFactory, redis_server: Any) -> Iterator[Web]:
    from tests.conftest import free_port

    web = Web(tmp_path_factory.mktemp("web"), free_port(), redis_server.url)
    web.python("manage.py", "migrate", "-v0")
    web.start()
    yield web
    web.stop()


@pytest.fixture(scope="session")
def admin_key(web: Web) -> str:
    return web.python("manage.py", "createkey", "--scope", "manage", "--name", "cli", "--role", "admin")


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def tandem(
    web: Web, admin_key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """`tandem` in this process, over real HTTP, as an admin."""
    monkeypatch.setenv("TANDEM_URL", web.url)
    monkeypatch.setenv("TANDEM_API_KEY", admin_key)

    def run(*arguments: str) -> Outcome:
        capsys.readouterr()
        try:
            code = main(arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
        return Outcome(code, *capsys.readouterr())

    return run
