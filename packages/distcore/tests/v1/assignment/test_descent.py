"""descent: each kind of step, and that a step lifts no rank to the height that it works on."""

from __future__ import annotations

import random

import pytest

from distcore.v1.assignment.descent import Descent
from distcore.v1.assignment.flow import Effort
from distcore.v1.assignment.workload import Workload


def go_down(work: Workload, owners: list[int], least: int = 0) -> Descent:
    descent = Descent(work, owners)
    descent.run(least, Effort(10**6))
    assert descent.loads == work.loads(descent.owners)
    return descent


def test_an_item_moves() -> None:
    work = Workload([3, 4, 5], [0, 0, 0], [(0, 1)], [0, 0])
    assert go_down(work, [0, 0, 0]).loads in ([7, 5], [5, 7])


def test_two_items_change_places() -> None:
    work = Workload([6, 3, 4, 1], [0, 0, 0, 0], [(0, 1)], [0, 0])
    descent = go_down(work, [0, 1, 0, 1], least=7)
    assert sorted(descent.loads) == [7, 7]


def test_a_chain_of_ranks_is_pushed() -> None:
    # Ranks in a row, two items on the first: each must hand its item to the next.
    sets = [(0,), *((rank, rank + 1) for rank in range(9))]
    work = Workload([5] * 10, list(range(10)), sets, [0] * 10)
    descent = go_down(work, [0, 0, 1, 2, 3, 4, 5, 6, 7, 8])
    assert descent.owners == list(range(10))
    assert descent.loads == [5] * 10


def test_it_ends_where_no_step_is_left() -> None:
    work = Workload([5, 5, 5], [0, 0, 0], [(0, 1)], [0, 0])
    assert max(go_down(work, [0, 0, 0]).loads) == 10


def test_it_stops_at_the_bound_and_without_effort() -> None:
    work = Workload([1] * 10, [0] * 10, [(0, 1)], [0, 0])
    assert max(go_down(work, [0] * 10, least=10).loads) == 10
    lazy = Descent(work, [0] * 10)
    lazy.run(0, Effort(0))
    assert max(lazy.loads) == 10


@pytest.mark.parametrize("seed", range(10))
def test_it_never_goes_up(seed: int) -> None:
    rng = random.Random(seed)
    sets = [tuple(sorted(rng.sample(range(8), 3))) for _ in range(10)]
    kinds = [rng.randrange(10) for _ in range(60)]
    work = Workload([rng.randint(0, 20) for _ in kinds], kinds, sets, [rng.randint(0, 9)] * 8)
    owners = [rng.choice(sets[kind]) for kind in kinds]
    descent = go_down(work, owners)
    assert max(descent.loads) < max(work.loads(owners))
    assert all(owner in sets[kind] for owner, kind in zip(descent.owners, kinds, strict=True))
