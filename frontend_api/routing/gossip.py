"""What routers of several hosts tell each other through Redis: their loads, a few times a second.

A message says all that one process has, so that losing one does no harm; who has nothing says so once and is silent. Siblings
see each other in shared memory and are not listened to. Without Redis each host knows its own loads alone. Nothing here is on
the way of a request.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic

import msgspec
import redis.asyncio as redis
from redis.exceptions import RedisError

from controlplane.fleet.wire import LOADS_CHANNEL, RouterLoads, decode, encode
from frontend_api.routing.loads import Heard, Loads
from frontend_api.routing.waiting import Waiting

log = logging.getLogger(__name__)

TELL_SECONDS = 0.2
"""Between two messages while loads change."""
REPEAT_SECONDS = 1.0
"""Between two messages while they do not: well below `loads.SILENCE_SECONDS`."""
LISTEN_SECONDS = 3.0
"""Below the limit of a call to Redis, or silence would look like one that hangs."""
RETRY_SECONDS = 1.0


class Gossip:
    """One process's mouth and ear."""

    def __init__(self, router: str, loads: Loads, waiting: Waiting, client: redis.Redis) -> None:
        self._router = router
        self._loads = loads
        self._waiting = waiting
        self._client = client
        self._said: Heard = {}
        self._said_at = 0.0

    async def tell(self, now: float) -> bool:
        """Say what this process has, if that is news. Raises `RedisError` or `OSError`. `now`: monotonic."""
        has = self._loads.said()
        if has == self._said and (not has or now - self._said_at < REPEAT_SECONDS):
            return False
        loads = {name: (requests, tokens) for name, (requests, tokens, _) in has.items()}
        kv = {name: taken for name, (_, _, taken) in has.items() if taken}
        await self._client.publish(LOADS_CHANNEL, encode(RouterLoads(self._router, self._loads.host, loads, kv)))
        self._said, self._said_at = has, now
        return True

    def hear(self, data: bytes, now: float) -> None:
        """A message of some router."""
        try:
            message = decode(data, RouterLoads)
        except msgspec.MsgspecError as error:
            log.warning("A message of another router cannot be read: %s", error)
            return
        if message.host != self._loads.host:
            heard = {name: (*load, message.kv.get(name, 0)) for name, load in message.loads.items()}
            self._loads.hear(message.router, heard, now)
            self._waiting.look()

    async def run_telling(self) -> None:
        while True:
            try:
                await self.tell(monotonic())
            except (RedisError, OSError) as error:
                log.debug("The loads were not told: %s", error)
            await asyncio.sleep(TELL_SECONDS)

    async def run_hearing(self) -> None:
        while True:
            try:
                async with self._client.pubsub(ignore_subscribe_messages=True) as channel:
                    await channel.subscribe(LOADS_CHANNEL)
                    while True:
                        message = await channel.get_message(timeout=LISTEN_SECONDS)
                        if message is not None:
                            self.hear(message["data"], monotonic())
            except (RedisError, OSError) as error:
                log.debug("Other routers' loads are not heard: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
