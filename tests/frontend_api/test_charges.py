"""What a request is charged: guessed before, seen afterwards. And how limits are told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from controlplane.fleet.wire import Result, SnapshotKey
from frontend_api.formats.openai import ENDPOINTS, Shape
from frontend_api.formats.sse import EventReader
from frontend_api.limits import answers
from frontend_api.limits.answers import Refusal, Standing, duration
from frontend_api.limits.charges import COMPLETION_OUTPUT, MOST, USUAL_OUTPUT, Estimate, estimate, guess
from frontend_api.limits.windows import Bound
from frontend_api.observe.account import Account

CHAT, TEXT, RESPONSES, MESSAGES = (
    ENDPOINTS[path] for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
)


@pytest.mark.parametrize(
    ("endpoint", "body", "output", "sure"),
    [
        (CHAT, {"max_tokens": 30}, 30, 30),
        (CHAT, {"max_completion_tokens": 20, "max_tokens": 30}, 20, 20),
        (CHAT, {"max_tokens": 30, "n": 3}, 90, 90),
        (CHAT, {}, USUAL_OUTPUT, 0),
        (CHAT, {"max_tokens": None}, USUAL_OUTPUT, 0),
        (CHAT, {"max_tokens": "many"}, USUAL_OUTPUT, 0),  # the engine will refuse it
        (CHAT, {"max_tokens": -1}, USUAL_OUTPUT, 0),
        (CHAT, {"max_tokens": True}, USUAL_OUTPUT, 0),
        (CHAT, {"max_tokens": "30"}, 30, 30),  # engines take it
        (CHAT, {"max_tokens": 30.0}, 30, 30),
        (CHAT, {"max_tokens": 10**400}, MOST, MOST),
        (CHAT, {"max_tokens": float("inf")}, MOST, MOST),
        (CHAT, {"max_tokens": 1 << 39, "n": 999}, MOST, MOST),
        (CHAT, {"max_tokens": 30, "n": 2000}, 60_000, 60_000),
        (CHAT, {"max_tokens": 30, "n": "3"}, 90, 90),
        (CHAT, {"max_tokens": 30, "n": 10**400}, MOST, MOST),
        (CHAT, {"n": 2}, 2 * USUAL_OUTPUT, 0),
        (TEXT, {"prompt": "a", "max_completion_tokens": 1, "max_tokens": 30}, 30, 30),  # no field of that endpoint
        (MESSAGES, {"max_completion_tokens": 1, "max_tokens": 30}, 30, 30),
        (TEXT, {"prompt": "a"}, COMPLETION_OUTPUT, 0),
        (TEXT, {"prompt": ["a", "b"], "max_tokens": 7}, 14, 14),
        (TEXT, {"prompt": [1, 2, 3], "max_tokens": 7}, 7, 7),
        (TEXT, {"prompt": [[1], [2], [3]], "max_tokens": 7, "n": 2}, 42, 42),
        (RESPONSES, {"max_output_tokens": 9, "max_tokens": 99}, 9, 9),
        (MESSAGES, {"max_tokens": 12}, 12, 12),
        (ENDPOINTS["/v1/embeddings"], {"input": "a"}, 0, 0),
    ],
)
def test_an_estimate_holds_what_was_asked_for(endpoint: Any, body: dict[str, Any], output: int, sure: int) -> None:
    data = json.dumps(body).encode().replace(b"Infinity", b"1e999")
    guessed = estimate(endpoint, data, None, None)
    assert guessed == Estimate(-(-len(data) // 4), output, sure)
    assert guess(endpoint, len(data), None, None).prompt == guessed.prompt
    if endpoint.generates:
        assert estimate(endpoint, data, 50, None) == Estimate(50, output, sure + 50)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
def test_counting_tokens_costs_none(path: str) -> None:
    assert estimate(ENDPOINTS[path], b'{"prompt": "a"}', None, 100) == Estimate(0, 0, 0)


def test_a_guess_never_takes_more_than_the_budget_but_what_is_sure_does() -> None:
    body = json.dumps({"messages": "x" * 4000}).encode()
    assert estimate(CHAT, body, None, 100).within(100) == 100
    assert estimate(CHAT, body, 10, 100) == Estimate(10, 25, 10)  # an open end: a quarter of the budget at most
    assert estimate(CHAT, body, 150, 100).within(100) == 150
    assert estimate(CHAT, b'{"max_tokens": 500}', 10, 100).within(100) == 510
    assert estimate(CHAT, b'{"max_tokens": 500}', 10, None).within(None) == 510


def account(
    *,
    prompt: int | None = None,
    output: int | None = None,
    texts: int | None = None,
    sent: bool = True,
    prefilled: int | None = None,
) -> Account:
    made = Account(0.0)
    if prefilled:
        made.prefill_reply = json.dumps({"usage": {"prompt_tokens": prefilled, "completion_tokens": 1}}).encode()
    made.usage.prompt, made.usage.output = prompt, output
    made.sent_at = 1.0 if sent else 0.0
    if texts is not None:
        made.reader = EventReader(Shape.CHAT, made.usage)
        made.reader.texts = texts
        made.streamed = texts > 0
    return made


BEFORE, RESERVED = Estimate(40, 60, 60), 100


@pytest.mark.parametrize(
    ("seen", "result", "status", "prompt", "output", "estimated"),
    [
        (account(prompt=30, output=7), Result.OK, 200, 30, 7, 0),
        (account(prompt=30), Result.OK, 200, 30, 0, 0),
        (account(), Result.OK, 200, 40, 60, 100),  # an answer without counts is never free
        (account(prompt=30, output=7, texts=8), Result.OK, 200, 30, 7, 0),
        (account(texts=6), Result.TRUNCATED, 200, 40, 5, 45),  # role and five texts
        (account(texts=6), Result.ABORTED, 499, 40, 5, 45),
        (account(texts=6, prefilled=33), Result.ABORTED, 499, 33, 5, 5),  # the prefill engine has counted the prompt
        (account(prompt=30, output=1, texts=6), Result.ABORTED, 499, 30, 5, 4),  # counts that began and were cut off
        (account(), Result.ABORTED, 499, 40, 0, 40),  # its prompt was being read
        (account(prefilled=33), Result.ABORTED, 499, 33, 0, 0),
        (account(sent=False), Result.ABORTED, 499, 0, 0, 0),
        (account(), Result.REFUSED, 400, 0, 0, 0),
        (account(), Result.FAILED, 503, 0, 0, 0),
        (account(prefilled=33), Result.FAILED, 504, 0, 0, 0),
        (account(sent=False), Result.FAILED, 503, 0, 0, 0),
    ],
    ids=range(15),
)
def test_what_was_seen_is_what_a_request_has_used(
    seen: Account, result: Result, status: int, prompt: int, output: int, estimated: int
) -> None:
    used = seen.used(CHAT, result, status, BEFORE, RESERVED)
    assert (used.prompt or 0, used.output or 0, used.estimated, used.total) == (
        prompt,
        output,
        estimated,
        prompt + output,
    )
    whole = seen.counted
    if whole is not None and result is Result.OK:
        assert (whole.prompt, whole.output, whole.estimated) == (used.prompt, used.output, 0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, b"0s"),
        (-3, b"0s"),
        (0.0201, b"21ms"),
        (0.999, b"999ms"),
        (1, b"1s"),
        (7.66, b"7.66s"),
        (60, b"1m0s"),
        (61, b"1m1s"),
        (359.5, b"5m59.5s"),
    ],
)
def test_durations(seconds: float, text: bytes) -> None:
    assert duration(seconds) == text


LIMITED = SnapshotKey(id="k", digest="d", requests_per_minute=60, tokens_per_minute=1000, concurrency=2)


def test_headers_tell_of_each_limit_that_there_is() -> None:
    assert answers.headers(LIMITED, Standing(1, 1300, 60.5)).decode().splitlines() == [
        "x-ratelimit-limit-requests: 60",
        "x-ratelimit-remaining-requests: 59",
        "x-ratelimit-reset-requests: 1m0.5s",
        "x-ratelimit-limit-tokens: 1000",
        "x-ratelimit-remaining-tokens: 0",
        "x-ratelimit-reset-tokens: 1m0.5s",
    ]
    assert answers.headers(SnapshotKey(id="k", digest="d", concurrency=1), Standing(1, 2, 3.0)) == b""


@pytest.mark.parametrize(
    ("refusal", "kind", "retry", "says"),
    [
        (
            Refusal(Bound.REQUESTS, 11.2, 60, 1),
            "requests",
            12,
            "requests per min (RPM): Limit 60, Used 60, Requested 1. ",
        ),
        (Refusal(Bound.TOKENS, 0.2, 900, 101), "tokens", 1, "Used 900, Requested 101. Please try again in 200ms."),
        (Refusal(Bound.CONCURRENCY, 1.0, 2, 1), "requests", 1, "requests at a time: Limit 2"),
        (
            Refusal(Bound.TOKENS, 61, 0, 1001),
            "tokens",
            61,
            "Request too large for m on tokens per min (TPM): Limit 1000",
        ),
    ],
)
def test_problems(refusal: Refusal, kind: str, retry: int, says: str) -> None:
    problem = answers.problem(LIMITED, refusal, "m")
    assert (problem.status, problem.code, problem.kind) == (429, "rate_limit_exceeded", kind)
    assert problem.retry_after == retry
    assert says in problem.message
