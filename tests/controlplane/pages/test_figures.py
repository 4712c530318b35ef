"""Geometry and words: pure, so by tables and properties."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.dashboards import cards, figures, lanes, looks, words
from controlplane.dashboards.figures import THINNEST, WIDEST_LINE, Proof
from controlplane.dashboards.templatetags.tandem import SHAPES
from controlplane.fleet.lifecycle import State
from controlplane.fleet.model import EngineLoad, Recent
from controlplane.fleet.status import Status
from controlplane.nodes.presence import Presence

ids = st.lists(st.text("abcdef", min_size=1, max_size=4), min_size=0, max_size=9, unique=True)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (None, "unknown"), (0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (69_000_000, "69.0 MB"), (1_240_000_000, "1.24 GB"),
        (812e9, "812 GB"), (1.31e12, "1.31 TB"),
    ],
)  # fmt: skip
def test_moved_bytes_are_decimal(number: float | None, said: str) -> None:
    assert str(words.moved(number)) == said


@pytest.mark.parametrize(
    ("number", "said"), [(None, "unknown"), (1024, "1.00 KiB"), (17_179_869_184, "16.0 GiB"), (141 * 2**30, "141 GiB")]
)
def test_memory_is_binary(number: float | None, said: str) -> None:
    assert str(words.memory(number)) == said


@pytest.mark.parametrize(
    ("moved", "seconds", "said"),
    [
        (2_400_000_000, 1.0, "2.40 GB/s"),
        (48_000_000, 1.0, "48.0 MB/s"),
        (0, 0.0, "unknown"),
        (None, 3.0, "unknown"),
        (5, None, "unknown"),
    ],
)
def test_a_rate_without_time_is_unknown(moved: float | None, seconds: float | None, said: str) -> None:
    assert str(words.rate(moved, seconds)) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(None, "unknown"), (-1, "0.0 s"), (0.42, "0.4 s"), (9.94, "9.9 s"), (9.96, "9 s"), (48, "48 s"), (60, "1 min"), (3599, "59 min"), (6 * 3600, "6 h"), (200_000, "2 d")],
)  # fmt: skip
def test_ages(seconds: float | None, said: str) -> None:
    assert words.age(seconds) == said


def test_a_share_of_nothing_is_unknown() -> None:
    assert str(words.share(0, 0)) == "unknown"
    assert str(words.share(None, 4)) == "unknown"
    assert str(words.share(3, 4)) == "75 %"


@given(st.lists(st.one_of(st.none(), st.integers(0, 10**15)), max_size=40))
def test_widths_stay_in_bounds_and_keep_the_order(numbers: list[int | None]) -> None:
    found = figures.widths(numbers)
    assert all(THINNEST <= w <= figures.WIDEST for w in found)
    pairs = sorted(zip((n or 0 for n in numbers), found, strict=True))
    assert [w for _, w in pairs] == sorted(found)


@given(ids, ids, st.data())
def test_every_pair_is_a_line_and_what_failed_is_never_left_out(
    prefills: list[str], decodes: list[str], data: st.DataObject
) -> None:
    pairs = [(p, d) for p in prefills for d in decodes]
    proofs = {pair: data.draw(st.booleans()) for pair in pairs if data.draw(st.booleans())}
    moved = {d: data.draw(st.one_of(st.none(), st.integers(0, 10**12))) for d in decodes}
    whole = figures.link(prefills, decodes, proofs=proofs, bytes_by_decode=moved, most=1000)
    assert [(line.prefill, line.decode) for line in whole.lines] == pairs
    assert all(THINNEST <= line.width <= WIDEST_LINE for line in whole.lines)
    assert all(re.fullmatch(r"M0 [\d.]+C50 [\d.]+ 50 [\d.]+ 100 [\d.]+", line.path) for line in whole.lines)
    some = figures.link(prefills, decodes, proofs=proofs, bytes_by_decode=moved, most=5)
    assert len(some.lines) + some.left_out == len(pairs)
    assert len(some.lines) <= 5
    failed = sum(worked is False for worked in proofs.values())
    assert sum(line.proof is Proof.FAILED for line in some.lines) == min(failed, 5)


W, F, U = Proof.WORKED, Proof.FAILED, Proof.UNTRIED


@pytest.mark.parametrize(
    ("proofs", "said", "tone"),
    [
        ([], "No pair yet", "wait"), ([W], "The pair is proved", "link"), ([W, W], "Both pairs are proved", "link"),
        ([W, W, W], "All 3 pairs are proved", "link"), ([F, F, F], "All 3 pairs failed", "bad"),
        ([U], "No pair proved yet", "wait"), ([W, U], "1 of 2 pairs proved so far", "wait"), ([F], "The pair failed", "bad"),
        ([F, F], "Both pairs failed", "bad"), ([W, F], "1 of 2 pairs failed", "warn"), ([F, U], "1 of 2 pairs failed", "warn"),
    ],
)  # fmt: skip
def test_the_verdict_never_flatters(proofs: list[Proof], said: str, tone: str) -> None:
    assert figures.verdict(proofs) == (said, tone)


def test_every_state_has_a_word_a_shape_and_a_tone_of_its_own() -> None:
    for kinds, table in ((State, looks.ENGINE), (Status, looks.DEPLOYMENT), (Presence, looks.NODE)):
        assert set(table) == set(kinds)
        assert len({look.word for look in table.values()}) == len(table)
        assert len({(look.shape, look.tone) for look in table.values()}) == len(table)
        assert all(look.shape in SHAPES for look in table.values())
        assert all(look.tone in ("ok", "wait", "warn", "bad", "off") for look in table.values())
    assert set(looks.SEVERITY) == set(Status)


@pytest.mark.parametrize(("code", "said"), [(None, ""), (0, "exit code 0"), (1, "exit code 1"), (-9, "signal 9")])
def test_how_a_process_ended(code: int | None, said: str) -> None:
    assert cards.ending(code) == said


MINUTE = Recent(60.0, nixl_bytes=2_000_000, nixl_seconds=0.5)


@pytest.mark.parametrize(
    ("recents", "per_rank", "rate", "pace"),
    [
        ([MINUTE, MINUTE], False, "4.00 MB/s", "while moving, last minute"),
        ([MINUTE], True, "4.00 MB/s", "while moving, per rank, last minute"),
        ([MINUTE, None], False, "4.00 MB/s", "while moving, last minute"),
        ([Recent(60.0), Recent(12.0)], False, "unknown", "no transfers in the last minute"),
        ([None], False, "unknown", "rate unknown"),
        ([], False, "unknown", "rate unknown"),
    ],
)
def test_a_links_rate_is_of_the_last_minute(recents: list[Recent | None], per_rank: bool, rate: str, pace: str) -> None:
    loads = [EngineLoad(nixl_bytes=10**12, nixl_seconds=1.0, recent=recent) for recent in recents]
    found, says = lanes.transfer_rate(loads, per_rank=per_rank)
    assert (str(found), says) == (rate, pace)
