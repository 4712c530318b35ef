"""What an engine will tokenise for a request: the rendered text, or the ids that the client sent. Pure.

The rules are vLLM 0.32's (`renderers/online_renderer.py`, `renderers/chat_utils.py`). Whatever is not known here to come out
the same (media, embeddings, truncation, fields that no rule names) raises `Unknown`: no ids are better than wrong ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from frontend_api.tokens.chat_messages import Unknown, chat_tool, flag, for_template, listed, refuse, validated
from frontend_api.tokens.chat_template import ChatTemplate, Message, Unrenderable

Body = dict[str, Any]


class Prompt(NamedTuple):
    """One prompt, as text or as ids."""

    text: str = ""
    special_tokens: bool = False
    """The tokenizer adds its own (as BOS) around the text."""
    ids: list[int] | None = None


class Templates(NamedTuple):
    """A model's templates: some have another one for requests with tools."""

    plain: ChatTemplate
    with_tools: ChatTemplate

    def choose(self, tools: object) -> ChatTemplate:
        return self.plain if tools is None else self.with_tools


_decode = msgspec.json.decode
_parts = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encode = msgspec.json.encode
HOW_TO_ANSWER = frozenset(
    ("model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n", "best_of",
     "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_sequences", "stop_token_ids", "ignore_eos", "logprobs",
     "top_logprobs", "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", "parallel_tool_calls", "user",
     "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "cache_salt", "request_id", "priority")
)  # fmt: skip
"""Fields of which no prompt is made."""


def made_of(body: bytes) -> bytes:
    """What makes a prompt: of two bodies for which this is the same the ids are the same too. Raises `Unknown`."""
    try:
        fields = _parts.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise Unknown("no JSON object") from None
    for name in HOW_TO_ANSWER.intersection(fields):
        del fields[name]
    return _encode(fields)


def read_body(body: bytes) -> Body:
    """The body as a JSON object. Raises `Unknown`."""
    try:
        fields = _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise Unknown("no JSON") from None
    if type(fields) is not dict:
        raise Unknown("no object")
    return fields


def completion(fields: Body) -> Prompt:
    """`/v1/completions`: one text, or one list of ids. Raises `Unknown`."""
    refuse(fields, "prompt_embeds", "suffix", "truncate_prompt_tokens", "mm_processor_kwargs", "media_io_kwargs")
    prompt = fields.get("prompt")
    special = flag(fields, "add_special_tokens", True)
    if type(prompt) is list and len(prompt) == 1 and type(prompt[0]) in (str, list):
        prompt = prompt[0]
    if type(prompt) is str:
        return Prompt(prompt, special)
    if type(prompt) is list and all(type(token) is int and 0 <= token < 1 << 32 for token in prompt):
        return Prompt(ids=prompt)
    raise Unknown("prompt")


def chat(fields: Body, templates: Templates) -> Prompt:
    """`/v1/chat/completions`, and `/tokenize` with messages. Raises `Unknown`."""
    messages = fields.get("messages")
    if type(messages) is not list:
        raise Unknown("messages")
    tools = fields.get("tools")
    if tools is not None:
        tools = [chat_tool(tool) for tool in listed(tools, "tools")]
    refuse(fields, "truncate_prompt_tokens", "chat_template", "mm_processor_kwargs", "media_io_kwargs")
    return conversation(
        [validated(message) for message in messages],
        templates,
        tools=tools,
        fields=fields,
        documents=fields.get("documents"),
        effort=fields.get("reasoning_effort"),
        generate=flag(fields, "add_generation_prompt", True),
        resume=flag(fields, "continue_final_message", False),
        special=flag(fields, "add_special_tokens", False),
    )


_RESERVED = frozenset(
    ("conversation", "messages", "tools", "chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors",
     "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "self")
)  # fmt: skip
"""Variables that a client may not set, or that steer the engine's tokenizer and not the template."""
NOT_DEFAULTS = _RESERVED | {"documents", "add_generation_prompt", "continue_final_message"}
"""Variables that the engine's own defaults may not set, for the like reasons."""


def conversation(
    messages: Iterable[Message],
    templates: Templates,
    *,
    tools: list[dict[str, Any]] | None,
    fields: Body,
    documents: object = None,
    effort: object = None,
    generate: bool = True,
    resume: bool = False,
    special: bool = False,
) -> Prompt:
    """Messages that passed the engine's validation, through the template. Raises `Unknown`."""
    given = fields.get("chat_template_kwargs") or {}
    if type(given) is not dict or not _RESERVED.isdisjoint(given):
        raise Unknown("chat_template_kwargs")
    variables = {name: value for name, value in given.items() if value is not None and value != "auto"}
    among = variables.pop("documents", None)
    for name in ("add_generation_prompt", "continue_final_message"):
        variables.pop(name, None)  # the request's own fields count
    if documents is None:
        documents = among
    if documents is not None and not (type(documents) is list and all(type(d) is dict for d in documents)):
        raise Unknown("documents")
    if effort is not None:
        if "enable_thinking" not in given:
            variables["enable_thinking"] = effort != "none"
        variables["reasoning_effort"] = effort
    template = templates.choose(tools)
    try:
        text = template.render(
            [for_template(message, template.takes_parts) for message in messages],
            tools=tools,
            documents=documents,
            add_generation_prompt=generate,
            continue_final_message=resume,
            variables=variables,
        )
    except Unrenderable as error:
        raise Unknown(str(error)) from None
    return Prompt(text, special)
