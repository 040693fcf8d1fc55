"""Packing and cut_rounds: where parts lie, and how they fill rounds."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distcore.v1 import Packing, PlanError, cut_rounds

sizes_of_parts = st.lists(st.integers(0, 100), max_size=20)


def refused(error: pytest.ExceptionInfo[PlanError]) -> list[tuple[str, str]]:
    return [(problem.where, problem.kind) for problem in error.value.problems]


def test_parts_begin_at_multiples_of_sixteen() -> None:
    assert Packing.of([3, 0, 20, 16]) == Packing((0, 16, 16, 48), (3, 0, 20, 16), 64)


def test_a_packing_of_nothing() -> None:
    assert Packing.of([]) == Packing((), (), 0)


def test_alignment_of_one_leaves_no_gap() -> None:
    assert Packing.of([3, 1], alignment=1).offsets == (0, 3)


def test_slice_of() -> None:
    packed = Packing.of([3, 20])
    assert [packed.slice_of(part) for part in (0, 1)] == [slice(0, 3), slice(16, 36)]


@given(sizes_of_parts, st.sampled_from([1, 2, 8, 16, 64]))
def test_parts_never_overlap_and_waste_less_than_the_alignment(
    sizes: list[int], alignment: int
) -> None:
    packed = Packing.of(sizes, alignment=alignment)
    slices = [packed.slice_of(part) for part in range(len(sizes))]
    assert [one.stop - one.start for one in slices] == sizes
    assert all(one.start % alignment == 0 for one in slices)
    for one, after in pairwise(slices):
        assert 0 <= after.start - one.stop < alignment
    assert packed.nbytes == max([one.stop for one in slices], default=0)


def test_lists_and_numpy_ints_become_plain() -> None:
    packed = Packing.of(np.array([3, 20]))
    assert packed == Packing([0, 16], [3, 20], 36)  # type: ignore[arg-type]
    assert hash(packed) == hash(Packing((0, 16), (3, 20), 36))
    assert {type(n) for n in (*packed.offsets, *packed.sizes, packed.nbytes)} == {int}


@pytest.mark.parametrize(
    ("offsets", "sizes", "nbytes", "problem"),
    [
        ((0,), (1, 2), 9, ("offsets", "length")),
        ((0, 3), (4, 1), 9, ("part 1", "overlap")),
        ((4, 0), (4, 4), 9, ("part 1", "overlap")),
        ((-1,), (1,), 9, ("part 0", "overlap")),
        ((0,), (-1,), 9, ("part 0", "range")),
        ((0, 4), (4, 4), 7, ("nbytes", "range")),
        ((), (), -1, ("nbytes", "range")),
        ((0.0,), (1,), 9, ("offsets", "type")),
        ((0,), (True,), 9, ("sizes", "type")),
        ((0,), (1,), 9.0, ("nbytes", "type")),
    ],
)
def test_a_wrong_packing_is_refused(
    offsets: tuple[int, ...], sizes: tuple[int, ...], nbytes: int, problem: tuple[str, str]
) -> None:
    with pytest.raises(PlanError) as caught:
        Packing(offsets, sizes, nbytes)
    assert refused(caught) == [problem]


@pytest.mark.parametrize(
    ("sizes", "alignment", "problem"),
    [
        ([1], 0, ("alignment", "range")),
        ([1], -8, ("alignment", "range")),
        ([1], 1.5, ("alignment", "type")),
        ([1, -1], 16, ("part 1", "range")),
        ([1.0], 16, ("sizes", "type")),
        (5, 16, ("sizes", "type")),
    ],
)
def test_wrong_sizes_are_refused(
    sizes: list[int], alignment: int, problem: tuple[str, str]
) -> None:
    with pytest.raises(PlanError) as caught:
        Packing.of(sizes, alignment=alignment)
    assert refused(caught) == [problem]


@pytest.mark.parametrize(
    ("sizes", "limit", "parts", "rounds"),
    [
        ([], 8, 9, []),
        ([4, 4, 9, 1], 8, 9, [[0, 1], [2], [3]]),
        ([9, 9], 8, 9, [[0], [1]]),
        ([0, 9, 0], 8, 9, [[0], [1], [2]]),
        ([0, 0, 0], 8, 2, [[0, 1], [2]]),
        ([8, 0, 8], 8, 9, [[0, 1], [2]]),
        ([8, 4, 4], 8, 9, [[0], [1, 2]]),
        ([1] * 5, 100, 2, [[0, 1], [2, 3], [4]]),
        ([1] * 3, 1, 9, [[0], [1], [2]]),
    ],
)
def test_cut_rounds(sizes: list[int], limit: int, parts: int, rounds: list[list[int]]) -> None:
    assert [list(one) for one in cut_rounds(sizes, limit, max_parts=parts)] == rounds


@given(sizes_of_parts, st.integers(1, 150), st.integers(1, 6))
def test_rounds_cover_the_parts_in_order_and_keep_the_limits(
    sizes: list[int], limit: int, parts: int
) -> None:
    rounds = cut_rounds(sizes, limit, max_parts=parts)
    assert [part for one in rounds for part in one] == list(range(len(sizes)))
    for one in rounds:
        assert 1 <= len(one) <= parts
        assert sum(sizes[part] for part in one) <= limit or len(one) == 1
    for one, after in pairwise(rounds):
        full = len(one) == parts or sum(sizes[part] for part in one) + sizes[after[0]] > limit
        assert full, "a round was closed early"


@pytest.mark.parametrize(
    ("sizes", "limit", "parts", "problem"),
    [
        ([1], 0, 1, ("max_nbytes", "range")),
        ([1], 1, 0, ("max_parts", "range")),
        ([1], 1.5, 1, ("max_nbytes", "type")),
        ([1], 1, True, ("max_parts", "type")),
        ([1, -2], 1, 1, ("sizes", "range")),
        ([], -1, 1, ("max_nbytes", "range")),
    ],
)
def test_wrong_limits_are_refused(
    sizes: list[int], limit: int, parts: int, problem: tuple[str, str]
) -> None:
    with pytest.raises(PlanError) as caught:
        cut_rounds(sizes, limit, max_parts=parts)
    assert refused(caught) == [problem]
