"""Every objection is a sentence that names what is wrong and what to do."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from controlplane.fleet.config import Config
from controlplane.up import preflight
from tests.conftest import free_port

GIB = 1 << 30


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield int(server.getsockname()[1])


def test_free_ports_are_no_objection() -> None:
    assert preflight.ports(Config(web_port=free_port(), openai_port=free_port())) == []


def test_a_taken_port_names_its_holder_and_the_variable(taken: int) -> None:
    (objection,) = preflight.ports(Config(web_port=taken, openai_port=free_port()))
    assert f"Port {taken} is taken by" in objection
    assert f"(process {os.getpid()})" in objection
    assert "make up TANDEM_WEB_PORT=" in objection
    suggested = int(objection.rpartition("=")[2])
    assert preflight.refusal("127.0.0.1", suggested) is None


def test_both_taken_ports_are_told_at_once(taken: int) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        objections = preflight.ports(Config(web_port=taken, openai_port=other.getsockname()[1]))
    assert ["TANDEM_WEB_PORT" in o for o in objections] == [True, False]
    assert ["TANDEM_OPENAI_PORT" in o for o in objections] == [False, True]


def test_a_redis_port_that_was_asked_for_is_checked_too(taken: int) -> None:
    config = Config(web_port=free_port(), openai_port=free_port(), redis_port=taken)
    (objection,) = preflight.ports(config, ["127.0.0.1"])
    assert "TANDEM_REDIS_PORT" in objection


def test_another_tandem_is_recognised_by_its_process(tmp_path: Path) -> None:
    script = (
        "import socket, sys; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); print(s.getsockname()[1], flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, "frontend_api"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"TANDEM_HOME": "/srv/other"},
    ) as other:  # fmt: skip
        assert other.stdout is not None
        port = int(other.stdout.readline())
        (objection,) = preflight.ports(Config(web_port=free_port(), openai_port=port))
        other.communicate("")
    assert f"another Tandem, the one of the state folder /srv/other, (process {other.pid})" in objection


@pytest.mark.parametrize(
    ("body", "expected"), [(b'{"status":"alive","program":"tandem"}', "another Tandem"), (b"ok", "cannot see")]
)
def test_another_tandem_is_recognised_by_its_health_answer(
    body: bytes, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    monkeypatch.setattr(psutil, "net_connections", lambda kind: [])  # it is somebody else's: nothing is seen
    with http.server.HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        assert expected in preflight.holder("127.0.0.1", server.server_port)
        server.shutdown()


def test_an_address_of_another_machine_is_refused() -> None:
    assert "TANDEM_BIND: 192.0.2.7 is not an address of this machine" in preflight.ports(Config(bind="192.0.2.7"))[0]


def test_equal_ports_are_refused(tmp_path: Path) -> None:
    config = Config(web_port=9000, openai_port=9000, redis_port=9000, runtime="sim", home=str(tmp_path))
    objections = preflight.machine(config)
    assert objections[0].startswith("TANDEM_WEB_PORT and TANDEM_OPENAI_PORT are both 9000")
    assert [o for o in objections if "TANDEM_REDIS_PORT" in o and "both 9000" in o] == objections[1:]


def test_settings_that_no_engine_here_could_have_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "gone"))
    config = Config(engine_ports="8000-8079", node_address="192.0.2.7", runtime="sim", home=str(tmp_path))
    ports, address, certificates = preflight.machine(config)
    assert ports.startswith("TANDEM_ENGINE_PORTS: 8000-8079 holds 8000, which is TANDEM_WEB_PORT's")
    assert address.startswith("TANDEM_NODE_ADDRESS: 192.0.2.7 is not an address of this machine")
    assert certificates.startswith("SSL_CERT_FILE: ")


def test_a_full_disk_names_folder_and_variable(tmp_path: Path) -> None:
    (objection,) = preflight.disk(tmp_path / "not" / "yet", "TANDEM_CACHE", 1 << 60)
    assert str(tmp_path / "not" / "yet") in objection
    assert "set TANDEM_CACHE" in objection
    assert preflight.disk(tmp_path, "TANDEM_CACHE", 1) == []


def test_a_cache_that_cannot_be_written_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "RUNTIME_BYTES", {"auto": 1})
    file = tmp_path / "file"
    file.touch()
    (objection,) = preflight.cache(Config(cache=str(file / "cache")))
    assert objection.startswith("TANDEM_CACHE: ")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    (objection,) = preflight.cache(Config(cache=str(tmp_path)))
    assert f"may not write in {tmp_path}" in objection
    assert "set TANDEM_CACHE" in objection
    (tmp_path / "runtimes" / "cpu-1").mkdir(parents=True)
    assert preflight.cache(Config(cache=str(tmp_path))) == []


def test_a_user_without_a_home_is_told_to_name_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", none)
    (objection,) = preflight.cache(Config())
    assert "no home folder" in objection
    assert objection.startswith("TANDEM_CACHE: ")


@pytest.mark.parametrize(("total", "objects"), [(2 * GIB, True), (24 * GIB, False)])
def test_too_little_memory_points_to_stand_ins(total: int, objects: bool) -> None:
    objections = preflight.memory(total)
    assert bool(objections) is objects
    assert all("RUNTIME=sim" in o for o in objections)


def test_stand_ins_need_neither_cache_nor_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "memory_limit", lambda: GIB)
    monkeypatch.setattr(preflight, "RUNTIME_BYTES", {"auto": 1 << 60})
    home, cache = str(tmp_path), str(tmp_path / "cache")
    assert preflight.machine(Config(runtime="sim", home=home, cache=cache)) == []
    assert len(preflight.machine(Config(runtime="auto", home=home, cache=cache))) == 2


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        ({"maxmemory": 1 << 30, "maxmemory_policy": "noeviction"}, []),
        ({"maxmemory": 0, "maxmemory_policy": "noeviction"}, ["set maxmemory"]),
        ({"maxmemory": 1 << 30, "maxmemory_policy": "allkeys-lru"}, ["noeviction"]),
        ({}, ["set maxmemory"]),
    ],
)
def test_a_redis_of_ones_own_is_warned_of_where_one_node_could_fill_it(memory: dict[str, Any], said: list[str]) -> None:
    warnings = preflight.own_redis(memory)
    assert len(warnings) == len(said)
    assert all(text in warning and "REDIS_URL" in warning for text, warning in zip(said, warnings, strict=True))
