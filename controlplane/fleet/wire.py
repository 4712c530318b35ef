"""The messages between the programs, how they are encoded, and the names they travel under.

Every message is a whole set with a generation: losing or repeating one does no harm. JSON by msgspec; unknown fields are
ignored, so that programs of neighbouring versions understand each other. What nodes and routers send is bounded by its types
(`fleet.bounds`).

| message       | from → to            | under                                                                   |
|---------------|----------------------|-------------------------------------------------------------------------|
| NodePlan      | controller → agent   | key `tandem:node:<node>:plan`; Celery task `apply_plan` only wakes      |
| NodeReport    | agent → controller   | key `tandem:node:<node>:report`                                         |
| claim         | agent → agents       | key `tandem:node:<node>:agent`, expires: who is the node's one agent       |
| tokenizer     | agent → routers      | key `tandem:node:<node>:tokenizer:<digest>`, expires after `TOKENIZER_TTL` seconds |
| log lines     | agent → web          | stream `tandem:node:<node>:log:<engine>:<attempt>`, field `line`, capped |
| FleetSnapshot | controller → routers | key `tandem:snapshot`; its version is published on the channel of the same name |
| RouterStatus  | router → controller  | key `tandem:router:<id>`, expires after `ROUTER_STATUS_TTL` seconds     |
| RequestRecord | router → metrics     | stream `tandem:requests`, field `r`, capped                             |
| RouterLoads   | router → routers     | channel `tandem:loads`                                                  |

Routers count the limits of keys together under `tandem:limits:*`, by one script (`frontend_api/counter.py`).

A node's Redis user may touch only `tandem:node:<node>:*` (its Celery queue has that key prefix too).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from controlplane.fleet.bounds import Count, Generation, Name, Seconds, ShortName, Whole, cut_sentences
from controlplane.fleet.errors import InvalidInput
from controlplane.fleet.model import EngineAssignment, NodeFacts, Observation, Role

SNAPSHOT_KEY = "tandem:snapshot"
REQUESTS_STREAM = "tandem:requests"
REQUESTS_MAXLEN = 50_000
ROUTER_STATUS_TTL = 5
PLAN_TASK_EXPIRES = 30
LOG_MAXLEN = 2_000
LOG_LINE_BYTES = 4_096
LOG_BYTES = 32 << 20
"""What a log's stream may take in Redis: three times as much as its lines can."""
LOG_TTL = 86_400
TOKENIZER_TTL = 3_600
REPORT_BYTES = 4 << 20
"""The longest report that is read: a thousand engines take about 3 MB."""
REPORT_EVERY = 2.0
"""Seconds between an agent's reports when nothing changes."""
APPLY_PLAN_TASK = "workers.apply_plan"
REPORT_NOW_TASK = "workers.report_now"
LOADS_CHANNEL = "tandem:loads"


def node_prefix(node: str) -> str:
    """Prefix of every key, channel and queue a node's Redis user may touch."""
    return f"tandem:node:{node}:"


def plan_key(node: str) -> str:
    return node_prefix(node) + "plan"


def report_key(node: str) -> str:
    return node_prefix(node) + "report"


def log_key(node: str, engine: str, attempt: int) -> str:
    return f"{node_prefix(node)}log:{engine}:{attempt}"


def tokenizer_key(node: str, digest: str) -> str:
    """Where a node offers the files of a tokenizer (`fleet.tokenizer_files`); `digest`: theirs."""
    return f"{node_prefix(node)}tokenizer:{digest}"


def queue_name(node: str) -> str:
    """The node's Celery queue (its Redis key gets `node_prefix` in front, by kombu's `global_keyprefix`)."""
    return f"node.{node}"


_NODE_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")


def checked_node_name(name: str) -> str:
    """The name, if it may be a node's: it becomes part of Redis keys, an ACL pattern and folder names.

    Raises `InvalidInput` for any other.
    """
    if not _NODE_NAME.fullmatch(name) or ".." in name:
        raise InvalidInput(
            "name: use 1 to 63 lower-case letters, digits, dots and hyphens, beginning and ending with a letter or digit",
            field="name",
        )
    return name


