"""The event reader: bytes through untouched, however they are cut; marks found only where they are marks."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend_api.formats.openai import Shape, Usage, event_error, read_params, read_reply, shaped_error
from frontend_api.formats.sse import MAX_EVENT, EventReader, EventTooLong


def data(body: object) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def feed(reader: EventReader, text: bytes, cuts: list[int]) -> bytes:
    ends = sorted({min(c, len(text)) for c in cuts} | {len(text)})
    parts = [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    return b"".join(reader.feed(part) for part in parts)


EVENTS = st.lists(
    st.one_of(
        st.text(max_size=20).map(lambda t: data({"choices": [{"delta": {"content": t}}]})),
        st.text(max_size=20).map(lambda t: data({"choices": [{"delta": {"content": t + ' "error" [DONE] "usage"'}}]})),
        st.sampled_from(
            [b": comment\n\n", b"event: x\ndata: {}\n\n", b"data: {}\r\n\r\n", b"\n\n", b"data: a\ndata: b\n\n"]
        ),
    ),
    max_size=8,
)


@given(EVENTS, st.lists(st.integers(0, 400), max_size=10))
def test_any_cut_gives_the_same_bytes_and_no_false_marks(events: list[bytes], cuts: list[int]) -> None:
    reader = EventReader(Shape.CHAT, Usage())
    text = b"".join(events)
    assert feed(reader, text, cuts) == text
    assert (reader.done, reader.failed) == (False, False)
    assert feed(reader, b"data: [DONE]\n\n", cuts) == b"data: [DONE]\n\n"
    assert reader.done


SAID = st.sampled_from(
    ["", "word", "usage", "[DONE]", "_transfer_params", '"usage"', '"error"', "\\", "a\nb", "\n\n", '"delta"']
)


@given(
    st.lists(st.tuples(st.sampled_from(["content", "text"]), SAID, st.booleans()), max_size=12), st.sampled_from(Shape)
)
def test_what_is_seen_by_comparing_is_what_looking_sees(said: list[tuple[str, str, bool]], shape: Shape) -> None:
    events = [data({"choices": [{"delta": {name: text}, "finish_reason": None}]}) for name, text, _ in said]
    events = [
        event.replace(b"null", b'"stop"') if ends else event for event, (_, _, ends) in zip(events, said, strict=True)
    ]
    compares, looks = EventReader(shape, Usage(), unasked=True), EventReader(shape, Usage(), unasked=True)
    for event in [*events, data({"usage": {"completion_tokens": 3}}), data({"error": {}}), b"data: [DONE]\n\n"]:
        looks._tries = 0
        assert compares.feed(event) == looks.feed(event)
        assert (compares.done, compares.failed, compares.usage.output) == (looks.done, looks.failed, looks.usage.output)
        assert bool(compares.texts) == bool(looks.texts)


def test_half_a_blank_line_too_many_is_not_lost() -> None:
    text = data({"choices": [{"delta": {"content": '"usage"'}}]}) + b"\n"
    assert feed(EventReader(Shape.CHAT, Usage()), text + b"\n", [len(text)]) == text + b"\n"


@given(st.lists(st.integers(0, 300), max_size=10))
def test_only_whole_events_come_out(cuts: list[int]) -> None:
    text = data({"choices": [{"delta": {"content": "é✓"}}]}) * 3
    reader = EventReader(Shape.CHAT, Usage())
    ends = sorted({min(c, len(text)) for c in cuts})
    for a, b in zip([0, *ends], ends, strict=False):
        out = reader.feed(text[a:b])
        assert out == b"" or out.endswith(b"\n\n")


def piece(text: str, finish: str | None = None, index: int = 0, **more: object) -> bytes:
    """A chunk as vLLM writes it."""
    choice = {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": finish}
    return data({"id": "c-1", "object": "chat.completion.chunk", "choices": [choice], **more})


MARK = {"system_fingerprint": "vllm-0"}
COUNTED = {"prompt_tokens": 5, "total_tokens": 7, "completion_tokens": 2}
DONE = b"data: [DONE]\n\n"
TEXT = '"finish_reason":"stop" [DONE] "usage" é✓'
UNASKED: dict[str, tuple[bytes, bytes]] = {
    "vllm": (
        piece(TEXT) + piece("", "stop") + data({"choices": [], "usage": COUNTED, **MARK}) + DONE,
        piece(TEXT) + piece("", "stop", **MARK) + DONE,
    ),
    "an engine without a fingerprint": (
        piece(TEXT) + piece("", "stop") + data({"choices": [], "usage": COUNTED}) + DONE,
        piece(TEXT) + piece("", "stop") + DONE,
    ),
    "several choices": (
        piece("a") + piece("b", index=1) + piece("", "length") + piece("", "stop", index=1)
        + data({"choices": [], "usage": COUNTED, **MARK}) + DONE,
        piece("a") + piece("b", index=1) + piece("", "length", **MARK) + piece("", "stop", index=1, **MARK) + DONE,
    ),
    "as OpenAI's own: null in every other chunk, the fingerprint everywhere": (
        piece(TEXT, usage=None, **MARK) + piece("", "stop", usage=None, **MARK)
        + data({"choices": [], "usage": COUNTED, **MARK}) + DONE,
        piece(TEXT, **MARK) + piece("", "stop", **MARK) + DONE,
    ),
    "an engine that counts whether asked or not": (
        (forced := piece(TEXT, usage=COUNTED) + piece("", "stop", usage=COUNTED)
         + data({"choices": [], "usage": COUNTED, **MARK}) + DONE),
        forced,
    ),
    "an error after the end of a choice": (
        (failed := piece("a") + piece("", "stop") + data({"error": {"message": "x"}}) + DONE),
        failed,
    ),
    "no counts after all": ((silent := piece("a") + piece("", "stop") + DONE), silent),
    "something else without choices": ((filtered := data({"choices": [], "filter": 1}) + piece("a") + DONE), filtered),
}  # fmt: skip
"""What an engine sends that was asked for counts, and what the client gets, who did not ask."""


@pytest.mark.parametrize("case", UNASKED)
@given(cuts=st.lists(st.integers(0, 900), max_size=12))
def test_counts_that_only_the_router_asked_for_stay_with_it(case: str, cuts: list[int]) -> None:
    sent, expected = UNASKED[case]
    reader = EventReader(Shape.CHAT, Usage(), unasked=True)
    assert feed(reader, sent, cuts) == expected
    assert reader.done
    if b'"usage":{' in sent:
        assert (reader.usage.prompt, reader.usage.output) == (5, 2)
    assert reader.waiting() == b""


def test_where_the_fingerprint_is_known_no_choice_waits_for_another() -> None:
    reader = EventReader(Shape.CHAT, Usage(), unasked=True, fingerprint=b'"vllm-0"')
    sent = [piece("a"), piece("b", index=1), piece("last", "stop"), piece("c", index=1), piece("", "length", index=1)]
    assert [reader.feed(event) for event in sent] == [
        *sent[:2], piece("last", "stop", **MARK), sent[3], piece("", "length", index=1, **MARK)
    ]  # fmt: skip
    counts = data({"choices": [], "usage": COUNTED, "system_fingerprint": "vllm-1"})
    assert reader.feed(counts + DONE) == DONE
    assert reader.fingerprint == b'"vllm-1"', "it was replaced"


def test_what_was_kept_back_is_not_lost_when_the_stream_breaks() -> None:
    reader = EventReader(Shape.CHAT, Usage(), unasked=True)
    assert reader.feed(piece("a") + piece("", "stop")) == piece("a")
    assert reader.waiting() == piece("", "stop")


USAGES = [
    (
        Shape.CHAT,
        {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": None}},
        (5, None, 2),
    ),
    (Shape.CHAT, {"usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}}, (5, 4, None)),
    (
        Shape.RESPONSES,
        {
            "type": "response.completed",
            "response": {
                "usage": {"input_tokens": 5, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 1}}
            },
        },
        (5, 1, 2),
    ),
    (
        Shape.MESSAGES,
        {"type": "message_start", "message": {"usage": {"input_tokens": 5, "output_tokens": 0}}},
        (5, None, 0),
    ),
    (
        Shape.MESSAGES,
        {"type": "message_delta", "usage": {"output_tokens": 9, "cache_read_input_tokens": 3}},
        (None, 3, 9),
    ),
    (
        Shape.MESSAGES,
        {"usage": {"input_tokens": 4, "cache_creation_input_tokens": 96, "cache_read_input_tokens": 32}},
        (132, 32, None),
    ),
    (Shape.CHAT, {"usage": "odd"}, (None, None, None)),
    (Shape.CHAT, {"usage": {"prompt_tokens": "5", "completion_tokens": 2.5}}, (None, None, None)),
    (Shape.CHAT, {"usage": {"prompt_tokens": -5, "completion_tokens": 10**30}}, (None, None, None)),
]


@pytest.mark.parametrize(("shape", "body", "counts"), USAGES)
def test_usage_of_every_format(shape: Shape, body: dict[str, object], counts: tuple[int | None, ...]) -> None:
    usage = Usage()
    EventReader(shape, usage).feed(data(body))
    assert (usage.prompt, usage.cached, usage.output) == counts


def test_usage_is_merged_by_field() -> None:
    """Case peer-S25."""
    usage = Usage()
    reader = EventReader(Shape.MESSAGES, usage)
    reader.feed(data({"type": "message_start", "message": {"usage": {"input_tokens": 5, "output_tokens": 0}}}))
    reader.feed(data({"type": "message_delta", "usage": {"output_tokens": 9}}))
    assert (usage.prompt, usage.output) == (5, 9)
    reader.feed(data({"type": "message_delta", "usage": {"input_tokens": 0, "output_tokens": 10}}))
    assert (usage.prompt, usage.output) == (5, 10)


@pytest.mark.parametrize(
    ("shape", "text", "done", "failed"),
    [
        (Shape.CHAT, b"data: [DONE]\n\n", True, False),
        (Shape.CHAT, b"data:[DONE]\r\n\r\n", True, False),
        (Shape.CHAT, b"data: [DONE] \n\n", True, False),
        (Shape.CHAT, b"data: x[DONE]\n\n", False, False),
        (Shape.CHAT, b'data: {"a":"\\ndata: [DONE]\\n"}\n\n', False, False),
        (Shape.CHAT, data({"error": {"message": "x"}}), False, True),
        (Shape.CHAT, data({"error": None}), False, False),
        (Shape.CHAT, data({"choices": [{"error": 1}]}), False, False),
        (Shape.MESSAGES, b"event: message_stop\n" + data({"type": "message_stop"}), True, False),
        (Shape.MESSAGES, b"event: error\n" + data({"type": "error", "error": {"message": "x"}}), False, True),
        (Shape.RESPONSES, data({"type": "response.completed", "response": {"error": None}}), True, False),
        (Shape.RESPONSES, data({"type": "response.incomplete", "response": {}}), True, False),
        (Shape.RESPONSES, data({"type": "response.failed", "response": {"error": {}}}), True, True),
        (Shape.RESPONSES, data({"type": "response.created", "response": {"error": None}}), False, False),
    ],
)
def test_ends_and_errors(shape: Shape, text: bytes, done: bool, failed: bool) -> None:
    reader = EventReader(shape, Usage())
    assert reader.feed(text) == text
    assert (reader.done, reader.failed) == (done, failed)


def test_an_error_event_tells_nothing_of_the_hand_over_either() -> None:
    failed = {"type": "response.failed", "response": {"error": {"message": "x"}, "kv_transfer_params": {"host": "h"}}}
    assert b"transfer" not in EventReader(Shape.RESPONSES, Usage()).feed(data(failed))


def test_an_endless_event_is_given_up() -> None:
    reader = EventReader(Shape.CHAT, Usage())
    assert reader.feed(b"x" * MAX_EVENT) == b""
    with pytest.raises(EventTooLong):
        reader.feed(b"x")


@pytest.mark.parametrize(
    ("reply", "params"),
    [
        (b'{"kv_transfer_params": {"a": [1,  2]}, "x": 1}', b'{"a": [1,  2]}'),
        (b'{"kv_transfer_params":null}', None),
        (b'{"kv_transfer_params":{}}', None),
        (b'{"kv_transfer_params":[1]}', None),
        (b'{"kv_transfer_params":"x"}', None),
        (b"{}", None),
        (b"[]", None),
        (b"nonsense", None),
        (b'{"kv_transfer_params":{"a":%b}}' % (b"[" * 5_000 + b"]" * 5_000), None),
        (b"", None),
    ],
)
def test_params_of_a_prefill_reply(reply: bytes, params: bytes | None) -> None:
    assert read_params(reply) == params


def test_replies_that_cannot_be_read_are_passed_on() -> None:
    deep = b'{"usage":%b}' % (b"[" * 5_000 + b"]" * 5_000)
    for body in (b"", b"nonsense", b"[1,2]", b'{"usage":7}', deep):
        assert read_reply(body, Usage()) == body


def test_error_of_a_first_event() -> None:
    assert event_error(data({"error": {"message": "x", "code": 429}})) == (429, b'{"error":{"message":"x","code":429}}')
    assert event_error(data({"error": {"message": "x", "code": "odd"}}))[0] == 500
    deep = b'{"error":%b}' % (b"[" * 5_000 + b"]" * 5_000)
    assert event_error(b"data: %b\n\n" % deep) == (500, deep)
    assert EventReader(Shape.CHAT, Usage()).feed(b"data: %b\n\n" % deep) == b"data: %b\n\n" % deep
    assert b"engine_error" in shaped_error(500, deep, Shape.CHAT)
    assert event_error(b'event: error\ndata: {"error"\n\n') == (500, b'{"error"')
