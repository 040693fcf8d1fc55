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


CACHES = (
    face._PLAN_CACHE,
    face._STRIPED_PLAN_CACHE,
    face._SUBCOMM_CACHE,
    face._INACTIVE_SUBCOMM_CACHE,
    face._PROCESS_GROUP_COMM_IDS,
    face._PROCESS_GROUP_FINALIZERS,
)


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
    assert all(isinstance(cache, OrderedDict) for cache in CACHES)
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


# --- the geometry against trying every element ----------------------------------------------


@st.composite
def sides(draw: st.DrawFn, ndim: int) -> tuple[Any, list[Any]]:
    placed = draw(strategies.placed_meshes(ndim, strided=False))
    found = [R if one == "R" else Shard(int(one[2:-1])) for one in placed.placements]
    return placed.mesh, found


def points(region: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(start, stop) for start, stop in region)))


@given(st.data())
def test_every_element_reaches_every_destination_once(data: st.DataObject) -> None:
    shape = data.draw(strategies.shapes(max_side=7))
    (src_mesh, src_at), (dst_mesh, dst_at) = data.draw(st.tuples(*[sides(len(shape))] * 2))
    src, dst, groups, transfers = exact(src_mesh, src_at, dst_mesh, dst_at, shape)
    assert transfers == tuple(sorted(transfers))
    assert sorted(rank for _, members, _ in groups for rank in members) == sorted(dst)
    for region, members, representative in groups:
        assert representative in members
        assert all(dst[rank] == region for rank in members)
        arriving = [(source, part) for source, to, part in transfers if to == representative]
        assert all(points(part) <= points(src[source]) for source, part in arriving)
        covered = [point for _, part in arriving for point in points(part)]
        assert sorted(covered) == sorted(points(region))
    found = striped(src_mesh, src_at, dst_mesh, dst_at, shape)
    if found is not None:
        *_, transfers, stripes = found
        for region, members, _ in groups:
            if points(region):
                striped_points = [point for rank in members for point in points(stripes[rank])]
                assert sorted(striped_points) == sorted(points(region))
        for rank, stripe in stripes.items():
            arriving = [(source, part) for source, to, part in transfers if to == rank]
            assert all(points(part) <= points(src[source]) for source, part in arriving)
            covered = [point for _, part in arriving for point in points(part)]
            assert sorted(covered) == sorted(points(stripe))


def test_what_a_receiver_holds_it_copies_and_the_rest_comes_from_the_first_holder() -> None:
    src = {7: ((0, 4),), 3: ((0, 4),), 9: ((4, 8),), 1: ((4, 8),)}
    groups = ((((0, 8),), (3, 11), 3),)
    assert face._build_exact_plan(src, (7, 3, 9, 1), groups) == (
        (3, 3, ((0, 4),)),
        (9, 3, ((4, 8),)),
    )
    targets = ((((0, 8),), 3), (((0, 8),), 5), (((0, 8),), 6))
    assert face._build_striped_transfers(src, (7, 3, 9, 1), targets) == (
        (1, 5, ((4, 8),)),
        (3, 3, ((0, 4),)),
        (3, 6, ((0, 4),)),
        (7, 5, ((0, 4),)),
        (9, 3, ((4, 8),)),
        (9, 6, ((4, 8),)),
    )


def test_replicas_are_ordered_with_their_representative_first() -> None:
    assert face._ordered_replica_members(5, (8, 2, 5, 9)) == (5, 8, 2, 9)


def test_the_most_peers_of_a_rank() -> None:
    part = ((0, 1),)
    assert face._max_p2p_peer_degree(()) == 0
    assert face._max_p2p_peer_degree(((0, 0, part), (1, 1, part))) == 0
    assert face._max_p2p_peer_degree(((0, 1, part), (0, 2, part), (2, 0, part), (3, 0, part))) == 3


# --- refusals -------------------------------------------------------------------------------


