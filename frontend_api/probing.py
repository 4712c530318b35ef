"""Probes of the engines and pairs that requests have put in doubt (`routing/outcomes` says which, and when).

An engine is asked for one token. Of a pair the decode engine is asked alone first, so that it is known whose fault it is; then
both for an exchange, with a prompt that nobody has sent before. Prompts are words, as any tokenizer reads them. No request ever
waits for a probe.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from time import monotonic
from typing import Any

import msgspec

from frontend_api.formats.openai import (
    ENDPOINTS,
    Endpoint,
    Usage,
    cached_at_prefill,
    prefill_body,
    read_params,
    side_channel,
)
from frontend_api.http.ask import Reply, ask
from frontend_api.http.upstream import Broken, Upstreams
from frontend_api.kv.room import work_done
from frontend_api.routing.failures import BROKE_OFF, OVERLOAD, Failure, refuses
from frontend_api.routing.outcomes import LONGEST_BLOCK, Outcomes, Trouble, computed_itself
from frontend_api.routing.view import Engine

log = logging.getLogger(__name__)

PROBE_SECONDS = 15.0
"""For one leg. An engine that works meanwhile, as its streams or its figures show, is not called silent."""
METRICS_SECONDS = 1.0
LOOK_SECONDS = 0.2
AT_ONCE = 16
FEW_WORDS = 8
STREAM_TOKENS = 16
TRIES = 4
"""Of a prompt that is too long for an engine, half as long each time."""
_TEXT, _CHAT = ENDPOINTS["/v1/completions"], ENDPOINTS["/v1/chat/completions"]
_NO_PATH = (404, 405)
_SAMPLE = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not what "
    "all were we when your can said there use an each which she do how their if will up other about out many then them these so "
    "some her would make like him into time has look two more write go see number no way could people my than first water been "
    "call who oil its now find long down day did get come made may part"
)
_WORDS = _SAMPLE.split()


class _Unsure(Exception):
    """The probe tells nothing of the engine."""


class Prober:
    """Of one router process."""

    def __init__(self, upstreams: Upstreams, outcomes: Outcomes, chance: random.Random | None = None) -> None:
        self._upstreams = upstreams
        self._outcomes = outcomes
        self._chance = chance or random.Random()
        self._running: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """For ever: probe what is due."""
        try:
            while True:
                self.start_due(monotonic())
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            for task in self._running:
                task.cancel()

    def start_due(self, now: float) -> None:
        if not self._outcomes.troubles:
            return
        for trouble in self._outcomes.due(now):
            if len(self._running) >= AT_ONCE:
                return
            if self._outcomes.begin(trouble):
                task = asyncio.get_running_loop().create_task(self._probe(trouble))
                self._running.add(task)
                task.add_done_callback(self._running.discard)

    async def _probe(self, trouble: Trouble) -> None:
        failure, unsure = None, True
        try:
            if trouble.prefill is None:
                failure = await self._engine(trouble)
            else:
                failure = await self._pair(trouble, trouble.prefill)
            unsure = False
        except _Unsure:
            pass
        except Exception:
            log.exception("defect in the router")
        finally:
            self._outcomes.end(trouble, monotonic(), failure, unsure=unsure)

    # ---- one engine

    async def _engine(self, trouble: Trouble) -> Failure | None:
        engine, model = trouble.engine, trouble.deployment.served_name
        if trouble.failure.what == "no-params":
            reply = await self._post(engine, _TEXT.path, prefill_body(_TEXT, self._body(model, FEW_WORDS)))
            if isinstance(reply, Reply) and reply.status == 200:
                return None if read_params(reply.body) is not None else Failure(engine, "no-params")
        if trouble.failure.what == BROKE_OFF:
            text = self._prompt(FEW_WORDS)
            body = _json(model, prompt=text, stream=True, max_tokens=STREAM_TOKENS, ignore_eos=True)
            reply = await self._post(engine, _TEXT.path, body)
            if isinstance(reply, Reply) and reply.status == 200:
                good = reply.body.rstrip().endswith(b"data: [DONE]") and b'"error"' not in reply.body
                return None if good else Failure(engine, BROKE_OFF)
            if reply is Broken.RESET or reply is Broken.PROTOCOL:
                return Failure(engine, BROKE_OFF)
        return await self._alone(engine, trouble)

    async def _alone(self, engine: Engine, trouble: Trouble) -> Failure | None:
        model = trouble.deployment.served_name
        reply = await self._post(engine, _TEXT.path, self._body(model, FEW_WORDS))
        if isinstance(reply, Reply) and reply.status in _NO_PATH:  # has it another model, or not this path?
            reply = await self._post(engine, _CHAT.path, self._body(model, FEW_WORDS, _CHAT))
        what = _what(reply, trouble)
        if what is None and isinstance(reply, Reply) and not _has_token(reply.body):
            what = "no-token"
        return Failure(engine, what) if what is not None else None

    # ---- a pair

    async def _pair(self, trouble: Trouble, prefill: Engine) -> Failure | None:
        decode, model = trouble.engine, trouble.deployment.served_name
        began_at = monotonic()
        if (failure := await self._alone(decode, trouble)) is not None:
            return failure
        waited = monotonic() - began_at > PROBE_SECONDS / 5
        block = decode.spec.block_size or prefill.spec.block_size or LONGEST_BLOCK
        words = block + block // 8 + 2
        # text completions do not tell what was computed
        endpoint = _CHAT if trouble.failure.what == "computed" else _TEXT
        for _ in range(TRIES):
            body = self._body(model, words, endpoint)
            reply = await self._post(prefill, endpoint.path, prefill_body(endpoint, body))
            if not (isinstance(reply, Reply) and reply.status == 400):
                break
            words = max(words // 2, FEW_WORDS)
        if (what := _what(reply, trouble)) is not None:
            return Failure(prefill, what)
        assert isinstance(reply, Reply)
        params = read_params(reply.body)
        if params is None:
            return Failure(prefill, "no-params")
        channel = side_channel(params)
        fetching = body[:-1] + b',"kv_transfer_params":%b}' % params
        reply = await self._post(decode, endpoint.path, fetching, waits=waited)
        what = _what(reply, trouble)
        if what is None and isinstance(reply, Reply):
            usage = Usage()
            usage.add(_object(reply.body).get("usage"))
            if not computed_itself(usage, cached_at_prefill(params), decode.spec.block_size):
                return None
            what = "computed"
        return Failure(decode, what or "", prefill, channel)

    # ---- one leg

    async def _post(self, engine: Engine, path: str, body: bytes, *, waits: bool = True) -> Reply | Broken:
        """`waits`: it may have to wait for others there. Raises `_Unsure` where what comes of it does not tell how the engine is."""
        began_at = monotonic()
        pool = self._upstreams.pool(engine)
        asking = asyncio.ensure_future(ask(pool, path.encode(), body, PROBE_SECONDS))
        try:
            answered, _ = await asyncio.wait((asking,), timeout=PROBE_SECONDS / 3)
            before = await self._work_done(engine) if waits and not answered else None
            reply = await asking
        finally:
            asking.cancel()
        if isinstance(reply, Reply):
            if reply.status in OVERLOAD:
                raise _Unsure
        elif reply is Broken.SILENT:
            if waits and (pool.heard_since(began_at) or before != await self._work_done(engine)):
                raise _Unsure  # it has much to do
        elif reply in (Broken.CONNECT, Broken.CONNECT_TIMEOUT):
            engine.failed(monotonic(), hangs=reply is Broken.CONNECT_TIMEOUT, cause=reply.value)
            raise _Unsure  # it is out already, and let in again by who sees that it takes connections
        return reply

    async def _work_done(self, engine: Engine) -> tuple[float, ...] | None:
        """By the engine's own account; None: it gives none."""
        pool = self._upstreams.pool(engine)
        reply = await ask(pool, b"/metrics", b"", METRICS_SECONDS, method=b"GET", fresh=False)
        return work_done(b"\n" + reply.body) if isinstance(reply, Reply) and reply.status == 200 else None

    def _prompt(self, words: int) -> str:
        return " ".join(self._chance.choices(_WORDS, k=words))

    def _body(self, model: str, words: int, endpoint: Endpoint = _TEXT) -> bytes:
        text = self._prompt(words)
        if endpoint is _CHAT:
            return _json(model, messages=[{"role": "user", "content": text}])
        return _json(model, prompt=text)


def _json(model: str, **fields: Any) -> bytes:
    return json.dumps({"model": model, "max_tokens": 1, "temperature": 0, **fields}).encode()


def _what(reply: Reply | Broken, trouble: Trouble) -> str | None:
    """What a leg failed by; None: it answered well. Raises `_Unsure` where the probe itself is refused, as requests were not."""
    if isinstance(reply, Broken):
        return reply.value
    what = f"status-{reply.status}"
    if refuses(reply.status) and what != trouble.failure.what:
        raise _Unsure
    return None if reply.status == 200 else what


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _has_token(body: bytes) -> bool:
    reply = _object(body)
    usage = reply.get("usage")
    return bool(reply.get("choices")) and not (isinstance(usage, dict) and usage.get("completion_tokens") == 0)
