"""The face's names, geometry and local steps: pure, or on the memory of one rank."""

from __future__ import annotations

import gc
import inspect
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from distcore.testing import strategies
from reshard import xferdtensor_python as face

R = Replicate()
S0, S1 = Shard(0), Shard(1)
Box = tuple[tuple[int, int], ...]


class Mesh:
    def __init__(self, ranks: Any) -> None:
        self.mesh = torch.tensor(ranks)


class Ref:
    """A reference to a distributed tensor, as a caller may have it."""

    def __init__(self, local: torch.Tensor | None, shape: tuple[int, ...]) -> None:
        self._local_tensor = local
        self.shape = torch.Size(shape)
        self.dtype = torch.float32 if local is None else local.dtype
        self.device = torch.device("cpu") if local is None else local.device


class Comm:
    """A communicator that notes what it is asked."""

    def __init__(self) -> None:
        self.splits: list[tuple[int, int]] = []
        self.ended: list[str] = []
        self.children: list[Comm] = []

    def split(self, color: int, key: int) -> Comm:
        self.splits.append((color, key))
        self.children.append(Comm())
        return self.children[-1]

    def finalize(self) -> None:
        self.ended.append("finalize")

    def destroy(self) -> None:
        self.ended.append("destroy")


@dataclass(eq=False)
class Stateless:
    rank: int
    nccl_communicator: Any


@pytest.fixture(autouse=True)
def _empty_caches() -> Iterator[None]:
    face.clear_xferdtensor_python_caches()
    yield
    face.clear_xferdtensor_python_caches()


def exact(src: Any, src_at: Any, dst: Any, dst_at: Any, shape: tuple[int, ...]) -> Any:
    return face._plan_geometry(Mesh(src), src_at, Mesh(dst), dst_at, shape)


def striped(src: Any, src_at: Any, dst: Any, dst_at: Any, shape: tuple[int, ...]) -> Any:
    return face._striped_geometry(Mesh(src), src_at, Mesh(dst), dst_at, shape)


# --- names ----------------------------------------------------------------------------------


def test_the_signature_and_the_exports_are_those_of_the_document() -> None:
    assert list(inspect.signature(face.xferdtensor_python_impl).parameters) == [
        "src_tensor",
        "src_mesh",
        "src_placement",
        "dst_tensor",
        "dst_mesh",
        "dst_placement",
        "process_group",
        "stream",
    ]
    assert inspect.signature(face.xferdtensor_python_impl).parameters["stream"].default is None
    assert face.__all__ == ["clear_xferdtensor_python_caches", "xferdtensor_python_impl"]
    assert isinstance(face._PLAN_CACHE, OrderedDict)
    assert isinstance(face._STRIPED_PLAN_CACHE, OrderedDict)
    assert (face._PLAN_CACHE_MAX_SIZE, face._STRIPED_PLAN_CACHE_MAX_SIZE) == (1024, 1024)


# --- meshes and placements ------------------------------------------------------------------


def test_a_mesh_keeps_its_ranks_in_its_own_order() -> None:
    mesh = Mesh([[8, 2, 5], [9, 1, 6]])
    assert face._mesh_ranks(mesh) == [8, 2, 5, 9, 1, 6]
    assert face._mesh_signature(mesh) == ((2, 3), (8, 2, 5, 9, 1, 6))
    assert face._mesh_coordinates(mesh) == {
        8: (0, 0),
        2: (0, 1),
        5: (0, 2),
        9: (1, 0),
        1: (1, 1),
        6: (1, 2),
    }
    older: Any = SimpleNamespace(_mesh=torch.tensor([4, 3]))
    assert face._mesh_ranks(older) == [4, 3]
    assert face._mesh_rank_tensor(mesh) is mesh.mesh


def test_placements_are_told_by_what_they_have() -> None:
    other = SimpleNamespace(dim=-1)
    assert face._placement_signature((Shard(-1), R, other), 3) == (
        ("Shard", 2),
        ("Replicate", None),
        ("Shard", 2),
    )


@pytest.mark.parametrize("ndim", range(5))
@pytest.mark.parametrize("dim", range(-5, 5))
def test_a_dim_is_counted_from_the_front(dim: int, ndim: int) -> None:
    if -ndim <= dim < ndim:
        assert face._normalize_shard_dim(dim, ndim) == dim % ndim
    else:
        with pytest.raises(ValueError, match=f"Shard dim {dim} is invalid for a {ndim}D tensor"):
            face._normalize_shard_dim(dim, ndim)


# --- regions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "sizes", "lengths"),
    [
        (10, (4,), [3, 3, 3, 1]),
        (5, (2, 2), [2, 1, 1, 1]),
        (2, (4,), [1, 1, 0, 0]),
        (0, (2,), [0, 0]),
    ],
)
def test_every_axis_cuts_what_the_axes_before_it_left(
    n: int, sizes: tuple[int, ...], lengths: list[int]
) -> None:
    found = [
        face._compute_shard_slices((n,), sizes, at, [S0] * len(sizes))[0]
        for at in product(*map(range, sizes))
    ]
    assert [one.stop - one.start for one in found] == lengths
    assert [one.start for one in found] == [sum(lengths[:at]) for at in range(len(lengths))]