def test_what_is_no_mesh_is_refused() -> None:
    with pytest.raises(ValueError, match="does not expose its ranks"):
        face._mesh_rank_tensor(object())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "placements", "text"),
    [
        ([0], [S0, R], "src_placement has 2 entries for a 1D mesh"),
        ([0], [], "src_placement has 0 entries for a 1D mesh"),
        ([0], [Shard(3)], "Shard dim 3 is invalid for a 3D tensor"),
        ([0, 0], [S0], "src_mesh: expected every rank once"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(ranks: Any, placements: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        exact(ranks, placements, [1], [R], (2, 3, 4))


@pytest.mark.parametrize("name", ["dst", "dst_placement"])
def test_a_refusal_names_its_side(name: str) -> None:
    face._validate_layout(Mesh([0]), [R], (2,), name)
    with pytest.raises(ValueError, match=r"^dst_placement has 2 entries for a 1D mesh"):
        face._validate_layout(Mesh([0]), [R, R], (2,), name)


class StridedShard(Shard):
    """As in older releases of torch, where a strided placement is a Shard."""

    split_factor = 2


@pytest.mark.parametrize("placement", [Partial(), StridedShard(0), object()])
def test_other_placements_are_refused(placement: Any) -> None:
    for plan in (exact, striped):
        with pytest.raises(NotImplementedError, match="only Shard and Replicate"):
            plan([0, 1], [placement], [2], [R], (8,))
        with pytest.raises(NotImplementedError, match="only Shard and Replicate"):
            plan([2], [R], [0, 1], [placement], (8,))


def test_metadata_of_two_tensors_must_agree() -> None:
    src = Ref(torch.zeros(2), (4,))
    assert face._tensor_metadata(None, src) == ((4,), torch.device("cpu"), torch.float32)
    with pytest.raises(
        ValueError, match=r"global shapes differ: source \(4,\), destination \(5,\)"
    ):
        face._tensor_metadata(src, Ref(torch.zeros(2), (5,)))
    with pytest.raises(ValueError, match=r"dtypes differ: source torch.float32, .*torch.float64"):
        face._tensor_metadata(src, Ref(torch.zeros(2, dtype=torch.float64), (4,)))
    with pytest.raises(ValueError, match="neither a source nor a destination"):
        face._tensor_metadata(None, None)


def test_a_local_tensor_is_an_attribute_or_a_method() -> None:
    local = torch.zeros(2)
    assert face._local_tensor(Ref(local, (4,))) is local
    assert face._local_tensor(SimpleNamespace(to_local=lambda: local)) is local
    assert face._local_tensor(None) is None
    with pytest.raises(ValueError, match="does not expose its local tensor"):
        face._local_tensor(local)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"src_tensor": None}, "rank 0 did not receive a source tensor"),
        ({"src_tensor": Ref(None, (2, 3))}, "rank 0 did not receive a source tensor"),
        ({"src_regions": {0: ((0, 3), (0, 3))}}, r"planned shape is \(3, 3\), got \(2, 3\)"),
        ({"dtype": torch.float64}, "torch.float32 on cpu does not match torch.float64 on cpu"),
        ({"device": torch.device("meta")}, "does not match torch.float32 on meta"),
        ({"src_regions": {}}, r"local tensor of shape \(2, 3\) on a non-source rank"),
        ({"dst_regions": {0: ((0, 2), (0, 3))}}, "did not receive a destination tensor"),
    ],
)
def test_local_tensors_are_held_against_the_plan(changes: dict[str, Any], text: str) -> None:
    given = {
        "rank": 0,
        "src_tensor": Ref(torch.zeros(2, 3), (2, 3)),
        "dst_tensor": None,
        "src_regions": {0: ((0, 2), (0, 3))},
        "dst_regions": {},
        "device": torch.device("cpu"),
        "dtype": torch.float32,
    }
    face._validate_local_inputs(**given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=text):
        face._validate_local_inputs(**{**given, **changes})


# --- caches ---------------------------------------------------------------------------------


def test_a_plan_is_made_once_and_the_oldest_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = [0], [R]
    first = exact(one, other, one, other, (1,))
    assert exact(one, other, one, other, (1,)) is first
    monkeypatch.setattr(face, "_PLAN_CACHE_MAX_SIZE", 3)
    monkeypatch.setattr(face, "_STRIPED_PLAN_CACHE_MAX_SIZE", 2)
    for size in (2, 3, 1, 4):
        striped(one, other, one, other, (size,))
    assert [key[-1] for key in face._PLAN_CACHE] == [(3,), (1,), (4,)]
    assert list(face._STRIPED_PLAN_CACHE.values()) == [None, None]
    exact([1, 0], [S0], one, other, (4,))
    assert len(face._PLAN_CACHE) == 3
    face.clear_xferdtensor_python_caches(Stateless(0, Comm()))
    assert (len(face._PLAN_CACHE), len(face._STRIPED_PLAN_CACHE)) == (3, 0)
    face.clear_xferdtensor_python_caches()
    assert not face._PLAN_CACHE


