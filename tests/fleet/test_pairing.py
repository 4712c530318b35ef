"""When a warmed-up engine may serve."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.fleet.model import Role
from controlplane.fleet.pairing import Incarnation, may_serve

P0, P1, D0 = Incarnation("p0", 1), Incarnation("p1", 1), Incarnation("d0", 1)


@pytest.mark.parametrize(
    ("up", "coming", "proofs", "ready", "words"),
    [
        ([], True, {}, False, "waits for a prefill engine"),
        ([], False, {}, True, "Serving alone"),
        ([P0], False, {}, False, "proved with 0 of 1"),
        ([P0], False, {(P0, D0): True}, True, "Serving."),
        ([P0], True, {(P0, D0): True}, True, "Serving."),
        ([P0], False, {(P0, D0): False}, False, "every prefill engine failed"),
        ([P0, P1], False, {(P0, D0): True}, False, "proved with 1 of 2"),
        ([P0, P1], False, {(P0, D0): True, (P1, D0): False}, True, "with 1 of 2 prefill engines failed"),
        ([P0], False, {(Incarnation("p0", 2), D0): True}, False, "proved with 0 of 1"),
        ([P0], False, {(P0, Incarnation("d0", 2)): True}, False, "proved with 0 of 1"),
    ],
)
def test_decode(
    up: list[Incarnation], coming: bool, proofs: dict[tuple[Incarnation, Incarnation], bool], ready: bool, words: str
) -> None:
    verdict = may_serve(D0, Role.DECODE, up=up, coming=coming, proofs=proofs)
    assert verdict.ready is ready
    assert words in verdict.reason


@pytest.mark.parametrize(("coming", "words"), [(True, "waits for a decode engine"), (False, "no decode engine is up")])
def test_prefill_never_serves_alone(coming: bool, words: str) -> None:
    verdict = may_serve(P0, Role.PREFILL, up=[], coming=coming, proofs={})
    assert not verdict.ready
    assert words in verdict.reason
    assert may_serve(P0, Role.PREFILL, up=[D0], coming=coming, proofs={(P0, D0): True}).ready


def test_aggregated_needs_nobody() -> None:
    assert may_serve(P0, Role.AGGREGATED, up=[], coming=False, proofs={}).ready


@given(
    st.lists(st.sampled_from([True, False, None]), max_size=6),
    st.booleans(),
    st.sampled_from([Role.PREFILL, Role.DECODE]),
)
def test_with_partners_up_it_serves_just_when_all_are_tried_and_one_worked(
    results: list[bool | None], coming: bool, role: Role
) -> None:
    me = Incarnation("me", 1)
    partners = [Incarnation(f"x{i}", 1) for i in range(len(results))]
    pairs = {p: (me, p) if role is Role.PREFILL else (p, me) for p in partners}
    proofs = {pairs[p]: r for p, r in zip(partners, results, strict=True) if r is not None}
    verdict = may_serve(me, role, up=partners, coming=coming, proofs=proofs)
    if partners:
        assert verdict.ready == (None not in results and True in results)
    assert verdict.reason.endswith(".")
