"""What an engine says over HTTP: alive, really answering, how loaded; and whether KV really moves between two engines.

Every call has a timeout, and a failure is an `Unanswered` with one sentence for people, without a secret in it. An engine
that answers `/health` has proved nothing: only a completion counts, and for a pair only bytes that moved.
"""

from __future__ import annotations

import random
import string
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import httpx
from msgspec import Struct

from controlplane.fleet.bounds import MOST_RANKS, MOST_TOKENS, sentence
from controlplane.fleet.model import EngineLoad, PairProof, Peer, Role
from workers import metrics
from workers.command import decode_context_parallel
from workers.metrics import Figures

QUICK_SECONDS = 5.0
"""For `/health` and everything that costs the engine nothing."""
COMPLETION_SECONDS = 120.0
"""For a few real tokens; a first one may compile kernels."""
ALONE_SECONDS = 20.0
"""For one token without the other side, of an engine that has just failed."""
METRICS_LAG_SECONDS = 5.0
"""An engine's counters follow its answer a little later."""
ANSWER_BYTES = 32 << 20
"""The longest answer that is read: an engine's metrics take a few hundred kilobytes."""
DEFAULT_BLOCK = 128
ORDINARY = range(300, 2_000)
"""Token ids that are ordinary text in every large vocabulary, for an engine that does not tell its own."""
LETTERS = string.ascii_letters + string.digits + string.punctuation + "éñüßøжитאבعرहि中文日本한국"
WORDS = "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you"
FEW_TOKENS = 8
"""With fewer different ones chance alone does not make a prompt new."""


class Unanswered(Exception):
    """The engine did not answer as it should; the message says how."""

    def __init__(self, message: str, *, status: int | None = None, in_time: bool = True) -> None:
        super().__init__(message)
        self.status = status
        """Of an answer that is a refusal."""
        self.in_time = in_time
        """False: nothing was said at all until the time was up."""


class Identity(Struct, frozen=True):
    """What an engine says about itself once it is up."""

    version: str
    max_model_len: int | None
    kv_events: bool | None
    block_size: int | None
    kv_blocks: int | None = None
    kv_ranks: int = 1
    """Data-parallel ranks with KV events."""