GROUPS = ((((0, 8),), (8, 2, 5), 8), (((8, 16),), (9, 1, 6), 9), (((16, 16),), (3, 4), 3))
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("rank", "color", "key", "active"),
    [(8, 0, 0, True), (5, 0, 2, True), (9, 1, 0, True), (6, 1, 2, True), (12, 2, 12, False)],
)
def test_replica_groups_are_split_once(rank: int, color: int, key: int, active: bool) -> None:
    parent = Comm()
    group = Stateless(rank, parent)
    first = face._get_replica_subcommunicator(group, GROUPS, CPU)
    assert face._get_replica_subcommunicator(group, GROUPS, CPU) is first
    assert parent.splits == [(color, key)]
    assert first is (parent.children[0] if active else None)
    assert len(face._SUBCOMM_CACHE) + len(face._INACTIVE_SUBCOMM_CACHE) == 1
    face.clear_xferdtensor_python_caches(group)
    assert parent.children[0].ended == ["finalize", "destroy"]
    assert not face._SUBCOMM_CACHE
    assert not face._INACTIVE_SUBCOMM_CACHE
    assert not face._PROCESS_GROUP_COMM_IDS
    assert not face._PROCESS_GROUP_FINALIZERS


def test_without_replicas_nothing_is_split() -> None:
    parent = Comm()
    groups = ((((0, 8),), (0,), 0), (((8, 8),), (3, 4), 3))
    assert face._active_replica_signature(GROUPS) == ((8, (8, 2, 5)), (9, (9, 1, 6)))
    assert face._active_replica_signature(groups) == ()
    assert face._get_replica_subcommunicator(Stateless(0, parent), groups, CPU) is None
    assert parent.splits == []


def test_a_group_takes_only_its_own_communicators_with_it() -> None:
    first, second = Stateless(8, Comm()), Stateless(8, Comm())
    for group in (first, second):
        face._get_replica_subcommunicator(group, GROUPS, CPU)
    gone, kept = first.nccl_communicator, second.nccl_communicator
    del first, group
    second_id = face._parent_communicator_key(second)
    gc.collect()
    assert [key[0] for key in face._SUBCOMM_CACHE] in ([second_id], [id(gone), second_id])
    face.clear_xferdtensor_python_caches(second)
    assert kept.children[0].ended == ["finalize", "destroy"]
    assert gone.children[0].ended == []


def test_a_dropped_group_is_forgotten() -> None:
    group = Stateless(8, Comm())
    face._get_replica_subcommunicator(group, GROUPS, CPU)
    child = group.nccl_communicator.children[0]
    del group
    gc.collect()
    assert not face._SUBCOMM_CACHE
    assert not face._PROCESS_GROUP_COMM_IDS
    assert child.ended == []  # its peers may be anywhere


def test_a_group_without_weak_references_has_a_key_too() -> None:
    class Slotted:
        __slots__ = ("nccl_communicator", "rank")

        def __init__(self) -> None:
            self.rank, self.nccl_communicator = 0, Comm()

    group = Slotted()
    assert face._parent_communicator_key(group) == id(group.nccl_communicator)
    face.clear_xferdtensor_python_caches(group)
    assert not face._PROCESS_GROUP_COMM_IDS


def test_all_are_destroyed_even_where_one_cannot_be() -> None:
    class Stuck(Comm):
        def finalize(self) -> None:
            raise RuntimeError("still busy")

    later = Comm()
    face._SUBCOMM_CACHE[1, ()] = Stuck()
    face._SUBCOMM_CACHE[2, ()] = later
    face._SUBCOMM_CACHE[2, "object"] = object()
    with pytest.raises(ExceptionGroup, match="could not be destroyed"):
        face.clear_xferdtensor_python_caches()
    assert later.ended == ["finalize", "destroy"]
    assert not face._SUBCOMM_CACHE


# --- staging --------------------------------------------------------------------------------

