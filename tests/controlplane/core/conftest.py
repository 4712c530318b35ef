from __future__ import annotations

import pytest

from controlplane.publish import InMemoryPublisher
from tests.controlplane.core.scripted import Fleet


@pytest.fixture
def fleet(publisher: InMemoryPublisher, db: None) -> Fleet:
    return Fleet(publisher)
