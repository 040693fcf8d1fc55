"""Owners that move less, without a higher load."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ownerplan.thrift import save_moves


def saved(
    owners: list[int],
    costs: list[float],
    held: list[dict[int, int]],
    ceiling: float,
    allowed: list[frozenset[int] | None] | None = None,
) -> list[int]:
    loads = [0.0] * 3
    for owner, cost in zip(owners, costs, strict=True):
        loads[owner] += cost
    return save_moves(
        owners,
        costs=costs,
        held=held,
        allowed=allowed or [None] * len(owners),
        loads=loads,
        ceiling=ceiling,
    )


def test_an_item_goes_where_there_is_room() -> None:
    assert saved([0], [2], [{1: 5}], 2) == [1]


def test_an_item_stays_where_there_is_none() -> None:
    assert saved([0, 1], [2, 1], [{1: 5}, {1: 9}], 2) == [0, 1]


def test_items_are_swapped_where_that_saves_something() -> None:
    assert saved([0, 1], [2, 2], [{1: 5}, {0: 5}], 2) == [1, 0]
    assert saved([0, 1], [2, 2], [{1: 5}, {1: 4}], 2) == [1, 0]
    assert saved([0, 1], [2, 2], [{1: 5}, {1: 5}], 2) == [0, 1]


def test_items_of_other_costs_are_swapped_below_the_ceiling() -> None:
    assert saved([0, 1], [2, 1], [{1: 5}, {0: 5}], 2) == [1, 0]
    assert saved([0, 1, 1], [3, 1, 1], [{1: 5}, {0: 5}, {1: 9}], 3) == [0, 1, 1]


def test_nobody_owns_what_they_may_not() -> None:
    assert saved([0], [2], [{1: 5}], 9, [frozenset({0, 2})]) == [0]
    assert saved([0, 1], [2, 2], [{1: 5}, {}], 2, [None, frozenset({1})]) == [0, 1]


items = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.integers(0, 6),
        st.dictionaries(st.integers(0, 2), st.integers(0, 9)),
        st.none() | st.frozensets(st.integers(0, 2)),
    ),
    max_size=7,
)


@given(items, st.integers(0, 3))
def test_no_load_above_the_ceiling_and_no_more_moves(
    drawn: list[tuple[int, int, dict[int, int], frozenset[int] | None]], slack: int
) -> None:
    owners = [owner for owner, _, _, _ in drawn]
    costs: list[float] = [cost for _, cost, _, _ in drawn]
    held = [holding for _, _, holding, _ in drawn]
    allowed = [None if some is None else some | {owner} for owner, _, _, some in drawn]

    def peak(some: list[int]) -> float:
        return max(
            sum(cost for cost, owner in zip(costs, some, strict=True) if owner == rank)
            for rank in range(3)
        )

    def stays(some: list[int]) -> int:
        return sum(holding.get(owner, 0) for holding, owner in zip(held, some, strict=True))

    ceiling = peak(owners) + slack
    found = saved(owners, costs, held, ceiling, allowed)
    assert peak(found) <= ceiling
    assert stays(found) >= stays(owners)
    assert all(some is None or owner in some for owner, some in zip(found, allowed, strict=True))