def node_name_of_host(hostname: str) -> str:
    """The node name that an agent takes when none is set: the host name with every other character made a hyphen."""
    name = re.sub(r"[.-]*\.[.-]*", ".", re.sub(r"[^a-z0-9.-]", "-", hostname.lower()))[:63].strip(".-")
    return name or "node"


def acl_user(node: str) -> str:
    """Name of the node's Redis user."""
    return f"node.{node}"


_ACL_COMMANDS = (
    "auth", "hello", "ping", "select", "echo",  # the connection
    "get", "set", "unlink", "expire", "xadd",  # plan, report, claim, tokenizers, logs
    "brpop", "lpush", "sadd", "llen", "multi", "exec",  # kombu: the queue
)  # fmt: skip


def acl_rules(node: str) -> list[str]:
    """What a node's Redis user may do, as arguments of `ACL SETUSER <acl_user> reset on #<sha256 of password> …`.

    Commands are named one by one: whole categories would hold SCAN, which shows every key's name whatever the key patterns
    say. There is no publish and no subscribe, because the agent's worker uses no broadcast. Scripts run under these rules too.

    Raises `InvalidInput` for a name that could widen the key pattern.
    """
    prefix = node_prefix(checked_node_name(node))
    return ["resetkeys", f"~{prefix}*", "resetchannels", "-@all", *(f"+{command}" for command in _ACL_COMMANDS)]


def router_key(router: str) -> str:
    return f"tandem:router:{router}"


class NodePlan(Struct, frozen=True):
    """The node's whole wanted set. An engine that is not in it is to be stopped."""

    node: str
    generation: int
    engines: tuple[EngineAssignment, ...] = ()


class NodeReport(Struct, frozen=True):
    """The node's whole observed set."""

    node: Name
    agent: ShortName
    """Random id of this agent process, so that a restart is visible."""
    sequence: Count
    """Rises by one per report of one agent process."""
    plan_generation: Generation
    """Newest generation that has been taken in (0: none yet)."""
    facts: NodeFacts
    engines: Annotated[tuple[Observation, ...], Meta(max_length=1_000)] = ()
    holds_plan: bool = True
    """False from an agent's start until it has read a plan: Redis may have lost it, and it is to be sent again."""
    sent_at: Seconds = 0.0
    """By the node's clock, only to show how far that is off; 0: not told."""
    leaving: bool = False
    """The agent was told to stop, and has ended its engines: nothing is to be placed on the node until its next one reports."""


class RoutingMode(StrEnum):
    KV = "kv"
    """Where the prompt's KV lies, as the engines' events tell."""
    KV_APPROXIMATE = "kv-approximate"
    """The same without events: where the router sent such prompts lately."""
    LEAST_LOAD = "least-load"
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"


class OnPrefillFailure(StrEnum):
    """What the router does when the prefill leg gives no usable KV."""

    FALLBACK = "fallback"
    FAIL = "fail"


class Disaggregate(StrEnum):
    AUTO = "auto"
    """Where a prefill engine is expected to be faster than the answering engine alone; where that is not known: always."""
    ALWAYS = "always"
    """Every request that can be, whatever it costs."""


class Affinity(StrEnum):
    """What keeps the requests of one session together."""

    NONE = "none"
    HEADER = "header"
    """The header `x-session-id`."""
    USER = "user"
    """That header, else the body's `user`."""


