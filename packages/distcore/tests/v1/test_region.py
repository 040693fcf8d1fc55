"""Region: the algebra of boxes, its edge cases, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distcore.v1 import PlanError, Region


@st.composite
def regions(draw: st.DrawFn, ndim: int) -> Region:
    start = draw(st.tuples(*[st.integers(0, 6)] * ndim))
    lengths = draw(st.tuples(*[st.integers(0, 5)] * ndim))
    return Region(start, tuple(low + n for low, n in zip(start, lengths, strict=True)))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Region, Region]:
    ndim = draw(st.integers(0, 3))
    return draw(regions(ndim)), draw(regions(ndim))


def indices(region: Region | None) -> set[tuple[int, ...]]:
    """Every index of the region: the slow and obvious reading of what a Region is."""
    if region is None:
        return set()
    found: set[tuple[int, ...]] = {()}
    for low, high in zip(region.start, region.stop, strict=True):
        found = {(*head, i) for head in found for i in range(low, high)}
    return found


def test_shape_and_numel() -> None:
    box = Region((1, 2, 3), (4, 2, 8))
    assert (box.shape, box.numel, box.ndim, box.is_empty) == ((3, 0, 5), 0, 3, True)
    assert Region((1, 2), (4, 7)).numel == 15


def test_a_region_without_dims_is_one_element() -> None:
    scalar = Region((), ())
    assert (scalar.shape, scalar.numel, scalar.is_empty) == ((), 1, False)
    assert scalar.intersect(Region((), ())) == scalar
    assert scalar.contains(scalar)
    assert scalar.slices() == ()
    assert scalar.translate(()) == scalar


def test_the_region_of_a_shape_begins_at_the_origin() -> None:
    assert Region.of_shape((3, 0)) == Region((0, 0), (3, 0))


def test_touching_boxes_have_nothing_in_common() -> None:
    assert Region((0,), (4,)).intersect(Region((4,), (8,))) is None


def test_an_empty_box_lies_in_every_box() -> None:
    assert Region((0,), (2,)).contains(Region((9,), (9,)))


def test_slices_index_an_array() -> None:
    grid = np.arange(12).reshape(3, 4)
    assert grid[Region((1, 1), (3, 3)).slices()].tolist() == [[5, 6], [9, 10]]
    assert grid[Region((0, 3), (2, 4)).slices()].tolist() == [[3], [7]]


def test_slices_of_a_negative_index_are_refused() -> None:
    with pytest.raises(PlanError, match="negative index"):
        Region((-1,), (2,)).slices()


def test_regions_order_by_start_then_stop() -> None:
    boxes = [Region((1,), (2,)), Region((0,), (9,)), Region((0,), (1,))]
    assert sorted(boxes) == [boxes[2], boxes[1], boxes[0]]


@given(pairs())
def test_intersection_holds_exactly_the_common_indices(pair: tuple[Region, Region]) -> None:
    a, b = pair
    assert indices(a.intersect(b)) == indices(a) & indices(b)
    assert a.intersect(b) == b.intersect(a)
    assert a.numel == len(indices(a))


@given(pairs())
def test_contains_means_that_every_index_is_inside(pair: tuple[Region, Region]) -> None:
    a, b = pair
    assert a.contains(b) == (indices(b) <= indices(a))


@given(pairs())
def test_relative_to_and_translate_undo_each_other(pair: tuple[Region, Region]) -> None:
    a, b = pair
    assert a.relative_to(b).translate(b.start) == a
    assert a.relative_to(a).start == (0,) * a.ndim
    assert a.relative_to(b).shape == a.shape


@pytest.mark.parametrize("numbers", [np.array([1, 2]), [np.int64(1), np.int32(2)], iter([1, 2])])
def test_whole_numbers_of_any_kind_become_plain_ints(numbers: tuple[int, ...]) -> None:
    box = Region(numbers, [3, 4])  # type: ignore[arg-type]
    assert box == Region((1, 2), (3, 4))
    assert hash(box) == hash(Region((1, 2), (3, 4)))
    assert [type(n) for n in box.start + box.stop] == [int] * 4


@pytest.mark.parametrize(("start", "stop"), [([1], (2,)), ((1,), [2]), ([1], [2])])
def test_lists_become_tuples(start: tuple[int, ...], stop: tuple[int, ...]) -> None:
    assert Region(start, stop) == Region((1,), (2,))


@pytest.mark.parametrize(
    ("start", "stop", "kind", "text"),
    [
        ((2,), (1,), "region", "behind"),
        ((0, 5), (9, 4), "region", "behind"),
        ((0,), (1, 2), "ndim", "differ in length"),
        ((0.0,), (1.0,), "type", "float"),
        ((False,), (True,), "type", "bool"),
        (("0",), ("1",), "type", "str"),
        ((None,), (1,), "type", "NoneType"),
        (0, 4, "type", "not a sequence"),
    ],
)
def test_what_is_no_box_is_refused(start: object, stop: object, kind: str, text: str) -> None:
    with pytest.raises(PlanError, match=text) as caught:
        Region(start, stop)  # type: ignore[arg-type]
    assert [(p.where, p.kind) for p in caught.value.problems] == [("region", kind)]


def test_boxes_of_different_dims_do_not_mix() -> None:
    line, plane = Region((0,), (1,)), Region((0, 0), (1, 1))
    for method in (line.intersect, line.contains, line.relative_to):
        with pytest.raises(PlanError, match=r"1 dims, .* has 2"):
            method(plane)
    with pytest.raises(PlanError, match="2 entries for 1 dims"):
        line.translate((1, 2))


def test_a_region_is_frozen() -> None:
    with pytest.raises(AttributeError):
        Region((0,), (1,)).start = (1,)  # type: ignore[misc]
