"""Buckets: rounds of owners, and a budget on every rank."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ownerplan.buckets import Load, form_buckets, owner_rounds


def keys(buckets: tuple[tuple[Load[str], ...], ...]) -> list[str]:
    return ["".join(load.key for load in bucket) for bucket in buckets]


def load(key: str, owner: int, cost: float, nbytes: int = 1) -> Load[str]:
    return Load(key, owner, cost, {0: nbytes, 1: nbytes})


LOADS = [load("a", 1, 3), load("b", 0, 1), load("c", 0, 5), load("d", 1, 3), load("e", 0, 2)]


def test_rounds_take_the_longest_of_every_owner_first() -> None:
    rounds = owner_rounds(LOADS)
    assert [[one.key for one in each] for each in rounds] == [["c", "a"], ["e", "d"], ["b"]]


def test_a_round_stays_together_where_it_fits() -> None:
    assert keys(form_buckets(LOADS, 100)) == ["caedb"]
    assert keys(form_buckets(LOADS, 3)) == ["ca", "edb"]
    assert keys(form_buckets(LOADS, 2)) == ["ca", "ed", "b"]
    assert keys(form_buckets(LOADS, 1)) == ["c", "a", "e", "d", "b"]


def test_a_matrix_that_is_too_large_is_alone() -> None:
    loads = [load("a", 0, 1), load("b", 0, 9, 50), load("c", 1, 1)]
    assert keys(form_buckets(loads, 2)) == ["b", "ca"]


def test_nothing_makes_no_bucket() -> None:
    assert form_buckets([], 1) == ()


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(0, 9),
            st.lists(st.integers(0, 9), min_size=4, max_size=4),
        ),
        max_size=20,
    ),
    st.integers(1, 40),
)
def test_every_matrix_is_in_one_bucket_that_fits(
    items: list[tuple[int, int, list[int]]], budget: int
) -> None:
    loads = [
        Load(at, owner, float(cost), dict(enumerate(nbytes)))
        for at, (owner, cost, nbytes) in enumerate(items)
    ]
    buckets = form_buckets(loads, budget)
    assert sorted(one.key for bucket in buckets for one in bucket) == list(range(len(items)))
    for bucket in buckets:
        total = [sum(one.nbytes[rank] for one in bucket) for rank in range(4)]
        assert max(total) <= budget or len(bucket) == 1
