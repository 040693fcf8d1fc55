"""Units: which boxes are read as one, and cuts that lose nothing."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckptx.cell import Cell
from ckptx.stored import Chunk, StoredTensor
from ckptx.unit import Unit, cut_box, units_of
from distcore.v1 import Region


def stored(*shape: int, dtype: str = "float32") -> StoredTensor:
    whole = Region.of_shape(shape)
    return StoredTensor(shape, dtype, (Chunk(whole, "file", 100),))


def columns(rows: int, width: int, count: int) -> list[Cell]:
    step = width // count
    return [Cell(Region((0, i * step), (rows, (i + 1) * step)), (i,)) for i in range(count)]


@given(st.data())
def test_a_cut_keeps_every_element_in_order(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=3)))
    box = Region.of_shape(shape)
    numel = data.draw(st.integers(0, box.numel))
    grain = data.draw(st.integers(1, 8))
    before, behind = cut_box(box, numel, grain)
    table = np.arange(box.numel).reshape(shape)
    order = [int(i) for part in before + behind for i in table[part.slices()].ravel()]
    assert order == list(range(box.numel))
    assert abs(sum(part.numel for part in before) - numel) <= grain / 2
    assert not any(part.is_empty for part in before + behind)


def test_whole_rows_are_read_into_place() -> None:
    cell = Cell(Region((2, 0), (5, 8)), (0, 1))
    units, astray = units_of("w", stored(10, 8), [cell], min_run=1 << 20)
    assert astray == []
    (unit,) = units
    assert (unit.region, unit.staged, unit.nbytes) == (cell.region, False, 96)
    assert unit.offset == 100 + 2 * 8 * 4


def test_long_runs_are_read_one_by_one() -> None:
    units, _ = units_of("w", stored(4, 1000), columns(4, 1000, 2), min_run=2000)
    assert [unit.staged for unit in units] == [False, False]


def test_short_runs_are_covered_by_rows_that_all_their_ranks_share() -> None:
    cells = columns(4, 1000, 2)
    units, _ = units_of("w", stored(4, 1000), cells, min_run=2001)
    (unit,) = units
    assert unit.staged
    assert unit.region == Region((0, 0), (4, 1000))
    assert unit.cells == tuple(cells)
    assert unit.ranks == (0, 1)


def test_rows_of_which_little_is_wanted_are_not_covered() -> None:
    (first, *_) = columns(4, 1000, 4)
    units, _ = units_of("w", stored(4, 1000), [first], min_run=1 << 20)
    assert [(unit.region, unit.staged) for unit in units] == [(first.region, False)]


def test_a_cover_grows_no_further_than_it_must() -> None:
    cells = [
        Cell(Region((0, 0, 0), (2, 3, 2)), (0,)),
        Cell(Region((0, 0, 2), (2, 3, 4)), (1,)),
        Cell(Region((0, 3, 0), (2, 6, 4)), (2,)),
    ]
    units, _ = units_of("w", stored(2, 6, 4), cells, min_run=4 * 3 * 4)
    assert [(unit.region, unit.staged) for unit in units] == [
        (Region((0, 3, 0), (2, 6, 4)), False),
        (Region((0, 0, 0), (2, 3, 4)), True),
    ]


def test_elements_that_no_chunk_holds_are_told() -> None:
    half = Chunk(Region((0,), (4,)), "file", 0)
    cell = Cell(Region((0,), (8,)), (0,))
    units, astray = units_of("w", StoredTensor((8,), "int8", (half,)), [cell], min_run=1)
    assert astray == [cell]
    assert [unit.region for unit in units] == [half.region]


def test_elements_that_two_chunks_hold_are_told() -> None:
    chunks = tuple(Chunk(Region((0,), (8,)), file, 0) for file in ("one", "two"))
    cells = [Cell(Region((0,), (8,)), (0,)), Cell(Region((2,), (3,)), (1,))]
    _, astray = units_of("w", StoredTensor((8,), "int8", chunks), cells, min_run=1)
    assert astray == cells


def test_a_cell_over_several_chunks() -> None:
    chunks = tuple(Chunk(Region((i,), (i + 4,)), f"f{i}", 10) for i in (0, 4))
    cell = Cell(Region((2,), (7,)), (0,))
    units, astray = units_of("w", StoredTensor((8,), "int16", chunks), [cell], min_run=1)
    assert astray == []
    assert [(unit.chunk.file, unit.region, unit.offset) for unit in units] == [
        ("f0", Region((2,), (4,)), 14),
        ("f4", Region((4,), (7,)), 10),
    ]


def unit_of(rows: int, width: int) -> Unit:
    (found,), _ = units_of(
        "w", stored(rows, width), [Cell(Region((0, 0), (rows, width)), (0, 1))], min_run=1
    )
    return found


def test_a_cut_leaves_no_crumbs() -> None:
    unit = unit_of(100, 10)  # 4000 bytes
    assert unit.cut(2000, min_split=1000) == (
        [unit.part(Region((0, 0), (50, 10)))],
        [unit.part(Region((50, 0), (100, 10)))],
    )
    assert unit.cut(999, min_split=1000) == ([], [unit])
    assert unit.cut(3001, min_split=1000) == ([unit], [])
    assert unit.cut(-5, min_split=1000) == ([], [unit])
    assert unit.cut(9000, min_split=1000) == ([unit], [])
