"""Where tensors lie in one flat buffer, and who holds what of it."""

from __future__ import annotations

from math import prod
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate

from ownerplan.layout import (
    BlockAtomic,
    GlobalLayout,
    Holders,
    Range,
    RowAtomic,
    TensorAtomic,
    intersect_ranges,
    non_leading_numel,
)

ROW = RowAtomic()


def mesh_of(ranks: object, rank: int = 0) -> SimpleNamespace:
    return SimpleNamespace(mesh=torch.tensor(ranks), get_rank=lambda: rank)


def test_a_layout_takes_any_iterables_and_keeps_tuples() -> None:
    layout = GlobalLayout([torch.Size((6, 4)), [4, 4]], [0, 24], 40)  # type: ignore[arg-type]
    assert layout.tensor_shapes == ((6, 4), (4, 4))
    assert isinstance(layout.tensor_shapes[0], torch.Size)
    assert layout.tensor_to_offset == (0, 24)
    assert layout.rank_to_offset is None
    assert layout == GlobalLayout(((6, 4), (4, 4)), (0, 24), 40)
    assert hash(layout) == hash(GlobalLayout(((6, 4), (4, 4)), (0, 24), 40))


def test_without_rank_offsets_segments_are_equal() -> None:
    layout = GlobalLayout(((6, 4), (4, 4)), (0, 24), 40)
    mesh = mesh_of([3, 1], 1)
    assert layout.get_rank_range(mesh, (ROW,), 3) == Range(0, 20)
    assert layout.get_local_range(mesh, (ROW,)) == Range(20, 20)
    assert layout.has_equal_shard_sizes
    with pytest.raises(ValueError, match="made without it"):
        _ = layout.dp_size
    with pytest.raises(ValueError, match="40 elements are not 3 equal segments"):
        layout.get_rank_range(mesh_of([0, 1, 2]), (ROW,), 0)


def test_accessors() -> None:
    layout = GlobalLayout.build([(6, 4), (4, 4)], 2)
    assert (layout.dp_size, layout.rank_size(1), layout.has_equal_shard_sizes) == (2, 20, True)
    assert layout.get_tensor_range(1) == Range(24, 16)
    assert [non_leading_numel(shape) for shape in [(6, 4), (5,), (2, 3, 4)]] == [4, 1, 12]


def test_ranges_over_two_axes() -> None:
    layout = GlobalLayout.build([(8, 4)], 4)
    mesh = mesh_of([[0, 1], [2, 3]])
    found = {rank: layout.get_rank_range(mesh, (ROW, ROW), rank) for rank in range(4)}
    assert found == {0: Range(0, 8), 2: Range(8, 8), 1: Range(16, 8), 3: Range(24, 8)}
    assert list(layout.get_rank_ranges(mesh)) == [0, 2, 1, 3]


def test_along_an_axis_that_does_not_cut_ranks_hold_a_run_of_segments() -> None:
    layout = GlobalLayout.build([(8, 4)], 4)
    mesh = mesh_of([[0, 1], [2, 3]])
    found = [layout.get_rank_range(mesh, (Replicate(), ROW), rank) for rank in range(4)]
    assert found == [Range(0, 16), Range(16, 16), Range(0, 16), Range(16, 16)]


def test_uneven_segments() -> None:
    layout = GlobalLayout(((4, 2), (3, 2)), (0, 8), 14, (0, 2, 2, 10))
    assert [layout.rank_size(index) for index in range(4)] == [2, 0, 8, 4]
    assert not layout.has_equal_shard_sizes
    assert layout.get_rank_range(mesh_of([0, 1, 2, 3]), (ROW,), 1) == Range(2, 0)
    assert layout.get_rank_range(mesh_of([0, 1]), (ROW,), 1) == Range(2, 12)
    with pytest.raises(ValueError, match="4 segments cannot be dealt evenly to 3 parts"):
        layout.get_rank_range(mesh_of([0, 1, 2]), (ROW,), 1)
    with pytest.raises(ValueError, match="segment 4: there are 4"):
        layout.rank_size(4)


def test_a_rank_outside_the_mesh_is_refused() -> None:
    layout = GlobalLayout.build([(8, 4)], 2)
    with pytest.raises(ValueError, match=r"rank 2: is not in the mesh of the ranks \[0, 1\]"):
        layout.get_rank_range(mesh_of([0, 1]), (ROW,), 2)
    with pytest.raises(ValueError, match="rank 7: is not in the mesh"):
        layout.get_local_range(mesh_of([0, 1], 7), (ROW,))


def test_blocks_of_rows() -> None:
    """Blocks of 2 rows: a chunk is lcm(2 * 4, 2 * 3) = 24, so (6, 4) is one and (4, 3) is less."""
    layout = GlobalLayout.build_for_row_atomic([(4, 3), (6, 4)], 2, block_size=2)
    assert layout.tensor_to_offset == (24, 0)
    assert (layout.size, layout.rank_to_offset) == (48, (0, 24))
    with pytest.raises(ValueError, match="tensor 1: 3 rows are not whole blocks of 2"):
        GlobalLayout.build_for_row_atomic([(4, 3), (3, 4)], 2, block_size=2)


