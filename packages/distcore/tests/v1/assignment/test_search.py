"""search: the ways from scratch, and that the best of all is found and told."""

from __future__ import annotations

import random
from math import ceil

import pytest

from distcore.v1.assignment.bounds import Demand, least_level
from distcore.v1.assignment.flow import Effort
from distcore.v1.assignment.groups import Groups
from distcore.v1.assignment.search import Found, find_least
from distcore.v1.assignment.workload import Workload


def search(work: Workload, least: int = 0, effort: int = 4_000_000) -> Found:
    first = [work.sets[kind][0] for kind in work.kinds]
    groups = Groups.of(work.sets, len(work.base))
    return find_least(work, first, least, groups, effort=Effort(effort))


def test_a_first_assignment_at_the_bound_is_kept() -> None:
    work = Workload([2, 2], [0, 0], [(0, 1)], [2, 0])
    groups = Groups.of(work.sets, 2)
    assert find_least(work, [1, 1], 4, groups, effort=Effort(0)) == Found([1, 1], 4, True)


def test_longest_first_then_multifit_then_trials() -> None:
    # 13 needs {8, 5}, {7, 6}, {5, 4, 4}: longest first alone ends at 14.
    work = Workload([8, 7, 6, 5, 5, 4, 4], [0] * 7, [(0, 1, 2)], [0, 0, 0])
    found = search(work)
    assert (found.makespan, found.proven) == (13, True)


@pytest.mark.parametrize("seed", range(5))
def test_equal_items_reach_the_level_rounded_up(seed: int) -> None:
    rng = random.Random(seed)
    sets = [tuple(sorted(rng.sample(range(40), 2))) for _ in range(60)]
    work = Workload([1] * 300, [item % 60 for item in range(300)], sets, [0] * 40)
    demand = Demand(work.amounts, Groups.of(sets, 40), work.base)
    level = ceil(least_level(demand, Effort(10**6), work.base).value)
    found = search(work, least=level)
    assert (found.makespan, found.proven) == (level, True)
    assert found.makespan == max(work.loads(found.owners))


@pytest.mark.parametrize("seed", range(20))
def test_never_above_what_it_started_from(seed: int) -> None:
    rng = random.Random(seed)
    sets = [tuple(sorted(rng.sample(range(9), rng.randint(1, 9)))) for _ in range(6)]
    work = Workload(
        [rng.randint(0, 50) for _ in range(70)],
        [rng.randrange(6) for _ in range(70)],
        sets,
        [rng.randint(0, 30) for _ in range(9)],
    )
    found = search(work)
    assert found.makespan == max(work.loads(found.owners))
    assert found.makespan <= max(work.loads([work.sets[kind][0] for kind in work.kinds]))
    assert all(o in sets[k] for o, k in zip(found.owners, work.kinds, strict=True))


def test_without_effort_something_is_found_all_the_same() -> None:
    work = Workload([8, 7, 6, 5, 5, 4, 4], [0] * 7, [(0, 1, 2)], [0, 0, 0])
    found = search(work, effort=0)
    assert 13 <= found.makespan < 39
    assert not found.proven
