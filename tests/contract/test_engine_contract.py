"""The contract, held by stand-in engines. `tests/real` holds real vLLM to the same checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.contract import expected
from tests.contract.contract import CHECKS
from tests.contract.pair import EnginePair
from tests.contract.standins import StandIn, pair_of


@pytest.fixture(scope="module")
def engines() -> Iterator[EnginePair]:
    with StandIn("prefill") as prefill, StandIn("decode") as decode:
        yield pair_of(prefill, decode)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_stand_in(engines: EnginePair, check: Callable[[EnginePair], None]) -> None:
    check(engines)


def test_stand_in_invents_no_metric(engines: EnginePair) -> None:
    """Every series of the stand-in is one that the contract looks for on real engines too."""
    histograms = tuple(f"{name}_{part}" for name in expected.HISTOGRAMS for part in ("sum", "count", "bucket"))
    info = "vllm:cache_config_info"
    for url in (engines.prefill_url, engines.decode_url):
        names = engines.metrics(url).keys()
        assert {name for name in names if not name.startswith((*histograms, info))} == expected.SERIES
