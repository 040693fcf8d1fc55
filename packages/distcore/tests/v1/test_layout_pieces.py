"""Layout from pieces: what it keeps, what it refuses, and when it equals one from a mesh."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distcore.v1 import Layout, Mesh, Piece, PlanError, Reading, Region


def piece(start: int, stop: int, place: int) -> Piece:
    return Piece(Region((start,), (stop,)), (place,))


def given_pieces(pieces: object, shape: tuple[int, ...] = (10,)) -> Layout:
    return Layout(shape=shape, dtype="float32", pieces=pieces)  # type: ignore[arg-type]


def refused(error: pytest.ExceptionInfo[PlanError]) -> list[tuple[str, str]]:
    return [(problem.where, problem.kind) for problem in error.value.problems]


def test_the_text_of_a_layout_of_pieces_names_its_ranks() -> None:
    made = given_pieces({0: [piece(0, 4, 0)], 5: [piece(4, 10, 0)]})
    assert repr(made) == "Layout(shape=(10,), dtype='float32', pieces on ranks 0,5)"


def test_pieces_are_kept_in_local_order_and_ranks_ascending() -> None:
    made = given_pieces({7: [piece(8, 10, 4), piece(0, 4, 0)], 3: iter([piece(4, 8, 0)])})
    assert made.ranks == (3, 7)
    assert made.pieces(7) == (piece(0, 4, 0), piece(8, 10, 4))
    assert (made.local_shape(7), made.form) == ((6,), None)


def test_pieces_may_leave_gaps_and_ranks_may_be_numpy_ints() -> None:
    made = given_pieces({np.int64(2): [piece(0, 2, 3)]})
    assert (made.ranks, made.local_shape(2)) == ((2,), (5,))
    assert type(made.ranks[0]) is int


@pytest.mark.parametrize(
    ("pieces", "problem"),
    [
        ({}, ("pieces", "ranks")),
        ({0: []}, ("rank 0", "pieces")),
        ({0: [piece(0, 11, 0)]}, ("rank 0", "bounds")),
        ({0: [piece(-1, 2, 0)]}, ("rank 0", "bounds")),
        ({0: [piece(12, 12, 0)]}, ("rank 0", "bounds")),
        ({0: [piece(0, 4, 0), piece(3, 6, 4)]}, ("rank 0", "overlap")),
        ({0: [piece(0, 4, 0), piece(4, 6, 3)]}, ("rank 0", "overlap")),
        ({0: [piece(0, 4, 0), piece(0, 4, 4)]}, ("rank 0", "overlap")),
        ({0: [Piece(Region((), ()), ())]}, ("rank 0", "ndim")),
        ({0: [Region((0,), (1,))]}, ("rank 0", "type")),
        ({-1: [piece(0, 4, 0)]}, ("rank -1", "rank")),
        ({"0": [piece(0, 4, 0)]}, ("pieces", "type")),
        ({True: [piece(0, 4, 0)]}, ("pieces", "type")),
    ],
)
def test_wrong_pieces_are_refused(pieces: object, problem: tuple[str, str]) -> None:
    with pytest.raises(PlanError) as caught:
        given_pieces(pieces)
    assert refused(caught) == [problem]


def test_two_pieces_of_a_scalar_overlap() -> None:
    scalar = Piece(Region((), ()), ())
    with pytest.raises(PlanError, match="overlap"):
        given_pieces({0: [scalar, scalar]}, ())
    assert given_pieces({0: [scalar]}, ()).local_shape(0) == ()


def test_the_problems_of_all_ranks_come_together() -> None:
    with pytest.raises(PlanError) as caught:
        given_pieces({0: [], 4: [piece(0, 11, 0)], 2: [piece(0, 2, 0)]})
    assert refused(caught) == [("rank 0", "pieces"), ("rank 4", "bounds")]


@given(st.lists(st.tuples(*[st.integers(0, 5)] * 4), max_size=5))
def test_overlap_is_found_exactly_where_an_index_is_held_twice(
    corners: list[tuple[int, int, int, int]],
) -> None:
    boxes = [Region((min(a, b), min(c, d)), (max(a, b), max(c, d))) for a, b, c, d in corners]
    times = np.zeros((5, 5), dtype=np.int64)
    for box in boxes:
        times[box.slices()] += 1
    pieces = [Piece(box, (10 * at, 0)) for at, box in enumerate(boxes)]
    pieces.append(Piece(Region((0, 0), (0, 0)), (0, 0)))
    if times.max() > 1:
        with pytest.raises(PlanError, match="overlap in global indices"):
            given_pieces({0: pieces}, (5, 5))
    else:
        assert len(given_pieces({0: pieces}, (5, 5)).pieces(0)) == len(pieces)


def test_many_columns_are_checked_in_time() -> None:
    columns = [Piece(Region((0, c), (4, c + 1)), (0, c)) for c in range(20_000)]
    assert given_pieces({0: columns}, (4, 20_000)).local_shape(0) == (4, 20_000)


@pytest.mark.parametrize(
    ("place", "kind"), [((-1,), "range"), ((0, 0), "ndim"), ((0.0,), "type"), (None, "type")]
)
def test_a_piece_with_a_wrong_place_is_refused(place: tuple[int, ...], kind: str) -> None:
    with pytest.raises(PlanError) as caught:
        Piece(Region((0,), (1,)), place)
    assert refused(caught) == [("place", kind)]


def test_a_piece_takes_a_region_and_nothing_else() -> None:
    with pytest.raises(PlanError, match="is a tuple, not a Region"):
        Piece(((0,), (1,)), (0,))  # type: ignore[arg-type]
    assert Piece(Region((2,), (4,)), [3]).local == Region((3,), (5,))  # type: ignore[arg-type]


axes = st.lists(
    st.tuples(
        st.integers(1, 3),
        st.sampled_from(["R", "S(0)", "S(1)", "S(-1)", "_S(0,2)", "_S(0,3)", "_S(1,2)", "_S(1,6)"]),
    ),
    min_size=1,
    max_size=3,
)


@given(st.tuples(st.integers(0, 9), st.integers(0, 9)), axes, st.sampled_from(["order", "index"]))
def test_the_same_layout_from_a_mesh_and_from_pieces_is_equal(
    shape: tuple[int, int], axes: list[tuple[int, str]], reading: Reading
) -> None:
    sizes = [size for size, _ in axes]
    mesh: Mesh = np.arange(prod(sizes)).reshape(sizes).tolist()
    made = Layout.from_mesh(
        shape=shape,
        dtype="float32",
        mesh=mesh,
        placements=[form for _, form in axes],
        reading=reading,
    )
    again = given_pieces(
        {rank: reversed(made.pieces(rank)) for rank in reversed(made.ranks)}, shape
    )
    assert made == again
    assert again == made
    assert hash(made) == hash(again)


def test_layouts_of_different_pieces_are_unequal() -> None:
    made = given_pieces({0: [piece(0, 4, 0)]})
    assert made != given_pieces({0: [piece(0, 5, 0)]})
    assert made != given_pieces({0: [piece(0, 4, 1)]})
    assert made != given_pieces({1: [piece(0, 4, 0)]})
    assert made == given_pieces({0: [piece(0, 4, 0)]})
