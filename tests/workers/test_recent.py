"""What an engine's counters rose by in the last minute."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controlplane.fleet.model import EngineLoad, Recent
from workers.recent import WINDOW_SECONDS, LastMinute


def test_a_slow_minute_is_seen_however_fast_the_hours_before_were() -> None:
    minute = LastMinute()
    moved = 0
    for second in range(0, 3_600, 2):  # a transfer of 10 MB each two seconds, at 1 GB/s
        moved += 10_000_000
        minute.of(EngineLoad(nixl_bytes=moved, nixl_seconds=moved / 1e9, nixl_transfers=second), float(second))
    before = moved
    for second in range(3_600, 3_664, 2):  # then at a hundredth of that
        moved += 10_000_000
        seconds = before / 1e9 + (moved - before) / 1e7
        load = minute.of(EngineLoad(nixl_bytes=moved, nixl_seconds=seconds), float(second))
    assert load.recent is not None
    assert load.recent.seconds == WINDOW_SECONDS
    assert round(load.recent.nixl_bytes / load.recent.nixl_seconds) == 10_000_000
    assert load.nixl_bytes == moved, "totals stay totals"


def test_one_reading_tells_nothing_and_a_quiet_minute_tells_zero() -> None:
    minute = LastMinute()
    load = EngineLoad(nixl_bytes=5, nixl_seconds=0.1, prompt_tokens_cached=7)
    assert minute.of(load, 0.0).recent is None
    assert minute.of(load, 2.0).recent == Recent(2.0)
    grown = minute.of(EngineLoad(nixl_bytes=9, nixl_seconds=0.1, prompt_tokens_cached=8), 4.0)
    assert grown.recent == Recent(4.0, nixl_bytes=4, prompt_tokens_cached=1)


def test_an_engine_that_counts_from_zero_again_begins_a_new_minute() -> None:
    minute = LastMinute()
    minute.of(EngineLoad(nixl_bytes=500), 0.0)
    assert minute.of(EngineLoad(nixl_bytes=3), 2.0).recent is None
    assert minute.of(EngineLoad(nixl_bytes=4), 4.0).recent == Recent(2.0, nixl_bytes=1)


@given(st.lists(st.tuples(st.floats(0.1, 90.0), st.integers(0, 1_000)), min_size=2, max_size=60))
def test_the_window_is_a_minute_and_what_rose_in_it(steps: list[tuple[float, int]]) -> None:
    minute, now, total = LastMinute(), 0.0, 0
    read = []
    for passes, rises in steps:
        now, total = now + passes, total + rises
        read.append((now, total))
        recent = minute.of(EngineLoad(prompt_tokens_local=total), now).recent
        if recent is None:
            continue
        since = now - recent.seconds
        assert recent.prompt_tokens_local == total - {round(at, 6): n for at, n in read}[round(since, 6)]
        later = [at for at, _ in read if at > since + 1e-6]
        assert later[0] > now - WINDOW_SECONDS, "no later reading would have made a whole minute"
