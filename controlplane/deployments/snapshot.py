"""Who takes traffic, and who may send it: pure. Built anew from the records at every step; only its digest tells a change."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from controlplane.deployments.draft import proofs_of
from controlplane.deployments.world import DeploymentRecord, EngineRecord
from controlplane.fleet import wire
from controlplane.fleet.lifecycle import SERVING, State
from controlplane.fleet.model import Role
from controlplane.fleet.status import ANSWERING, Condition, EngineView, derive
from controlplane.fleet.wire import FleetSnapshot, SnapshotDeployment, SnapshotEngine, SnapshotKey


def build(
    deployments: Iterable[DeploymentRecord], engines: Mapping[str, EngineRecord], keys: Iterable[SnapshotKey]
) -> FleetSnapshot:
    """The snapshot without version and time. Deployments that are being deleted are left out."""
    by_deployment: dict[str, list[EngineRecord]] = {}
    for engine in engines.values():
        by_deployment.setdefault(engine.deployment, []).append(engine)
    parts = [
        _deployment(deployment, by_deployment.get(deployment.name, []))
        for deployment in sorted(deployments, key=lambda d: d.name)
        if not deployment.deleting
    ]
    return FleetSnapshot(version=0, deployments=tuple(parts), keys=ordered(keys))


def ordered(keys: Iterable[SnapshotKey]) -> tuple[SnapshotKey, ...]:
    """Always in the same order, so that the digest tells a change."""
    return tuple(sorted(keys, key=lambda k: (k.id, k.digest)))


def digest(snapshot: FleetSnapshot) -> str:
    """Of a snapshot without version and time."""
    return hashlib.sha256(wire.encode(snapshot)).hexdigest()


def takes_traffic(engine: EngineRecord) -> bool:
    """Whether the snapshot names the engine."""
    return bool(engine.url) and (engine.state in SERVING or is_suspect(engine))


def is_suspect(engine: EngineRecord) -> bool:
    """It was ready when its node fell silent, or is blamed by others than itself: it stays in the snapshot until it is ready
    again or replaced."""
    back = engine.state is State.WARMING and engine.answers
    return engine.ready_at is not None and (engine.state is State.LOST or back or engine.is_blamed)


def condition_of(deployment: DeploymentRecord, engines: Iterable[EngineRecord]) -> Condition:
    """The deployment's derived condition."""
    wanted = {role: pool.replicas for role, pool in deployment.spec.pools.items()}
    views = [
        EngineView(e.role, e.state, e.name, e.reason, is_suspect(e), e.attempt, e.failures)
        for e in engines
        if e.state is not State.STOPPED
    ]
    return derive(wanted, views, deleting=deployment.deleting)


def _deployment(deployment: DeploymentRecord, engines: list[EngineRecord]) -> SnapshotDeployment:
    taking = sorted((e for e in engines if takes_traffic(e)), key=lambda e: e.id)
    prefills = {e.incarnation for e in taking if e.role is Role.PREFILL}
    decodes = {e.incarnation for e in taking if e.role is Role.DECODE}
    broken = [
        (prefill.engine, decode.engine)
        for (prefill, decode), ok in proofs_of({e.id: e for e in taking}).items()
        if not ok and prefill in prefills and decode in decodes
    ]
    prefill_pool = deployment.spec.pools.get(Role.PREFILL)
    folder, key = _tokenizer(taking)
    return SnapshotDeployment(
        name=deployment.name,
        served_name=deployment.spec.served_name,
        routing=deployment.spec.routing,
        engines=tuple(_engine(engine) for engine in taking),
        broken_pairs=tuple(sorted(broken)),
        wants_prefill=prefill_pool is not None and prefill_pool.replicas > 0,
        status="" if any(e.role in ANSWERING for e in taking) else condition_of(deployment, engines).sentence,
        tokenizer=folder,
        tokenizer_key=key,
    )


def _tokenizer(taking: Iterable[EngineRecord]) -> tuple[str, str]:
    """Folder and Redis key of the deployment's tokenizer: those of the first engine whose node offers its files, else of the
    first one. Where engines differ, the routers' own check of each engine tells."""
    seen = [(engine, engine.observation) for engine in taking if engine.observation is not None]
    for engine, found in seen:
        if found.tokenizer and engine.node:
            return found.tokenizer_folder, wire.tokenizer_key(engine.node, found.tokenizer)
    return next((found.tokenizer_folder or found.model_folder for _, found in seen), ""), ""


def _engine(engine: EngineRecord) -> SnapshotEngine:
    seen = engine.observation
    assert seen is not None
    assert seen.ports is not None
    return SnapshotEngine(
        id=engine.id,
        name=engine.name,
        attempt=engine.attempt,
        role=engine.role,
        url=engine.url,
        secret=engine.secret,
        block_size=seen.block_size,
        kv_blocks=seen.kv_blocks,
        max_model_len=seen.max_model_len,
        events=engine.socket_url("tcp", seen.ports.events),
        replay=engine.socket_url("tcp", seen.ports.replay),
        ranks=seen.kv_ranks,
        suspect=is_suspect(engine),
    )
