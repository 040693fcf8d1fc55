"""Matchings: steps in which no rank sends twice or receives twice, as few as can be."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from distcore.v1 import Pair, Plan, Region, Transfer, matchings, pairs_of

ranks = st.integers(0, 11)


def largest_degree(pairs: Sequence[Pair]) -> int:
    counts = [Counter(pair[end] for pair in pairs) for end in (0, 1)]
    return max((n for count in counts for n in count.values()), default=0)


def check(pairs: Sequence[Pair]) -> None:
    """Every pair is there as often as it came, nobody acts twice at once, and none is wasted."""
    found = matchings(pairs)
    assert len(found) == largest_degree(pairs)
    assert Counter(pair for one in found for pair in one) == Counter(pairs)
    for one in found:
        assert len({sender for sender, _ in one}) == len({got for _, got in one}) == len(one) > 0
        assert one == tuple(sorted(one))


@given(st.lists(st.tuples(ranks, ranks), max_size=60))
def test_any_pairs_take_as_many_as_the_busiest_rank_has(pairs: list[Pair]) -> None:
    check(pairs)


@given(st.lists(st.tuples(ranks, ranks), max_size=30))
def test_the_order_of_the_pairs_does_not_matter(pairs: list[Pair]) -> None:
    turned = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
    assert matchings(turned) == matchings(pairs)


def test_all_to_all_goes_round_the_ring() -> None:
    pairs = [(sender, receiver) for sender in range(4) for receiver in range(4, 8)]
    assert matchings(pairs) == (
        ((0, 4), (1, 5), (2, 6), (3, 7)),
        ((0, 5), (1, 6), (2, 7), (3, 4)),
        ((0, 6), (1, 7), (2, 4), (3, 5)),
        ((0, 7), (1, 4), (2, 5), (3, 6)),
    )


def test_a_colour_is_made_free_where_none_is() -> None:
    """(0, 0) and (1, 1) have the first colour and (1, 2) the second, in the order of distance.

    For (0, 2) the first is taken at 0 and the second at 2, so (1, 2) and (1, 1) change theirs.
    """
    pairs = [(0, 0), (0, 2), (1, 1), (1, 2)]
    assert matchings(pairs) == (((0, 0), (1, 2)), ((0, 2), (1, 1)))


def test_no_pairs_take_none() -> None:
    assert matchings([]) == ()
    assert pairs_of(Plan()) == ()


def test_what_stays_on_a_rank_is_no_exchange() -> None:
    box = Region((0,), (1,))
    plan = Plan([Transfer(*one, box) for one in (("a", 1, 1), ("a", 1, 0), ("b", 1, 0))])
    assert pairs_of(plan) == ((1, 0),)


def test_a_thousand_ranks_to_a_thousand_take_little_time() -> None:
    """Sparse, in two directions: 1 024 ranks to 1 024; and dense, 256 to 256."""
    sparse = [(at, 1024 + to % 1024) for at in range(1024) for to in (at, at + 1, 7 * at, 3 * at)]
    dense = [(at, 256 + to) for at in range(256) for to in range(256)]
    for pairs, bound_s in ((sparse, 1.0), (dense, 4.0)):  # 0.02 and 0.3 s where nothing else runs
        begin = time.process_time()
        matchings(pairs)
        assert time.process_time() - begin < bound_s
        check(pairs)
