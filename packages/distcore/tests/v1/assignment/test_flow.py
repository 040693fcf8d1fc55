"""flow: how much fits, the set that is too full if not all fits, and what is thin."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distcore.v1.assignment.bounds import Demand, least_level
from distcore.v1.assignment.flow import Effort, Flow
from distcore.v1.assignment.groups import Groups


def test_later_kinds_push_earlier_ones_aside() -> None:
    flow = Flow(members=[[0, 1], [1, 2], [2, 3], [0]], room=[5, 5, 5, 5], rest=[5, 5, 5, 5])
    assert flow.run([1, 1, 1, 1], Effort(1000))
    assert flow.room == [0, 0, 0, 0]
    assert [{k: a for k, a in held.items() if a} for held in flow.held] == [
        {3: 5},
        {0: 5},
        {1: 5},
        {2: 5},
    ]


def test_the_cut_is_the_overfull_set() -> None:
    flow = Flow(members=[[0, 1], [0], [2]], room=[4, 4, 9], rest=[6, 3, 1])
    assert not flow.run([1, 1, 1], Effort(1000))
    assert flow.cut == {0, 1}
    assert sum(flow.rest) == 1


def test_without_effort_there_is_no_answer() -> None:
    flow = Flow(members=[[0, 1], [0]], room=[4, 4], rest=[6, 3])
    assert not flow.run([1, 1], Effort(0))
    assert flow.cut is None


def test_a_part_of_the_effort_is_taken_off() -> None:
    effort = Effort(10)
    assert effort.part(4).left == 4
    assert effort.part(100).left == 6
    assert effort.part(1).left == 0
    assert not effort.spend(1)


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    num_ranks = draw(st.integers(1, 5))
    ranks = st.sets(st.integers(0, num_ranks - 1), min_size=1).map(lambda s: tuple(sorted(s)))
    sets = draw(st.lists(ranks, min_size=1, max_size=6, unique=True))
    amounts = draw(st.lists(st.integers(0, 20), min_size=len(sets), max_size=len(sets)))
    base = draw(st.lists(st.integers(0, 9), min_size=num_ranks, max_size=num_ranks))
    return Demand(amounts, Groups.of(sets, num_ranks), base)


def rank_sets(demand: Demand) -> list[set[int]]:
    groups = range(len(demand.groups.ranks))
    return [set(inside) for size in groups for inside in itertools.combinations(groups, size + 1)]


@given(demands(), st.integers(9, 30), st.integers(1, 3))
def test_all_fits_unless_a_set_is_overfull(demand: Demand, high: int, parts: int) -> None:
    level = Fraction(high * parts + 1, parts)
    flow = demand.pour(level, Effort(10**6))
    overfull = [inside for inside in rank_sets(demand) if demand.average(inside) > level]
    assert any(flow.rest) == bool(overfull)
    if any(flow.rest):
        assert flow.cut is not None
        assert demand.average(flow.cut) > level


@given(demands())
def test_thin_flows_hold_the_same(demand: Demand) -> None:
    flow = demand.pour(Fraction(200), Effort(10**6))
    totals = [sum(held.values()) for held in flow.held]
    flow.thin(Effort(1000))
    assert [sum(held.values()) for held in flow.held] == totals
    for kind, amount in enumerate(demand.amounts):
        groups = [group for group, held in enumerate(flow.held) if held.get(kind)]
        assert sum(flow.held[group][kind] for group in groups) == amount
        assert set(groups) <= set(demand.groups.members[kind])
    held_by = [{kind for kind, amount in held.items() if amount} for held in flow.held]
    for one, two in itertools.combinations(held_by, 2):
        assert len(one & two) <= 1
    assert all(amount >= 0 for held in flow.held for amount in held.values())


@pytest.mark.parametrize("seed", range(3))
def test_a_tight_level_is_reached_exactly(seed: int) -> None:
    rng = random.Random(seed)
    sets = [tuple(sorted(rng.sample(range(60), rng.randint(2, 30)))) for _ in range(25)]
    owned = [[rng.choice(ranks) for _ in range(40)] for ranks in sets]
    loads = [sum(found.count(rank) for found in owned) for rank in range(60)]
    level = max(loads)
    demand = Demand([40] * 25, Groups.of(sets, 60), [0] * 60)
    flow = Demand(demand.amounts, demand.groups, [level - load for load in loads]).pour(
        Fraction(level), Effort(10**6)
    )
    assert not any(flow.rest)
    assert not any(flow.room)


@pytest.mark.parametrize("rounds", [False, True])
def test_sets_along_a_line_or_a_ring_cost_little_effort(rounds: bool) -> None:
    rng = random.Random(2)
    names = rng.sample(range(512), 512)
    sets = [
        tuple(sorted(names[place % 512] for place in range(first, first + 16)))
        for first in range(512 if rounds else 497)
    ]
    demand = Demand([rng.randint(1, 10**6) for _ in sets], Groups.of(sets, 512), [0] * 512)
    effort = Effort(10**6)
    level = least_level(demand, effort, demand.base)
    assert level.flow is not None
    assert effort.left > 0
