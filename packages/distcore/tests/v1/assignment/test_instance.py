"""instance: what the arguments become. What is refused is tested with balance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from distcore.v1.assignment.instance import Instance, read_instance


def read(items: Any, costs: Any, candidates: Any = None, **more: Any) -> Instance[Any]:
    known = {"policy": "greedy", "initial": None, "splittable": None, "min_split": 1}
    return read_instance(items, costs, candidates, 3, **{**known, **more})


def test_equal_sets_are_one_kind() -> None:
    found = read("abcd", [1, 2, 3, 4], [[2, 0], (0, 2, 2), {1}, frozenset([0, 2])])
    assert found.kinds == [0, 0, 1, 0]
    assert found.sets == [(0, 2), (1,)]
    assert read("ab", [1, 2]).sets == [(0, 1, 2)]


def test_a_set_is_read_once_however_many_items_have_it() -> None:
    class Counted:
        reads = 0

        def __iter__(self) -> Iterator[int]:
            Counted.reads += 1
            return iter([0, 2])

    ranks = Counted()
    found = read(range(100), [1] * 100, [ranks] * 100)
    assert Counted.reads == 1
    assert found.sets == [(0, 2)]


def test_ints_are_their_own_weights() -> None:
    found = read("ab", [3, 10**30], initial=[1, 2, 3])
    assert found.whole
    assert (found.costs, found.weights) == ([3, 10**30], [3, 10**30])
    assert (found.initial, found.base) == ([1, 2, 3], [1, 2, 3])
    assert found.amount(7) == 7


def test_floats_get_ints_of_one_unit() -> None:
    found = read("ab", [0.75, 2], initial=[0.5, 0, 0])
    assert not found.whole
    assert found.costs == [0.75, 2.0]
    assert found.initial == [0.5, 0.0, 0.0]
    assert [found.amount(weight) for weight in found.weights] == [0.75, 2.0]
    assert [found.amount(load) for load in found.base] == [0.5, 0.0, 0.0]
    assert 2**61 <= sum(found.weights) + sum(found.base) < 2**62


@pytest.mark.parametrize("scale", [5e-324, 1e-300, 1e300])
def test_floats_of_any_size(scale: float) -> None:
    found = read("ab", [scale, 2 * scale])
    assert [found.amount(weight) for weight in found.weights] == [scale, 2 * scale]
    nothing = read("ab", [0.0, 0.0])
    assert nothing.weights == [0, 0]


def test_what_is_divisible() -> None:
    candidates = [[0, 1], [0, 1], [0], [0, 1]]
    assert read("abcd", [9, 3, 9, 4], candidates, splittable="abc", min_split=2).divisible == [
        True,
        False,
        False,
        False,
    ]
    assert read("abcd", [9, 1, 9, 0], candidates, splittable=True).divisible == [
        True,
        True,
        False,
        False,
    ]
    assert not any(read("ab", [1, 2], splittable=False).divisible)
