"""Who holds which part of a buffer that is cut along axes of a mesh."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from ownerplan.placements import (
    BlockAtomic,
    Placement,
    RowAtomic,
    TensorAtomic,
    axes_of,
    buffer_order,
    count_shards,
    shard_indices,
)

ROW = RowAtomic()


def mesh_of(ranks: object) -> SimpleNamespace:
    return SimpleNamespace(mesh=ranks)


@pytest.mark.parametrize("placement", [RowAtomic(), BlockAtomic(2), TensorAtomic()])
def test_all_kinds_cut_dim_0(placement: RowAtomic | BlockAtomic | TensorAtomic) -> None:
    assert isinstance(placement, Placement)
    assert (placement.is_shard(), placement.is_shard(0), placement.is_shard(1)) == (
        True,
        True,
        False,
    )
    assert placement.dim == 0
    assert not placement.is_replicate()
    assert not placement.is_partial()


def test_kinds_are_values() -> None:
    assert RowAtomic() == RowAtomic()
    assert BlockAtomic(2) != BlockAtomic(3)
    assert len({RowAtomic(), TensorAtomic(), BlockAtomic()}) == 3
    with pytest.raises(ValueError, match="block_size 0 is below 1"):
        BlockAtomic(0)


def test_a_mesh_of_one_axis_is_in_its_own_order() -> None:
    assert buffer_order(mesh_of([3, 1, 2])) == (3, 1, 2)
    assert buffer_order(mesh_of(torch.tensor([3, 1, 2]))) == (3, 1, 2)


def test_the_last_axis_is_the_most_significant_digit() -> None:
    mesh = mesh_of([[0, 1, 2], [3, 4, 5]])
    assert buffer_order(mesh) == (0, 3, 1, 4, 2, 5)
    assert shard_indices(mesh, (ROW, ROW)) == {0: 0, 3: 1, 1: 2, 4: 3, 2: 4, 5: 5}
    assert axes_of(mesh) == 2


def test_three_axes() -> None:
    mesh = mesh_of([[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
    assert buffer_order(mesh) == (0, 4, 2, 6, 1, 5, 3, 7)


@pytest.mark.parametrize("whole", [Replicate(), SimpleNamespace(is_shard=lambda: False)])
def test_an_axis_that_is_no_shard_does_not_cut(whole: Placement) -> None:
    mesh = mesh_of([[0, 1], [2, 3]])
    assert shard_indices(mesh, (whole, ROW)) == {0: 0, 1: 1, 2: 0, 3: 1}
    assert shard_indices(mesh, (ROW, whole)) == {0: 0, 1: 0, 2: 1, 3: 1}
    assert count_shards(mesh, (whole, ROW)) == 2
    assert count_shards(mesh, (whole, whole)) == 1


def test_a_shard_of_torch_cuts_too() -> None:
    assert count_shards(mesh_of([0, 1]), (Shard(0),)) == 2


def test_there_is_a_placement_for_each_axis() -> None:
    with pytest.raises(ValueError, match="1 placements for a mesh of 2 axes"):
        shard_indices(mesh_of([[0, 1]]), (ROW,))


@pytest.mark.parametrize("ranks", [[[0, 1], [2]], [[0], 1], [0, 0], 3, ["a"]])
def test_what_is_no_mesh_is_refused(ranks: object) -> None:
    with pytest.raises(ValueError, match="mesh: "):
        buffer_order(mesh_of(ranks))
