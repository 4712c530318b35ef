"""The contract: what Tandem relies on in an engine, as checks that run on stand-ins and on real vLLM alike.

Each check takes an `EnginePair` and asserts; `CHECKS` is all of them, for parametrising. They share one pair and run in
any order: each uses prompts of its own and compares counters before and after.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.contract import exchange, kv_events, surface
from tests.contract.pair import EnginePair

CHECKS: tuple[Callable[[EnginePair], None], ...] = tuple(
    check for room in (surface, exchange, kv_events) for name, check in vars(room).items() if name.startswith("check_")
)
