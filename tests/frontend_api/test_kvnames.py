"""The compact mapping against a dict, through its growth."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend_api.kv.names import FILL, Names

SMALL = st.integers(0, 40)


@given(st.lists(st.tuples(st.sampled_from(["put", "put", "put", "pop", "old"]), SMALL, st.integers(0, 2**64 - 1))))
def test_it_is_a_mapping(steps: list[tuple[str, int, int]]) -> None:
    names, model = Names(), {}
    for action, key, value in steps:
        match action:
            case "put":
                assert names.put(key, value) == model.pop(key, None)
                model[key] = value
            case "pop":
                assert names.pop(key) == model.pop(key, None)
            case "old":
                if model:
                    key, value = names.pop_old()
                    assert model.pop(key) == value
        assert len(names) == len(model)
        for asked in range(41):
            assert names.get(asked) == model.get(asked)
            assert (asked in names) is (asked in model)


def test_it_grows_and_drains() -> None:
    draw = random.Random(1)
    model = {draw.getrandbits(64): number for number in range(200 * FILL)}
    names = Names()
    for key, value in model.items():
        names.put(key, value)
    assert all(names.get(key) == value for key, value in model.items())
    drained: list[int] = []
    while part := names.drain(100):
        assert len(part) < 100 + 10 * FILL
        drained += part
    assert sorted(drained) == sorted(model.values())
    assert len(names) == 0


def test_what_goes_first_is_old() -> None:
    draw = random.Random(1)
    names = Names()
    for number in range(100 * FILL):
        names.put(draw.getrandbits(64), number)
    gone = [names.pop_old()[1] for _ in range(100)]
    assert max(gone) < 100 * FILL / 2
    with pytest.raises(KeyError):
        Names().pop_old()
