"""Cells against an oracle that looks at every element."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from ckptx.cell import Cell, cells_of
from distcore.v1 import Layout, Piece, Region


def held(layout: Layout, rank: int, index: tuple[int, ...]) -> bool:
    point = Region(index, tuple(i + 1 for i in index))
    return any(piece.region.contains(point) for piece in layout.pieces(rank))


def test_replicas_of_shards() -> None:
    layout = Layout.from_mesh(
        shape=(10, 4), dtype="int8", mesh=[[0, 1], [2, 3]], placements=["R", "S(0)"]
    )
    assert cells_of(layout, (0, 1, 2, 3)) == [
        Cell(Region((0, 0), (5, 4)), (0, 2)),
        Cell(Region((5, 0), (10, 4)), (1, 3)),
    ]
    assert cells_of(layout, (2, 1)) == [
        Cell(Region((0, 0), (5, 4)), (2,)),
        Cell(Region((5, 0), (10, 4)), (1,)),
    ]


def test_a_scalar_and_an_empty_tensor() -> None:
    scalar = Layout.replicated(shape=(), dtype="int8", ranks=(0, 1))
    assert cells_of(scalar, (0, 1)) == [Cell(Region((), ()), (0, 1))]
    empty = Layout.replicated(shape=(0, 3), dtype="int8", ranks=(0, 1))
    assert cells_of(empty, (0, 1)) == []


def test_regions_that_overlap_in_part() -> None:
    pieces = {
        0: (Piece(Region((0,), (6,)), (0,)),),
        1: (Piece(Region((4,), (10,)), (0,)),),
    }
    layout = Layout(shape=(10,), dtype="int8", pieces=pieces)
    assert cells_of(layout, (0, 1)) == [
        Cell(Region((0,), (4,)), (0,)),
        Cell(Region((4,), (6,)), (0, 1)),
        Cell(Region((6,), (10,)), (1,)),
    ]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))

    def box() -> Region:
        edges = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
        return Region(tuple(low for low, _ in edges), tuple(high for _, high in edges))

    count = draw(st.integers(1, 4))
    pieces = {rank: (Piece(box(), (0,) * len(shape)),) for rank in range(count)}
    return Layout(shape=shape, dtype="int8", pieces=pieces)


@given(layouts())
def test_every_element_lies_in_one_cell_with_the_ranks_that_hold_it(layout: Layout) -> None:
    ranks = layout.ranks
    cells = cells_of(layout, ranks)
    assert cells == sorted(cells)
    for index in product(*map(range, layout.shape)):
        expected = tuple(rank for rank in ranks if held(layout, rank, index))
        point = Region(index, tuple(i + 1 for i in index))
        around = [cell for cell in cells if cell.region.contains(point)]
        assert [cell.ranks for cell in around] == ([expected] if expected else [])
