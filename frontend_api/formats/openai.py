"""What the router reads and writes of the OpenAI and Anthropic formats. Pure: bytes in, bytes out.

It reads the few request fields that decide routing and passes everything else on untouched. It never judges a request
that the engine can judge better; it refuses only what is the router's own (`OWNED_FIELDS`).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import msgspec
from msgspec import UNSET, Raw

from controlplane.fleet.errors import InvalidInput
from frontend_api.formats.fields import ABSENT, ErrorReply, KvSource, Metadata, PrefillReply, Reply, RequestFields
from frontend_api.routing.reason import Reason

OWNED_FIELDS = ("kv_transfer_params", "ec_transfer_params", "data_parallel_rank")
"""Body fields that only the router may send: they tell an engine whose memory to read."""
OWNED_ARGUMENTS = (*OWNED_FIELDS, "kv_cache_report_mode")
"""Of `vllm_xargs`: vLLM takes the first ones as the fields themselves; with the last one blocks that a request only uses are told
of as if they were stored once more."""
OWNED_HEADER = b"x-data-parallel-"
"""Beginning of the request headers that choose an engine rank."""


class Shape(Enum):
    """How an endpoint counts tokens, marks text in a stream and tells errors."""

    CHAT = "chat"
    TEXT = "text"
    RESPONSES = "responses"
    MESSAGES = "messages"
    PLAIN = "plain"
    """Has no tokens to count, text to mark, or errors of its own kind."""


class Endpoint(NamedTuple):
    path: str
    shape: Shape
    counts_if_asked: bool = False
    """A stream gives its counts only on request. The other endpoints refuse the field that asks for them."""
    generates: bool = True
    names_model: bool = True
    """False: the model may be left out where there is but one."""
    method: bytes = b"POST"


ENDPOINTS = {
    endpoint.path: endpoint
    for endpoint in (
        Endpoint("/v1/chat/completions", Shape.CHAT, counts_if_asked=True),
        Endpoint("/v1/completions", Shape.TEXT, counts_if_asked=True),
        Endpoint("/v1/responses", Shape.RESPONSES),
        Endpoint("/v1/messages", Shape.MESSAGES),
        Endpoint("/v1/messages/count_tokens", Shape.MESSAGES, generates=False),
        Endpoint("/v1/embeddings", Shape.PLAIN, generates=False),
        *(
            Endpoint(path, Shape.PLAIN, generates=False, names_model=False)
            for path in (
                "/tokenize", "/detokenize", "/v2/embed", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/pooling",
                "/classify",
            )
        ),
        Endpoint("/tokenizer_info", Shape.PLAIN, generates=False, names_model=False, method=b"GET"),
    )
}  # fmt: skip
"""Of an engine, what its users need. The others steer the engine itself, or belong to a router's siblings."""


_LONG_IDS = 64 << 10
"""Bytes."""
UNREADABLE = (msgspec.MsgspecError, RecursionError)
"""JSON that is none, is of another kind, or is nested too deep to be read."""


_fields = msgspec.json.Decoder(RequestFields)
_metadata = msgspec.json.Decoder(Metadata)
_prefill_reply = msgspec.json.Decoder(PrefillReply)
_source = msgspec.json.Decoder(KvSource)
_reply = msgspec.json.Decoder(Reply)
_error_reply = msgspec.json.Decoder(ErrorReply)
_object = msgspec.json.Decoder(dict[str, Raw])
_list = msgspec.json.Decoder(list[Any])
_encode = msgspec.json.encode


class Ask:
    """What routing needs of one request."""

    __slots__ = ("alone", "limit", "metadata", "metering", "model", "owned", "salt", "user")

    def __init__(
        self,
        model: str,
        alone: Reason | None,
        salt: str | None,
        metering: bytes,
        limit: int | None,
        user: Any,
        metadata: Raw,
        owned: bool,
    ) -> None:
        self.model = model
        self.alone = alone
        """Why it must go to one engine; None: it may be disaggregated."""
        self.salt = salt
        """Separates its KV from that of others."""
        self.metering = metering
        """What the answering engine's body gets besides, so that the stream ends with its counts; empty: the client asked for
        them itself, or the endpoint has them anyway, or gives none."""
        self.limit = limit
        """The most tokens that its answer may have; None: left open, or not written as a whole number."""
        self.user = user
        self.metadata = metadata
        self.owned = owned
        """The body has fields of the router's own, as null: no engine is to get them."""


