"""A vLLM plugin for nodes without a GPU: what waits there sleeps, so that it does not take a core from the model.

Two loops of an engine spin, which is right beside a GPU and wrong where model and waiting share a few cores:

* NIXL's progress thread (`pthrDelay = 0` for every agent): a whole core for ever in each engine, idle or not.
* The ring buffer between engine core and worker calls `sched_yield` while it waits. On a busy machine that is worse than
  slow: Linux takes each yield as consent to run later, and an engine that yielded a million times gets no turn for tens
  of seconds (seen: 20 to 40 s before the first token at load 10 on two cores).

vLLM loads this in each of its processes before they begin. It must never touch what is transferred or computed.
"""

import os
import time
from typing import Any

PROGRESS_DELAY_US = 1000
"""Of NIXL's progress thread. Seen: idle CPU of an engine 100 % → 3 %, transfers as fast as before."""

PAUSE_SECONDS = 0.0001
"""Between two looks into the ring buffer: noise beside a token's tens of milliseconds on a CPU."""


def register() -> None:
    """Make the waiting loops of this process sleep. Repeating it does no harm."""
    # vLLM sets this before it imports NIXL itself, to avoid a leak in UCX; we come first.
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    from nixl import _bindings as bindings
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = _pause
    make_agent = bindings.nixlAgent
    if getattr(make_agent, "sleeps_between_polls", False):
        return

    def agent_that_sleeps(name: str, config: Any) -> Any:
        config.pthrDelay = PROGRESS_DELAY_US
        return make_agent(name, config)

    agent_that_sleeps.sleeps_between_polls = True  # type: ignore[attr-defined]
    bindings.nixlAgent = agent_that_sleeps


def _pause() -> None:
    time.sleep(PAUSE_SECONDS)
