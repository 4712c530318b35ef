"""A temporary folder for state: a Unix socket in it must be reached by a path of at most 107 bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Shorter than pytest's, whose length depends on the test's name, the user's, and the lane it runs in."""
    with tempfile.TemporaryDirectory(prefix="tandem-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