def read_request(endpoint: Endpoint, body: bytes) -> Ask:
    """The fields that decide routing.

    Raises `InvalidInput` for a body that is no JSON object, a missing `model`, and the router's own fields.
    """
    try:
        fields = _fields.decode(body)
        if not body.isascii():
            body.decode()  # msgspec checks only the text that it turns into a value
    except msgspec.ValidationError as error:
        at = str(error).partition("`$.")[2].rstrip("`") or None
        raise InvalidInput(f"{at or 'body'}: {str(error).partition(' - at')[0]}", field=at) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"The body is not valid JSON: {error}") from None
    owned = (
        fields.kv_transfer_params is not UNSET
        or fields.ec_transfer_params is not UNSET
        or fields.data_parallel_rank is not UNSET
    )
    if owned or fields.vllm_xargs is not None:
        _check_owned(fields)
    if not fields.model and endpoint.names_model:
        raise InvalidInput("model: send the name of a model", field="model")
    salt = fields.cache_salt
    return Ask(
        fields.model or "",
        _alone(endpoint, fields),
        salt if isinstance(salt, str) else None,
        _metering(fields) if endpoint.counts_if_asked and bytes(fields.stream) == b"true" else b"",
        _limit(endpoint, fields),
        fields.user,
        fields.metadata,
        owned,
    )


def user_of(endpoint: Endpoint, ask: Ask) -> str | None:
    """Whom a request says it is for: the field `user`, or `metadata.user_id` of messages."""
    user = ask.user
    if endpoint.shape is Shape.MESSAGES:
        try:
            user = _metadata.decode(ask.metadata).user_id if bytes(ask.metadata) else None
        except msgspec.MsgspecError:  # the engine's to refuse
            return None
    return user if isinstance(user, str) and user else None


def _limit(endpoint: Endpoint, fields: RequestFields) -> int | None:
    limit = fields.max_output_tokens if endpoint.shape is Shape.RESPONSES else fields.max_tokens
    if endpoint.shape is Shape.CHAT and fields.max_completion_tokens is not ABSENT:
        limit = fields.max_completion_tokens
    text = bytes(limit)
    return int(text) if text.isdigit() and len(text) < 12 else None


def _check_owned(fields: RequestFields) -> None:
    for name in OWNED_FIELDS:
        if getattr(fields, name) not in (UNSET, None):
            raise InvalidInput(f"{name}: this field is set by the router; remove it", field=name)
    if isinstance(fields.vllm_xargs, dict):
        for name in OWNED_ARGUMENTS:
            if fields.vllm_xargs.get(name) is not None:
                where = f"vllm_xargs.{name}"
                raise InvalidInput(f"{where}: this is set by the router; remove it", field=where)


def _alone(endpoint: Endpoint, fields: RequestFields) -> Reason | None:
    if not endpoint.generates:
        return Reason.RELAYED
    n, best_of = fields.n, fields.best_of
    if not (n is best_of is None or (_is_one(n) and _is_one(best_of))) or fields.use_beam_search not in (None, False):
        return Reason.SEVERAL_SEQUENCES
    if fields.prompt_logprobs is not None or fields.echo not in (None, False):
        return Reason.PROMPT_LOGPROBS
    if fields.background not in (None, False):
        return Reason.BACKGROUND
    if fields.previous_response_id is not None:
        return Reason.STORED_RESPONSE
    if endpoint.shape is Shape.TEXT:
        if fields.prompt_embeds is not None:
            return Reason.EMBEDDED_PROMPT
        prompt = bytes(fields.prompt)
        if prompt[:1] == b"[" and not _is_long_ids(prompt):
            try:
                items = _list.decode(prompt)
            except msgspec.MsgspecError as error:  # a number that no machine type holds
                raise InvalidInput(f"prompt: {str(error).partition(' - at')[0]}", field="prompt") from None
            if len(items) != 1 and not (items and all(type(item) is int for item in items)):
                return Reason.SEVERAL_PROMPTS
    return None if _is_plain(endpoint, fields) else Reason.UNUSUAL_FIELDS


