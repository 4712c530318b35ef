"""The one counter of all routers: a script in Redis that takes a whole batch of reservations and settlements at a time.

Requests and tokens are sums per second and key (rules: `windows`). Requests at a time are told by each router as its whole
number per key, whatever its limits are now, so that repeating or losing a message does no harm; a router that has not spoken
for its lease counts no more. Each call has a number: a router that finds another count than the one it knows, or one that has
fallen behind (a replica, or older data read back from disk), is told so, and nothing is counted.
Nothing here decides what to do without Redis: `limits` does.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec
import redis.asyncio as redis
from msgspec import Struct
from redis.exceptions import NoScriptError

from frontend_api.limits.windows import Caps

LEASE = 10
"""Seconds after which a router that says nothing counts as dead."""

SCRIPT = """
local batch = cmsgpack.unpack(ARGV[1])
local router, lease, known, seen = batch[1], batch[2], batch[3], batch[5]
local clock = redis.call('TIME')
local now = tonumber(clock[1])
local exact = now + tonumber(clock[2]) / 1000000
local routers = 'tandem:limits:routers'
redis.call('ZADD', routers, exact + lease, router)
redis.call('ZREMRANGEBYSCORE', routers, '-inf', exact)
redis.call('EXPIRE', routers, 3600)
local found = redis.call('HMGET', 'tandem:limits:calls', 'born', 'calls')
local born, calls = found[1], tonumber(found[2] or 0)
if not born or (known == born and calls < seen) then
  born = clock[1] .. '.' .. clock[2]
end
calls = calls + 1
redis.call('HSET', 'tandem:limits:calls', 'born', born, 'calls', calls)
redis.call('EXPIRE', 'tandem:limits:calls', 3600)
local replies = {}
if known ~= '' and known ~= born then
  batch[4] = {}
