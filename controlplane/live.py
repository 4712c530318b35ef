"""The live channel: tells signed-in browsers *that* something changed; the page then fetches its partial again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from channels.auth import get_user
from channels.generic.websocket import AsyncJsonWebsocketConsumer
from django.urls import path

from controlplane.publish import LIVE_GROUP

PATH = "/live/"
SIGNED_OUT = 4401
CHECKED_EVERY = 15.0
"""Seconds between two looks at whether the session still stands."""


class SignedIn:
    """ASGI: nobody who is not signed in, and no other path, gets as far as a consumer, which takes a connection to Redis."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        user = scope.get("user")
        if user is not None and user.is_authenticated and scope["path"] == PATH:
            return await self._app(scope, receive, send)
        await receive()
        return await send({"type": "websocket.close", "code": SIGNED_OUT})


class LiveConsumer(AsyncJsonWebsocketConsumer):
    """Relays `{"topic": "deployment:smollm2"}`. Whose session ends is told so by the code `SIGNED_OUT`."""

    _watch: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        await self.channel_layer.group_add(LIVE_GROUP, self.channel_name)
        await self.accept()
        self._watch = asyncio.create_task(self._until_signed_out())

    async def disconnect(self, code: int) -> None:
        if self._watch is not None:
            self._watch.cancel()
        await self.channel_layer.group_discard(LIVE_GROUP, self.channel_name)

    async def changed(self, message: dict[str, Any]) -> None:
        await self.send_json({"topic": message["topic"]})

    async def _until_signed_out(self) -> None:
        stored = self.scope["session"]
        while True:
            await asyncio.sleep(CHECKED_EVERY)
            now = type(stored)(stored.session_key)  # read anew
            user = await get_user({"session": now})
            if not user.is_authenticated:
                await self.close(code=SIGNED_OUT)
                return


websocket_urls = [path(PATH.removeprefix("/"), LiveConsumer.as_asgi())]