class EngineClient:
    """One engine's HTTP surface, with its secret. Not for requests of users."""

    def __init__(self, url: str, secret: str, *, transport: httpx.BaseTransport | None = None) -> None:
        self.url = url
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {secret}"} if secret else {},
            timeout=httpx.Timeout(QUICK_SECONDS),
            trust_env=False,  # engines are on this network: never by a proxy
            transport=transport,
        )

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def health(self) -> None:
        """Raises `Unanswered` unless the engine calls itself healthy."""
        self._ask("GET", "/health")

    def identity(self, arguments: Sequence[str] = ()) -> Identity:
        """Version, limits and KV events. The guarded `/v1/models` makes it an authenticated answer. `arguments`: what it was
        given besides the usual ones."""
        models = self._json("GET", "/v1/models").get("data")
        model = models[0] if isinstance(models, list) and models else None
        longest = model.get("max_model_len") if isinstance(model, dict) else None
        sources = [s for s in self._json("GET", "/kv_event_sources").values() if isinstance(s, dict)]
        publishing = [s for s in sources if s.get("enable_kv_cache_events", True) and s.get("endpoint")]
        figures = self.figures()
        return Identity(
            version=sentence(str(self._json("GET", "/version").get("version", "")), 100),
            max_model_len=longest if isinstance(longest, int) and 0 < longest <= MOST_TOKENS else None,
            kv_events=bool(publishing),
            block_size=figures.block_size and figures.block_size * decode_context_parallel(arguments),
            kv_blocks=figures.kv_blocks,
            kv_ranks=min(max(len(publishing), 1), MOST_RANKS),
        )

    def figures(self) -> Figures:
        return metrics.read(self._ask("GET", "/metrics").text)

    def tokens(self, model: str) -> list[int]:
        """Different token ids that the model has, by its own tokenizer; of one that does not tell them, ordinary ones."""
        body = {"model": model, "prompt": f"{WORDS} {' '.join(LETTERS)}", "add_special_tokens": False}
        try:
            told = self._json("POST", "/tokenize", json=body).get("tokens")
        except Unanswered:
            told = None
        known = {token for token in told if isinstance(token, int)} if isinstance(told, list) else None
        return sorted(known or {0}) if known is not None else list(ORDINARY)

    def answer(self, model: str, *, max_tokens: int = 1, timeout: float = COMPLETION_SECONDS) -> None:
        """Asks for real tokens, by a text or, where the model's tokenizer knows no letter of it, by a token. Raises
        `Unanswered`."""
        try:
            self.complete(model, "Hello", max_tokens=max_tokens, timeout=timeout)
        except Unanswered as error:
            if error.status != httpx.codes.BAD_REQUEST:
                raise
            self.complete(model, self.tokens(model)[:1], max_tokens=max_tokens, timeout=timeout)

    def complete(
        self,
        model: str,
        prompt: str | list[int],
        *,
        max_tokens: int,
        timeout: float = COMPLETION_SECONDS,
        **more: object,
    ) -> dict[str, Any]:
        """A real text completion. Raises `Unanswered` also when the answer holds no token."""
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **more,
        }
        answer = self._json("POST", "/v1/completions", json=body, timeout=timeout)
        usage = answer.get("usage") or {}
        if not answer.get("choices") or not usage.get("completion_tokens"):
            raise Unanswered("/v1/completions answered 200 without a single token")
        return answer

    def _json(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        answer = self._ask(method, path, **options)
        try:
            value = answer.json()
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise Unanswered(f"{path} answered something that is not a JSON object")
        return value

    def _ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            with self._http.stream(method, path, **options) as answer:
                answer = _read(answer, path)
        except httpx.TimeoutException:
            raise Unanswered(f"{path} gave no answer in time", in_time=False) from None
        except httpx.HTTPError as error:
            raise Unanswered(f"{path}: {type(error).__name__}") from None
        if answer.status_code != 200:
            raise Unanswered(f"{path} answered {answer.status_code}{_reason(answer)}", status=answer.status_code)
        return answer


def _read(answer: httpx.Response, path: str) -> httpx.Response:
    """The answer with its whole body, which an engine may not make longer than `ANSWER_BYTES`."""
    body = bytearray()
    for part in answer.iter_bytes():
        body += part
        if len(body) > ANSWER_BYTES:
            raise Unanswered(f"{path} answered more than {ANSWER_BYTES >> 20} MiB")
    return httpx.Response(answer.status_code, content=bytes(body), request=answer.request)


def _reason(answer: httpx.Response) -> str:
    text = " ".join(answer.text.split())[:200]
    return f": {text}" if text else ""


FOR_REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Asks a prefill engine to keep a prompt's KV for a decode engine to fetch."""


def prove_pair(
    decode: EngineClient,
    prefill: EngineClient,
    peer: Peer,
    *,
    model: str,
    block_size: int | None,
    max_model_len: int | None,
    chance: random.Random,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> PairProof:
    """Sends one fresh prompt through both engines and looks whether its KV moved.

    The prompt is longer than one KV block and has never been seen, so that decode can hold nothing of it. A busy decode
    engine's counters also move by its users' requests: there a completion and risen counters are weaker evidence. Of an engine
    that fails its part, a completion without the other tells whether the fault is its own.
    """

    def verdict(ok: bool, detail: str, moved: int = 0, seconds: float = 0.0, fault: Role | None = None) -> PairProof:
        return PairProof(peer.engine, peer.attempt, ok, detail, bytes_moved=moved, seconds=seconds, fault=fault)

    block = block_size or DEFAULT_BLOCK
    tokens = prefill.tokens(model)
    prompt = fresh_prompt(tokens, block, max_model_len, chance)
    salt: dict[str, Any] = {"cache_salt": f"{chance.getrandbits(128):032x}"} if len(tokens) < FEW_TOKENS else {}
    try:
        answer = prefill.complete(model, prompt, max_tokens=1, kv_transfer_params=FOR_REMOTE_DECODE, **salt)
    except Unanswered as error:
        fault = None if _answers(prefill, model) else Role.PREFILL
        return verdict(False, f"Prefill on {peer.engine} failed: {error}", fault=fault)
    params = answer.get("kv_transfer_params")
    too_short = (
        f"No prompt that fits the model ({max_model_len} tokens) fills a KV block ({block} tokens), so there is nothing to "
        "transfer: set a smaller block_size, or use an aggregated pool."
    )
    if not params or not params.get("do_remote_prefill"):
        if len(prompt) < block:
            return verdict(False, too_short)
        return verdict(False, f"{peer.engine} answered without KV transfer parameters.", fault=Role.PREFILL)
    try:
        before = decode.figures().load
        decode.complete(model, prompt, max_tokens=2, kv_transfer_params=params, **salt)
        after = _settled(decode, before, clock, sleep)
    except Unanswered as error:
        fault = None if _answers(decode, model) else Role.DECODE
        return verdict(False, f"Decode with KV from {peer.engine} failed: {error}", fault=fault)
    moved = after.nixl_bytes - before.nixl_bytes
    taken = after.prompt_tokens_transferred - before.prompt_tokens_transferred
    computed = after.prompt_tokens_local - before.prompt_tokens_local
    seconds = max(after.nixl_seconds - before.nixl_seconds, 0.0)
    if moved <= 0 and taken <= 0 and len(prompt) < block:
        return verdict(False, too_short)
    if moved <= 0 and taken <= 0:
        return verdict(False, f"No KV came from {peer.engine}: decode computed the prompt itself.")
    if computed >= len(prompt) > taken:
        return verdict(False, f"Only {taken} of {len(prompt)} prompt tokens came from {peer.engine}.", moved, seconds)
    return verdict(True, f"{len(prompt)} prompt tokens came from {peer.engine}.", moved, seconds)


def fresh_prompt(tokens: Sequence[int], block_size: int, max_model_len: int | None, chance: random.Random) -> list[int]:
    """A random row of these tokens, an eighth longer than one block where the model's limit allows it."""
    length = block_size + block_size // 8 + 2
    if max_model_len is not None:
        length = max(1, min(length, max_model_len - 4))
    return chance.choices(tokens, k=length)


def _answers(engine: EngineClient, model: str) -> bool:
    try:
        engine.answer(model, timeout=ALONE_SECONDS)
    except Unanswered:
        return False
    return True


def _settled(
    decode: EngineClient, before: EngineLoad, clock: Callable[[], float], sleep: Callable[[float], None]
) -> EngineLoad:
    deadline = clock() + METRICS_LAG_SECONDS
    while True:
        after = decode.figures().load
        if after.nixl_bytes > before.nixl_bytes or clock() >= deadline:
            return after
        sleep(0.1)
