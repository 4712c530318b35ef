"""The live channel: tells signed-in browsers *that* something changed; the page then fetches its partial again."""

from __future__ import annotations

from typing import Any

from channels.generic.websocket import AsyncJsonWebsocketConsumer
from django.urls import path

from controlplane.publish import LIVE_GROUP


class LiveConsumer(AsyncJsonWebsocketConsumer):
    """Relays `{"topic": "deployment:smollm2"}`. Nobody who is not signed in gets past `connect`."""

    async def connect(self) -> None:
        user = self.scope.get("user")
        if user is None or not user.is_authenticated:
            await self.close(code=4401)
            return
        await self.channel_layer.group_add(LIVE_GROUP, self.channel_name)
        await self.accept()

    async def disconnect(self, code: int) -> None:
        await self.channel_layer.group_discard(LIVE_GROUP, self.channel_name)

    async def changed(self, message: dict[str, Any]) -> None:
        await self.send_json({"topic": message["topic"]})


websocket_urls = [path("live/", LiveConsumer.as_asgi())]
