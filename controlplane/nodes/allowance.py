"""How much of Redis a node may take: pure. Redis knows no such limits, so the control plane measures (`deployments/guard.py`).

Honest nodes stay far below. Their logs may grow large together: then the oldest of them go, and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from controlplane.fleet import wire
from controlplane.fleet.tokenizer_files import MAX_PACKED_BYTES
from controlplane.publish import Footprint

MIB = 1 << 20
BASE_BYTES, ENGINE_BYTES = 256 * MIB, 16 * MIB
"""Of one node, and for each engine that has a place there."""
MOST_KEYS = 50_000
MOST_CONNECTIONS = 100
"""An agent needs about ten."""

_KINDS = (
    (r"plan", 16 * MIB),
    (r"report", 2 * wire.REPORT_BYTES),
    (r"tokenizer:[0-9a-f]{64}", MAX_PACKED_BYTES + MAX_PACKED_BYTES // 4),
    (r"log:.*", wire.LOG_BYTES),
    (r".*", MIB),
)


class Verdict(NamedTuple):
    cut: str = ""
    """Why its access is to end, as `node <name> …`; empty: it is not."""
    drop: tuple[str, ...] = ()
    """Keys that are to go."""


def judge(footprint: Footprint, *, engines: int, current: Collection[str]) -> Verdict:
    """`engines`: that have a place on the node. `current`: keys of the logs of their attempts, which stay."""
    for key, size in footprint.keys.items():
        most = next(most for kind, most in _KINDS if re.fullmatch(kind, key, re.DOTALL))
        if size > most:
            return Verdict(f"stored {size // MIB} MiB in Redis under one key, where {most // MIB} MiB are the most")
    if footprint.connections > MOST_CONNECTIONS:
        return Verdict(f"opened {footprint.connections} connections to Redis, where {MOST_CONNECTIONS} are the most")
    if len(footprint.keys) > MOST_KEYS:
        return Verdict(f"made more than {MOST_KEYS:,} keys in Redis")
    whole = sum(footprint.keys.values()) + footprint.connection_bytes
    allowance = BASE_BYTES + ENGINE_BYTES * engines
    if whole > 2 * allowance:
        return Verdict(f"took {whole // MIB} MiB of Redis, where {allowance // MIB} MiB are its allowance")
    drop = []
    logs = sorted(key for key in footprint.keys if key.startswith("log:") and key not in current)
    for key in sorted(logs, key=lambda key: -footprint.keys[key]):
        if whole <= allowance:
            break
        drop.append(key)
        whole -= footprint.keys[key]
    return Verdict(drop=tuple(drop))
