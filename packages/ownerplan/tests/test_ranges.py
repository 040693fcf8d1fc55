"""Runs of elements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ownerplan.ranges import Range, intersect_ranges

runs = st.builds(Range, st.integers(0, 12), st.integers(0, 12))


def test_the_end_is_the_first_element_behind() -> None:
    assert Range(4, 3).end == 7
    assert Range(start=4, numel=0).end == 4


@pytest.mark.parametrize(("start", "numel"), [(-1, 2), (0, -1)])
def test_nothing_is_negative(start: int, numel: int) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        Range(start, numel)


def test_runs_apart_have_the_later_start_in_common() -> None:
    assert intersect_ranges(Range(5, 1), Range(0, 2)) == Range(5, 0)
    assert intersect_ranges(Range(0, 2), Range(2, 3)) == Range(2, 0)


@given(runs, runs)
def test_the_intersection_has_the_elements_of_both(a: Range, b: Range) -> None:
    found = intersect_ranges(a, b)
    assert set(range(found.start, found.end)) == set(range(a.start, a.end)) & set(
        range(b.start, b.end)
    )
    assert found == intersect_ranges(b, a)
    assert found.start == max(a.start, b.start)
