from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from controlplane.publish import InMemoryPublisher
    from tests.controlplane.core.scripted import Fleet


@pytest.fixture
def fleet(publisher: InMemoryPublisher, db: None) -> Fleet:
    from tests.controlplane.core.scripted import Fleet  # after Django is set up

    return Fleet(publisher)