end
for i, line in ipairs(batch[4]) do
  local id, max_requests, max_tokens, max_held = line[1], line[2], line[3], line[4]
  local held, owed, asks = line[5], line[6], line[7]
  local reply = {0, 0, 0}

  local holders, others = 'tandem:limits:held:' .. id .. ':' .. born, 0
  if max_held > 0 then
    local all = redis.call('HGETALL', holders)
    for j = 1, #all, 2 do
      if all[j] ~= router then
        if redis.call('ZSCORE', routers, all[j]) then
          others = others + tonumber(all[j + 1])
        else
          redis.call('HDEL', holders, all[j])
        end
      end
    end
  end

  local window, counted = 'tandem:limits:window:' .. id .. ':' .. born, max_requests > 0 or max_tokens > 0
  local requests, tokens, first, last = 0, 0, now, 0
  local function at(second)
    local found = redis.call('HMGET', window, 'r' .. second, 't' .. second)
    return tonumber(found[1] or 0), tonumber(found[2] or 0)
  end
  local function add(second, more_requests, more_tokens)
    local r, t = at(second)
    more_requests, more_tokens = math.max(more_requests, -r), math.max(more_tokens, -t)
    redis.call('HSET', window, 'r' .. second, r + more_requests, 't' .. second, t + more_tokens)
    requests, tokens = requests + more_requests, tokens + more_tokens
    first, last = math.min(first, second), math.max(last, second)
  end
  if counted then
    local sums = redis.call('HMGET', window, 'requests', 'tokens', 'first', 'last')
    last = tonumber(sums[4] or 0)
    if last >= now - 60 and last <= now + 1 then
      requests, tokens, first = tonumber(sums[1]), tonumber(sums[2]), tonumber(sums[3])
    else
      redis.call('DEL', window)
      last = 0
    end
    while first < now - 60 do
      local r, t = at(first)
      requests, tokens = requests - r, tokens - t
      redis.call('HDEL', window, 'r' .. first, 't' .. first)
      first = first + 1
    end
    for _, item in ipairs(owed) do
      local second = math.min(item[1], now)
      if second >= now - 60 then
        add(second, item[2], item[3])
      end
    end
  end

  local granted, spent = 0, 0
  local seconds = nil
  local function wait(over_requests, over_tokens)
    if not seconds then  -- read once: thousands may ask for what a key no longer has
      local names = {}
      for second = first, now do
        names[#names + 1] = 'r' .. second
        names[#names + 1] = 't' .. second
      end
      seconds = redis.call('HMGET', window, unpack(names))
      for j, found in ipairs(seconds) do
        seconds[j] = tonumber(found or 0)
      end
    end
    for second = first, now do
      local j = 2 * (second - first)
      local r, t = seconds[j + 1], seconds[j + 2]
      if second == now then
        r, t = r + granted, t + spent
      end
      over_requests, over_tokens = over_requests - r, over_tokens - t
      if over_requests <= 0 and over_tokens <= 0 then
        return second + 61 - exact
      end
    end
    return 61
  end
  local waits = nil
  for _, more in ipairs(asks) do
    local bound, pause = 0, 0
    if max_requests > 0 and requests + 1 > max_requests then
      waits = waits or wait(requests + 1 - max_requests, 0)
      bound, pause = 1, waits
    elseif max_tokens > 0 and tokens + more > max_tokens then
      bound, pause = 2, wait(0, tokens + more - max_tokens)
    elseif max_held > 0 and others + held + granted + 1 > max_held then
      bound, pause = 3, 1
    else
      granted, spent = granted + 1, spent + more
      requests, tokens = requests + 1, tokens + more
    end
    reply[#reply + 1] = bound
    reply[#reply + 1] = pause
    reply[#reply + 1] = requests
    reply[#reply + 1] = tokens
  end

  if counted then
    if granted > 0 then
      requests, tokens = requests - granted, tokens - spent
      add(now, granted, spent)
    end
    if last > 0 then
      redis.call('HSET', window, 'requests', requests, 'tokens', tokens, 'first', first, 'last', last)
      redis.call('EXPIRE', window, 120)
    end
    reply[1], reply[2], reply[3] = last, requests, tokens
  end
  if held + granted > 0 then
    redis.call('HSET', holders, router, held + granted)
    redis.call('EXPIRE', holders, 60)
  else
    redis.call('HDEL', holders, router)
  end
  replies[i] = reply
end
return cmsgpack.pack({exact, redis.call('ZCARD', routers), replies, born, calls})
"""


class Line(Struct, array_like=True, frozen=True):
    """What one router says of one key."""

    key: str
    max_requests: int
    max_tokens: int
    max_held: int
    held: int
    """Requests of the key that this router has in motion, all of them."""
    owed: list[tuple[int, int, int]] = []
    """(second, requests, tokens): what is to be counted besides, or given back."""
    asks: list[int] = []
    """Tokens of each new request."""

    @property
    def caps(self) -> Caps:
        return Caps(self.max_requests, self.max_tokens, self.max_held)


class Reply(Struct, array_like=True, frozen=True):
    now: float
    """By the clock of Redis."""
    routers: int
    """That live."""
    lines: list[list[float]]
    """Per line: the newest second in the window, its requests and tokens; then for each ask: bound, wait, requests and tokens
    counted by then."""
    born: str = ""
    """Names this count: another Redis, or one that lost something, has another."""
    calls: int = 0
    """By all routers until now."""


class Forgotten(Exception):
    """Redis has lost what it counted, and has counted nothing of this batch."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Reply).decode


class RedisCounter:
    """One connection of its own: the calls are few, large and in order."""

    def __init__(self, client: redis.Redis, router: str) -> None:
        self._pool: Any = client.connection_pool
        self._router = router
        self._connection: Any = None
        self._digest = b""
        self._born = ""
        self._calls = 0

    async def ask(self, lines: list[Line], *, last: bool = False) -> Reply:
        """Count a batch. `last`: this router ends. Raises `Forgotten`; `RedisError`, `OSError`, or `MsgspecError` for an odd
        answer: then, and when the call is cancelled, `drop` the connection, as an answer may still be under way on it."""
        if self._connection is None:
            self._connection = self._pool.make_connection()
            self._connection.socket_timeout = None  # the caller's limit is shorter, and one timer is enough
            await self._connection.connect()
            self._digest = await self._call("SCRIPT", "LOAD", SCRIPT)
        batch = _encode((self._router, 0 if last else LEASE, self._born, lines, self._calls))
        try:
            answer = await self._call("EVALSHA", self._digest, "0", batch)
        except NoScriptError:  # Redis was emptied
            self._digest = await self._call("SCRIPT", "LOAD", SCRIPT)
            answer = await self._call("EVALSHA", self._digest, "0", batch)
        reply = _decode(answer)
        known, self._born, self._calls = self._born, reply.born, reply.calls
        if known not in ("", reply.born):
            raise Forgotten
        return reply

    async def _call(self, *command: Any) -> bytes:
        await self._connection.send_command(*command, check_health=False)
        return cast(bytes, await self._connection.read_response(disable_decoding=True))

    async def drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.disconnect(nowait=True)
