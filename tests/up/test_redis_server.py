"""The Redis of our own: never on a wildcard, no secret in its arguments, a port that stays."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest

from controlplane.fleet.config import Config
from controlplane.up import redis_server
from controlplane.up.redis_server import choose, configuration, find_server, listen_addresses
from controlplane.up.state import StateFolder


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    state = StateFolder(tmp_path / "home")
    state.prepare()
    return state


@pytest.mark.parametrize(
    ("bind", "own", "expected"),
    [
        ("127.0.0.1", [], ("127.0.0.1",)),
        ("::1", [], ("127.0.0.1", "::1")),
        ("10.0.0.5", ["127.0.0.1", "10.0.0.5"], ("127.0.0.1", "10.0.0.5")),
        ("0.0.0.0", ["127.0.0.1", "10.0.0.5", "8.8.8.8", "192.168.1.2"], ("127.0.0.1", "10.0.0.5", "192.168.1.2")),
        ("0.0.0.0", ["::1", "fd00::5", "169.254.3.3"], ("127.0.0.1",)),
        ("::", ["127.0.0.1", "10.0.0.5", "fe80::1%eth0"], ("127.0.0.1", "::1", "10.0.0.5")),
        ("::", ["::1", "fd00::5", "2001:4860:4860::8888"], ("127.0.0.1", "::1", "fd00::5")),
    ],
)
def test_it_listens_on_loopback_and_private_addresses_only(
    bind: str, own: list[str], expected: tuple[str, ...]
) -> None:
    assert listen_addresses(bind, own) == expected


def test_its_configuration_has_a_password_and_no_wildcard(state: StateFolder) -> None:
    server = choose(Config(), state)
    text = configuration(server, state.redis)
    settings = dict(line.split(" ", 1) for line in text.splitlines())
    assert settings["bind"] == "127.0.0.1"
    assert len(settings["requirepass"]) == 64
    assert settings["protected-mode"] == "yes"
    assert settings["dir"] == f'"{state.redis}"'
    assert server.password in server.url


def test_port_and_password_are_remembered(state: StateFolder) -> None:
    first, second = choose(Config(), state), choose(Config(), state)
    assert (first.port, first.password) == (second.port, second.password)
    assert first.port in redis_server.PORTS


@pytest.mark.parametrize("damaged", ["", "abc", "-5", "99999", "1e4"])
def test_a_port_file_that_is_damaged_is_made_anew(state: StateFolder, damaged: str) -> None:
    state.write(state.redis / "port", damaged)
    assert choose(Config(), state).port == int(state.read(state.redis / "port")) in redis_server.PORTS


def test_a_remembered_port_that_was_taken_is_given_up_and_said(state: StateFolder) -> None:
    first = choose(Config(), state)
    with socket.socket() as thief:
        thief.bind(("127.0.0.1", first.port))
        thief.listen()
        second = choose(Config(), state)
    assert second.moved_from == first.port
    assert second.port != first.port
    assert choose(Config(), state).port == second.port


def test_a_port_that_was_asked_for_is_kept_even_when_taken(state: StateFolder) -> None:
    """Preflight refuses it by its variable's name; choosing another silently would not be what was asked."""
    with socket.socket() as thief:
        thief.bind(("127.0.0.1", 0))
        thief.listen()
        port = thief.getsockname()[1]
        assert choose(Config(redis_port=port), state).port == port


@pytest.mark.parametrize(
    ("says", "taken"),
    [
        ("Redis server v=7.0.15 sha=0:0 malloc=jemalloc", True),
        ("Redis server v=5.0.14 sha=0:0", False),
        ("what?", False),
    ],
)
def test_a_server_on_path_is_used_when_it_is_new_enough(
    says: str, taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "redis-server"
    fake.write_text(f"#!/bin/sh\necho '{says}'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    binary, name = find_server()
    assert (binary == fake) is taken
    assert name == "Redis 7.0.15" if taken else name.startswith("Valkey 8.")


def test_the_wheel_carries_a_server_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    binary, name = find_server()
    assert binary.is_file()
    assert name.startswith("Valkey 8.")