def test_a_mesh_out_of_order_gives_its_first_rank_the_first_part() -> None:
    found = face._rank_regions(Mesh([1, 0]), [S0], (4, 3))
    assert list(found.items()) == [(1, ((0, 2), (0, 3))), (0, ((2, 4), (0, 3)))]


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (((0, 4),), ((2, 6),), ((2, 4),)),
        (((0, 2),), ((2, 4),), None),
        (((0, 0),), ((0, 0),), None),
        (((0, 4), (1, 8)), ((2, 5), (3, 6)), ((2, 4), (3, 6))),
        ((), (), ()),
    ],
)
def test_regions_share_elements_or_nothing(left: Box, right: Box, expected: Box | None) -> None:
    assert face._intersect(left, right) == expected


def test_a_part_lies_in_the_local_tensor_of_its_owner() -> None:
    assert face._local_slices(((2, 4), (3, 6)), ((1, 5), (2, 8))) == (slice(1, 3), slice(1, 4))
    assert face._region_numel(((4, 7), (8, 10), (2, 6))) == 24
    assert face._region_numel(()) == 1


@given(st.data())
def test_contiguous_is_what_torch_calls_contiguous(data: st.DataObject) -> None:
    shape = data.draw(strategies.shapes(max_dims=4, max_side=4).filter(all))
    region = data.draw(strategies.regions(shape).filter(lambda one: one.numel > 0))
    box = tuple(zip(region.start, region.stop, strict=True))
    parent = tuple((0, n) for n in shape)
    assert face._region_view_is_contiguous(box, parent) == (
        torch.empty(shape)[region.slices()].is_contiguous()
    )


# --- the worked examples --------------------------------------------------------------------


def test_example_1_four_shards_to_one_rank() -> None:
    src, dst, groups, transfers = exact([0, 1, 2, 3], [S0], [4], [R], (10,))
    assert src == {0: ((0, 3),), 1: ((3, 6),), 2: ((6, 9),), 3: ((9, 10),)}
    assert dst == {4: ((0, 10),)}
    assert groups == ((((0, 10),), (4,), 4),)
    assert transfers == (
        (0, 4, ((0, 3),)),
        (1, 4, ((3, 6),)),
        (2, 4, ((6, 9),)),
        (3, 4, ((9, 10),)),
    )
    assert striped([0, 1, 2, 3], [S0], [4], [R], (10,)) is None


def test_example_2_uneven_rows() -> None:
    src, dst, _, transfers = exact([0, 1, 2], [S0], [3, 4], [S0], (7, 3))
    assert [region[0] for region in src.values()] == [(0, 3), (3, 6), (6, 7)]
    assert [region[0] for region in dst.values()] == [(0, 4), (4, 7)]
    assert transfers == (
        (0, 3, ((0, 3), (0, 3))),
        (1, 3, ((3, 4), (0, 3))),
        (1, 4, ((4, 6), (0, 3))),
        (2, 4, ((6, 7), (0, 3))),
    )


def test_example_3_two_axes_cut_one_dim() -> None:
    src, dst, _, transfers = exact([[0, 1], [2, 3]], [S0, S0], [4, 5], [S0], (5,))
    assert list(src.values()) == [((0, 2),), ((2, 3),), ((3, 4),), ((4, 5),)]
    assert list(dst.values()) == [((0, 3),), ((3, 5),)]
    assert transfers == (
        (0, 4, ((0, 2),)),
        (1, 4, ((2, 3),)),
        (2, 5, ((3, 4),)),
        (3, 5, ((4, 5),)),
    )


def test_example_4_replicas_to_replicas() -> None:
    whole = ((0, 8), (0, 2))
    *_, groups, transfers = exact([0, 1], [R], [2, 3, 4, 5], [R], (8, 2))
    assert groups == ((whole, (2, 3, 4, 5), 2),)
    assert transfers == ((0, 2, whole),)
    *_, transfers, stripes = striped([0, 1], [R], [2, 3, 4, 5], [R], (8, 2))
    assert transfers == (
        (0, 2, ((0, 2), (0, 2))),
        (0, 4, ((4, 6), (0, 2))),
        (1, 3, ((2, 4), (0, 2))),
        (1, 5, ((6, 8), (0, 2))),
    )
    assert stripes == {receiver: region for _, receiver, region in transfers}
    assert striped([0, 1], [R], [2, 3, 4], [R], (8, 2)) is None


def test_example_5_rows_to_columns() -> None:
    *_, transfers = exact([0, 1], [S0], [2, 3], [S1], (4, 6))
    assert transfers == (
        (0, 2, ((0, 2), (0, 3))),
        (0, 3, ((0, 2), (3, 6))),
        (1, 2, ((2, 4), (0, 3))),
        (1, 3, ((2, 4), (3, 6))),
    )


