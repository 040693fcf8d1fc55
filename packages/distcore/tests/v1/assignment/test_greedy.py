"""greedy: the three ways to find the emptiest rank agree with the plain loop."""

from __future__ import annotations

import random

import pytest

from distcore.v1.assignment.greedy import Emptiest, assign_in_order

LARGE = [tuple(range(first, first + 25)) for first in range(0, 40, 5)]
SMALL = [(0, 1, 2), (2, 3), (3, 4, 5)]
APART = [(0, 3), (1, 2, 4), (5,)]


def plain_loop(
    costs: list[float], kinds: list[int], sets: list[tuple[int, ...]], loads: list[float]
) -> list[int]:
    owners = []
    for cost, kind in zip(costs, kinds, strict=True):
        owners.append(min(sets[kind], key=lambda rank: (loads[rank], rank)))
        loads[owners[-1]] += cost
    return owners


@pytest.mark.parametrize("sets", [LARGE, SMALL, APART, LARGE + SMALL, [tuple(range(60))]])
@pytest.mark.parametrize("unit", [1, 0.1, 2**62])
def test_all_ways_agree(sets: list[tuple[int, ...]], unit: float) -> None:
    rng = random.Random(len(sets))
    costs = [rng.randint(0, 9) * unit for _ in range(400)]
    kinds = [rng.randrange(len(sets)) for _ in costs]
    loads = [rng.randint(0, 9) * unit for _ in range(60)]
    expected_loads, found_loads = list(loads), list(loads)
    expected = plain_loop(costs, kinds, sets, expected_loads)
    assert assign_in_order(costs, kinds, sets, found_loads) == expected
    assert found_loads == expected_loads
    assert {type(load) for load in found_loads} == {type(load) for load in expected_loads}


def test_nothing_to_assign() -> None:
    loads = [3, 1]
    assert assign_in_order([], [], [(0, 1)], loads) == []
    assert loads == [3, 1]


@pytest.mark.parametrize("num_ranks", [3, 50])
def test_emptiest_follows_what_is_put(num_ranks: int) -> None:
    loads = [0] * num_ranks
    emptiest = Emptiest([tuple(range(num_ranks)), (1, 2)], loads, [5, 1])
    assert emptiest.find(0) == 0
    emptiest.put(0, 5)
    assert (emptiest.find(0), emptiest.find(1)) == (1, 1)
    emptiest.put(1, 1)
    assert emptiest.find(1) == 2
    assert loads[:3] == [5, 1, 0]
