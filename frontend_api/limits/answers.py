"""How limits are told to clients: the headers and errors of OpenAI's API. Pure."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from controlplane.fleet.wire import SnapshotKey
from frontend_api.formats.openai import Problem
from frontend_api.limits.windows import SPAN, Bound


class Standing(NamedTuple):
    """A key's use of its minute."""

    requests: int
    tokens: int
    reset: float
    """Seconds until all of it has left the window, if nothing comes."""


class Refusal(NamedTuple):
    """What a request ran into."""

    bound: Bound
    wait: float
    """Seconds until it may pass."""
    used: int
    asked: int


_NAMES = {
    Bound.REQUESTS: "requests per min (RPM)",
    Bound.TOKENS: "tokens per min (TPM)",
    Bound.CONCURRENCY: "requests at a time",
}


def headers(key: SnapshotKey, standing: Standing) -> bytes:
    """The header lines of an answer to a limited key."""
    lines = b""
    for name, limit, used in (
        (b"requests", key.requests_per_minute, standing.requests),
        (b"tokens", key.tokens_per_minute, standing.tokens),
    ):
        if limit is not None:
            lines += (
                b"x-ratelimit-limit-%b: %d\r\nx-ratelimit-remaining-%b: %d\r\nx-ratelimit-reset-%b: %b\r\n"
                % (name, limit, name, max(0, limit - used), name, duration(standing.reset if used else 0.0))
            )  # fmt: skip
    return lines


def problem(key: SnapshotKey, refusal: Refusal, model: str) -> Problem:
    """The 429."""
    limits = {
        Bound.REQUESTS: key.requests_per_minute,
        Bound.TOKENS: key.tokens_per_minute,
        Bound.CONCURRENCY: key.concurrency,
    }
    bound, limit = refusal.bound, limits[refusal.bound]
    kind = "tokens" if bound is Bound.TOKENS else "requests"
    if bound is Bound.TOKENS and limit is not None and refusal.asked > limit:
        text = (
            f"Request too large for {model} on {_NAMES[bound]}: Limit {limit}, Requested {refusal.asked}. "
            "Shorten the prompt or ask for fewer output tokens."
        )
    else:
        text = (
            f"Rate limit reached for {model} on {_NAMES[bound]}: Limit {limit}, Used {refusal.used}, "
            f"Requested {refusal.asked}. Please try again in {duration(refusal.wait).decode()}."
        )
    retry = min(max(1, ceil(refusal.wait)), SPAN + 1)
    return Problem(429, "rate_limit_exceeded", text, None, retry, kind)


def duration(seconds: float) -> bytes:
    """As Go writes it: `120ms`, `7.5s`, `1m0.25s`."""
    milliseconds = ceil(max(0.0, seconds) * 1000 - 1e-6)
    if milliseconds < 1000:
        return b"%dms" % milliseconds if milliseconds else b"0s"
    minutes, rest = divmod(milliseconds, 60_000)
    text = b"%gs" % (rest / 1000)
    return b"%dm%b" % (minutes, text) if minutes else text
