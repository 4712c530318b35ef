"""Token ids of requests: against the rendered text tokenised whole, and never where they cannot be known."""

from __future__ import annotations

import json
from array import array
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest

from frontend_api.formats.openai import ENDPOINTS
from frontend_api.tokens import chat_template
from frontend_api.tokens.model_folder import TokenizerUnusable
from frontend_api.tokens.prompts import HOW_TO_ANSWER
from frontend_api.tokens.tokenizer import AT_ONCE_CHARACTERS, MOST_BYTES, Slow, Tokenizer
from tests.frontend_api.tiny_model import CHATML, EVERYTHING, tiny_tokenizer, write_model

CHAT, TEXT, RESPONSES, MESSAGES = (
    ENDPOINTS[f"/v1/{name}"] for name in ("chat/completions", "completions", "responses", "messages")
)
USER = {"role": "user", "content": "What is the weather in Zürich?"}
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
ANSWER = {"role": "assistant", "content": "It's 3.14 degrees."}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


def whole(text: str, special: bool = False) -> list[int]:
    return tiny_tokenizer().encode(text, add_special_tokens=special).ids


TURN = "<|im_start|>user\nWhat is the weather in Zürich?<|im_end|>\n"
HEAD = "<|im_start|>assistant\n"
RENDERED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [USER]}, TURN + HEAD),
    (
        {"messages": [SYSTEM, USER, ANSWER, USER]},
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        + TURN
        + "<|im_start|>assistant\nIt's 3.14 degrees.<|im_end|>\n"
        + TURN
        + HEAD,
    ),
    ({"messages": [USER], "add_generation_prompt": False}, TURN),
    ({"messages": [{**USER, "content": ""}]}, "<|im_start|>user\n<|im_end|>\n" + HEAD),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]}]},
        "<|im_start|>user\na\n b<|im_end|>\n" + HEAD,
    ),
    (
        {"messages": [USER, {**ANSWER, "content": "It's "}], "continue_final_message": True}
        | {"add_generation_prompt": False},
        TURN + "<|im_start|>assistant\nIt's ",
    ),
    ({"messages": [{**USER, "content": "<|im_end|>🙂\x00"}]}, "<|im_start|>user\n<|im_end|>🙂\x00<|im_end|>\n" + HEAD),
    ({"messages": [{**SYSTEM, "content": "x-anthropic-billing-header: 1\nStay."}]}, "<|im_start|>system\nStay.<|im_end|>\n" + HEAD),
    ({"messages": [{"role": "developer", "content": "Dev."}, USER]}, "<|im_start|>system\nDev.<|im_end|>\n" + TURN + HEAD),
    (
        {"messages": [SYSTEM, USER, {"role": "developer", "content": "Dev."}]},
        "<|im_start|>system\nYou are a helpful assistant.\n\nDev.<|im_end|>\n" + TURN + HEAD,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "text"), RENDERED)
def test_a_chat_is_the_rendered_text(tokenizer: Tokenizer, fields: dict[str, Any], text: str) -> None:
    for _ in range(2):  # cold, then from the cache
        assert list(tokenizer.token_ids(CHAT, body(**fields)) or ()) == whole(text)
    assert list(tokenizer.token_ids(CHAT, body(**fields, add_special_tokens=True)) or ()) == whole(text, special=True)


def test_a_completion_gets_the_tokenizers_own_tokens_unless_told(tokenizer: Tokenizer) -> None:
    text = " two  words "
    for prompt in (text, [text]):
        assert list(tokenizer.token_ids(TEXT, body(prompt=prompt)) or ()) == whole(text, special=True)
    assert list(tokenizer.token_ids(TEXT, body(prompt=text, add_special_tokens=False)) or ()) == whole(text)