FULL = torch.arange(28.0).reshape(4, 7)
WHOLE = ((0, 4), (0, 7))
PART = ((0, 4), (2, 5))


def staged(
    rank: int,
    src: torch.Tensor | None,
    dst: torch.Tensor | None,
    regions: tuple[dict[int, Box], dict[int, Box]],
    transfers: Any,
) -> tuple[Any, Any, Any]:
    one, other = (None if local is None else Ref(local, (4, 7)) for local in (src, dst))
    return face._stage_rank_operations(rank, one, other, *regions, transfers, CPU, torch.float32)


def test_what_stays_is_copied_at_once() -> None:
    destination = torch.zeros(4, 7)
    sends, receives, local = staged(
        0, FULL, destination, ({0: WHOLE}, {0: WHOLE}), ((0, 0, WHOLE),)
    )
    assert (sends, receives) == ([], [])
    assert local is destination
    assert destination.tolist() == FULL.tolist()


def test_only_strided_parts_have_buffers() -> None:
    plan = ((0, 1, PART),)
    sends, receives, _ = staged(0, FULL, None, ({0: WHOLE}, {1: PART}), plan)
    assert receives == []
    assert [(peer, one.is_contiguous(), one.tolist()) for peer, one in sends] == [
        (1, True, FULL[:, 2:5].tolist())
    ]
    whole = torch.zeros(4, 3)
    _, [(peer, buffer, view)], _ = staged(1, None, whole, ({0: WHOLE}, {1: PART}), plan)
    assert (peer, view, buffer.data_ptr()) == (0, None, whole.data_ptr())
    target = torch.zeros(4, 7)
    _, [(peer, buffer, view)], _ = staged(1, None, target, ({0: PART}, {1: WHOLE}), plan)
    assert buffer.shape == view.shape == (4, 3)
    assert buffer.is_contiguous()
    assert view.data_ptr() == target[:, 2:].data_ptr()


def test_a_source_that_would_be_written_over_is_sent_as_it_was() -> None:
    local = torch.arange(4.0)
    (sends, receives, _) = staged(
        0,
        local,
        local,
        ({0: ((0, 4),), 1: ((4, 8),)}, {0: ((2, 6),)}),
        ((0, 0, ((2, 4),)), (0, 1, ((0, 2),)), (1, 0, ((4, 6),))),
    )
    assert local[:2].tolist() == [2.0, 3.0]
    assert [(peer, one.tolist()) for peer, one in sends] == [(1, [0.0, 1.0])]
    assert [(peer, one.data_ptr()) for peer, one, _ in receives] == [(1, local[2:].data_ptr())]


def test_a_source_beside_its_destination_is_sent_where_it_lies() -> None:
    flat = torch.arange(8.0)
    whole: dict[int, Box] = {0: ((0, 4),)}
    plan = ((0, 1, ((0, 4),)),)
    for source, destination in ((flat[:4], flat[4:]), (flat[:4], flat[:4])):
        ((peer, buffer),), _, _ = staged(0, source, destination, (whole, whole), plan)
        assert (peer, buffer.data_ptr()) == (1, flat.data_ptr())


