"""draft: greedy with its bound, then what improvement makes of it."""

from __future__ import annotations

from typing import Any

from distcore.v1.assignment.draft import Draft
from distcore.v1.assignment.instance import read_instance


def draft_of(costs: list[int], candidates: Any, num_ranks: int, **more: Any) -> Draft[int]:
    known = {"policy": "optimal", "initial": None, "splittable": None, "min_split": 1}
    items = range(len(costs))
    return Draft(read_instance(items, costs, candidates, num_ranks, **{**known, **more}))


def test_greedy_comes_first_and_is_then_improved() -> None:
    draft = draft_of([1, 1, 2], None, 2)
    assert (draft.owners, draft.makespan, draft.bound) == ([0, 1, 0], 3, 2)
    draft.improve()
    assert (draft.makespan, draft.bound) == (2, 2)


def test_a_proof_raises_the_bound() -> None:
    draft = draft_of([4, 5, 2, 9, 4], None, 2)
    assert (draft.makespan, draft.bound) == (14, 12)
    draft.improve()
    assert (draft.makespan, draft.bound) == (13, 13)


def test_whole_items_make_room_for_divided_ones() -> None:
    draft = draft_of([10, 10, 10], [[0, 1], [0, 2], [0]], 3, splittable=[1])
    assert draft.whole == [0, 2]
    draft.improve()
    assert draft.owners == [1, 0]
    assert draft.shares == {1: [(2, 10)]}
    assert draft.makespan == 10
