"""shares: how one item and how many are divided in whole units."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distcore.v1.assignment.groups import Groups
from distcore.v1.assignment.instance import Instance, read_instance
from distcore.v1.assignment.shares import divide, divide_evenly, divide_in_order


def instance_of(
    costs: list[int], candidates: list[list[int]], num_ranks: int, unit: int = 1
) -> Instance[int]:
    return read_instance(
        range(len(costs)),
        costs,
        candidates,
        num_ranks,
        policy="optimal",
        initial=None,
        splittable=True,
        min_split=unit,
    )


def test_the_emptiest_ranks_are_filled_first() -> None:
    assert divide(range(4), [5, 0, 2, 9], 10, 1, 9) == [(1, 9), (2, 1)]
    assert divide(range(4), [5, 0, 2, 9], 10, 3, 9) == [(1, 10)]


def test_above_the_level_it_is_spread_evenly() -> None:
    assert divide(range(3), [4, 0, 2], 12, 1, 5) == [(0, 2), (1, 6), (2, 4)]
    assert divide(range(3), [9, 0, 2], 7, 1, 3) == [(1, 5), (2, 2)]


def test_one_share_takes_the_remainder() -> None:
    assert divide([0, 1], [0, 0], 25, 10, 0) == [(0, 15), (1, 10)]
    assert divide([0, 1], [6, 0], 25, 10, 0) == [(0, 10), (1, 15)]


@given(
    st.lists(st.integers(0, 30), min_size=2, max_size=5),
    st.integers(1, 7),
    st.integers(2, 90),
    st.integers(0, 40),
)
def test_an_item_is_divided_as_evenly_as_units_allow(
    loads: list[int], unit: int, cost: int, level: int
) -> None:
    cost = max(cost, 2 * unit)
    found = divide(range(len(loads)), loads, cost, unit, level)
    assert sum(amount for _, amount in found) == cost
    assert [rank for rank, _ in found] == sorted({rank for rank, _ in found})
    assert all(amount >= unit for _, amount in found)
    assert sum(amount % unit != 0 for _, amount in found) <= 1
    highest = max(loads[rank] + amount for rank, amount in found)
    even = min(
        -(-(cost + sum(sorted(loads)[:count])) // count) for count in range(1, len(loads) + 1)
    )
    assert highest < max(level, even) + 2 * unit


def test_items_in_order_stay_whole_below_the_level() -> None:
    instance = instance_of([6, 6, 6], [[0, 1]] * 3, 2)
    loads = [0, 0]
    shares = divide_in_order(instance, [0, 1, 2], loads, 9)
    assert shares == {0: [(0, 6)], 1: [(1, 6)], 2: [(0, 3), (1, 3)]}
    assert loads == [9, 9]


def test_a_row_of_items_is_cut_where_ranks_end() -> None:
    instance = instance_of([5, 5, 5, 5], [[0, 1, 2]] * 4, 3)
    loads = [0, 0, 0]
    shares = divide_evenly(instance, range(4), loads, Groups.of(instance.sets, 3))
    assert shares is not None
    assert max(loads) == 7
    assert sum(len(found) - 1 for found in shares.values()) <= 2


def test_kinds_push_each_other_aside() -> None:
    instance = instance_of([9, 9, 2], [[0, 1], [1, 2], [2, 3]], 4)
    loads = [0, 0, 0, 3]
    shares = divide_evenly(instance, range(3), loads, Groups.of(instance.sets, 4))
    assert shares is not None
    assert loads == [6, 6, 6, 5]


@pytest.mark.parametrize("unit", [2, 5, 7])
def test_rounding_costs_few_units(unit: int) -> None:
    costs = [100 + 3 * item for item in range(12)]
    candidates = [[item % 4, (item + 1) % 4, 4] for item in range(12)]
    instance = instance_of(costs, candidates, 5, unit)
    loads = [0] * 5
    shares = divide_evenly(instance, range(12), loads, Groups.of(instance.sets, 5))
    assert shares is not None
    assert max(loads) <= -(-sum(costs) // 5) + 2 * unit