class Carrier:
    """A communicator of which every receive brings its peer plus one."""

    def __init__(self, *, fails: bool = False, value: float = 7.0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails, self.value = fails, value

    def send(self, buffer: torch.Tensor, peer: int, stream: object) -> None:
        self.calls.append(("send", peer, stream))
        if self.fails:
            raise RuntimeError("send failed")

    def recv(self, buffer: torch.Tensor, peer: int, stream: object) -> None:
        self.calls.append(("recv", peer, stream))
        buffer.fill_(peer + 1)

    def broadcast(
        self, sendbuf: torch.Tensor, recvbuf: torch.Tensor, root: int, stream: object
    ) -> None:
        self.calls.append((sendbuf, recvbuf, root, stream))
        recvbuf.fill_(self.value)

    def allgather(self, sendbuf: torch.Tensor, recvbuf: torch.Tensor, stream: object) -> None:
        self.calls.append((sendbuf, recvbuf, stream))


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of a module that stands for nccl4py."""
    found: list[str] = []
    package, core = ModuleType("nccl"), ModuleType("nccl.core")
    package.__path__ = []
    core.__dict__.update(
        group_start=lambda: found.append("start"), group_end=lambda: found.append("end")
    )
    monkeypatch.setitem(sys.modules, "nccl", package)
    monkeypatch.setitem(sys.modules, "nccl.core", core)
    return found


STREAM = SimpleNamespace(cuda_stream=0xC0FFEE)


def test_sends_and_receives_are_one_group_in_order(events: list[str]) -> None:
    carrier, destination, buffer = Carrier(), torch.zeros(2, 3), torch.zeros(2, 2)
    sends = [(5, torch.ones(4)), (7, torch.ones(2))]
    receives = [(3, buffer, destination[:, 1:])]
    face._exchange_exact_overlaps(carrier, sends, receives, STREAM)
    assert events == ["start", "end"]
    assert carrier.calls == [("send", 5, 0xC0FFEE), ("send", 7, 0xC0FFEE), ("recv", 3, 0xC0FFEE)]
    assert destination.tolist() == [[0, 4, 4], [0, 4, 4]]
    face._exchange_exact_overlaps(carrier, [], [], STREAM)
    assert events == ["start", "end"]


def test_a_group_is_closed_whatever_happens(events: list[str]) -> None:
    with pytest.raises(RuntimeError, match="send failed"):
        face._exchange_exact_overlaps(Carrier(fails=True), [(1, torch.ones(1))], [], STREAM)
    assert events == ["start", "end"]


@pytest.mark.parametrize("strided", [False, True])
def test_a_broadcast_goes_through_the_local_tensor(strided: bool) -> None:
    base = torch.zeros(4, 6)
    local = base[:, ::2] if strided else base
    carrier = Carrier(value=9)
    face._broadcast_destination(carrier, local, STREAM)
    ((sent, received, root, stream),) = carrier.calls
    assert sent is received
    assert (sent is local) is not strided
    assert (root, stream) == (0, 0xC0FFEE)
    assert local.eq(9).all()
    face._broadcast_destination(carrier, torch.empty(0), STREAM)
    face._broadcast_destination(None, local, STREAM)
    face._broadcast_destination(carrier, None, STREAM)
    assert len(carrier.calls) == 1


def test_an_all_gather_is_in_place_and_unknown_dtypes_travel_as_bytes() -> None:
    carrier = Carrier()
    whole = torch.zeros(4, 6, dtype=torch.bool)
    face._allgather_destination(carrier, whole, ((8, 12), (0, 6)), ((10, 12), (0, 6)), None)
    ((sent, received, stream),) = carrier.calls
    assert (sent.dtype, sent.numel(), received.numel()) == (torch.uint8, 12, 24)
    assert sent.data_ptr() == whole[2:].data_ptr()
    assert received.data_ptr() == whole.data_ptr()
    assert stream is None


def test_a_strided_destination_has_one_buffer() -> None:
    local = torch.zeros(4, 6)
    assert face._destination_buffer(local, CPU, torch.float32, None) == (local, False)
    assert face._destination_buffer(None, CPU, torch.float32, None) == (None, False)
    buffer, copies_back = face._destination_buffer(local.T, CPU, torch.float32, None)
    assert copies_back
    assert buffer is not None
    assert buffer.shape == (6, 4)
    assert buffer.is_contiguous()


def test_the_steps_come_in_the_order_of_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    tensor = Ref(torch.ones(1), (1,))
    cuda = torch.device("cuda", 0)

    def note(name: str, value: object = None) -> Any:
        def act(*args: object) -> object:
            calls.append(name)
            return value

        return act

    monkeypatch.setattr(face, "_tensor_metadata", lambda *_: ((1,), cuda, torch.float32))
    monkeypatch.setattr(face, "_validate_local_inputs", note("validate"))
    monkeypatch.setattr(face, "_get_replica_subcommunicator", note("split", "subcomm"))
    monkeypatch.setattr(face, "_stage_rank_operations", note("stage", ([], [], None)))
    monkeypatch.setattr(face, "_exchange_exact_overlaps", note("exchange"))
    monkeypatch.setattr(face, "_broadcast_destination", note("broadcast"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: STREAM)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    group = Stateless(0, object())
    face.xferdtensor_python_impl(tensor, Mesh([0]), (R,), tensor, Mesh([0]), (R,), group)
    assert calls == ["validate", "split", "stage", "exchange", "broadcast"]
