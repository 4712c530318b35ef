"""How a machine becomes a node, against an HTTP server that plays the control plane."""

from __future__ import annotations

import json
import socket
import ssl
import stat
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import redis

from controlplane.cli import prefixes
from controlplane.cli.client import Client, Refused
from controlplane.fleet import wire
from controlplane.fleet.errors import Forbidden, InvalidInput
from controlplane.fleet.this_node import NODE_FILE
from tests.conftest import free_port
from tests.workers import test_redis_user
from workers.join import Application, Identity, ask_control_plane, identify
from workers.probe import EngineClient, Unanswered

NOWHERE = "redis://node.x:pw@127.0.0.1:1/0"


class ControlPlane(ThreadingHTTPServer):
    """Answers joins with `answers`, one after the other, and the last one for ever."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.answers: list[tuple[int, object]] = [(200, {"name": "x", "redis_url": NOWHERE})]
        self.asked: list[tuple[str, Any]] = []


class _Handler(BaseHTTPRequestHandler):
    server: ControlPlane

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.asked.append((self.path, json.loads(body)))
        answers = self.server.answers
        status, answer = answers.pop(0) if len(answers) > 1 else answers[0]
        data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def control_plane() -> Iterator[ControlPlane]:
    server = ControlPlane()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def join(folder: Path, url: str, token: str = "one-time") -> Identity:
    return identify(folder, name="x", control_plane=url, token=token, sleep=lambda _: None)


@pytest.fixture(params=["", "localhost,127.0.0.0/8", "fd00::/8,[nonsense"])
def proxy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """What listens where every proxy variable points; nobody may ever connect."""
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.setblocking(False)
        url = f"http://127.0.0.1:{trap.getsockname()[1]}"
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, url)
            monkeypatch.setenv(name.lower(), url)
        monkeypatch.setenv("NO_PROXY", request.param)
        monkeypatch.setenv("no_proxy", request.param)
        yield trap
        with pytest.raises(BlockingIOError):
            trap.accept()


@pytest.mark.usefixtures("proxy")
def test_no_proxy_is_told_a_token_key_or_secret(
    tmp_path: Path, control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert join(tmp_path, control_plane.url).redis_url == NOWHERE
    control_plane.answers = [(404, {})]
    for call in (
        lambda: Client(control_plane.url, "tdm-key").call("POST", "join-tokens", body={}),
        lambda: prefixes.Endpoint(control_plane.url, "tdm-key", "m").ask(1, "x"),
        lambda: EngineClient(control_plane.url, "secret").complete("m", "x", max_tokens=1),
    ):
        asked = len(control_plane.asked)
        with pytest.raises((Refused, Unanswered)):
            call()
        assert len(control_plane.asked) == asked + 1


def test_a_token_gives_an_identity_that_is_kept(tmp_path: Path, control_plane: ControlPlane) -> None:
    folder = tmp_path / "agents" / "x"
    identity = join(folder, control_plane.url)
    assert identity == Identity("x", NOWHERE, control_plane.url)
    assert control_plane.asked == [("/api/v1/nodes/join", {"token": "one-time", "name": "x"})]
    assert stat.S_IMODE((folder / NODE_FILE).stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert "one-time" not in (folder / NODE_FILE).read_text()
    assert join(folder, control_plane.url, token="") == identity
    assert identify(folder, name="x", control_plane="", token="") == identity
    assert len(control_plane.asked) == 1, "one that has joined asks nobody"


def test_a_control_plane_that_is_not_up_yet_is_waited_for(tmp_path: Path, control_plane: ControlPlane) -> None:
    control_plane.answers[:0] = [(503, "starting"), (502, "proxy"), (429, {})]
    waits: list[float] = []
    identity = identify(tmp_path, name="x", control_plane=control_plane.url, token="t", sleep=waits.append)
    assert identity.name == "x"
    assert len(waits) == 3
    assert ask_control_plane(f"http://127.0.0.1:{free_port()}", Application("t", "x")) is None


def test_a_name_that_seems_in_use_is_tried_for_a_while(control_plane: ControlPlane, tmp_path: Path) -> None:
    in_use = (409, {"error": {"message": "a node named x is reporting now"}})
    control_plane.answers = [in_use, in_use, (200, {"name": "x", "redis_url": NOWHERE})]
    waits: list[float] = []
    found = identify(tmp_path, name="x", control_plane=control_plane.url, token="t", sleep=waits.append)
    assert (found.name, len(waits)) == ("x", 2)
    control_plane.answers = [in_use]
    with pytest.raises(Forbidden, match="a node named x is reporting now"):
        identify(tmp_path / "other", name="x", control_plane=control_plane.url, token="t", sleep=waits.append)
    assert 10 < sum(waits[2:]) < 20


@pytest.mark.parametrize(
    ("status", "answer", "says"),
    [
        (403, {"error": {"code": "forbidden", "message": "this join token is used"}}, "this join token is used"),
        (404, "<html>nothing here</html>", r"is 127.0.0.1:\d+ a Tandem control plane"),
        (404, {"error": {"message": "There is no /api/v1/nodes/join here."}}, "a Tandem control plane"),  # a router
        (400, {"detail": "odd"}, "answered 400"),
        (400, [], "answered 400"),
    ],
)
def test_a_refusal_is_one_sentence(
    tmp_path: Path, control_plane: ControlPlane, status: int, answer: object, says: str
) -> None:
    control_plane.answers = [(status, answer)]
    with pytest.raises(Forbidden, match=says) as refused:
        join(tmp_path, control_plane.url, token="secret-token")
    assert "\n" not in refused.value.message
    assert "secret-token" not in refused.value.message
    assert not (tmp_path / NODE_FILE).exists()


def test_tls_where_none_is_spoken_is_no_reason_to_wait(control_plane: ControlPlane) -> None:
    with pytest.raises(InvalidInput, match="speaks no TLS; write http://"):
        ask_control_plane(control_plane.url.replace("http:", "https:"), Application("t", "x"))


def test_a_certificate_that_is_not_accepted_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = ssl.SSLCertVerificationError("certificate verify failed")
    refused.verify_message = "self-signed certificate"

    def fail(*_: object, **__: object) -> None:
        raise httpx.ConnectError("no") from refused

    monkeypatch.setattr(httpx.Client, "post", fail)
    with pytest.raises(InvalidInput, match=r"not accepted \(self-signed certificate\).*SSL_CERT_FILE"):
        ask_control_plane("https://tandem.example.com", Application("t", "x"))


@pytest.mark.parametrize("answer", ["hello", {"name": "x"}, [1]])
def test_something_else_that_answers_is_named(tmp_path: Path, control_plane: ControlPlane, answer: object) -> None:
    control_plane.answers = [(200, answer)]
    with pytest.raises(InvalidInput, match="no Tandem control plane"):
        join(tmp_path, control_plane.url)


@pytest.mark.parametrize(
    ("url", "token", "field"), [("", "t", "join"), ("http://h", "", "join_token"), ("not a url", "t", "join")]
)
def test_what_is_missing_is_named(tmp_path: Path, url: str, token: str, field: str) -> None:
    with pytest.raises(InvalidInput) as missing:
        join(tmp_path, url, token)
    assert missing.value.field == field


def test_an_unreadable_identity_means_joining_again(tmp_path: Path, control_plane: ControlPlane) -> None:
    (tmp_path / NODE_FILE).write_text("{")
    assert join(tmp_path, control_plane.url).name == "x"


def stored(folder: Path, redis_url: str, control_plane: str) -> None:
    (folder / NODE_FILE).write_bytes(msgspec.json.encode(Identity("x", redis_url, control_plane)))
    (folder / "applied.json").write_text('{"generation": 9}')


def test_a_node_that_was_removed_joins_again_with_a_token(
    tmp_path: Path, control_plane: ControlPlane, redis_url: str
) -> None:
    admin = redis.Redis.from_url(redis_url)
    node_url = test_redis_user.join(admin, "x")
    stored(tmp_path, node_url, control_plane.url)
    assert join(tmp_path, control_plane.url).redis_url == node_url, "its login works: the token is left alone"
    assert control_plane.asked == []
    admin.execute_command("ACL", "DELUSER", wire.acl_user("x"))
    assert join(tmp_path, control_plane.url, token="").redis_url == node_url, "without a token it goes on and tries"
    assert join(tmp_path, control_plane.url).redis_url == NOWHERE
    assert len(control_plane.asked) == 1
    assert not (tmp_path / "applied.json").exists(), "another control plane counts its generations for itself"


def test_a_control_plane_that_moved_is_joined_again(tmp_path: Path, control_plane: ControlPlane) -> None:
    stored(tmp_path, NOWHERE, control_plane.url)
    assert join(tmp_path, control_plane.url).redis_url == NOWHERE
    assert control_plane.asked == [], "Redis being away for a while is no reason"
    stored(tmp_path, NOWHERE, "http://former.example:8000")
    join(tmp_path, control_plane.url)
    assert len(control_plane.asked) == 1


def test_a_login_that_comes_back_while_the_name_seems_in_use_is_used(
    tmp_path: Path, control_plane: ControlPlane, redis_url: str
) -> None:
    """All was restarted: the agent's last report is fresh, and the controller has not yet told the new Redis of it."""
    admin = redis.Redis.from_url(redis_url)
    node_url = test_redis_user.join(admin, "x")
    stored(tmp_path, node_url, control_plane.url)
    admin.execute_command("ACL", "DELUSER", wire.acl_user("x"))
    control_plane.answers = [(409, {"error": {"message": "a node named x is reporting now"}})]
    found = identify(
        tmp_path, name="x", control_plane=control_plane.url, token="t", sleep=lambda _: test_redis_user.join(admin, "x")
    )
    assert found.redis_url == node_url
    assert len(control_plane.asked) == 2
    assert (tmp_path / "applied.json").exists(), "the control plane is the same"


