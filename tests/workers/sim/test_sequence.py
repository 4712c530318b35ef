"""Where an answer ends, and what of it may be shown when."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.sim.sequence import Output, Sampling, Sequence
from workers.sim.text import Answer


def run(sampling: Sampling, kv: bytes = b"kv") -> list[Output]:
    """All outputs of one sequence, sampled to its end."""
    outputs: asyncio.Queue[Output] = asyncio.Queue()
    sequence = Sequence("r", [1, 2, 3], sampling, outputs)
    sequence.answer = Answer([kv])
    while (reason := sequence.sample()) is None:
        pass
    sequence.finished(reason, None)
    return [outputs.get_nowait() for _ in range(outputs.qsize())]


def text(outputs: list[Output]) -> str:
    return "".join(output.text for output in outputs)


def test_natural_end_has_a_full_stop_and_an_empty_last_token() -> None:
    outputs = run(Sampling(max_tokens=1000))
    assert text(outputs).endswith(".")
    assert outputs[-1].text == ""
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].stop_reason is None
    assert len(outputs) == Answer([b"kv"]).natural_length + 2


@pytest.mark.parametrize("limit", [1, 5, 200])
def test_limit(limit: int) -> None:
    outputs = run(Sampling(max_tokens=limit, ignore_eos=True))
    assert len(outputs) == limit
    assert outputs[-1].finish_reason == "length"
    assert "." not in text(outputs)


def test_min_tokens_outlasts_the_natural_end() -> None:
    natural = Answer([b"kv"]).natural_length
    assert len(run(Sampling(max_tokens=1000, min_tokens=natural + 30))) == natural + 31


@given(st.integers(0, 60), st.integers(1, 8), st.binary(min_size=1, max_size=4), st.booleans())
def test_stop_string_never_shows(at: int, length: int, kv: bytes, include: bool) -> None:
    whole = text(run(Sampling(max_tokens=40, ignore_eos=True), kv))
    stop = whole[at : at + length]
    outputs = run(Sampling(max_tokens=40, ignore_eos=True, stop=(stop, "never"), include_stop=include), kv)
    first = whole.index(stop)
    assert text(outputs) == whole[: first + (len(stop) if include else 0)]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", stop)


def test_stop_token() -> None:
    token = Answer([b"kv"]).token(3)[0]
    outputs = run(Sampling(max_tokens=40, stop_token_ids=(token,)))
    assert len(outputs) == 4
    assert outputs[-1].stop_reason == token


def test_script_is_written_instead_of_words() -> None:
    outputs = run(Sampling(max_tokens=40, script=('{"a', '":1}')))
    assert text(outputs) == '{"a":1}'
    assert outputs[-1].finish_reason == "stop"
    assert run(Sampling(max_tokens=1, script=("{", "}")))[-1].finish_reason == "length"
