"""When a warmed-up engine may serve."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.fleet.model import Role
from controlplane.fleet.pairing import Incarnation, at_fault, may_serve

P0, P1, D0 = Incarnation("p0", 1), Incarnation("p1", 1), Incarnation("d0", 1)


@pytest.mark.parametrize(
    ("up", "coming", "proofs", "ready", "words"),
    [
        ([], True, {}, False, "Waiting for a prefill engine"),
        ([], False, {}, True, "Serving alone"),
        ([P0], False, {}, False, "work with 0 of 1"),
        ([P0], False, {(P0, D0): True}, True, "Serving."),
        ([P0], True, {(P0, D0): True}, True, "Serving."),
        ([P0], False, {(P0, D0): False}, True, "Serving alone: no KV transfer works"),
        ([P0, P1], False, {(P0, D0): False, (P1, D0): False}, True, "Serving alone: no KV transfer works"),
        ([P0, P1], False, {(P0, D0): True}, False, "work with 1 of 2"),
        ([P0, P1], False, {(P0, D0): True, (P1, D0): False}, True, "with 1 of 2 prefill engines failed"),
        ([P0], False, {(Incarnation("p0", 2), D0): True}, False, "work with 0 of 1"),
        ([P0], False, {(P0, Incarnation("d0", 2)): True}, False, "work with 0 of 1"),
    ],
)
def test_decode(
    up: list[Incarnation], coming: bool, proofs: dict[tuple[Incarnation, Incarnation], bool], ready: bool, words: str
) -> None:
    verdict = may_serve(D0, Role.DECODE, up=up, coming=coming, proofs=proofs)
    assert verdict.ready is ready
    assert words in verdict.reason


def test_an_engine_at_fault_neither_serves_alone_nor_counts_as_a_partner() -> None:
    failed = {(P0, D0): False}
    accused = may_serve(D0, Role.DECODE, up=[P0], coming=False, proofs=failed, accused={D0})
    assert (accused.ready, accused.reason) == (
        False,
        "It answers, but the KV transfer with every prefill engine failed.",
    )
    assert may_serve(P0, Role.PREFILL, up=[D0], coming=False, proofs=failed, accused={D0}).reason.endswith(
        "No decode engine is running that could take its KV."
    )
    assert may_serve(D0, Role.DECODE, up=[P0, P1], coming=False, proofs={(P1, D0): True}, accused={P0}).ready


PREFILLS, DECODES = ([Incarnation(f"{side}{n}", 1) for n in range(3)] for side in "pd")


@pytest.mark.parametrize("decodes", [1, 2, 3])
@pytest.mark.parametrize("prefills", [1, 2, 3])
@pytest.mark.parametrize("faulty", ["prefill", "decode", "pair", "all", "none"])
def test_who_is_at_fault_where_transfers_fail(faulty: str, prefills: int, decodes: int) -> None:
    fails = {
        "prefill": lambda p, d: p == P0,
        "decode": lambda p, d: d == D0,
        "pair": lambda p, d: (p, d) == (P0, D0),
        "all": lambda p, d: True,
        "none": lambda p, d: False,
    }[faulty]
    tried = {(p, d): not fails(p, d) for p in PREFILLS[:prefills] for d in DECODES[:decodes]}
    expected: set[Incarnation] = set()
    if prefills + decodes > 2:  # of one pair nobody can tell
        expected = {"prefill": {P0}, "decode": {D0}}.get(faulty, set())
        if faulty == "pair" and 1 in (prefills, decodes):
            expected = {P0} if decodes == 1 else {D0}  # it works with nobody, its partner does
        if faulty == "all" and 1 in (prefills, decodes):
            expected = {P0} if prefills == 1 else {D0}  # what they have in common
    assert at_fault(tried) == expected


@given(
    st.dictionaries(st.tuples(st.sampled_from(PREFILLS), st.sampled_from(DECODES)), st.booleans()),
)
def test_never_both_sides_of_a_pair_are_at_fault_and_nobody_for_whom_a_transfer_works(
    tried: dict[tuple[Incarnation, Incarnation], bool],
) -> None:
    found = at_fault(tried)
    for pair, ok in tried.items():
        assert not (ok and found & {*pair})
        assert len(found & {*pair}) <= 1


@pytest.mark.parametrize(
    ("coming", "words"), [(True, "Waiting for a decode engine"), (False, "No decode engine is running")]
)
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
        assert verdict.ready == (None not in results and (True in results or role is Role.DECODE))
    assert verdict.reason.endswith(".")
