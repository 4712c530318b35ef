"""Defects of the router's own: the client is told, and nothing else ends. Code is put in place of code, so it runs uncompiled."""

from __future__ import annotations

import pytest

from tests.frontend_api.client import PROMPT, Client, ask, events, request
from tests.frontend_api.conftest import Site

CHAT = "/v1/chat/completions"


async def test_a_defect_is_answered_and_ends_nothing_else(alone: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> bytes:
        raise RuntimeError("defect")

    with monkeypatch.context() as patch:
        patch.setattr("frontend_api.formats.openai.read_request", fail)
        async with Client(alone.port) as client:
            client.send(request(CHAT, PROMPT) + request("/health"))
            reply = await client.reply()
            assert (reply.status, reply.error["code"]) == (500, "internal_error")
            assert await client.closed() == b""
    for name in ("formats.openai.read_reply", "flow.choose", "legs.AnswerLeg.head"):
        with monkeypatch.context() as patch:
            patch.setattr(f"frontend_api.{name}", fail)
            assert (await ask(alone.port, CHAT, PROMPT)).error["code"] == "internal_error"
    with monkeypatch.context() as patch:
        patch.setattr("frontend_api.exchange.Exchange.relay", fail)
        reply = await ask(alone.port, CHAT, {**PROMPT, "stream": True})
        *_, told, done = events(reply.body)
        assert (told["error"]["code"], done) == ("internal_error", "[DONE]")
    assert (await ask(alone.port, CHAT, PROMPT)).status == 200
    await alone.settled()
