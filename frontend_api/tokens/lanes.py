"""The threads in which long prompts are tokenised. Very long ones keep to a few of their own, so that a prompt that takes
milliseconds never waits behind those that take seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

VERY_LONG_BYTES = 64 << 10
"""Of a request's body: from about 25 ms on."""
_T = TypeVar("_T")

_long = ThreadPoolExecutor(4, "prompts")
_very_long = ThreadPoolExecutor(2, "long-prompts")


def start(size: int, work: Callable[[], _T]) -> asyncio.Future[_T]:
    """Begin the work for a request with a body of `size` bytes. Cancelled in time, it is never done."""
    lane = _very_long if size > VERY_LONG_BYTES else _long
    return asyncio.get_running_loop().run_in_executor(lane, work)
