"""balance: worked examples, what every assignment must hold, and agreement with slow oracles."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distcore.v1 import Assignment, PlanError, balance

TP_GROUPS = [[0, 2, 4, 6], [1, 3, 5, 7]]
EIGHT_RANKS: dict[str, tuple[int, Sequence[int]]] = {
    **{f"own{rank}": (80, [rank]) for rank in range(8)},
    "repl1.0": (40, TP_GROUPS[0]),
    "repl1.1": (40, TP_GROUPS[1]),
    "repl2.0": (40, TP_GROUPS[0]),
    "repl2.1": (40, TP_GROUPS[1]),
    "D": (4000, range(8)),
    "C": (400, range(8)),
    "E": (400, range(8)),
}
"""A model on 8 ranks, tensor parallel 2, data parallel 4, in the order of coverage and size."""


def place(entries: Mapping[str, tuple[int, Collection[int]]], num_ranks: int) -> Assignment[str]:
    costs = {item: cost for item, (cost, _) in entries.items()}
    return balance(list(entries), costs, {i: r for i, (_, r) in entries.items()}, num_ranks)


def check_holds(
    found: Assignment[int],
    costs: Sequence[float],
    candidates: Sequence[Collection[int]],
    initial: Sequence[float],
    unit: int = 1,
) -> None:
    """What every assignment of the items 0, 1, ... must hold."""
    loads = list(initial)
    assert sorted(found.owner) == sorted(found.shares) == list(range(len(costs)))
    for item in found.owner:
        shares = found.shares[item]
        ranks = [rank for rank, _ in shares]
        assert ranks == sorted(set(ranks))
        assert set(ranks) <= set(candidates[item])
        assert sum(amount for _, amount in shares) == costs[item]
        largest = max(amount for _, amount in shares)
        assert found.owner[item] == min(rank for rank, amount in shares if amount == largest)
        if len(shares) > 1:
            assert all(amount >= unit for _, amount in shares)
            assert sum(amount % unit != 0 for _, amount in shares) <= 1
        for rank, amount in shares:
            loads[rank] += amount
    assert found.loads == tuple(loads)
    assert found.makespan == max(loads)
    assert found.lower_bound <= found.makespan
    assert found.ratio >= 1


def naive_greedy(
    costs: Sequence[float], candidates: Sequence[Collection[int]], initial: Sequence[float]
) -> tuple[list[int], list[float]]:
    loads, owners = list(initial), []
    for cost, ranks in zip(costs, candidates, strict=True):
        rank = min(ranks, key=lambda rank: (loads[rank], rank))
        loads[rank] += cost
        owners.append(rank)
    return owners, loads


def least_by_force(
    costs: Sequence[int], candidates: Sequence[Collection[int]], initial: Sequence[int]
) -> int:
    best = None
    for owners in itertools.product(*candidates):
        loads = list(initial)
        for cost, rank in zip(costs, owners, strict=True):
            loads[rank] += cost
        best = max(loads) if best is None else min(best, max(loads))
    return best if best is not None else max(initial)


def fullest_set(
    costs: Sequence[int], candidates: Sequence[Collection[int]], initial: Sequence[int]
) -> int:
    """The level that divided items reach, rounded up: the average of the fullest set of ranks."""
    best = 0
    for size in range(1, len(initial) + 1):
        for inside in map(set, itertools.combinations(range(len(initial)), size)):
            taken = sum(
                c for c, ranks in zip(costs, candidates, strict=True) if inside >= set(ranks)
            )
            best = max(best, math.ceil((taken + sum(initial[r] for r in inside)) / size))
    return best


@st.composite
def small_cases(draw: st.DrawFn) -> tuple[list[int], list[list[int]], list[int]]:
    num_ranks = draw(st.integers(1, 4))
    sets = st.sets(st.integers(0, num_ranks - 1), min_size=1).map(sorted)
    items = draw(st.lists(st.tuples(st.integers(0, 12), sets), max_size=6))
    initial = draw(
        st.one_of(
            st.just([0] * num_ranks),
            st.lists(st.integers(0, 12), min_size=num_ranks, max_size=num_ranks),
        )
    )
    return [cost for cost, _ in items], [ranks for _, ranks in items], initial


# --- worked examples -------------------------------------------------------------------------


def test_the_order_decides() -> None:
    found = place({"B": (100, [0]), "A": (100, [0, 1])}, 2)
    assert list(found.owner.items()) == [("B", 0), ("A", 1)]
    assert found.loads == (100, 100)
    last = place({"A": (100, [0, 1]), "B": (100, [0])}, 2)
    assert (last.owner, last.makespan, last.lower_bound, last.ratio) == (
        {"A": 0, "B": 0},
        200,
        100,
        2,
    )


def test_ties_go_to_the_lowest_rank() -> None:
    found = place({"a": (5, [0, 1]), "b": (5, [1, 0])}, 2)
    assert list(found.owner.items()) == [("a", 0), ("b", 1)]


def test_what_is_placed_last_takes_what_is_left() -> None:
    assert place({"own": (1, [0, 1]), "big": (100, [0, 1])}, 2).owner == {"own": 0, "big": 1}


def test_a_group_without_the_main_copies() -> None:
    unique = {"u2": (4, [0]), "u3": (4, [1])}
    cross = {"w.0": (16, [0]), "w.4": (16, [1]), "n": (4, [0, 1])}
    assert place({**unique, **cross}, 2).owner == {"u2": 0, "u3": 1, "w.0": 0, "w.4": 1, "n": 0}


def test_all_ranks_with_the_main_copies() -> None:
    unique = {f"u{rank}": (4, [rank]) for rank in range(4)}
    found = place({**unique, "w.0": (16, [0, 2]), "w.4": (16, [1, 3]), "n": (4, range(4))}, 4)
    assert found.owner == {"u0": 0, "u1": 1, "u2": 2, "u3": 3, "w.0": 0, "w.4": 1, "n": 2}


def test_eight_ranks_whole_shards() -> None:
    found = place(EIGHT_RANKS, 8)
    assert found.loads == (120, 120, 120, 120, 4080, 480, 480, 80)
    assert [found.owner[item] for item in ("repl1.0", "repl1.1", "repl2.0", "repl2.1")] == [
        0,
        1,
        2,
        3,
    ]
    assert [found.owner[item] for item in "DCE"] == [4, 5, 6]
    assert found.lower_bound == 4000


def test_eight_ranks_divided() -> None:
    items, (costs, candidates) = list(EIGHT_RANKS), zip(*EIGHT_RANKS.values(), strict=True)
    found = balance(items, costs, candidates, 8, policy="optimal", splittable=True)
    assert (found.makespan, found.lower_bound, found.ratio) == (700, 700, 1.0)
    assert found.loads == (700,) * 8


def test_groups_of_four() -> None:
    own = {f"own{rank}": (80, [rank]) for rank in range(4)}
    everywhere = {"D": (4000, range(4)), "C": (400, range(4)), "E": (400, range(4))}
    small = {"repl1": (40, range(4)), "repl2": (40, range(4))}
    with_main = place({**own, **everywhere, **small}, 4).owner
    assert [with_main[item] for item in (*everywhere, *small)] == [0, 1, 2, 3, 3]
    without = place({**own, **small, **everywhere}, 4).owner
    assert [without[item] for item in (*small, *everywhere)] == [0, 1, 2, 3, 0]


def test_across_groups() -> None:
    found = place(
        {"g": (4, [3]), "d": (4, [0, 3]), "e": (4, [0, 2]), "f": (4, [0, 2]), "b": (4, range(4))}, 4
    )
    assert list(found.owner.items()) == [("g", 3), ("d", 0), ("e", 2), ("f", 0), ("b", 1)]


def test_items_without_cost_go_to_the_lowest_rank() -> None:
    found = balance("abcd", [0, 0, 0, 0], None, 3)
    assert set(found.owner.values()) == {0}
    assert (found.makespan, found.lower_bound, found.ratio) == (0, 0, 1.0)


def test_greedy_and_optimum_of_a_flat_buffer() -> None:
    costs, holders = {0: 336, 1: 384, 2: 336, 3: 384}, {0: [0], 1: [0, 1], 2: [1, 2], 3: [2, 3]}
    order = [0, 1, 3, 2]
    greedy = balance(order, costs, holders, 4)
    assert greedy.owner == {0: 0, 1: 1, 3: 2, 2: 1}
    assert (greedy.makespan, greedy.lower_bound) == (720, 384)
    best = balance(order, costs, holders, 4, policy="optimal")
    assert best.owner == {0: 0, 1: 1, 2: 2, 3: 3}
    assert (best.makespan, best.lower_bound) == (384, 384)


def test_one_huge_item_is_divided() -> None:
    costs = [1024, 2, 1, 1, 1, 1, 1, 1]
    assert balance(range(8), costs, None, 8).makespan == 1024
    for policy in ("greedy", "optimal"):
        found = balance(range(8), costs, None, 8, policy=policy, splittable=[0])
        assert (found.makespan, found.lower_bound) == (129, 129)
        assert found.shares[1] == ((found.owner[1], 2),)


def test_experts_on_two_ranks_each() -> None:
    items = [*range(64), "shared"]
    candidates = [*([e // 8, e // 8 + 8] for e in range(64)), range(16)]
    costs = [100] * 64 + [400]
    assert balance(items, costs, candidates, 16).makespan == 800
    whole = balance(items, costs, candidates, 16, policy="optimal")
    assert (whole.makespan, whole.lower_bound) == (600, 500)
    divided = balance(items, costs, candidates, 16, policy="optimal", splittable=True)
    assert (divided.makespan, divided.lower_bound) == (425, 425)


def test_pigeonhole_bound() -> None:
    found = balance(range(5), [10, 10, 10, 10, 9], None, 4)
    assert (found.makespan, found.lower_bound) == (19, 19)


def test_bound_of_an_overfull_set_of_ranks() -> None:
    found = balance(range(7), [3] * 7, [[0, 1]] * 6 + [[2, 3]], 4)
    assert (found.makespan, found.lower_bound) == (9, 9)


def test_bound_is_a_multiple_of_what_all_costs_are_multiples_of() -> None:
    assert balance(range(3), [100, 200, 200], None, 2).lower_bound == 300
    assert balance(range(3), [100, 200, 200], None, 2, initial=[0, 50]).lower_bound == 300
    assert balance(range(3), [100, 200, 200], None, 2, splittable=True).lower_bound == 250


def test_initial_loads_count() -> None:
    found = balance("ab", [3, 3], None, 2, initial=[10, 5])
    assert (found.owner, found.loads, found.lower_bound) == ({"a": 1, "b": 1}, (10, 11), 11)
    idle = balance("a", [1], [[0]], 3, initial=[0, 0, 7])
    assert (idle.makespan, idle.lower_bound) == (7, 7)


def test_no_items_and_one_rank() -> None:
    empty: Assignment[int] = balance([], [], [], 3, policy="optimal", splittable=True)
    assert (empty.owner, empty.loads, empty.lower_bound, empty.ratio) == ({}, (0, 0, 0), 0, 1.0)
    assert balance([], {}, {}, 2, initial=[1, 4]).lower_bound == 4
    one = balance("ab", [2, 3], None, 1, policy="optimal", splittable=True)
    assert (one.owner, one.loads, one.ratio) == ({"a": 0, "b": 0}, (5,), 1.0)


def test_arguments_of_other_types() -> None:
    plain = balance("abc", [1, 2, 3], [[0, 1], [1], [0, 1]], 2)
    sets = {"a": {1, 0}, "b": frozenset([1]), "c": np.array([1, 0, 1])}
    assert balance("abc", {"c": 3, "b": 2, "a": 1}, sets, 2) == plain
    assert balance("abc", np.array([1, 2, 3]), [range(2), (1,), [0, 1]], 2) == plain
    sized: Any = np.int64(2)
    assert balance("abc", [1, 2, 3], sets, sized) == plain
    assert type(balance("abc", np.array([1, 2, 3]), None, 2).makespan) is int


def test_ints_stay_exact() -> None:
    big = 2**70
    found = balance(range(40), [big + i for i in range(40)], [range(30), range(1, 30)] * 20, 30)
    assert sum(found.loads) == 40 * big + 780
    assert found.makespan == 2 * big + 48
    assert balance("ab", [2**53 + 1, 1], None, 1).makespan == 2**53 + 2


def test_floats_add_up_in_order() -> None:
    found = balance(range(10), [0.1] * 10, None, 1)
    assert found.loads == (sum([0.1] * 10),)
    assert found.ratio == 1.0
    mixed = balance("ab", [1, 0.5], None, 2)
    assert mixed.loads == (1.0, 0.5)
    assert all(type(load) is float for load in mixed.loads)


# --- whole units -----------------------------------------------------------------------------


def test_shares_are_whole_units() -> None:
    found = balance("a", [103], None, 4, policy="optimal", splittable=True, min_split=10)
    amounts = sorted(amount for _, amount in found.shares["a"])
    assert amounts == [20, 23, 30, 30]
    assert found.lower_bound == 26


def test_what_is_below_two_units_stays_whole() -> None:
    found = balance("ab", [19, 1], None, 2, policy="optimal", splittable=True, min_split=10)
    assert found.shares == {"a": ((0, 19),), "b": ((1, 1),)}


def test_greedy_divides_only_what_would_stand_out() -> None:
    found = balance("abc", [8, 4, 4], None, 2, splittable=True)
    assert found.shares == {"a": ((0, 8),), "b": ((1, 4),), "c": ((1, 4),)}
    uneven = balance("abc", [6, 6, 6], None, 2, splittable=True)
    assert uneven.shares["c"] == ((0, 3), (1, 3))


def test_greedy_fills_few_ranks() -> None:
    found = balance("ab", [30, 10], None, 4, splittable=True, initial=[0, 10, 10, 0])
    assert found.loads == (15, 15, 15, 15)
    assert found.shares == {"a": ((0, 15), (3, 15)), "b": ((1, 5), (2, 5))}


def test_divided_items_leave_room_for_the_others() -> None:
    found = balance("ud", [10, 10], {"u": [0, 1], "d": [0, 2]}, 3, policy="optimal", splittable="d")
    assert (found.makespan, found.lower_bound) == (10, 10)


# --- what always holds -----------------------------------------------------------------------


@given(small_cases())
def test_optimal_is_the_least_makespan(case: tuple[list[int], list[list[int]], list[int]]) -> None:
    costs, candidates, initial = case
    items = range(len(costs))
    least = least_by_force(costs, candidates, initial)
    best = balance(items, costs, candidates, len(initial), initial=initial, policy="optimal")
    check_holds(best, costs, candidates, initial)
    assert (best.makespan, best.lower_bound) == (least, least)
    greedy = balance(items, costs, candidates, len(initial), initial=initial)
    check_holds(greedy, costs, candidates, initial)
    assert fullest_set(costs, candidates, initial) <= greedy.lower_bound <= least


@given(small_cases())
def test_optimal_reaches_the_level_of_divided_items(
    case: tuple[list[int], list[list[int]], list[int]],
) -> None:
    costs, candidates, initial = case
    found = balance(
        range(len(costs)),
        costs,
        candidates,
        len(initial),
        initial=initial,
        policy="optimal",
        splittable=True,
    )
    check_holds(found, costs, candidates, initial)
    level = fullest_set(costs, candidates, initial)
    assert (found.makespan, found.lower_bound) == (level, level)


@given(small_cases(), st.integers(1, 5), st.sets(st.integers(0, 5)))
def test_some_items_divided_into_units(
    case: tuple[list[int], list[list[int]], list[int]], unit: int, wanted: set[int]
) -> None:
    costs, candidates, initial = case
    wanted = {item for item in wanted if item < len(costs)}
    greedy, best = (
        balance(
            range(len(costs)),
            costs,
            candidates,
            len(initial),
            initial=initial,
            policy=policy,
            splittable=wanted,
            min_split=unit,
        )
        for policy in ("greedy", "optimal")
    )
    for found in (greedy, best):
        check_holds(found, costs, candidates, initial, unit)
        assert all(len(found.shares[i]) == 1 for i in range(len(costs)) if i not in wanted)
        assert found.lower_bound >= fullest_set(costs, candidates, initial)
    assert best.makespan <= greedy.makespan


@given(st.lists(st.floats(0, 1e6), max_size=6), st.integers(1, 3))
def test_floats_are_balanced_too(costs: list[float], num_ranks: int) -> None:
    every = [range(num_ranks)] * len(costs)
    greedy = balance(range(len(costs)), costs, None, num_ranks)
    best = balance(range(len(costs)), costs, None, num_ranks, policy="optimal")
    check_holds(best, costs, every, [0.0] * num_ranks)
    assert best.makespan <= greedy.makespan
    placed = (
        max(
            math.fsum(c for c, r in zip(costs, owners, strict=True) if r == rank) for rank in owners
        )
        for owners in itertools.product(*every)
        if owners
    )
    least = min(placed, default=0.0)
    assert best.makespan == pytest.approx(least, rel=1e-12)
    assert greedy.lower_bound <= least * (1 + 1e-12)


def test_greedy_is_the_plain_loop() -> None:
    for seed in range(1000):
        rng = random.Random(seed)
        num_ranks = rng.randint(1, 40)
        sets = [
            sorted(rng.sample(range(num_ranks), rng.randint(1, num_ranks)))
            for _ in range(rng.randint(1, 6))
        ]
        highest = rng.choice([1, 5, 1000, 2**70])
        whole = rng.random() < 0.7
        count = rng.randint(0, 60)
        costs: list[float] = [
            rng.randint(0, highest) if whole else rng.random() * highest for _ in range(count)
        ]
        candidates = [rng.choice(sets) for _ in costs]
        initial: list[float] = [rng.choice([0, costs[0] if costs else 1]) for _ in range(num_ranks)]
        found = balance(range(count), costs, candidates, num_ranks, initial=initial)
        owners, loads = naive_greedy(costs, candidates, initial)
        assert list(found.owner.items()) == list(enumerate(owners)), seed
        assert list(found.loads) == loads, seed


def test_the_result_repeats() -> None:
    rng = random.Random(3)
    costs = [rng.randint(1, 1000) for _ in range(120)]
    candidates = [rng.sample(range(12), 3) for _ in costs]
    for splittable in (None, range(0, 120, 2)):
        first, again = (
            balance(
                range(120),
                costs,
                [list(ranks) for ranks in candidates],
                12,
                policy="optimal",
                splittable=splittable,
            )
            for _ in range(2)
        )
        assert first == again
        assert list(first.owner) == list(again.owner)


def test_optimal_closes_most_of_the_gap() -> None:
    rng = random.Random(5)
    costs = [rng.randint(1, 10**6) for _ in range(3000)]
    candidates = [range(first, first + 3) for first in (rng.randrange(254) for _ in costs)]
    greedy = balance(range(3000), costs, candidates, 256)
    best = balance(range(3000), costs, candidates, 256, policy="optimal")
    assert greedy.ratio > 1.1
    assert best.ratio < 1.01


@pytest.mark.parametrize(
    ("policy", "count", "ratio"), [("greedy", 100_000, 1.02), ("optimal", 20_000, 1.005)]
)
@pytest.mark.parametrize("splittable", [None, True])
def test_large_input_ends_soon(
    policy: Any, count: int, ratio: float, splittable: bool | None
) -> None:
    rng = random.Random(7)
    sets = [rng.sample(range(1024), rng.randint(64, 512)) for _ in range(64)]
    candidates = [rng.choice(sets) for _ in range(count)]
    costs = [rng.randint(1, 10**6) for _ in candidates]
    started = time.monotonic()
    found = balance(range(count), costs, candidates, 1024, policy=policy, splittable=splittable)
    assert time.monotonic() - started < 60
    assert found.ratio < ratio


# --- wrong input -----------------------------------------------------------------------------


def test_every_problem_is_listed() -> None:
    costs: dict[str, Any] = {"a": -1, "b": math.nan, "d": "3"}
    candidates: dict[str, Any] = {"a": [0, 5], "b": [], "c": [0], "d": 1}
    policy: Any = "best"
    with pytest.raises(PlanError) as caught:
        balance("abacd", costs, candidates, 2, initial=[1], policy=policy, min_split=0)
    found = [(problem.where, problem.kind) for problem in caught.value.problems]
    assert found == [
        ("policy", "unknown"),
        ("item 'a'", "duplicate"),
        ("min_split", "range"),
        ("initial", "length"),
        ("item 'c'", "missing"),
        ("cost of item 'a'", "range"),
        ("cost of item 'b'", "range"),
        ("cost of item 'a'", "range"),
        ("cost of item 'd'", "type"),
        ("candidates of item 'a'", "range"),
        ("candidates of item 'b'", "empty"),
        ("candidates of item 'a'", "range"),
        ("candidates of item 'd'", "type"),
    ]
    assert "ranks [5] lie outside 0 to 1" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"costs": [1]}, "cost: 1 entries for 2 items"),
        ({"candidates": [[0]] * 3}, "candidates: 3 entries for 2 items"),
        ({"candidates": {"a": [0]}}, "item 'b': has no candidates"),
        ({"candidates": [[0], [-1]]}, "candidates of item 'b': ranks [-1] lie outside 0 to 1"),
        (
            {"candidates": [[0], ["x"]]},
            "item 'b': ['x'] is not a collection of ranks",
        ),
        ({"num_ranks": 0}, "num_ranks: 0 is below 1"),
        ({"num_ranks": 2.0}, "num_ranks: 2.0 is not an int"),
        ({"num_ranks": True}, "num_ranks: True is not an int"),
        ({"costs": [1, math.inf]}, "cost of item 'b': inf is not a finite number of at least 0"),
        ({"costs": [True, 1]}, "cost of item 'a': True is a bool, not an int or a float"),
        ({"costs": [10**400, 0.5]}, "costs: an int is more than a float can hold"),
        ({"costs": [1e308, 1e308]}, "costs: their sum is more than a float can hold"),
        ({"initial": [0, -2]}, "initial load of rank 1: -2 is not a finite number of at least 0"),
        ({"splittable": ["c"]}, "splittable item 'c': is not among the items"),
        ({"splittable": "a", "costs": [1, 0.5]}, "splittable: only ints can be divided"),
        ({"items": [["a"], "b"]}, "items: an item is no key"),
    ],
)
def test_what_is_wrong_is_said(arguments: dict[str, Any], text: str) -> None:
    known: dict[str, Any] = {"items": "ab", "costs": [1, 2], "candidates": None, "num_ranks": 2}
    with pytest.raises(PlanError) as caught:
        balance(**{**known, **arguments})
    assert text in str(caught.value)
    assert len(caught.value.problems) == 1


def test_an_assignment_cannot_be_changed() -> None:
    found = balance("a", [1], None, 1)
    with pytest.raises(AttributeError):
        found.lower_bound = 0  # type: ignore[misc]
