"""Hashes of prompts whose beginnings are known: the very same as those of prompts that are not."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from frontend_api.kv.chains import RUN, Chains
from frontend_api.kv.index import chain

PROMPTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), max_size=6),  # runs that prompts have in common
        st.integers(0, RUN * 4),  # and tokens of their own
        st.sampled_from([1, 3, 4]),
        st.sampled_from([None, "salt", "pepper"]),
    ),
    min_size=1,
    max_size=30,
)


@settings(deadline=None)
@given(PROMPTS, st.integers(1, 8))
def test_known_beginnings_have_the_hashes_they_had(
    prompts: list[tuple[list[int], int, int, str | None]], most: int
) -> None:
    chains = Chains(most)
    for number, (runs, tail, size, salt) in enumerate(prompts):
        tokens = array("I", [run for run in runs for _ in range(RUN * size)] + [1_000 + number] * tail)
        given = chains.of(tokens, size, salt)
        assert given == chain(tokens, size, salt=salt)
        given.append(0)  # the list is the caller's
        assert chains.of(tokens, size, salt) == given[:-1]


def test_what_is_asked_for_stays_known_and_the_rest_is_forgotten() -> None:
    chains = Chains(8)
    hot = array("I", range(RUN))
    known = chains.of(hot, 1)
    for number in range(100):
        chains.of(array("I", [number + 1_000] * RUN), 1)
        assert chains.of(hot, 1)[0] is known[0]
    assert len(chains._young) <= 8
    assert len(chains._old) <= 8