def test_example_6_columns_to_replicated_rows() -> None:
    args = [0, 1], [S1], [[2, 3], [4, 5]], [R, S0], (8, 4)
    *_, groups, _ = exact(*args)
    assert groups == ((((0, 4), (0, 4)), (2, 4), 2), (((4, 8), (0, 4)), (3, 5), 3))
    *_, transfers, stripes = striped(*args)
    assert transfers == (
        (0, 2, ((0, 2), (0, 2))),
        (0, 3, ((4, 6), (0, 2))),
        (0, 4, ((2, 4), (0, 2))),
        (0, 5, ((6, 8), (0, 2))),
        (1, 2, ((0, 2), (2, 4))),
        (1, 3, ((4, 6), (2, 4))),
        (1, 4, ((2, 4), (2, 4))),
        (1, 5, ((6, 8), (2, 4))),
    )
    assert stripes == {
        2: ((0, 2), (0, 4)),
        4: ((2, 4), (0, 4)),
        3: ((4, 6), (0, 4)),
        5: ((6, 8), (0, 4)),
    }


def test_example_6_falls_back_where_both_ends_would_pack() -> None:
    args = [0, 1], [S1], [[2, 3, 4], [5, 6, 7]], [R, S1], (4, 6)
    assert striped(*args) is None
    *_, groups, transfers = exact(*args)
    assert transfers == (
        (0, 2, ((0, 4), (0, 2))),
        (0, 3, ((0, 4), (2, 3))),
        (1, 3, ((0, 4), (3, 4))),
        (1, 4, ((0, 4), (4, 6))),
    )
    assert [members for _, members, _ in groups] == [(2, 5), (3, 6), (4, 7)]


def test_example_7_overlapping_meshes() -> None:
    args = [0, 1], [S0], [[0, 1], [2, 3]], [R, S0], (8,)
    *_, transfers = exact(*args)
    assert transfers == ((0, 0, ((0, 4),)), (1, 1, ((4, 8),)))
    *_, transfers, _ = striped(*args)
    assert transfers == (
        (0, 0, ((0, 2),)),
        (0, 2, ((2, 4),)),
        (1, 1, ((4, 6),)),
        (1, 3, ((6, 8),)),
    )


def test_example_8_more_shards_than_rows() -> None:
    src, dst, _, transfers = exact([0, 1, 2, 3], [S0], [4, 5, 6], [S0], (2, 3))
    assert src[2] == src[3] == dst[6] == ((2, 2), (0, 3))
    assert transfers == ((0, 4, ((0, 1), (0, 3))), (1, 5, ((1, 2), (0, 3))))


def test_example_9_scalars_and_tensors_without_elements() -> None:
    src, _, groups, transfers = exact([0, 1], [R], [2, 3], [R], ())
    assert src == {0: (), 1: ()}
    assert groups == (((), (2, 3), 2),)
    assert transfers == ((0, 2, ()),)
    assert striped([0, 1], [R], [2, 3], [R], ()) is None
    *_, groups, transfers = exact([0, 1], [R], [2, 3], [R], (0, 4))
    assert transfers == ()
    assert face._active_replica_signature(groups) == ()


def test_example_10_one_mesh_of_replicas_to_another() -> None:
    args = [[0, 1], [2, 3]], [R, S0], [[4, 5], [6, 7]], [R, S1], (4, 4)
    *_, groups, transfers = exact(*args)
    assert {source for source, _, _ in transfers} == {0, 1}
    assert [members for _, members, _ in groups] == [(4, 6), (5, 7)]
    *_, transfers, _ = striped(*args)
    assert transfers == (
        (0, 4, ((0, 2), (0, 2))),
        (1, 6, ((2, 4), (0, 2))),
        (2, 5, ((0, 2), (2, 4))),
        (3, 7, ((2, 4), (2, 4))),
    )


def test_the_order_of_meshes_is_kept() -> None:
    *_, groups, transfers, _ = striped([1, 0], [S0], [3, 2], [R], (4,))
    assert groups == ((((0, 4),), (3, 2), 3),)
    assert transfers == ((0, 2, ((2, 4),)), (1, 3, ((0, 2),)))
    cube = torch.arange(8).reshape(2, 2, 2).tolist()
    *_, groups, _ = exact(cube, [R, S0, R], cube, [R, S0, R], (4,))
    assert groups == ((((0, 2),), (0, 1, 4, 5), 0), (((2, 4),), (2, 3, 6, 7), 2))
    mesh = Mesh([[8, 2, 5], [9, 1, 6]])
    regions = face._rank_regions(mesh, [S0, R], (12,))
    assert face._destination_groups(mesh, [S0, R], regions) == (
        (((0, 6),), (8, 2, 5), 8),
        (((6, 12),), (9, 1, 6), 9),
    )
