"""bounds: the least level against all sets of ranks, and each bound where it is the highest."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from distcore.v1.assignment.bounds import Demand, Level, least_level, lower_bound, pigeonhole
from distcore.v1.assignment.flow import Effort
from distcore.v1.assignment.groups import Groups
from distcore.v1.assignment.instance import read_instance


def level_by_force(demand: Demand) -> Fraction:
    groups = range(len(demand.groups.ranks))
    averages = [
        demand.average(inside)
        for size in groups
        for inside in itertools.combinations(groups, size + 1)
    ]
    return max([Fraction(max(demand.base)), *averages])


def find_level(demand: Demand, effort: int = 10**6) -> Level:
    return least_level(demand, Effort(effort), demand.base)


def test_the_fullest_set_of_ranks_is_found() -> None:
    sets = [(0, 1), (1, 2), (2, 3), (0, 3), (4, 5)]
    level = find_level(Demand([5, 6, 0, 0, 1], Groups.of(sets, 6), [0, 1, 0, 9, 0, 0]))
    assert level.value == 9
    lower = find_level(Demand([9, 6, 0, 0, 1], Groups.of(sets, 6), [0, 1, 0, 2, 0, 0]))
    assert lower.value == Fraction(16, 3)
    assert lower.tight == {0, 1, 2}


@given(st.data())
def test_least_level_is_that_of_all_sets(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 6))
    ranks = st.sets(st.integers(0, num_ranks - 1), min_size=1).map(lambda s: tuple(sorted(s)))
    sets = data.draw(st.lists(ranks, max_size=8, unique=True))
    count = len(sets)
    amounts = data.draw(st.lists(st.integers(0, 50), min_size=count, max_size=count))
    base = data.draw(st.lists(st.integers(0, 9), min_size=num_ranks, max_size=num_ranks))
    demand = Demand(amounts, Groups.of(sets, num_ranks), base)
    level = find_level(demand)
    assert level.value == level_by_force(demand)
    assert level.flow is not None
    assert not any(level.flow.rest)
    assert find_level(demand, effort=0).value <= level.value


def test_a_long_chain_of_sets() -> None:
    sets = [(rank, rank + 1) for rank in range(199)]
    amounts = [10] * 199
    amounts[100] = 29
    level = find_level(Demand(amounts, Groups.of(sets, 200), [0] * 200))
    assert level.value == Fraction(29, 2)
    amounts[99] = 25
    level = find_level(Demand(amounts, Groups.of(sets, 200), [0] * 200))
    assert level.value == 18
    assert level.flow is not None


def test_the_level_of_many_overlapping_sets_is_proven() -> None:
    rng = random.Random(0)
    sets = [tuple(sorted(rng.sample(range(1024), rng.randint(64, 512)))) for _ in range(64)]
    amounts = [rng.randint(1, 10**9) for _ in sets]
    level = find_level(Demand(amounts, Groups.of(sets, 1024), [0] * 1024))
    assert level.flow is not None
    assert level.value >= Fraction(sum(amounts), 1024)


def test_pigeonhole_of_a_set() -> None:
    demand = Demand([0, 0], Groups.of([(0, 1), (0, 1, 2, 3)], 4), [3, 3, 0, 0])
    assert pigeonhole([[5, 5, 4], [1]], demand, ()) == 3 + 9
    assert pigeonhole([[5, 5], [9, 9, 9]], demand, ()) == 10
    assert pigeonhole([[7] * 4 + [2], []], demand, ()) == 3 + 16


def bound_of(
    costs: list[int], candidates: list[list[int]], num_ranks: int, *, splittable: bool = False
) -> int:
    instance = read_instance(
        range(len(costs)),
        costs,
        candidates,
        num_ranks,
        policy="greedy",
        initial=None,
        splittable=splittable,
        min_split=1,
    )
    amounts = [0] * len(instance.sets)
    for cost, kind in zip(costs, instance.kinds, strict=True):
        amounts[kind] += cost
    demand = Demand(amounts, Groups.of(instance.sets, num_ranks), instance.base)
    return lower_bound(instance, find_level(demand), demand)


def test_the_highest_bound_counts() -> None:
    assert bound_of([7, 1], [[0, 1], [0, 1]], 2) == 7
    assert bound_of([3, 3, 3], [[0, 1]] * 3, 2) == 6
    assert bound_of([3, 3, 4], [[0, 1]] * 3, 2) == 6
    assert bound_of([3, 3, 4, 1], [[0]] * 4, 2) == 11
    assert bound_of([7, 2], [[0, 1], [0, 1]], 2, splittable=True) == 5
