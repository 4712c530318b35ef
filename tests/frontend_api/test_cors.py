"""Web pages of other origins: what their browsers ask and are told, and what no page may read."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.fleet.errors import InvalidInput
from controlplane.fleet.model import Role
from frontend_api.http.cors import Origins
from frontend_api.http.reading import Limits
from tests.frontend_api.client import PROMPT, Client, ask, request
from tests.frontend_api.conftest import MakeSite, Site

CHAT = "/v1/chat/completions"
PAGE = "https://chat.example.com"
GOOD = {"Authorization": "Bearer tdm-inference"}
ASKS = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}


@pytest.fixture
async def guarded(make_site: MakeSite) -> Site:
    site = await make_site(auth=True, limits=Limits(body_bytes=4_000))
    await site.engine("a", Role.AGGREGATED)
    site.publish()
    return site


def allowed(headers: dict[str, str]) -> str | None:
    assert "access-control-allow-credentials" not in headers
    origin = headers.get("access-control-allow-origin")
    assert headers.get("access-control-expose-headers") == (None if origin is None else "*")
    return origin


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/tokenize", "/v1/models", "/v1/models/m"])
async def test_a_browser_asks_without_a_key(guarded: Site, path: str) -> None:
    names = "authorization,content-type,x-stainless-lang,anthropic-version"
    reply = await ask(guarded.port, path, method="OPTIONS", **ASKS, Access_Control_Request_Headers=names)
    assert (reply.status, reply.body, allowed(reply.headers)) == (200, b"", "*")
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert reply.headers["access-control-allow-headers"] == names
    assert guarded.engines["a"].heard == []


async def test_names_that_are_no_headers_are_not_repeated(guarded: Site) -> None:
    reply = await ask(guarded.port, CHAT, method="OPTIONS", **ASKS, Access_Control_Request_Headers="x;<script>")
    assert reply.status == 200
    assert "access-control-allow-headers" not in reply.headers


@pytest.mark.parametrize(
    ("path", "body", "more", "status"),
    [
        (CHAT, PROMPT, GOOD, 200),
        (CHAT, {**PROMPT, "stream": True}, GOOD, 200),
        ("/v1/models", None, GOOD, 200),
        (CHAT, PROMPT, {}, 401),
        (CHAT, PROMPT, {"Authorization": "Bearer tdm-manage"}, 403),
        (CHAT, {**PROMPT, "model": "none"}, GOOD, 404),
        ("/v1/nothing", PROMPT, GOOD, 404),
        (CHAT, None, GOOD, 405),
        (CHAT, b"{", GOOD, 400),
        (CHAT, b" " * 5_000, GOOD, 413),
        (CHAT, PROMPT, {**GOOD, "Content-Encoding": "gzip"}, 415),
        (CHAT, PROMPT, {**GOOD, "Expect": "magic"}, 417),
        ("/v1/realtime", None, {"Connection": "Upgrade", "Upgrade": "websocket"}, 426),
        (CHAT, PROMPT, {"x": "y" * 40_000}, 431),
    ],
)
async def test_a_page_reads_every_answer_and_every_refusal(
    guarded: Site, path: str, body: Any, more: dict[str, str], status: int
) -> None:
    reply = await ask(guarded.port, path, body, Origin=PAGE, **more)
    assert (reply.status, allowed(reply.headers)) == (status, "*")
    assert "access-control-allow-origin" not in (await ask(guarded.port, path, body, **more)).headers  # no page asked


async def test_a_page_reads_that_no_engine_is_there_and_each_answer_of_one_connection(guarded: Site) -> None:
    async with Client(guarded.port) as client:
        for _ in range(3):
            client.post(CHAT, PROMPT, Origin=PAGE, **GOOD)
            reply = await client.reply()
            assert (reply.status, allowed(reply.headers)) == (200, "*")
        guarded.publish(without=("a",))
        client.post(CHAT, PROMPT, Origin=PAGE, **GOOD)
        reply = await client.reply()
        assert (reply.status, allowed(reply.headers)) == (503, "*")


async def test_only_the_origins_that_are_listed(guarded: Site) -> None:
    guarded.router.origins = Origins(f"{PAGE}, tauri://localhost")
    for origin in (PAGE, "tauri://localhost"):
        reply = await ask(guarded.port, CHAT, PROMPT, Origin=origin, **GOOD)
        assert (allowed(reply.headers), reply.headers["vary"]) == (origin, "origin")
        assert (await ask(guarded.port, CHAT, method="OPTIONS", **{**ASKS, "Origin": origin})).status == 200
    for origin in ("https://evil.example.com", "http://chat.example.com", PAGE + ":444", "null", "*"):
        reply = await ask(guarded.port, CHAT, PROMPT, Origin=origin, **GOOD)
        assert (reply.status, allowed(reply.headers), reply.headers["vary"]) == (200, None, "origin")
        reply = await ask(guarded.port, CHAT, method="OPTIONS", **{**ASKS, "Origin": origin})
        assert (reply.status, reply.error["code"], allowed(reply.headers)) == (403, "origin_not_allowed", None)
    assert (await ask(guarded.port, CHAT, PROMPT, **GOOD)).headers["vary"] == "origin"


@pytest.mark.parametrize("path", ["/metrics", "/debug/decisions", "/metrics/"])
async def test_figures_and_decisions_are_no_pages_business(guarded: Site, path: str) -> None:
    reply = await ask(guarded.port, path, Origin=PAGE)  # this machine reads them without a key; so does a browser on it
    assert (reply.status, allowed(reply.headers)) == (200, None)
    assert (await ask(guarded.port, path, method="OPTIONS", **ASKS)).status == 404


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example.com", 401),
        ("evil.example.com:8080", 401),
        ("127.0.0.1.nip.io:8080", 401),
        ("localhost:8080", 200),
        ("router", 200),
        ("127.0.0.1:8080", 200),
        ("[::1]:8080", 200),
        ("[::1]", 200),
        ("", 200),
    ],
)
async def test_a_name_that_somebody_made_mean_this_machine_opens_nothing(guarded: Site, host: str, status: int) -> None:
    """DNS rebinding: the browser then takes the router for that page's own server, and asks no leave."""
    async with Client(guarded.port) as client:
        client.send(request("/metrics").replace(b"Host: router", b"Host: " + host.encode()))
        assert (await client.reply()).status == status


@pytest.mark.parametrize(
    "text", ["chat.example.com", "https://a.example/path", "https://a, *", "https://*.a", "", "null"]
)
def test_what_is_no_origin_is_said_at_the_start(text: str) -> None:
    with pytest.raises(InvalidInput, match="is not an origin; write"):
        Origins(text)


def test_none_may() -> None:
    assert Origins("none").headers({b"origin": PAGE.encode()}) == b""