class RoutingPolicy(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    mode: RoutingMode = RoutingMode.LEAST_LOAD
    on_prefill_failure: OnPrefillFailure = OnPrefillFailure.FALLBACK
    disaggregate: Disaggregate = Disaggregate.AUTO
    local_below_tokens: int = 0
    """With fewer prompt tokens to compute, the answering engine computes them itself, whatever `disaggregate` says. Like costs and
    temperature it needs the prompt's tokens: the modes kv and kv-approximate."""
    affinity: Affinity = Affinity.HEADER
    temperature: float = 0.0
    """Of the choice by cost: 0 takes the cheapest; above, dearer engines have a chance as in a softmax of cost ÷ temperature,
    costs scaled to 0…1 over the candidates."""
    max_in_flight: int | None = None
    """Requests that one engine may have at a time over all routers; more wait in the router. None: the engine queues."""
    queue_limit: int = 1_000
    """Requests that may wait in one router process while all engines are full."""
    queue_seconds: float = 30.0
    """The longest that one waits."""
    silence_seconds: float = 600.0
    """The longest wait for an engine's first byte: of an answer that is no stream, for all of it."""
    gap_seconds: float = 300.0
    """The longest silence inside a stream."""


class SnapshotEngine(Struct, frozen=True):
    id: str
    """`EngineAssignment.engine`."""
    name: str
    """Short name inside the deployment: `decode-0`."""
    attempt: int
    role: Role
    url: str
    """`http://address:port`, no trailing slash."""
    secret: str = ""
    """Sent as Bearer key to the engine; empty: none."""
    block_size: int | None = None
    kv_blocks: int | None = None
    """KV blocks of one rank, where known."""
    max_model_len: int | None = None
    events: str = ""
    """ZMQ address of the KV event publisher; empty: none."""
    replay: str = ""
    ranks: int = 1
    """Data-parallel ranks: rank n publishes on the ports above plus n, as vLLM does."""
    suspect: bool = False
    """Its node is silent, or routers blame it: use it only when no other engine is there."""


class SnapshotDeployment(Struct, frozen=True):
    name: str
    served_name: str
    routing: RoutingPolicy
    engines: tuple[SnapshotEngine, ...] = ()
    broken_pairs: tuple[tuple[str, str], ...] = ()
    """(prefill id, decode id) pairs whose transfer probe failed."""
    wants_prefill: bool = True
    """The intent has a prefill pool; decode alone is then a fallback, not the plan."""
    status: str = ""
    """One sentence for the 503 when no engine may serve."""
    tokenizer: str = ""
    """Folder of the model's tokenizer on its engines' machine, or on the router's; empty: none, and tokens are not known."""
    tokenizer_key: str = ""
    """Key of the same files in Redis, for routers on other machines; ends in their digest. Empty: they are not offered."""


class Scope(StrEnum):
    INFERENCE = "inference"
    MANAGE = "manage"


class SnapshotKey(Struct, frozen=True):
    """An API key by its digest: lower-case hex SHA-256 of the key's bytes (keys have 256 random bits)."""

    id: str
    digest: str
    scope: Scope = Scope.INFERENCE
    expires_at: float | None = None
    models: tuple[str, ...] = ()
    """Served names it may use; empty: all."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Prompt and output together."""
    concurrency: int | None = None
    """Requests at a time, over all routers."""
    priority: int = 0
    """Of two requests that wait for an engine the one with the higher is served first."""
    silence_seconds: float | None = None
    """Instead of the deployment's, as the next; None: that holds."""
    gap_seconds: float | None = None

    @property
    def limited(self) -> bool:
        """Whether its use is counted."""
        return not (self.requests_per_minute is self.tokens_per_minute is self.concurrency is None)


class FleetSnapshot(Struct, frozen=True):
    """Who takes traffic, and who may send it. Holds secrets: on disk with mode 0600 only."""

    version: int
    made_at: float = 0.0
    deployments: tuple[SnapshotDeployment, ...] = ()
    keys: tuple[SnapshotKey, ...] = ()


class CacheState(Struct, frozen=True):
    """How far a router's evidence for cache-aware routing goes, for one deployment."""

    state: str
    """exact, approximate, degraded or blind."""
    reasons: Annotated[dict[str, str], Meta(max_length=10_000)] = {}
    """Why it is not exact: by engine id, `*` for all."""
    prompts: Count = 0
    """Lately …"""
    short_prompts: Count = 0
    """… and those of them that were no longer than one KV block, and so cannot be cached."""
    short_block: Count = 0
    """Tokens of that block."""


class Fault(Struct, frozen=True):
    """An engine or a pair that the outcomes of requests show to fail, as one router process sees it now."""

    engine: Name
    """Id of the engine at fault; of a pair: its decode engine."""
    attempt: Whole
    cause: str
    """A short code: `prefill-status-404`, `transfer-silent` (with KV to fetch), `decode-reset`, `decode-computed`."""
    reason: str
    """One sentence for people: the engines' names, the stage and, of a transfer, the side channel's host:port where known."""
    seconds: Seconds
    """For how long now, by the router's own monotonic clock."""
    failures: Count
    """Outcomes of this kind since the last good one."""
    prefill: Name = ""
    """Of a pair: id of its prefill engine …"""
    prefill_attempt: Whole = 0
    """… and its attempt."""

    def __post_init__(self) -> None:
        cut_sentences(self, "cause", longest=64)
        cut_sentences(self, "reason")


class RouterStatus(Struct, frozen=True):
    """One router process, about once a second."""

    router: Name
    snapshot_version: Count
    in_flight: dict[str, Count] = {}
    """Requests now at each engine id. A prefill engine counts until decode's first byte: its KV is still being read."""
    requests: dict[str, Count] = {}
    """By `RequestRecord.result`, since the process started."""
    started_at: Seconds = 0.0
    caches: dict[str, CacheState] = {}
    """By name of the deployments that route by KV."""
    keys_seen: dict[str, Seconds] = {}
    """Key id -> when it was used, in seconds since 1970. A use is told for some seconds, and at most one a minute per key."""
    faults: Annotated[tuple[Fault, ...], Meta(max_length=10_000)] = ()
    """Engines and pairs that get no requests, or fewer, because of what requests showed. Other routers may see others."""


class RouterLoads(Struct, frozen=True):
    """What one router process has at each engine now: all of it, told when it changes and about once a second."""

    router: str
    host: str
    """The processes behind one port. Among themselves they see their loads faster."""
    loads: dict[str, tuple[int, int]] = {}
    """By `<engine id>:<attempt>`: requests, and prompt tokens that these wait for."""
    kv: dict[str, int] = {}
    """Likewise: KV tokens that requests took there since the engine told of its free KV, less what others gave back."""


class Result(StrEnum):
    OK = "ok"
    REFUSED = "refused"
    """The request itself was wrong (4xx)."""
    FAILED = "failed"
    """No answer, a 5xx, or an answer without tokens."""
    TRUNCATED = "truncated"
    """The stream broke after its first byte."""
    ABORTED = "aborted"
    """The client left first."""


class RequestRecord(Struct, frozen=True, omit_defaults=True):
    """One request through the router, written when it ends: what is as usual is left out. Seconds unless named otherwise;
    None: does not apply."""

    id: str
    at: float
    deployment: str
    endpoint: str
    status: int
    result: Result
    stream: bool = False
    key: str = ""
    prefill: str | None = None
    decode: str | None = None
    reason: str = ""
    """Why it was routed so: a `Reason` of the router."""
    fallback: bool = False
    """It should have been disaggregated and was not."""
    fallback_cause: str = ""
    tried: tuple[str, ...] = ()
    """Legs that gave nothing before the request was served another way, or not at all: `prefill-status-404 <engine>`,
    `transfer-silent <prefill engine> <decode engine>`."""
    prompt_tokens: int | None = None
    """What it used: what its key is charged and the metrics count, also of a request that was cut or left."""
    cached_tokens: int | None = None
    output_tokens: int | None = None
    estimated_tokens: int = 0
    """Of prompt and output, those that no engine told of: the router's own count or estimate."""
    overlap_tokens: int | None = None
    """Tokens of the prompt that the router expected the engine to have already; None: it did not ask."""
    prefill_seconds: float | None = None
    ttft: float | None = None
    itl_mean: float | None = None
    longest_gap: float | None = None
    e2e: float = 0.0
    overhead_us: float = 0.0
    """The router's own time before the first upstream byte was sent, in microseconds."""
    stranded: int = 0
    """Prompts whose KV a prefill engine keeps until its lease ends, as no decode engine ever got it: `kv_expired` counts them
    later."""
    queue_seconds: float | None = None
    """Spent waiting in the router because every engine was full; None: it did not have to. No part of `overhead_us`."""


_T = TypeVar("_T", bound=Struct)
_encoder = msgspec.json.Encoder()


def encode(message: Struct) -> bytes:
    """A message as JSON bytes."""
    return _encoder.encode(message)


def encode_lines(messages: Sequence[Struct]) -> bytes:
    """Messages as JSON, each a line."""
    return _encoder.encode_lines(messages)


def decode(data: bytes | str, kind: type[_T]) -> _T:
    """JSON bytes as a message.

    Raises `msgspec.ValidationError` (wrong shape, out of bounds; names the path) or `msgspec.DecodeError` (not JSON, too deep).
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise msgspec.DecodeError("nested too deep") from None
