"""Request bodies: the fields that the stand-in reads. Every other field is accepted and ignored, as vLLM does."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from workers.sim.http import ApiError, invalid

Json = dict[str, object]
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Common(Struct, kw_only=True):
    """What chat and text completions share."""

    model: str | None = None
    n: int | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Natural = 0
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    kv_transfer_params: Json | None = None
    response_format: Json | None = None

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def check(self) -> None:
        """vLLM's own rules between fields.

        Raises `ApiError`.
        """
        if self.stream_options is not None and not self.stream:
            raise invalid("Stream options can only be defined when `stream=True`.", "stream_options")
        if "" in self.stops():
            raise invalid("stop cannot contain an empty string.", "stop")
        if self.n is not None and self.n < 1:
            raise invalid(f"n must be at least 1, got {self.n}.")
        if self.temperature is not None and not 0 <= self.temperature <= 2:
            raise invalid(f"temperature must be in [0, 2], got {self.temperature}.", "temperature", self.temperature)
        if (self.n or 1) > 1 and self.temperature == 0:
            raise invalid(f"n must be 1 when using greedy sampling, got {self.n}.")


class ChatRequest(Common, kw_only=True):
    messages: list[Json]
    max_tokens: Natural | None = None
    max_completion_tokens: Natural | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Meta(ge=0)] | None = 0
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class CompletionRequest(Common, kw_only=True):
    prompt: str | list[str | int | list[int]]
    max_tokens: Natural | None = 16
    logprobs: Natural | None = None
    echo: bool | None = False


class CountRequest(Struct, kw_only=True):
    """What decides the prompt of Anthropic's Messages API."""

    model: str
    messages: list[Json]
    system: str | list[Json] | None = None
    tools: list[Json] | None = None
    tool_choice: Json | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """Anthropic's Messages API."""

    max_tokens: Positive
    stream: bool | None = False
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    kv_transfer_params: Json | None = None


class ResponsesRequest(Struct, kw_only=True):
    """OpenAI's Responses API. The fields that only return in the reply are taken as they come."""

    input: str | list[Json]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    tools: list[Json] = []
    tool_choice: str | Json = "auto"
    parallel_tool_calls: bool | None = True
    previous_response_id: str | None = None
    metadata: Json | None = None
    reasoning: Json | None = None
    text: Json | None = None
    truncation: str | None = "disabled"
    service_tier: str | None = "auto"
    user: str | None = None
    background: bool | None = False
    ignore_eos: bool = False
    stop: str | list[str] | None = None
    seed: int | None = None
    request_id: str | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    kv_transfer_params: Json | None = None


class Carried(Struct):
    """What any request may carry."""

    kv_transfer_params: Json | None = None


class DetokenizeRequest(Struct, kw_only=True):
    model: str | None = None
    tokens: list[Natural]


class TokenizeRequest(Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Json] | None = None
    tools: list[Json] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False


_R = TypeVar("_R", bound=Struct)


def parse(body: bytes, kind: type[_R]) -> _R:
    """The body as a request.

    Raises `ApiError` (400) in the shape of vLLM's validation errors, naming the field.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        field = path.rstrip("`")
        if not field and "required field" in message:
            field = message.split("`")[1]
        raise ApiError(
            f"1 validation error:\n  {message} (body.{field})", kind="Bad Request", param=f"body.{field}"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(f"1 validation error:\n  JSON decode error: {error}", kind="Bad Request", param="body") from None