def _is_long_ids(prompt: bytes) -> bool:
    """Whether it is one prompt of very many token ids: seen a hundred times faster than by reading them."""
    return len(prompt) > _LONG_IDS and prompt.count(b"[") == 1 and not prompt.translate(None, b"[]0123456789, \t\r\n")


def _is_one(value: Any) -> bool:
    return value is None or (type(value) is int and value == 1)


_PLAIN_SWITCH = frozenset((b"", b"null", b"false", b"true"))
_ASK_COUNTS = b',"stream_options":{"include_usage":true}'


def _metering(fields: RequestFields) -> bytes:
    """The field that asks for a stream's counts, where the client did not. What it gave besides is kept."""
    if fields.stream_options is ABSENT:
        return _ASK_COUNTS
    given = bytes(fields.stream_options)
    if given == b"null":
        return _ASK_COUNTS
    try:
        options = _object.decode(given)
    except msgspec.MsgspecError:  # the engine's to refuse
        return b""
    if bytes(options.get("include_usage", ABSENT)) not in (b"", b"null", b"false"):
        return b""
    if bytes(options.pop("continuous_usage_stats", ABSENT)) not in _PLAIN_SWITCH:
        return b""  # without counts it says nothing; with them every chunk would have some
    options["include_usage"] = _TRUE
    return b',"stream_options":%b' % _encode(options)


def _is_plain(endpoint: Endpoint, fields: RequestFields) -> bool:
    """Whether prefill and decode judge the request alike: the prompt is there, and the fields that the prefill leg leaves out
    or replaces are of the kind that every engine takes. Else KV would be kept for a request that decode then refuses, or
    the refusal would speak of a body that the client never sent."""
    shape = endpoint.shape
    prompt = fields.input if shape is Shape.RESPONSES else fields.prompt if shape is Shape.TEXT else fields.messages
    if prompt is ABSENT or prompt == _NULL:
        return False
    if fields.stream is not ABSENT and bytes(fields.stream) not in _PLAIN_SWITCH:
        return False
    if fields.stream_options is not ABSENT:
        options = bytes(fields.stream_options)
        if options != b"null" and (bytes(fields.stream) != b"true" or not _are_plain_options(options)):
            return False
    if fields.min_tokens is not ABSENT and not bytes(fields.min_tokens).isdigit():
        return False
    if shape is Shape.RESPONSES:
        return _is_limit(fields.max_output_tokens)
    if shape is Shape.MESSAGES and bytes(fields.max_tokens) in (b"", b"null"):  # there it must be given
        return False
    return _is_limit(fields.max_tokens) and _is_limit(fields.max_completion_tokens)


def _are_plain_options(text: bytes) -> bool:
    try:
        options = _object.decode(text)
    except msgspec.MsgspecError:
        return False
    names = ("include_usage", "continuous_usage_stats")
    return all(bytes(options.get(name, ABSENT)) in _PLAIN_SWITCH for name in names)


def _is_limit(value: Raw) -> bool:
    if value is ABSENT:
        return True
    text = bytes(value)
    return (text.isdigit() and text != b"0") or text == b"null"


_ASK_PREFILL = Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
    b'"remote_host":null,"remote_port":null}'
)
_ONE = Raw(b"1")
_NULL = Raw(b"null")
_TRUE = Raw(b"true")
_FALSE = Raw(b"false")


def prefill_body(endpoint: Endpoint, body: bytes, *, keep: bool = True) -> bytes:
    """The client's body as the prefill engine gets it: one token, not streamed, KV kept for a remote reader if `keep`.

    Raises `InvalidInput` for a body that is nested too deep.
    """
    try:
        fields = _object.decode(body)
    except RecursionError:  # the stack is a little higher here than where the body was read
        raise InvalidInput("The body is nested too deep.") from None
    for name in ("stream_options", "min_tokens"):
        fields.pop(name, None)
    fields["stream"] = _FALSE
    if endpoint.shape is Shape.RESPONSES:
        fields["max_output_tokens"] = _ONE
    else:
        fields["max_tokens"] = _ONE
        if "max_completion_tokens" in fields:
            fields["max_completion_tokens"] = _ONE
    if keep:
        fields["kv_transfer_params"] = _ASK_PREFILL
    return _encode(fields)


