"""The HTTP surface: which path does what, the key, the faults, and what a leaving client ends.

A bare ASGI application. Every generation ends in `abort`, whatever happened, so that no block is ever stranded.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from http import HTTPStatus
from typing import Protocol

from msgspec import Struct

from workers.sim.chat import Chat
from workers.sim.completion import Completion
from workers.sim.engine import Engine
from workers.sim.events import EventPublisher
from workers.sim.faults import FAULTS, Faults, UnknownFault
from workers.sim.generation import Choice, Generation, Job
from workers.sim.http import (
    DONE,
    ApiError,
    ClientGone,
    Exchange,
    Receive,
    Scope,
    Send,
    internal,
    late,
    no_route,
    unless_gone,
)
from workers.sim.messages import Messages, count_tokens, in_anthropic_shape
from workers.sim.model_tokens import chat_text, ids, strings, text_of
from workers.sim.requests import Carried, CountRequest, DetokenizeRequest, Json, TokenizeRequest, parse
from workers.sim.responses import Responses
from workers.sim.settings import VERSION, Settings
from workers.sim.transfer import remote_of

GUARDED = ("/v1", "/v2", "/inference", "/cohere", "/sim")
"""vLLM's guarded prefixes, and our own."""
_AFTER_TOKENS = 3


class Endpoint(Protocol):
    """How one API words a generation."""

    prefix: str
    job: Job
    asked_model: str | None

    def refuse(self, error: ApiError) -> ApiError:
        """The error in this API's shape."""

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """The last frames of a stream that broke. May raise it: then the connection breaks."""

    def whole(self, request_id: str, generation: Generation, choices: list[Choice]) -> Json:
        """The answer to a request that does not stream."""

    def chunks(self, request_id: str, generation: Generation) -> AsyncIterator[bytes]:
        """The frames of one that does."""


class FaultsRequest(Struct):
    faults: list[str]


class _Broken(Exception):
    """A fault breaks the connection."""


