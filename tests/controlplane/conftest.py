"""Fixtures of the control plane's tests. Nothing leaves the process unless a test asks for a Redis.

Imports of Django code are inside the fixtures: this file is read before Django is set up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from controlplane.publish import InMemoryPublisher


@pytest.fixture(autouse=True)
def publisher(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemoryPublisher]:
    """What this process publishes is kept in memory, and no wake-up is sent."""
    from controlplane import publish
    from controlplane.deployments import tasks

    monkeypatch.setattr(tasks, "wake", lambda: None)
    memory = publish.InMemoryPublisher()
    with publish.using(memory):
        yield memory
