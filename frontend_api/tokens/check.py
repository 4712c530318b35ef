"""Whether the engines make the same token ids as the router: each is asked by its `/tokenize` when it appears, and from then
on every few minutes, one engine at a time with a handful of short texts.

What is found is written into the evidence and lowers the effective state there; no request ever waits for it. An engine
that does not answer is unverified, which speaks neither for nor against its ids.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple

import msgspec

from frontend_api.formats.openai import ENDPOINTS, Endpoint
from frontend_api.http.ask import Reply, ask
from frontend_api.http.upstream import Upstreams
from frontend_api.kv.evidence import Cache, Evidence, Tokenization, TokenSource
from frontend_api.routing.view import Engine, Health

log = logging.getLogger(__name__)

EVERY_SECONDS = 300.0
MISMATCH_SECONDS = 60.0
"""Until an engine whose ids differ is asked again."""
RETRY_SECONDS = 5.0
"""Until an engine that did not answer is asked again; doubled each time, up to `EVERY_SECONDS`."""
ANSWER_SECONDS = 10.0
UNVERIFIED_AFTER = 3
"""Vain attempts after which an engine that never answered is called unverified."""
_CHAT, _TEXT = ENDPOINTS["/v1/chat/completions"], ENDPOINTS["/v1/completions"]


class Probe(NamedTuple):
    """One body for `/tokenize`."""

    what: str
    """For people."""
    endpoint: Endpoint
    """The requests it stands for."""
    body: bytes


_WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Now, at a place — “as seen”.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
            "required": ["place"],
        },
    },
}
_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"place": "Zürich", "days": 2}'},
}
_SYSTEM = {"role": "system", "content": "Answer in one word."}
_ODD = {"role": "user", "content": "Größe  of 42 crates\n\tin\u00a0世界 🙂?"}
_ANSWER = {"role": "assistant", "content": "Large."}
_AGAIN = {"role": "user", "content": "\n Again: don't, I'll, 3.14159, <|x|>, ---  \n"}
_PARTS = {"role": "user", "content": [{"type": "text", "text": "Two parts,"}, {"type": "text", "text": " of text."}]}
_TEXT_BODY = " Plain cafe\u0301,  with   spaces\r\n\r\nand lines.\n\n  def f(x): return x_1 != 0"


def probes(model: str, marks: Sequence[str] = ()) -> list[Probe]:
    """What shows whether a tokenizer, with its chat template, is the engine's own. `marks`: some of its added tokens."""
    chats: dict[str, dict[str, Any]] = {
        "a chat": {"messages": [_ODD]},
        "a chat of several turns": {"messages": [_SYSTEM, _ODD, _ANSWER, _AGAIN]},
        "a chat to be gone on with": {
            "messages": [_SYSTEM, _ODD, _ANSWER],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
        "a chat without a generation prompt": {"messages": [_ODD, _ANSWER], "add_generation_prompt": False},
        "a chat with tools": {"messages": [_SYSTEM, _ODD], "tools": [_WEATHER]},
        "a chat with a tool's result": {
            "messages": [
                _ODD,
                {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": '{"sky": "clear"}'},
            ],
            "tools": [_WEATHER],
        },
        "a chat in parts": {"messages": [_PARTS]},
    }
    texts: dict[str, dict[str, Any]] = {
        "a text": {"prompt": _TEXT_BODY},
        "a text without special tokens": {"prompt": _TEXT_BODY, "add_special_tokens": False},
    }
    if marks:
        texts["a text with added tokens"] = {"prompt": "".join(f"a{mark}b {mark} \n" for mark in marks)}
    named = [(_CHAT, *chat) for chat in chats.items()] + [(_TEXT, *text) for text in texts.items()]
    return [Probe(what, path, json.dumps({"model": model, **fields}).encode()) for path, what, fields in named]


def mismatches(tokens: TokenSource, answers: Mapping[Probe, Sequence[int]]) -> list[str]:
    """What speaks against the router's ids: one sentence per probe whose ids differ from the engine's. Empty: all are the
    same. May take a while: for a thread."""
    found = []
    for probe, theirs in answers.items():
        mine = tokens.at_once(probe.endpoint, probe.body)
        if mine is not None and not isinstance(mine, array):
            mine = mine.ids()
        if mine is None:
            found.append(f"no ids for {probe.what}, where the engine has {len(theirs)}")
        elif list(mine) != list(theirs):
            same = next(
                (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs))
            )
            found.append(
                f"{len(mine)} ids for {probe.what}, where the engine has {len(theirs)} (the first {same} are equal)"
            )
    return found


class _Reply(msgspec.Struct):
    tokens: list[int]


@dataclass
class _Turn:
    """When an engine is asked next, about which ids."""

    tokens: TokenSource
    due: float = 0.0
    vain: int = 0
    """Attempts in a row without an answer."""


class TokenCheck:
    """Keeps `Cache.tokenization` true for every engine whose requests are routed by tokens.

    `count`: told the deployment and the outcome of each check (`same`, `mismatch`, `unanswered`).
    """

    def __init__(
        self,
        evidence: Evidence,
        upstreams: Upstreams,
        count: Callable[[str, str], None],
        chance: random.Random | None = None,
    ) -> None:
        self._evidence = evidence
        self._upstreams = upstreams
        self._count = count
        self._chance = chance or random.Random()
        self._turns: dict[Engine, _Turn] = {}

    async def run(self) -> None:
        """For ever. A check that fails by a defect is logged, and made again later."""
        while True:
            try:
                again = await self.one_step(monotonic())
            except Exception:
                log.exception("The token ids could not be checked.")
                again = False
            await asyncio.sleep(0.0 if again else 1.0)

    async def one_step(self, now: float) -> bool:
        """Check the engine whose turn came first. False: nobody's has come. `now`: monotonic."""
        there: dict[Engine, tuple[str, Cache, TokenSource]] = {}
        for model, cache in self._evidence.caches.items():
            if (tokens := cache.tokens) is not None:
                there |= dict.fromkeys(cache.engines, (model, cache, tokens))
        self._turns = {engine: self._turn(engine, tokens) for engine, (_, _, tokens) in there.items()}
        due = [engine for engine, turn in self._turns.items() if turn.due <= now and engine.health is not Health.DOWN]
        if not due:
            return False
        engine = min(due, key=lambda engine: self._turns[engine].due)
        model, cache, tokens = there[engine]
        turn = self._turns[engine]
        turn.due = now + EVERY_SECONDS  # should this step end by a defect
        found = await self._found(engine, model, tokens)
        if cache.tokens is tokens and engine in cache.engines:
            self._conclude(engine, cache, turn, found)
        pause = EVERY_SECONDS
        if found is None:
            pause = min(RETRY_SECONDS * 2 ** min(turn.vain, 9) / 2, EVERY_SECONDS)
        elif found:
            pause = MISMATCH_SECONDS
        turn.due = now + pause * self._chance.uniform(0.8, 1.2)
        return True

    def _turn(self, engine: Engine, tokens: TokenSource) -> _Turn:
        turn = self._turns.get(engine)
        return turn if turn is not None and turn.tokens is tokens else _Turn(tokens)

    def _conclude(self, engine: Engine, cache: Cache, turn: _Turn, found: list[str] | None) -> None:
        before = cache.tokenization.get(engine)
        who = f"{engine.spec.name} (attempt {engine.spec.attempt}) of {cache.name}"
        if found is None:
            turn.vain += 1
            self._count(cache.name, "unanswered")
            if before is None and turn.vain >= UNVERIFIED_AFTER:
                cache.tokenization[engine] = Tokenization.UNVERIFIED
                log.warning("%s: the router's token ids could not be checked; its /tokenize does not answer.", who)
            return
        turn.vain = 0
        self._count(cache.name, "mismatch" if found else "same")
        if not found:
            cache.tokenization[engine] = Tokenization.SAME
            if before is Tokenization.MISMATCH:
                log.info("%s: the router's token ids are the engine's again.", who)
            return
        cache.tokenization[engine] = Tokenization.MISMATCH
        if before is not Tokenization.MISMATCH:
            log.warning("%s: the router's token ids are not the engine's: %s.", who, "; ".join(found))

    async def _found(self, engine: Engine, model: str, tokens: TokenSource) -> list[str] | None:
        """The mismatches; None: the engine said nothing that could be compared."""
        answers: dict[Probe, list[int]] = {}
        for probe in probes(model, tokens.marks):
            answer = await self._ask(engine, probe.body, fresh=not answers)
            if answer is None:
                return None
            status, body = answer
            if status in (400, 422):  # a template that knows no tools refuses them; so do the engine's requests
                continue
            if status != 200:
                return None
            try:
                answers[probe] = msgspec.json.decode(body, type=_Reply).tokens
            except msgspec.MsgspecError:
                return None
        return await asyncio.to_thread(mismatches, tokens, answers) if answers else None

    async def _ask(self, engine: Engine, body: bytes, *, fresh: bool) -> Reply | None:
        reply = await ask(self._upstreams.pool(engine), b"/tokenize", body, ANSWER_SECONDS, fresh=fresh)
        return reply if isinstance(reply, Reply) else None
