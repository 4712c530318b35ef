"""The fields that are read of requests, replies and events; all others are passed on unseen.

A file of their own: msgspec makes these classes, and a compiler would make other ones of them (see `compiled`).
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Raw, Struct

ABSENT = Raw(b"")


class RequestFields(Struct):
    model: str | None = None
    n: Any = None
    best_of: Any = None
    use_beam_search: Any = None
    messages: Raw = ABSENT
    input: Raw = ABSENT
    prompt: Raw = ABSENT
    prompt_embeds: Any = None
    prompt_logprobs: Any = None
    echo: Any = None
    background: Any = None
    cache_salt: Any = None
    previous_response_id: Any = None
    stream: Raw = ABSENT
    stream_options: Raw = ABSENT
    max_tokens: Raw = ABSENT
    max_completion_tokens: Raw = ABSENT
    max_output_tokens: Raw = ABSENT
    min_tokens: Raw = ABSENT
    user: Any = None
    metadata: Raw = ABSENT
    vllm_xargs: Any = None
    kv_transfer_params: Any = UNSET
    ec_transfer_params: Any = UNSET
    data_parallel_rank: Any = UNSET


class Metadata(Struct):
    user_id: Any = None


class PrefillReply(Struct):
    kv_transfer_params: Raw = Raw(b"null")


class KvSource(Struct):
    remote_host: Any = None
    remote_port: Any = None
    remote_prefill_cached_tokens: Any = None


class Reply(Struct):
    choices: Raw = ABSENT
    output: Raw = ABSENT
    error: Any = None
    usage: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None


class ErrorReply(Struct):
    error: Any = None
    detail: Any = None
    message: Any = None


class Event(Struct):
    type: Any = None
    choices: Any = None
    usage: Any = UNSET
    error: Any = None
    message: Any = None
    response: Any = None
    system_fingerprint: Raw = Raw(b"null")
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
