"""groups: which ranks are alike, and the line on which sets are runs."""

from __future__ import annotations

import random

import pytest

from distcore.v1.assignment.groups import Groups


def test_ranks_in_the_same_sets_are_one_group() -> None:
    groups = Groups.of([(0, 1, 2), (2, 3), (5,)], 6)
    assert groups.ranks == [[0, 1], [2], [3], [5]]
    assert groups.members == [[0, 1], [1, 2], [3]]
    assert groups.group_of == [0, 0, 1, 2, None, 3]
    assert groups.arcs == 5
    assert groups.sums([1, 2, 4, 8, 16, 32]) == [3, 4, 8, 32]


def test_nothing_to_group() -> None:
    assert Groups.of([], 2) == Groups([], [], [None, None])


@pytest.mark.parametrize("seed", range(5))
def test_pairs_along_a_line_are_found_again(seed: int) -> None:
    names = random.Random(seed).sample(range(30), 30)
    sets = [(names[place], names[place + 1]) for place in range(29)]
    groups = Groups.of(sets, 30)
    line = [ranks[0] for ranks in groups.ranks]
    assert line in (names, names[::-1])
    assert all(high - low == 1 for low, high in groups.members)
    assert [groups.group_of[rank] for rank in line] == list(range(30))
