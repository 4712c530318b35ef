"""Fixtures of the control plane's tests. Nothing leaves the process unless a test asks for a Redis."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from controlplane import publish
from controlplane.deployments import tasks


@pytest.fixture(autouse=True)
def publisher(monkeypatch: pytest.MonkeyPatch) -> Iterator[publish.InMemoryPublisher]:
    """What this process publishes is kept in memory, and no wake-up is sent."""
    monkeypatch.setattr(tasks, "wake", lambda: None)
    memory = publish.InMemoryPublisher()
    with publish.using(memory):
        yield memory