def test_whole_tensors_lie_by_owner_without_padding() -> None:
    layout = GlobalLayout.build_for_tensor_atomic([(2, 2), (3,), (1, 5), (2, 1)], [2, 0, 2, 0], 4)
    assert layout.tensor_to_offset == (5, 0, 9, 3)
    assert layout.size == 14
    assert layout.rank_to_offset == (0, 5, 5, 14)
    with pytest.raises(ValueError, match="tensor 0: segment 4 is not one of 4"):
        GlobalLayout.build_for_tensor_atomic([(2, 2)], [4], 4)
    with pytest.raises(ValueError, match="1 owners for 2 tensors"):
        GlobalLayout.build_for_tensor_atomic([(2, 2), (2,)], [0], 4)
    with pytest.raises(ValueError, match="dp_size: 0 is below 1"):
        GlobalLayout.build_for_tensor_atomic([], [], 0)


def test_ranges_of_an_existing_buffer() -> None:
    layout = GlobalLayout.from_ranges(
        [(2, 2), (3,)], [Range(3, 4), Range(0, 3)], [Range(0, 5), Range(5, 5)]
    )
    assert layout.tensor_to_offset == (3, 0)
    assert (layout.size, layout.rank_to_offset) == (10, (0, 5))
    with pytest.raises(ValueError, match=r"tensor 0: shape \(2, 2\) has not 3 elements"):
        GlobalLayout.from_ranges([(2, 2)], [Range(0, 3)], [Range(0, 4)])
    with pytest.raises(ValueError, match="segment 1: starts at 3, the one before ends at 4"):
        GlobalLayout.from_ranges([(2, 2)], [Range(0, 4)], [Range(0, 4), Range(3, 1)])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ((((),), (0,), 4), "tensor 0: has no dims"),
        ((((2, 0),), (0,), 4), r"tensor 0: \(2, 0\) has rows without elements"),
        ((((-2, 2),), (0,), 4), "or a negative dim"),
        ((((2, 2),), (0,), -4), "size: -4 is negative"),
        ((((2, 2),), (0, 4), 8), "2 offsets for 1 tensors"),
        ((((2, 2),), (-1,), 8), r"tensor 0: \[-1, 3\) leaves the buffer of 8"),
        ((((2, 2),), (5,), 8), r"tensor 0: \[5, 9\) leaves the buffer of 8"),
        ((((2, 2), (2,), (3,)), (0, 6, 3), 8), "tensor 2: shares elements with tensor 0"),
        ((((2, 2),), (0,), 8, (1, 4)), r"\(1, 4\) does not start with 0"),
        ((((2, 2),), (0,), 8, ()), r"\(\) does not start with 0"),
        ((((2, 2),), (0,), 8, (0, 6, 4)), "does not rise up to the size 8"),
        ((((2, 2),), (0,), 8, (0, 9)), "does not rise up to the size 8"),
    ],
)
def test_what_is_no_layout_is_refused(fields: tuple[object, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GlobalLayout(*fields)  # type: ignore[arg-type]


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"tensor 0: has no dims.*tensor 1: .*size: -1"):
        GlobalLayout(((), (2, 0)), (0, 0), -1)


def test_tensors_without_rows_lie_anywhere() -> None:
    layout = GlobalLayout(((0, 4), (2, 2)), (2, 0), 4)
    assert layout.get_tensor_range(0) == Range(2, 0)
    built = GlobalLayout.build([(0, 4), (3, 2)], 2)
    assert built.get_tensor_range(0).numel == 0


def test_no_tensors_make_an_empty_buffer() -> None:
    layout = GlobalLayout.build([], 2)
    assert (layout.size, layout.rank_to_offset) == (0, (0, 0))


@pytest.mark.parametrize("parts", [0, -1])
def test_there_must_be_a_segment(parts: int) -> None:
    with pytest.raises(ValueError, match="dp_size"):
        GlobalLayout.build([(2, 2)], parts)


def test_the_kinds_of_placement_come_with_the_layout() -> None:
    assert {RowAtomic().dim, BlockAtomic().dim, TensorAtomic().dim} == {0}


shapes = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), max_size=6)


@given(shapes=shapes, parts=st.integers(1, 6), block=st.integers(1, 3))
def test_built_layouts_end_between_blocks_of_rows(
    shapes: list[tuple[int, int]], parts: int, block: int
) -> None:
    shapes = [(rows * block, row) for rows, row in shapes]
    layout = GlobalLayout.build_for_row_atomic(shapes, parts, block_size=block)
    assert layout.has_equal_shard_sizes
    assert layout.dp_size == parts
    assert layout.rank_to_offset is not None
    for index, shape in enumerate(shapes):
        run = layout.get_tensor_range(index)
        for border in layout.rank_to_offset:
            if run.start < border < run.end:
                assert (border - run.start) % (block * shape[1]) == 0
    largest = max((prod(shape) for shape in shapes), default=0)
    assert layout.size >= largest


@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    start=st.integers(0, 12),
    numel=st.integers(0, 12),
)
def test_holders_are_all_that_hold_some(sizes: list[int], start: int, numel: int) -> None:
    ranges: dict[int, Range] = {}
    for rank, size in enumerate(sizes):
        end = ranges[rank - 1].end if rank else 0
        ranges[rank] = Range(end, size)
    run = Range(start, numel)
    wanted = [(rank, intersect_ranges(held, run)) for rank, held in ranges.items()]
    assert Holders(ranges).of(run) == [(rank, part) for rank, part in wanted if part.numel]
