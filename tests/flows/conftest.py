from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.flows.site import Site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A running Tandem with one node on stand-in engines; one for the module."""
    site = Site(tmp_path_factory.mktemp("site"))
    try:
        site.up()
        yield site
    finally:
        site.down()