def test_ids_stay_as_they_are(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_ids(TEXT, body(prompt=[5, 6, 7])) == array("I", [5, 6, 7])
    assert tokenizer.token_ids(TEXT, body(prompt=[[5, 6, 7]])) == array("I", [5, 6, 7])


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
UNKNOWN = [
    (CHAT, {"messages": [{"role": "user", "content": [{"type": ["text"], "text": "a"}]}]}),
    (CHAT, {"messages": [{"role": ["user"], "content": "a"}]}),
    (CHAT, {"messages": [USER], "chat_template_kwargs": [1]}),
    (CHAT, {"messages": [USER], "tools": [{"function": {"name": 1}}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
    (CHAT, {"messages": [{"role": "user", "content": None}]}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": "Hi"}),
    (CHAT, {"messages": [USER], "tools": []}),
    (CHAT, {"messages": [USER], "tools": [{"type": "custom", "custom": {"name": "f"}}]}),
    (CHAT, {"messages": [USER], "truncate_prompt_tokens": 5}),
    (CHAT, {"messages": [USER], "chat_template": "{{ 1 }}"}),
    (CHAT, {"messages": [USER], "chat_template_kwargs": {"tools": []}}),
    (CHAT, {"messages": [USER], "chat_template_kwargs": {"chat_template": "x"}}),
    (CHAT, {"messages": [USER], "continue_final_message": True}),
    (CHAT, {"messages": [USER], "add_generation_prompt": "yes"}),
    (CHAT, {"messages": [{**ANSWER, "audio": {"id": "a"}}, USER]}),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}]}),
    (TEXT, {"prompt": ["a", "b"]}),
    (TEXT, {"prompt": [1, -2]}),
    (TEXT, {"prompt": [1, 1 << 32]}),
    (TEXT, {"prompt": [1, True]}),
    (TEXT, {"prompt": None}),
    (TEXT, {"prompt": "a", "suffix": "b"}),
    (TEXT, {"prompt": "a", "prompt_embeds": "AAAA"}),
    (TEXT, {"prompt": "a", "truncate_prompt_tokens": 1}),
    (RESPONSES, {"input": "Hi", "previous_response_id": "resp_1"}),
    (RESPONSES, {"input": "Hi", "truncation": "auto"}),
    (RESPONSES, {"input": "Hi", "chat_template_kwargs": {"enable_thinking": None}}),
    (RESPONSES, {"input": "Hi", "tools": [{"type": "web_search"}]}),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "1"}]}),
    (RESPONSES, {"input": [{"type": "message", **ANSWER, "status": "in_progress"}]}),
    (RESPONSES, {"input": [USER, {"type": "reasoning", "encrypted_content": "x", "summary": []}]}),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]}]}),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "document"}]}]}),
    (MESSAGES, {"messages": [USER], "tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    (ENDPOINTS["/v1/embeddings"], {"input": "Hi"}),
]


@pytest.mark.parametrize(("endpoint", "fields"), UNKNOWN)
def test_what_cannot_be_known_gets_no_ids(tokenizer: Tokenizer, endpoint: Any, fields: dict[str, Any]) -> None:
    assert tokenizer.token_ids(endpoint, body(**fields)) is None
    assert tokenizer.at_once(endpoint, body(**fields)) is None


@pytest.mark.parametrize("broken", [b"", b"[]", b"{", b'{"prompt":"\xff"}', b'{"prompt":"\\ud800"}', b"[" * 5000])
def test_what_is_no_json_object_gets_no_ids(tokenizer: Tokenizer, broken: bytes) -> None:
    assert tokenizer.token_ids(TEXT, broken) is None
    assert tokenizer.at_once(TEXT, broken) is None


CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "Zürich"}'}}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}]
FUNCTION = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}}
CALLED = {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "rain\nwind"}
ANTHROPIC_TOOLS = [{"name": "look", "description": "Looks.", "input_schema": {}}]
TOOL_USE = {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "Zürich"}}
TOOL_RESULT = {"type": "tool_result", "tool_use_id": "c1"} | {
    "content": [{"type": "text", "text": "rain"}, {"type": "text", "text": "wind"}]
}
AS_CHAT: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (RESPONSES, {"input": USER["content"]}, {"messages": [USER]}),
    (RESPONSES, {"input": [USER], "instructions": SYSTEM["content"]}, {"messages": [SYSTEM, USER]}),
    (
        RESPONSES,
        {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": USER["content"]}]}]},
        {"messages": [USER]},
    ),
    (
        RESPONSES,
        {
            "input": [
                USER,
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It's wet."}]},
                USER,
            ],
            "reasoning": {"effort": "low"},
        },
        {
            "messages": [USER, {"role": "assistant", "content": "It's wet.", "reasoning": "Hm."}, USER],
            "reasoning_effort": "low",
        },
    ),
    (RESPONSES, {"input": [USER], "tools": [FUNCTION]}, {"messages": [USER], "tools": TOOLS}),
    (MESSAGES, {"messages": [USER], "system": SYSTEM["content"]}, {"messages": [SYSTEM, USER]}),
    (
        MESSAGES,
        {
            "messages": [USER],
            "system": [
                {"type": "text", "text": "You are ", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "x-anthropic-billing-header: cch=1"},
                {"type": "text", "text": "a helpful assistant."},
            ],
        },
        {"messages": [SYSTEM, USER]},
    ),
    (
        MESSAGES,
        {
            "messages": [
                USER,
                {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, TOOL_USE]},
                {"role": "user", "content": [TOOL_RESULT, {"type": "text", "text": USER["content"]}]},
            ],
            "tools": ANTHROPIC_TOOLS,
        },
        {"messages": [USER, CALLED, RESULT, USER], "tools": TOOLS},
    ),
    (
        MESSAGES,
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "text", "text": "It's 3.14 degrees."},
                    ],
                },
            ],
            "output_config": {"effort": "low"},
        },
        {"messages": [USER, {**ANSWER, "reasoning": "Hm."}], "reasoning_effort": "low"},
    ),
    (MESSAGES, {"messages": [USER], "thinking": {"type": "disabled"}}, {"messages": [USER], "reasoning_effort": "none"}),
    (MESSAGES, {"messages": [USER, SYSTEM, USER]}, {"messages": [USER, SYSTEM, USER]}),
    (RESPONSES, {"input": [{**USER, "name": "bob"}]}, {"messages": [{**USER, "name": "bob"}]}),
    (RESPONSES, {"input": [USER], "documents": [{"text": "x"}]}, {"messages": [USER]}),
    (MESSAGES, {"messages": [USER], "documents": [{"text": "x"}]}, {"messages": [USER]}),
]  # fmt: skip


