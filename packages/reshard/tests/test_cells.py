"""Cells: boxes with the same holders and the same receivers."""

from __future__ import annotations

import time

import pytest
from hypothesis import given

from distcore.testing.strategies import layout_pairs
from distcore.v1 import Layout, Piece, PlanError, Region
from reshard.cells import CellMaker


def indices(region: Region) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for low, high in zip(region.start, region.stop, strict=True):
        found = [(*index, i) for index in found for i in range(low, high)]
    return found


def who(layout: Layout) -> dict[tuple[int, ...], set[int]]:
    """For every element the ranks that hold it."""
    found: dict[tuple[int, ...], set[int]] = {}
    for rank in layout.ranks:
        for piece in layout.pieces(rank):
            for index in indices(piece.region):
                found.setdefault(index, set()).add(rank)
    return found


@given(pair=layout_pairs())
def test_every_needed_element_lies_in_one_cell_with_its_ranks(pair: tuple[Layout, Layout]) -> None:
    held, needed = who(pair[0]), who(pair[1])
    if not needed.keys() <= held.keys():
        with pytest.raises(PlanError, match="no source rank holds"):
            CellMaker().cells_of("w", *pair)
        return
    seen: set[tuple[int, ...]] = set()
    for cell in CellMaker().cells_of("w", *pair):
        assert cell.numel == cell.region.numel
        assert set(cell.kept) == set(cell.holders) & set(cell.receivers)
        assert set(cell.missing) == set(cell.receivers) - set(cell.holders)
        for index in indices(cell.region):
            assert index not in seen
            seen.add(index)
            assert held[index] == set(cell.holders)
            assert needed[index] == set(cell.receivers)
    assert seen == needed.keys()


def test_tensors_of_one_shape_and_mesh_share_their_cells() -> None:
    src = Layout.from_mesh(shape=(8, 4), dtype="int8", mesh=[0, 1], placements=["S(0)"])
    dst = Layout.from_mesh(shape=(8, 4), dtype="float32", mesh=[2, 3], placements=["S(1)"])
    maker = CellMaker()
    assert maker.cells_of("a", src, dst) is maker.cells_of("b", src, dst)


def test_rows_that_interleave_take_little_time() -> None:
    """Gate and up rows in turn: 4 000 pieces on one rank, cut from two halves of two others."""
    rows = 4000
    src = Layout.from_mesh(shape=(rows, 8), dtype="int8", mesh=[0, 1], placements=["S(0)"])
    half = rows // 2
    pieces = [
        Piece(Region((row, 0), (row + 1, 8)), (2 * (row % half) + row // half, 0))
        for row in range(rows)
    ]
    dst = Layout(shape=(rows, 8), dtype="int8", pieces={2: pieces})
    begin = time.process_time()
    cells = CellMaker().cells_of("w", src, dst)
    assert len(cells) == rows
    assert time.process_time() - begin < 2  # 0.1 s where nothing else runs
