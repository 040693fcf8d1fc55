"""tree: the least makespan, proven, and the end when the effort is spent."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from distcore.v1.assignment.flow import Effort
from distcore.v1.assignment.tree import Tree
from distcore.v1.assignment.workload import Workload


@given(st.data())
def test_the_least_is_found_and_proven(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 3))
    ranks = st.sets(st.integers(0, num_ranks - 1), min_size=1).map(lambda s: tuple(sorted(s)))
    sets = data.draw(st.lists(ranks, min_size=1, max_size=3))
    kinds = data.draw(st.lists(st.integers(0, len(sets) - 1), min_size=1, max_size=6))
    weights = [data.draw(st.integers(0, 9)) for _ in kinds]
    base = [data.draw(st.integers(0, 9)) for _ in range(num_ranks)]
    work = Workload(weights, kinds, sets, base)
    least = min(
        max(work.loads(owners)) for owners in itertools.product(*(sets[kind] for kind in kinds))
    )
    tree = Tree(work, least + 1, max(base))
    assert tree.run(Effort(10**7))
    assert tree.makespan == least
    assert tree.owners is not None
    assert max(work.loads(tree.owners)) == least
    if least > max(base):
        nothing = Tree(work, least, max(base))
        assert nothing.run(Effort(10**7))
        assert nothing.owners is None


def test_it_stops_without_effort() -> None:
    work = Workload([3, 3, 2, 2, 2], [0] * 5, [(0, 1)], [0, 0])
    tree = Tree(work, 7, 6)
    assert not tree.run(Effort(0))
    assert tree.owners is None


def test_ranks_that_are_alike_are_not_tried_one_by_one() -> None:
    work = Workload([10] * 21, [0] * 21, [tuple(range(10))], [0] * 10)
    assert Tree(work, 30, 0).run(Effort(100_000))