@pytest.mark.parametrize(("endpoint", "fields", "chat"), AS_CHAT)
def test_the_other_formats_are_the_chat_that_the_engine_makes_of_them(
    tmp_path: Path, endpoint: Any, fields: dict[str, Any], chat: dict[str, Any]
) -> None:
    tokenizer = Tokenizer(write_model(tmp_path, EVERYTHING))
    special = endpoint is RESPONSES  # as vLLM 0.32 does, and for no other chat
    expected = tokenizer.token_ids(CHAT, body(**chat, add_special_tokens=special))
    assert expected is not None
    assert tokenizer.token_ids(endpoint, body(**fields)) == expected


def shown(tokenizer: Tokenizer, **fields: Any) -> str:
    ids = tokenizer.token_ids(CHAT, body(**fields))
    assert ids is not None
    return tiny_tokenizer().decode(list(ids), skip_special_tokens=False)


def test_a_tool_call_is_shown_in_the_apis_order_with_its_arguments_parsed(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_model(tmp_path, EVERYTHING))
    mixed = {"index": 0, "type": "function", "id": "c1"} | {"function": {"name": "look", "arguments": '{"at": 1.50}'}}
    text = shown(tokenizer, messages=[{"role": "assistant", "tool_calls": [mixed]}])
    assert (
        '{"id": "c1", "function": {"arguments": {"at": 1.5}, "name": "look"}, "type": "function", "index": 0}' in text
    )
    for unusable in ("", "[1]", "{bad"):
        call = {**CALL, "function": {"name": "look", "arguments": unusable}}
        assert '"arguments": {}' in shown(tokenizer, messages=[{"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize(
    "arguments", ['{"a": "\\ud800"}', '{"a": ' + "9" * 5000 + "}", '{"a": ' + "[" * 5000 + "]" * 5000 + "}", "[" * 5000]
)
def test_arguments_that_break_an_engine_break_nothing_here(tmp_path: Path, arguments: str) -> None:
    tokenizer = Tokenizer(write_model(tmp_path, EVERYTHING))
    call = {**CALL, "function": {"name": "look", "arguments": arguments}}
    messages = [{"role": "assistant", "content": "x", "tool_calls": [call]}]
    assert tokenizer.token_ids(CHAT, body(messages=messages)) is None
    assert tokenizer.at_once(CHAT, body(messages=messages)) is None
    resumed = body(messages=messages, add_generation_prompt=False, continue_final_message=True)
    tokenizer.at_once(CHAT, resumed)  # its text ends before the call


def test_a_tool_has_only_the_apis_fields(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_model(tmp_path, EVERYTHING))
    tool = {"function": {"unknown": 1, "strict": True, "name": "look"}}
    text = shown(tokenizer, messages=[USER], tools=[tool])
    assert '[{"type": "function", "function": {"name": "look", "description": null, "parameters": null, "strict": true}}]' in text  # fmt: skip


def test_variables_reach_the_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_model(tmp_path, EVERYTHING))
    assert "[False/none]" in shown(tokenizer, messages=[USER], reasoning_effort="none")
    unset = {"enable_thinking": None, "reasoning_effort": "auto"}
    assert "[/]" in shown(tokenizer, messages=[USER], chat_template_kwargs=unset)
    assert "[/low]" in shown(tokenizer, messages=[USER], reasoning_effort="low", chat_template_kwargs=unset)
    given = {"enable_thinking": True, "other": 1, "bos_token": "BOS"}
    text = shown(tokenizer, messages=[USER], reasoning_effort="none", chat_template_kwargs=given)
    assert "[True/none]" in text
    assert text.startswith("BOS")
    assert '[{"text": "t"}]' in shown(tokenizer, messages=[USER], documents=[{"text": "t"}])


def test_a_template_that_refuses_gives_no_ids(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_model(tmp_path, "{{ raise_exception('no') }}"))
    assert tokenizer.token_ids(CHAT, body(messages=[USER])) is None


def test_a_model_without_a_template_takes_text_only(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_model(tmp_path, None))
    assert tokenizer.token_ids(CHAT, body(messages=[USER])) is None
    assert tokenizer.token_ids(TEXT, body(prompt="Hi")) is not None


def test_templates_of_the_configuration(tmp_path: Path) -> None:
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "tools:" + CHATML}]
    tokenizer = Tokenizer(write_model(tmp_path, None, chat_template=named))
    assert shown(tokenizer, messages=[USER]) == TURN + HEAD
    assert shown(tokenizer, messages=[USER], tools=TOOLS) == "tools:" + TURN + HEAD


