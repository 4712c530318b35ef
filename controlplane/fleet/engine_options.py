"""Options that a deployment may hand to its engines (`extra_args`), and who may: pure tables of vLLM 0.32's options.

An option is judged by what vLLM's parser makes of it. Those that Tandem sets are refused. Those listed as harmless are anybody's
who may deploy; written in full, so that no abbreviation means another option. Every other one is for admins, because options load
code (`--worker-cls`, `--trust-remote-code`), read files (`--chat-template`, `--allowed-local-media-path`), write them or call other
machines; a new option of a new vLLM is for admins until it is listed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from controlplane.fleet.errors import InvalidInput, ManagedArgument

MOST_ARGUMENTS, MOST_CHARACTERS = 200, 32_000
"""Of one pool: what an argument vector, a plan and a page take easily."""

MANAGED_ARGUMENTS = frozenset(
    {
        # what is served, and where
        "--model", "--served-model-name", "--host", "--port", "--uds", "--grpc", "--grpc-port", "--root-path",
        "--headless", "--api-server-count", "-asc", "--config", "--help", "-h", "--tokens-only", "--enable-scale-out",
        "--middleware", "--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-ciphers",
        "--enable-ssl-refresh", "--disable-uvicorn-access-log",
        # secrets: an argv is world-readable
        "--api-key", "--hf-token",
        # KV transfer and events, and the figures that prove them
        "--kv-transfer-config", "--kv-events-config", "--ec-transfer-config", "--ec-manager-config",
        "--kv-offloading-size", "--kv-offloading-backend", "--enable-prompt-tokens-details", "--disable-log-stats",
        # size and numbers
        "--dtype", "--max-model-len", "--max-num-batched-tokens", "--block-size", "--kv-cache-memory-bytes",
        "--gpu-memory-utilization", "--device-memory-utilization",
        # one engine is one process group on the GPUs that placement chose
        "--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--prefill-context-parallel-size", "-pcp",
        "--data-parallel-size", "-dp", "--data-parallel-rank", "-dpn", "--data-parallel-start-rank", "-dpr",
        "--data-parallel-size-local", "-dpl", "--data-parallel-address", "-dpa", "--data-parallel-rpc-port", "-dpp",
        "--data-parallel-backend", "-dpb", "--data-parallel-hybrid-lb", "-dph", "--data-parallel-external-lb", "-dpe",
        "--data-parallel-multi-port-external-lb", "-dpm", "--data-parallel-supervisor-port", "--nnodes", "-n",
        "--node-rank", "-r", "--master-addr", "--master-port", "--distributed-executor-backend", "--device-ids",
    }
)  # fmt: skip
"""vLLM options that Tandem sets itself (or that would break what it sets). Refused in `extra_args`, by name, together with
what vLLM's parser takes for them: beginnings (`--max-model`), underscores, dotted parts, negated forms, and values that stick to a
short one (`-n2`). No other option of vLLM is the beginning of one of these (tests/real holds this to its parser)."""

_FLAGS = frozenset(
    {
        "--enforce-eager", "--enable-auto-tool-choice", "--exclude-tools-when-tool-choice-none",
        "--return-tokens-as-token-ids", "--enable-per-request-metrics", "--enable-server-load-tracking",
        "--enable-force-include-usage", "--enable-tokenizer-info-endpoint", "--log-error-stack",
        "--cohere-is-reasoning-model", "--enable-request-id-headers", "--disable-fastapi-docs",
        "--allow-deprecated-quantization", "--use-fp64-gumbel", "--disable-sliding-window", "--disable-cascade-attn",
        "--enable-expert-parallel", "-ep", "--enable-ep-weight-filter", "--enable-dbo", "--enable-eplb",
        "--enable-batch-sharded-sampling", "--disable-nccl-for-dp-synchronization", "--disable-custom-all-reduce",
        "--dcp-q-replicate", "--enable-prefix-caching", "--kv-sharing-fast-prefill", "--enable-mamba-cache-stochastic-rounding",
        "--enable-mamba-shared-prefix-checkpoint", "--use-replayssm", "--language-model-only", "--interleave-mm-strings",
        "--skip-mm-profiling", "--mm-encoder-only", "--enable-lora", "--fully-sharded-loras", "--specialize-active-lora",
        "--enable-mixed-moe-lora-format", "--enable-moe-shared-loras", "--kv-cache-metrics", "--cudagraph-metrics",
        "--enable-mfu-metrics", "--long-prefill-token-threshold-adaptive", "--enable-chunked-prefill",
        "--disable-chunked-mm-input", "--scheduler-reserve-full-isl", "--disable-hybrid-kv-cache-manager",
        "--async-scheduling", "--enable-flashinfer-autotune", "--use-tqdm-on-load", "--numa-bind",
    }
)  # fmt: skip
"""Harmless ones without a value."""

_VALUED = frozenset(
    {
        "--seed", "--max-num-seqs", "--max-num-active-seqs", "--max-num-queued-reqs", "--max-num-queued-tokens",
        "--max-num-scheduled-tokens", "--max-logprobs", "--logprobs-mode", "--quantization", "-q", "--kv-cache-dtype",
        "--num-gpu-blocks-override", "--prefix-caching-hash-algo", "--prefix-cache-retention-interval",
        "--prefix-match-unit", "--scheduling-policy", "--long-prefill-token-threshold", "--stream-interval", "--watermark",
        "--prefill-schedule-interval", "--runner", "--convert", "--renderer-num-workers", "--response-role",
        "--chat-template-content-format", "--default-chat-template-kwargs", "--tool-call-parser", "--tool-strict-level",
        "--reasoning-parser", "--override-generation-config", "--cohere-format", "--anthropic-disabled-thinking-effort",
        "--max-log-len", "--sse-keep-alive-interval", "--uvicorn-log-level", "--log-level", "--shutdown-timeout",
        "--distributed-timeout-seconds", "--cpu-distributed-timeout-seconds", "--decode-context-parallel-size", "-dcp",
        "--dcp-comm-backend", "--dcp-kv-cache-interleave-size", "--cp-kv-cache-interleave-size", "--all2all-backend",
        "--ubatch-size", "--dbo-decode-token-threshold", "--dbo-prefill-token-threshold", "--expert-placement-strategy",
        "--max-parallel-loading-workers", "--attention-backend", "--mamba-backend", "--mamba-ssu-algorithm",
        "--mamba-cache-philox-rounds", "--mamba-cache-dtype", "--mamba-ssm-cache-dtype", "--mamba-block-size",
        "--mamba-cache-mode", "--replayssm-buffer-len", "--offload-backend", "--cpu-offload-gb", "--offload-group-size",
        "--offload-num-in-group", "--offload-prefetch-step", "--limit-mm-per-prompt", "--mm-processor-cache-gb",
        "--mm-processor-cache-type", "--mm-hasher-algorithm", "--mm-shm-cache-max-object-size-mb", "--mm-encoder-tp-mode",
        "--mm-encoder-attn-backend", "--mm-encoder-attn-dtype", "--video-pruning-rate", "--video-pruning-method",
        "--max-loras", "--max-lora-rank", "--lora-dtype", "--max-cpu-loras", "--kv-cache-metrics-sample",
        "--max-cudagraph-capture-size", "--moe-backend", "--linear-backend", "--sparse-indexer-topk-backend",
        "--optimization-level", "--performance-mode", "--gdn-prefill-backend", "--kda-prefill-backend",
        "--kda-decode-backend", "--safetensors-load-strategy", "--per-request-spec-decode-metrics",
    }
)  # fmt: skip
"""Harmless ones with one value: a number, a choice, a registered name, or JSON of such."""

_MANY = frozenset({"--cudagraph-capture-sizes", "--kv-cache-dtype-skip-layers", "--lora-target-modules"})
"""Harmless ones with any number of values."""

HARMLESS = _FLAGS | _VALUED | _MANY

_STAND_IN = frozenset(
    {
        "--kv-blocks", "--prefill-tokens-per-second", "--itl-ms", "--transfer-bytes-per-second", "--kv-bytes-per-token",
        "--lease-seconds", "--startup-seconds", "--fault",
    }
)  # fmt: skip
"""What the stand-in engine has besides; harmless where no other runtime can read them."""


class Option(NamedTuple):
    """One option as it was written, with the values behind it."""

    written: str
    """Without a value that an equals sign joins to it."""
    name: str
    """With hyphens, without a negation and dotted parts: as the tables have it."""
    values: tuple[str, ...]


def options(arguments: Iterable[str]) -> Iterator[Option]:
    """The arguments as options with their values. Words before the first option are one of the name ''."""
    written = ""
    values: list[str] = []
    for argument in arguments:
        if argument.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?", argument):
            if written or values:
                yield Option(written, _canonical(written), tuple(values))
            written, equals, value = argument.partition("=")
            values = [value] if equals else []
            if level := re.fullmatch(r"-O=?([0-3]?)", argument):  # vLLM's parser knows this one by itself
                written, values = "--optimization-level", [level[1]] if level[1] else []
        else:
            values.append(argument)
    if written or values:
        yield Option(written, _canonical(written), tuple(values))


def check(at: str, arguments: tuple[str, ...]) -> None:
    """What nobody may write. Raises `InvalidInput` or `ManagedArgument` for the field `at`."""
    if len(arguments) > MOST_ARGUMENTS or sum(map(len, arguments)) > MOST_CHARACTERS:
        raise InvalidInput(
            f"{at}: write at most {MOST_ARGUMENTS} arguments and {MOST_CHARACTERS:,} characters", field=at
        )
    for argument in arguments:
        if re.search("[\0\ud800-\udfff]", argument):
            raise InvalidInput(f"{at}: an argument holds a NUL character or half a surrogate pair; remove it", field=at)
    for written, name, values in options(arguments):
        if not written:
            raise InvalidInput(
                f"{at}: {values[0]!r} belongs to no option; begin with one, like --max-num-seqs", field=at
            )
        if re.search(r"\s", written):
            raise InvalidInput(f"{at}: write {written!r} as two arguments, the option and its value", field=at)
        if meant := managed_argument(written):
            short = "" if meant == written else f" (vLLM reads it as {meant})"
            raise ManagedArgument(
                f"{at}: {written}{short} is set by Tandem; remove it (the field of the same meaning is its place)",
                field=at,
            )
        most = 0 if name in _FLAGS else 1 if name in _VALUED else len(values)
        if len(values) > most:  # vLLM would take it for the model
            raise InvalidInput(
                f"{at}: {values[most]!r} belongs to no option; {written} takes {most or 'none'}", field=at
            )


def admin_options(arguments: Iterable[str], *, stand_in: bool) -> list[str]:
    """The options, as written, that only an admin may give. `stand_in`: only the stand-in engine will read them."""
    known = HARMLESS | _STAND_IN if stand_in else HARMLESS
    return [option.written for option in options(arguments) if option.name not in known]


def managed_argument(name: str) -> str | None:
    """The managed option that vLLM's parser would take this option for, or None."""
    name = _canonical(name)
    for managed in sorted(MANAGED_ARGUMENTS):
        sticks = len(managed) == 2 and name.startswith(managed) and not name.startswith("--")
        if managed.startswith(name) or sticks:
            return managed
    return None


def _canonical(name: str) -> str:
    """argparse takes underscores for hyphens in vLLM, and a negated form: `--no-enable-x` is `--enable-x`."""
    if not name.startswith("--"):
        return name
    name = name.replace("_", "-").split(".", 1)[0]
    return "--" + name[5:] if name.startswith("--no-") else name