def answer_body(body: bytes, metering: bytes, params: bytes | None) -> bytes:
    """The client's own bytes with the router's fields as the last ones: of two equal names the last one counts."""
    if params is not None:
        return b'%b%b,"kv_transfer_params":%b}' % (body[: body.rindex(b"}")], metering, params)
    return b"%b%b}" % (body[: body.rindex(b"}")], metering) if metering else body


def freeing_body(model: str, params: bytes) -> bytes:
    """A completion that a decode engine refuses, and by that lets go of the KV that a prefill engine keeps."""
    return b'{"model":%b,"prompt":"-","max_tokens":0,"kv_transfer_params":%b}' % (_encode(model), params)


def read_params(reply: bytes) -> bytes | None:
    """The KV params of a prefill engine's reply; None: it gave none."""
    try:
        params = bytes(_prefill_reply.decode(reply).kv_transfer_params)
        return params if params[:1] == b"{" and len(params) <= MAX_PARAMS and _object.decode(params) else None
    except UNREADABLE:
        return None


def read_counts(reply: bytes, usage: Usage) -> None:
    """Take in the counts of a reply that goes to no client."""
    if reply:
        try:
            usage.add(_reply.decode(reply).usage)
        except UNREADABLE:
            return


def side_channel(params: bytes) -> str:
    """host:port where the KV of such params is asked for; empty: they do not say it."""
    try:
        found = _source.decode(params)
    except UNREADABLE:
        return ""
    host, port = found.remote_host, found.remote_port
    if not isinstance(host, str) or type(port) is not int or len(host) > 255 or not host.isascii():
        return ""
    return f"{host}:{port}" if host.isprintable() and " " not in host else ""


def cached_at_prefill(params: bytes) -> int | None:
    """How much of the prompt the prefill engine had in its cache, as the params say; None: they do not."""
    try:
        cached = _source.decode(params).remote_prefill_cached_tokens
    except UNREADABLE:
        return None
    return cached if type(cached) is int else None


MAX_PARAMS = 4 << 20
"""Bytes of KV params; those of a million tokens take a tenth."""
_COUNTABLE = 1 << 40
"""A larger count is nonsense, and sums of such would be more than counters hold."""


class Usage:
    """Token counts, merged per field: a later event that lacks one does not erase it."""

    __slots__ = ("cached", "created", "output", "prompt")

    def __init__(self) -> None:
        self.prompt: int | None = None
        self.cached: int | None = None
        self.created: int | None = None
        """Of the prompt, tokens that the answering engine computed in whole KV blocks."""
        self.output: int | None = None

    def add(self, counts: Any) -> None:
        """Take in a `usage` object of any of the formats."""
        if not isinstance(counts, dict):
            return
        prompt = _count(counts, "prompt_tokens", "input_tokens", None)
        if prompt is not None and "cache_read_input_tokens" in counts:  # Anthropic's input is what was not cached
            for name in ("cache_creation_input_tokens", "cache_read_input_tokens"):
                prompt += _count(counts, name, name, None) or 0
        self.prompt = prompt or self.prompt  # no prompt is empty: a zero tells nothing
        self.output = _count(counts, "completion_tokens", "output_tokens", self.output)
        details = counts.get("prompt_tokens_details") or counts.get("input_tokens_details")
        if isinstance(details, dict):
            self.cached = _count(details, "cached_tokens", "cached_tokens", self.cached)
            self.created = _count(details, "created_cache_tokens", "cache_write_tokens", self.created)
        self.cached = _count(counts, "cache_read_input_tokens", "cache_read_input_tokens", self.cached)
        self.created = _count(counts, "cache_creation_input_tokens", "cache_creation_input_tokens", self.created)


def _count(counts: dict[str, Any], name: str, other: str, before: int | None) -> int | None:
    value = counts.get(name, counts.get(other))
    return value if type(value) is int and 0 <= value <= _COUNTABLE else before


class NotAnAnswer(NamedTuple):
    """A whole reply with status 200 that is an error all the same."""

    status: int
    body: bytes