def test_a_token_that_only_the_configuration_names_is_added(tmp_path: Path) -> None:
    more = {"420": {"content": "<|call|>", "normalized": False, "special": True}}
    tokenizer = Tokenizer(write_model(tmp_path, added_tokens_decoder=more))
    ids = tokenizer.token_ids(TEXT, body(prompt="a<|call|>b", add_special_tokens=False))
    assert ids is not None
    assert len(ids) == 3


def test_long_unknown_text_is_work_for_a_thread_and_then_known(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    long = {**SYSTEM, "content": "The river rises. " * 1000}
    request = body(messages=[long, USER])
    slow = tokenizer.at_once(CHAT, request)
    assert isinstance(slow, Slow)
    ids = slow.ids()
    assert ids is not None
    assert tokenizer.at_once(CHAT, request) == ids
    longer = body(messages=[long, USER, ANSWER, USER])  # its history is known
    assert tokenizer.at_once(CHAT, longer) == tokenizer.token_ids(CHAT, longer)


def test_a_huge_body_is_not_even_read_at_once(tokenizer: Tokenizer) -> None:
    request = body(prompt=[1] * 600_000)
    slow = tokenizer.at_once(TEXT, request)
    assert isinstance(slow, Slow)
    assert slow.ids() == array("I", [1] * 600_000)


def test_what_is_too_long_for_any_model_is_not_tokenised(tokenizer: Tokenizer) -> None:
    request = body(prompt="")
    most = request.replace(b'""', b'"%b"' % (b"a" * (MOST_BYTES - len(request))))
    assert isinstance(tokenizer.at_once(TEXT, most), Slow)
    assert tokenizer.at_once(TEXT, most + b" ") is None


def test_the_cache_is_bounded(folder: Path) -> None:
    tokenizer = Tokenizer(folder, cache_bytes=20_000)
    assert tokenizer.caches_segments
    for number in range(200):
        assert tokenizer.token_ids(CHAT, body(messages=[{**USER, "content": f"{number} " * 40}])) is not None
        assert tokenizer.cached_bytes <= 20_000
    assert tokenizer.cached_bytes > 10_000
    assert tokenizer.token_ids(TEXT, body(prompt="x" * 30_000)) is not None
    assert tokenizer.cached_bytes <= 20_000


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "{"),
        ("tekken.json", "{}"),
        ("chat_template.json", "{}"),
        ("chat_template.jinja", "{% for %}"),
        ("config.json", '{"model_type": "gpt_oss"}'),
    ],
)
def test_an_unusable_folder_is_refused_with_its_reason(tmp_path: Path, name: str, content: str | None) -> None:
    folder = write_model(tmp_path)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(TokenizerUnusable, match=r"\w"):
        Tokenizer(folder)