class App:
    def __init__(self, settings: Settings, engine: Engine, faults: Faults, publisher: EventPublisher | None) -> None:
        self._settings, self._engine, self._faults, self._publisher = settings, engine, faults, publisher
        self._key = hashlib.sha256(settings.api_key.encode()).digest() if settings.api_key else None
        self._load = 0
        self._get: dict[str, Callable[[Exchange], Awaitable[None]]] = {
            "/health": self._health,
            "/ping": self._health,
            "/metrics": self._metrics,
            "/version": lambda exchange: exchange.json({"version": VERSION}),
            "/load": lambda exchange: exchange.json({"server_load": self._load}),
            "/v1/models": self._models,
            "/kv_event_sources": self._event_sources,
            "/sim/faults": self._show_faults,
        }
        self._post: dict[str, Callable[[Exchange], Awaitable[None]]] = {
            "/v1/chat/completions": lambda exchange: self._generate(exchange, Chat.read),
            "/v1/completions": lambda exchange: self._generate(exchange, Completion.read),
            "/v1/responses": lambda exchange: self._generate(exchange, Responses.read),
            "/v1/messages": lambda exchange: self._generate(exchange, Messages.read),
            "/v1/messages/count_tokens": self._count_tokens,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/sim/reset_prefix_cache": self._reset_prefix_cache,
            "/sim/faults": self._set_faults,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send)
        try:
            await self._route(exchange)
        except ApiError as error:
            if exchange.started:
                raise
            await exchange.json(error.body, error.status)
        except ClientGone:
            pass

    async def _route(self, exchange: Exchange) -> None:
        if exchange.path.startswith(GUARDED) and not self._known(exchange.header(b"authorization")):
            await exchange.json({"error": "Unauthorized"}, 401)
            return
        routes, others = (self._get, self._post) if exchange.method == "GET" else (self._post, self._get)
        if exchange.method not in ("GET", "POST"):
            routes, others = {}, self._get | self._post
        if handler := routes.get(exchange.path):
            await handler(exchange)
        else:
            raise no_route(HTTPStatus.METHOD_NOT_ALLOWED if exchange.path in others else HTTPStatus.NOT_FOUND)

    def _known(self, authorization: str) -> bool:
        if self._key is None:
            return True
        scheme, _, key = authorization.partition(" ")
        digest = hashlib.sha256(key.encode()).digest()
        return scheme.lower() == "bearer" and hmac.compare_digest(digest, self._key)

    # --- about the engine --------------------------------------------------------------------------------------

    async def _health(self, exchange: Exchange) -> None:
        await exchange.answer(b"", status=503 if "unhealthy" in self._faults else 200)

    async def _metrics(self, exchange: Exchange) -> None:
        await exchange.answer(self._engine.metrics_text(), b"text/plain; version=1.0.0; charset=utf-8")

    async def _models(self, exchange: Exchange) -> None:
        permission = {
            "id": f"modelperm-{secrets.token_hex(8)}",
            "object": "model_permission",
            "created": 0,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        card = {
            "id": self._settings.served_model_name,
            "object": "model",
            "created": 0,
            "owned_by": "vllm",
            "root": "sim",
            "parent": None,
            "max_model_len": self._settings.max_model_len,
            "permission": [permission],
        }
        await exchange.json({"object": "list", "data": [card]})

    async def _event_sources(self, exchange: Exchange) -> None:
        await exchange.json({"0": self._publisher.source()} if self._publisher else {})

    async def _reset_prefix_cache(self, exchange: Exchange) -> None:
        await exchange.body()
        await exchange.answer(b"", status=200 if self._engine.reset_prefix_cache() else 500)

    async def _tokenize(self, exchange: Exchange) -> None:
        if "no-tokenize" in self._faults:
            raise no_route(HTTPStatus.NOT_FOUND)
        request = parse(await exchange.body(), TokenizeRequest)
        self._check_model(request.model)
        if request.messages is not None:
            generate, resume = request.add_generation_prompt, request.continue_final_message
            text = chat_text(request.messages, request.tools, self._settings, generate=generate, resume=resume)
        elif request.prompt is not None:
            text = request.prompt
        else:
            raise ApiError("1 validation error:\n  Field required", kind="Bad Request", param="body.prompt")
        special = request.add_special_tokens
        if special is None:
            special = request.messages is None
        tokens = ids(text, self._settings, special=special)
        if "wrong-tokens" in self._faults:
            tokens = [token ^ 1 for token in tokens]
        await exchange.json(
            {
                "count": len(tokens),
                "max_model_len": self._settings.max_model_len,
                "tokens": tokens,
                "token_strs": strings(text, self._settings, special=special) if request.return_token_strs else None,
            }
        )

    async def _detokenize(self, exchange: Exchange) -> None:
        request = parse(await exchange.body(), DetokenizeRequest)
        self._check_model(request.model)
        await exchange.json({"prompt": text_of(request.tokens, self._settings)})

    async def _count_tokens(self, exchange: Exchange) -> None:
        request = parse(await exchange.body(), CountRequest)
        try:
            self._check_model(request.model)
            counted = count_tokens(request, self._settings)
        except ApiError as error:
            raise in_anthropic_shape(error) from None
        await exchange.json({"input_tokens": counted})

    # --- faults ------------------------------------------------------------------------------------------------

    async def _show_faults(self, exchange: Exchange) -> None:
        await exchange.json({"faults": self._faults.names(), "known": FAULTS})

    async def _set_faults(self, exchange: Exchange) -> None:
        request = parse(await exchange.body(), FaultsRequest)
        try:
            self._faults.set(request.faults)
        except UnknownFault as error:
            raise ApiError(str(error), param="faults") from None
        await self._show_faults(exchange)

    # --- generation --------------------------------------------------------------------------------------------

    def _check_model(self, model: str | None) -> None:
        if model and model != self._settings.served_model_name:
            error = ApiError(
                f"The model `{model}` does not exist. Valid aliases: {self._settings.served_model_name}.",
                status=404,
                kind="NotFoundError",
                param="model",
            )
            raise late(error)

    async def _generate(self, exchange: Exchange, read: Callable[[bytes, Settings], Endpoint]) -> None:
        body = await exchange.body()
        if not exchange.header(b"content-type").lower().startswith("application/json"):
            raise ApiError(
                "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed",
                kind="Bad Request",
            )
        try:
            endpoint = read(body, self._settings)
            try:
                self._check_model(endpoint.asked_model)
                if "http-500" in self._faults:
                    raise internal()
                if "transfer-refused" in self._faults and remote_of(endpoint.job.kv_transfer_params) is not None:
                    raise late(ApiError("kv_transfer_params: told to refuse them", param="kv_transfer_params"))
            except ApiError as error:
                raise endpoint.refuse(error) from None
        except ApiError as error:
            if error.late:
                self._engine.let_go(parse(body, Carried).kv_transfer_params)
            raise
        if self._faults.crash_due():
            os._exit(1)
        request_id = endpoint.prefix + (exchange.header(b"x-request-id") or secrets.token_hex(16))
        generation = Generation(self._engine, request_id, endpoint.job)
        self._load += 1
        try:
            await unless_gone(exchange, self._answer(exchange, endpoint, request_id, generation))
        finally:
            self._load -= 1
            generation.abort()

    async def _answer(self, exchange: Exchange, endpoint: Endpoint, request_id: str, generation: Generation) -> None:
        fetches = generation.sequences[0].remote is not None
        if "cut" in self._faults or ("transfer-cut" in self._faults and fetches):
            await exchange.stream(_nothing())
        if "hang" in self._faults:
            await asyncio.Event().wait()
        if endpoint.job.stream:
            chunks = endpoint.chunks(request_id, generation)
            await exchange.stream(self._spoiled(_with_error(chunks, endpoint), endpoint))
            return
        try:
            choices = await generation.choices()
        except ApiError as error:
            raise endpoint.refuse(error) from None
        if "empty-stream" in self._faults:
            for choice in choices:
                choice.text, choice.tokens = "", 0
        await exchange.json(endpoint.whole(request_id, generation, choices))

    async def _spoiled(self, chunks: AsyncIterator[bytes], endpoint: Endpoint) -> AsyncIterator[bytes]:
        """A stream with the faults that spoil streams."""
        count = 0
        if "empty-stream" in self._faults:
            yield DONE
            return
        async for chunk in chunks:
            yield chunk
            count += 1
            if count != _AFTER_TOKENS:
                continue
            if "truncated-stream" in self._faults:
                raise _Broken
            if "in-band-error" in self._faults:
                for frame in endpoint.failed(internal()):
                    yield frame
                return
            if "stalled-stream" in self._faults:
                await asyncio.Event().wait()


async def _nothing() -> AsyncIterator[bytes]:
    """A stream that breaks before its first event."""
    raise _Broken
    yield b""


async def _with_error(chunks: AsyncIterator[bytes], endpoint: Endpoint) -> AsyncIterator[bytes]:
    """A failure inside a stream becomes an event of it: its headers have left long ago."""
    try:
        async for chunk in chunks:
            yield chunk
    except ApiError as error:
        for frame in endpoint.failed(error):
            yield frame