def read_reply(body: bytes, usage: Usage, shape: Shape = Shape.PLAIN) -> bytes | NotAnAnswer:
    """A whole reply, its counts read, as the client may see it: without the router's own fields. That they are null tells
    nothing: then not a byte is changed. `shape`: of an endpoint that generates; what else engines answer need not be JSON."""
    try:
        reply = _reply.decode(body)
    except UNREADABLE:
        if shape is Shape.PLAIN:
            return body
        problem = Problem(502, "not_an_answer", "The engine's answer cannot be read: it is no JSON object.")
        return NotAnAnswer(502, error_body(problem))
    if shape is not Shape.PLAIN:
        if reply.error is not None and reply.output is ABSENT:  # a response may tell of an error of its own
            return NotAnAnswer(_error_status(reply.error), body)
        if shape in (Shape.CHAT, Shape.TEXT) and bytes(reply.choices) in (b"", b"null", b"[]"):
            return NotAnAnswer(502, error_body(EMPTY_ANSWER))
    usage.add(reply.usage)
    if reply.kv_transfer_params is None and reply.ec_transfer_params is None:
        return body
    return without_owned(body)


def _error_status(error: Any) -> int:
    """Of an error that an engine reported without one, or with 200."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if type(code) is int and 400 <= code < 600 else 500


def named_in(query: bytes) -> bytes:
    """The body that a request without one stands for: its query may name the model."""
    (name,) = parse_qs(query.decode("latin-1"), max_num_fields=16).get("model", [""])[:1] or [""]
    return _encode({"model": name})


def without_owned(body: bytes) -> bytes:
    """A JSON object without the router's own fields."""
    return without(body, OWNED_FIELDS)


def without(body: bytes, names: Iterable[str]) -> bytes:
    """A JSON object without these fields; every other value byte for byte."""
    fields = _object.decode(body)
    for name in names:
        fields.pop(name, None)
    return _encode(fields)


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
"""Of the 4xx that are not the body's or the request's own fault."""


class Problem(NamedTuple):
    """An error of the router's own, not yet in any format."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after: int | None = None
    """Seconds."""
    kind: str = ""
    """OpenAI's error type, where the status does not tell it."""


EMPTY_ANSWER = Problem(502, "empty_answer", "The engine ended its answer without a single token.")


def error_body(problem: Problem, shape: Shape = Shape.PLAIN, *, marked: bool = False) -> bytes:
    """OpenAI's error object; for Anthropic's endpoints with the types and the mark that its clients know. `marked`: with that
    mark anyway."""
    anthropic = shape is Shape.MESSAGES
    by_status = _ERROR_TYPES.get(problem.status, "invalid_request_error")
    if problem.status >= 500:
        by_status = "api_error" if anthropic else "server_error"
    error = {
        "message": problem.message,
        "type": by_status if anthropic else problem.kind or by_status,
        "param": problem.param,
        "code": problem.code,
    }
    return _encode({"type": "error", "error": error} if anthropic or marked else {"error": error})


def error_event(problem: Problem, shape: Shape) -> bytes:
    """The events that end a stream which has begun."""
    if shape in (Shape.MESSAGES, Shape.RESPONSES):
        return b"event: error\ndata: %b\n\n" % error_body(problem, shape, marked=True)
    return b"data: %b\n\n%b" % (error_body(problem), end_after_error(shape))


def end_after_error(shape: Shape) -> bytes:
    """The event that ends a stream behind an error event. In Anthropic's format and in that of responses the error does so itself."""
    return b"" if shape in (Shape.MESSAGES, Shape.RESPONSES) else b"data: [DONE]\n\n"


def shaped_error(status: int, body: bytes, shape: Shape) -> bytes:
    """An engine's error reply, passed on untouched where it is shaped rightly, else put into the shape."""
    try:
        reply = _error_reply.decode(body)
    except UNREADABLE:
        reply = ErrorReply()
    if isinstance(reply.error, dict) and "message" in reply.error:
        if shape is Shape.MESSAGES and not body.startswith(b'{"type":"error"'):
            return _encode({"type": "error", "error": reply.error})
        return body
    text = next((t for t in (reply.error, reply.detail, reply.message) if isinstance(t, str) and t), None)
    return error_body(Problem(status, "engine_error", text or f"The engine answered with status {status}."), shape)


def event_error(events: bytes) -> tuple[int, bytes]:
    """Status and body of an error that an engine reported as the first event of a stream."""
    status, body = 500, b""
    for line in events.splitlines():
        if line.startswith(b"data:") and b'"error"' in line:
            body = line[5:].strip()
            try:
                error = _error_reply.decode(body).error
            except UNREADABLE:
                break
            status = _error_status(error)
            break
    return status, body