def test_what_the_engine_was_told_beside_its_files_counts(tmp_path: Path) -> None:
    folder = write_model(tmp_path, EVERYTHING)
    (folder / "tandem.json").write_text(
        '{"chat_template_kwargs": {"enable_thinking": false}, "content_format": "openai"}'
    )
    tokenizer = Tokenizer(folder)
    assert "[False/]" in shown(tokenizer, messages=[USER])
    assert "[{'type': 'text', 'text': " in shown(tokenizer, messages=[USER])
    assert "[True/]" in shown(tokenizer, messages=[USER], chat_template_kwargs={"enable_thinking": True})
    assert "[False/]" in shown(tokenizer, messages=[USER], chat_template_kwargs={"enable_thinking": None})
    assert "[True/low]" in shown(tokenizer, messages=[USER], reasoning_effort="low")
    (folder / "tandem.json").write_text('{"chat_template_kwargs": {"documents": []}}')
    with pytest.raises(TokenizerUnusable):
        Tokenizer(folder)


def test_a_short_text_is_never_left_to_a_thread(tokenizer: Tokenizer) -> None:
    text = "é" * AT_ONCE_CHARACTERS
    assert isinstance(tokenizer.at_once(TEXT, body(prompt=text)), array)


def test_a_body_that_is_asked_again_is_known_whole_and_by_its_path(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    request = body(messages=[USER], prompt="What is the weather?")
    first = tokenizer.at_once(CHAT, request)
    assert tokenizer.at_once(CHAT, request) is first
    assert tokenizer.at_once(TEXT, request) == array("I", whole("What is the weather?", special=True)) != first
    assert tokenizer.at_once(CHAT, body(messages=[SYSTEM, USER])) == tokenizer.token_ids(
        CHAT, body(messages=[SYSTEM, USER])
    )


ASKED = [
    (CHAT, {"messages": [SYSTEM, USER, ANSWER, USER]}),
    (CHAT, {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f"}}], "reasoning_effort": "low"}),
    (TEXT, {"prompt": "What is the weather?"}),
    (TEXT, {"prompt": [1, 2, 3]}),
    (RESPONSES, {"input": "What is the weather?", "instructions": "Be brief.", "reasoning": {"effort": "low"}}),
    (MESSAGES, {"messages": [USER], "system": "Be brief.", "thinking": {"type": "disabled"}}),
]


@pytest.mark.parametrize(("endpoint", "fields"), ASKED)
@pytest.mark.parametrize("value", [None, True, 7, "text", ["a"], {"a": 1}])
def test_how_to_answer_is_no_matter(tokenizer: Tokenizer, endpoint: Any, fields: dict[str, Any], value: Any) -> None:
    ids = tokenizer.token_ids(endpoint, body(**fields))
    assert ids is not None
    for name in HOW_TO_ANSWER:
        asked = body(**{**fields, name: value})
        assert tokenizer.token_ids(endpoint, asked) == ids == tokenizer.at_once(endpoint, asked), name


def test_a_prompt_that_is_asked_again_is_known_however_it_is_to_be_answered(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    ids = tokenizer.at_once(CHAT, body(messages=[USER], seed=1))
    assert ids is not None
    bytes_before = tokenizer.cached_bytes
    assert tokenizer.at_once(CHAT, body(temperature=0.5, messages=[USER], seed=2, stream=True)) is ids
    assert tokenizer.cached_bytes == bytes_before
    other = tokenizer.at_once(CHAT, body(messages=[USER], seed=1, add_generation_prompt=False))
    assert other == array("I", whole(TURN)) != ids


def test_a_template_that_tells_the_time_is_rendered_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(write_model(tmp_path / "timed", CHATML + "{{ strftime_now('%d %B') }}"))
    request = body(messages=[USER])
    first = tokenizer.at_once(CHAT, request)
    monkeypatch.setattr(chat_template, "datetime", _Tomorrow)
    second = tokenizer.at_once(CHAT, request)
    assert second == tokenizer.token_ids(CHAT, request) != first


class _Tomorrow(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return datetime.now(tz) + timedelta(days=1)
