"""What browsers are told goes through the channel layer that the web process listens on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from asgiref.testing import ApplicationCommunicator
from channels.layers import channel_layers, get_channel_layer
from django.conf import settings
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.contrib.auth.models import AnonymousUser, User
from django.contrib.sessions.backends.db import SessionStore
from django.test import override_settings

from controlplane import live
from controlplane.fleet.errors import Unavailable
from controlplane.publish import LIVE_GROUP, RedisPublisher
from tests.conftest import RedisServer


@contextmanager
def layer_of(url: str) -> Iterator[None]:
    backend = "channels_redis.pubsub.RedisPubSubChannelLayer"
    with override_settings(CHANNEL_LAYERS={"default": {"BACKEND": backend, "CONFIG": {"hosts": [url]}}}):
        channel_layers.backends = {}
        yield
    channel_layers.backends = {}


async def test_topics_reach_a_listener_from_a_plain_thread(redis_url: str) -> None:
    with layer_of(redis_url):
        layer = get_channel_layer()
        assert layer is not None
        channel = await layer.new_channel()
        await layer.group_add(LIVE_GROUP, channel)
        publisher = RedisPublisher(redis_url)
        for topics in (
            ("deployments", "deployment:demo"),
            ("nodes",),
        ):  # the second call meets what the first left behind
            await asyncio.get_running_loop().run_in_executor(None, lambda topics=topics: publisher.push_live(*topics))
            for topic in topics:
                message = await asyncio.wait_for(layer.receive(channel), 10)
                assert message == {"type": "changed", "topic": topic}


def test_a_redis_that_is_away_is_unavailable_here_too(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)  # never started
    with layer_of(server.url), pytest.raises(Unavailable):
        RedisPublisher(server.url).push_live("deployments")


@pytest.mark.django_db(transaction=True)
async def test_who_is_signed_out_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "CHECKED_EVERY", 0.05)
    user = await User.objects.acreate(username="olga")
    session = SessionStore()
    session[SESSION_KEY], session[BACKEND_SESSION_KEY] = str(user.pk), settings.AUTHENTICATION_BACKENDS[0]
    session[HASH_SESSION_KEY] = user.get_session_auth_hash()
    await session.asave()
    with override_settings(CHANNEL_LAYERS={"default": {"BACKEND": "channels.layers.InMemoryChannelLayer"}}):
        channel_layers.backends = {}
        scope = {"type": "websocket", "path": "/live/", "user": user, "session": session}
        socket = ApplicationCommunicator(live.LiveConsumer.as_asgi(), scope)
        await socket.send_input({"type": "websocket.connect"})
        assert (await socket.receive_output(10))["type"] == "websocket.accept"
        assert await socket.receive_nothing(0.2)
        await session.adelete()
        assert await socket.receive_output(10) == {"type": "websocket.close", "code": live.SIGNED_OUT}
        await socket.send_input({"type": "websocket.disconnect", "code": live.SIGNED_OUT})
        await socket.wait(10)
    channel_layers.backends = {}


@pytest.mark.parametrize(
    ("user", "path"), [(None, "/live/"), (AnonymousUser(), "/live/"), (User(username="ada"), "/elsewhere")]
)
async def test_nobody_who_is_not_signed_in_gets_as_far_as_a_consumer(user: Any, path: str) -> None:
    reached: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["path"])

    async def ask(path: str, user: Any) -> ApplicationCommunicator:
        socket = ApplicationCommunicator(live.SignedIn(app), {"type": "websocket", "path": path, "user": user})
        await socket.send_input({"type": "websocket.connect"})
        return socket

    socket = await ask(path, user)
    assert await socket.receive_output(10) == {"type": "websocket.close", "code": live.SIGNED_OUT}
    assert reached == []
    await (await ask("/live/", User(username="ada"))).wait(10)
    assert reached == ["/live/"]