def test_a_node_says_where_it_listens_and_shows_that_it_is_the_same(
    tmp_path: Path, control_plane: ControlPlane
) -> None:
    """Asked again with a token at hand and another address, it shows its former password to the control plane that gave it."""
    given = (200, {"name": "x", "redis_url": "redis://node.x:p%2Fw@127.0.0.1:1/0", "address": "10.0.0.5"})
    control_plane.answers = [given]

    def at(address: str, url: str = control_plane.url) -> Identity:
        return identify(
            tmp_path, name="x", control_plane=url, token="t", address=lambda _: address, sleep=lambda _: None
        )

    assert at("10.0.0.5").address == "10.0.0.5"
    assert at("10.0.0.5").address == "10.0.0.5"
    assert len(control_plane.asked) == 1, "nothing has changed"
    at("10.0.0.6")
    asked = [body for _, body in control_plane.asked]
    assert asked == [
        {"token": "t", "name": "x", "address": "10.0.0.5"},
        {"token": "t", "name": "x", "address": "10.0.0.6", "former_password": "p/w"},
    ]
    stored(tmp_path, NOWHERE, "http://former.example:8000")
    at("10.0.0.5")
    assert "former_password" not in control_plane.asked[-1][1], "another control plane learns no password"


def test_an_old_token_does_not_stop_a_node_whose_address_changed(tmp_path: Path, control_plane: ControlPlane) -> None:
    known = Identity("x", NOWHERE, control_plane.url, "10.0.0.5")
    (tmp_path / NODE_FILE).write_bytes(msgspec.json.encode(known))
    control_plane.answers = [(403, {"error": {"message": "this join token is used"}})]
    found = identify(
        tmp_path,
        name="x",
        control_plane=control_plane.url,
        token="t",
        address=lambda _: "10.0.0.6",
        sleep=lambda _: None,
    )
    assert found == known


def test_a_new_address_waits_until_the_name_is_free(
    tmp_path: Path, control_plane: ControlPlane, redis_url: str
) -> None:
    """Its own former agent reported a moment ago; the stored login works, and would keep the former address."""
    known = Identity("x", test_redis_user.join(redis.Redis.from_url(redis_url), "x"), control_plane.url, "10.0.0.5")
    (tmp_path / NODE_FILE).write_bytes(msgspec.json.encode(known))
    in_use = (409, {"error": {"message": "a node named x is reporting now"}})
    moved = (200, {"name": "x", "redis_url": known.redis_url, "address": "10.0.0.6"})
    control_plane.answers = [in_use, in_use, moved]
    found = identify(
        tmp_path,
        name="x",
        control_plane=control_plane.url,
        token="t",
        address=lambda _: "10.0.0.6",
        sleep=lambda _: None,
    )
    assert (found.address, len(control_plane.asked)) == ("10.0.0.6", 3)
