"""Layouts of tensors as torch really makes them: of every rank in turn, in a pretended world."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    _dtensor_spec,
    distribute_tensor,
)
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from distcore.testing import rank_threads
from distcore.v1 import ITEMSIZES, Channel, Layout, Plan, Region, Transfer
from distcore.v1.errors import DisagreementError, PeerError, PlanError
from distcore.v1.runtime import (
    dtype_name,
    execute,
    is_dtensor,
    layout_of,
    layouts_of,
    torch_dtype,
)
from distcore.v1.runtime.layouts import local_tensor, readings_of

Make = Callable[[DeviceMesh], torch.Tensor]


@contextmanager
def world(rank: int, size: int) -> Iterator[None]:
    """A default world in which this process is `rank` and nobody else is there."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_every_rank(sizes: tuple[int, ...], make: Make) -> list[torch.Tensor]:
    """What `make` returns on each rank of a mesh; mesh and tensor outlive their world."""
    found = []
    for rank in range(prod(sizes)):
        with world(rank, prod(sizes)):
            names = ("dp", "tp", "cp")[: len(sizes)]
            found.append(make(init_device_mesh("cpu", sizes, mesh_dim_names=names)))
    return found


def by_fsdp2(rows: int) -> Make:
    """The weight of a layer that is cut by tensor parallelism, and then by FSDP2."""

    def make(mesh: DeviceMesh) -> torch.Tensor:
        layer = torch.nn.Linear(2, rows, bias=False)
        whole = torch.arange(2.0 * rows).view(rows, 2)
        cut = distribute_tensor(whole, mesh["tp"], [Shard(0)], src_data_rank=None)
        layer.weight = torch.nn.Parameter(cut)
        fully_shard(layer, mesh=mesh["dp"])
        weight = layer.weight
        assert isinstance(weight, DTensor)
        # torch keeps the joint mesh of the first pretended world; ours knows its own rank.
        return placed(weight.to_local().detach(), mesh, weight.placements, tuple(weight.shape))

    return make


def placed(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: tuple[int, ...]
) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def distributed(whole: torch.Tensor, *placements: Placement) -> Make:
    """What distribute_tensor makes of `whole` without communication: the index reading."""
    return lambda mesh: distribute_tensor(whole, mesh, placements, src_data_rank=None)


def strided(rows: int, parts: int) -> Make:
    whole = torch.arange(2.0 * rows).view(rows, 2)
    return distributed(whole, _StridedShard(0, split_factor=parts), Shard(0))


def proven(tensors: list[torch.Tensor]) -> Layout:
    """The layout that all ranks together find, the same on all."""

    def find(channel: Channel) -> Layout:
        return layouts_of({"w": tensors[channel.rank]}, channel)["w"]

    layouts = rank_threads(len(tensors), find).values()
    assert all(layout == layouts[0] for layout in layouts)
    return layouts[0]


def rows_of(tensor: torch.Tensor) -> list[int]:
    return [int(row) // 2 for row in local_tensor(tensor)[:, 0].tolist()]


def rows_in(layout: Layout, rank: int) -> list[int]:
    """The rows that a layout gives a rank, in the order of its local tensor."""
    return [row for p in layout.pieces(rank) for row in range(p.region.start[0], p.region.stop[0])]


# Dtypes


def test_every_dtype_has_its_name_and_back() -> None:
    names = [name for name in ITEMSIZES if isinstance(getattr(torch, name, None), torch.dtype)]
    assert len(names) > 35
    for name in names:
        assert dtype_name(torch_dtype(name)) == name


@pytest.mark.parametrize("name", ["float", "float33", "nn", "", "float8"])
def test_a_name_without_a_dtype_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match="no dtype"):
        torch_dtype(name)


# Plain tensors


def test_a_plain_tensor_is_held_whole() -> None:
    layout = layout_of(torch.zeros(3, 4, dtype=torch.bfloat16), ranks=[4, 2])
    assert layout == Layout.replicated(shape=(3, 4), dtype="bfloat16", ranks=[4, 2])
    assert layout_of(torch.zeros(())).ranks == (0,)
    assert not is_dtensor(torch.zeros(3))
    assert not is_dtensor([1])


def test_with_a_channel_its_ranks_hold_a_plain_tensor() -> None:
    def find(channel: Channel) -> tuple[int, ...]:
        return layout_of(torch.zeros(2), channel).ranks

    assert rank_threads(3, find).values() == ((0, 1, 2),) * 3


# FSDP2 over tensor parallelism

UNEVEN = [*product([(2, 2), (3, 2)], [5, 7, 8, 9, 13]), ((3, 4), 13), ((3, 4), 27)]


@pytest.mark.parametrize(("sizes", "rows"), UNEVEN)
def test_what_fsdp2_makes_of_tensor_parallelism(sizes: tuple[int, ...], rows: int) -> None:
    tensors = on_every_rank(sizes, by_fsdp2(rows))
    layout = proven(tensors)
    assert [rows_in(layout, rank) for rank in range(prod(sizes))] == list(map(rows_of, tensors))


def test_seven_rows_on_three_times_two_ranks() -> None:
    """The smallest case in which torch's own offset helper is wrong."""
    layout = proven(on_every_rank((3, 2), by_fsdp2(7)))
    held = [rows_in(layout, rank) for rank in range(6)]
    assert held == [[0, 1], [4], [2, 3], [5], [], [6]]


# torch's own distribute_tensor, which reads by index


@pytest.mark.parametrize(("sizes", "rows"), UNEVEN)
def test_what_distribute_tensor_makes_of_the_same_placements(
    sizes: tuple[int, ...], rows: int
) -> None:
    tensors = on_every_rank(sizes, strided(rows, sizes[1]))
    layout = proven(tensors)
    assert [rows_in(layout, rank) for rank in range(prod(sizes))] == list(map(rows_of, tensors))


def test_the_two_readings_of_seven_rows_differ_on_the_last_two_ranks() -> None:
    layout = proven(on_every_rank((3, 2), strided(7, 2)))
    assert [rows_in(layout, rank) for rank in range(6)] == [[0, 1], [4], [2, 3], [5], [6], []]


def test_a_rank_alone_takes_the_reading_that_fits_it() -> None:
    by_order, by_index = on_every_rank((3, 2), by_fsdp2(7)), on_every_rank((3, 2), strided(7, 2))
    assert rows_in(layout_of(by_order[5]), 5) == [6]
    assert rows_in(layout_of(by_index[4]), 4) == [6]
    # Rank 0 cannot tell: its rows are the same in both, so it speaks for FSDP2.
    assert rows_in(layout_of(by_index[0]), 5) == [6]


def test_a_bare_strided_shard_has_several_pieces() -> None:
    whole = torch.arange(16.0).view(8, 2)
    tensors = on_every_rank((2,), distributed(whole, _StridedShard(0, split_factor=2)))
    layout = proven(tensors)
    assert [rows_in(layout, rank) for rank in range(2)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert len(layout.pieces(0)) == 2
    assert list(map(rows_of, tensors)) == [[0, 1, 4, 5], [2, 3, 6, 7]]


@pytest.mark.parametrize("rows", [5, 7, 13])
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_uneven_bare_strided_shards(rows: int, parts: int) -> None:
    whole = torch.arange(2.0 * rows).view(rows, 2)
    tensors = on_every_rank((3,), distributed(whole, _StridedShard(0, split_factor=parts)))
    layout = proven(tensors)
    assert [rows_in(layout, rank) for rank in range(3)] == list(map(rows_of, tensors))


def test_where_three_axes_cut_one_dim_shapes_may_not_tell() -> None:
    """Both readings give every rank as many rows: then FSDP2's is taken."""
    whole = torch.arange(40.0).view(20, 2)
    cuts = (_StridedShard(0, split_factor=6), _StridedShard(0, split_factor=2), Shard(0))
    tensors = on_every_rank((3, 3, 2), distributed(whole, *cuts))
    first, second = readings_of(tensors[0])
    shapes = [[layout.local_shape(rank) for rank in range(18)] for layout in (first, second)]
    assert shapes[0] == shapes[1]
    assert proven(tensors) == first != second


# An explicit order of cuts


@pytest.mark.skipif(not hasattr(_dtensor_spec, "ShardOrderEntry"), reason="needs torch 2.10")
def test_an_explicit_order_of_cuts_is_followed() -> None:
    held = [[0, 1], [4], [2, 3], [5], [], [6]]

    def make(mesh: DeviceMesh) -> torch.Tensor:
        spec = DTensorSpec(
            mesh,
            (Shard(0), Shard(0)),
            tensor_meta=TensorMeta(torch.Size([7, 2]), (2, 1), torch.float32),
            shard_order=(_dtensor_spec.ShardOrderEntry(0, (1, 0)),),
        )
        rows = held[dist.get_rank()]
        local = torch.tensor([[2.0 * row, 0.0] for row in rows]).view(len(rows), 2)
        return DTensor(local, spec, requires_grad=False)

    layout = proven(on_every_rank((3, 2), make))
    assert [rows_in(layout, rank) for rank in range(6)] == held


# Everything else that torch can place


@given(st.data())
def test_plain_placements_are_read_as_torch_makes_them(data: st.DataObject) -> None:
    sizes = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=3)))
    choices = [Replicate(), *(Shard(dim) for dim in range(-len(shape), len(shape)))]
    placements = [data.draw(st.sampled_from(choices)) for _ in sizes]
    whole = torch.arange(float(prod(shape))).view(shape)
    rank = data.draw(st.integers(0, prod(sizes) - 1))
    with world(rank, prod(sizes)):
        tensor = distributed(whole, *placements)(init_device_mesh("cpu", sizes))
    layout = layout_of(tensor)
    local = torch.full(tuple(tensor.to_local().shape), -1.0)  # type: ignore[attr-defined]
    for piece in layout.pieces(rank):
        local[piece.local.slices()] = whole[piece.region.slices()]
    assert torch.equal(local, local_tensor(tensor))


def test_ranks_outside_the_mesh_hold_nothing() -> None:
    def make(mesh: DeviceMesh) -> torch.Tensor:
        return placed(torch.zeros(2), DeviceMesh("cpu", [3, 1]), [Shard(0)], (4,))

    tensors = on_every_rank((4,), make)
    tensors = [t if rank in (1, 3) else emptied(t) for rank, t in enumerate(tensors)]
    layout = proven(tensors)
    assert layout.ranks == (3, 1)
    assert layout.pieces(1)[0].region == Region((2,), (4,))
    assert layout.pieces(0) == ()


def emptied(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return DTensor(torch.zeros(0), tensor._spec, requires_grad=False)


@pytest.mark.parametrize("placement", [Partial(), Partial("max")], ids=["sum", "max"])
def test_a_partial_tensor_is_refused(placement: Placement) -> None:
    with world(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(torch.zeros(4), mesh, [placement], run_check=False)
    with pytest.raises(PlanError, match="sum it first"):
        layout_of(tensor)


def test_a_placement_of_an_unknown_kind_is_refused() -> None:
    class Ragged(Placement):
        pass

    with world(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(torch.zeros(4), mesh, [Replicate()], run_check=False)
    tensor._spec.placements = (Ragged(),)
    with pytest.raises(PlanError, match="not known here"):
        layout_of(tensor)


def test_a_tensor_on_its_way_is_waited_for() -> None:
    with world(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        late = AsyncCollectiveTensor(torch.ones(4))
        tensor = DTensor.from_local(late, mesh, [Replicate()], run_check=False)
        assert type(local_tensor(tensor)) is torch.Tensor


def test_the_local_tensor_shares_memory_and_leaves_the_graph() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    assert local_tensor(weight).data_ptr() == weight.data_ptr()
    assert not local_tensor(weight).requires_grad


# Descriptions that are not true


def misshapen(rank_with: int, rows: int) -> list[torch.Tensor]:
    """Tensors as torch makes them, one of which has another number of rows than it says."""

    def make(mesh: DeviceMesh) -> torch.Tensor:
        held = rows if dist.get_rank() == rank_with else 4
        return placed(torch.zeros(held, 2), mesh, [Shard(0)], (8, 2))

    return on_every_rank((2,), make)


def test_a_local_tensor_that_fits_no_reading_is_refused() -> None:
    with pytest.raises(PlanError, match=r"rank 1 holds \(3, 2\), but .* gives it \(4, 2\)"):
        layout_of(misshapen(1, 3)[1])


def test_a_local_tensor_that_fits_no_reading_is_refused_on_all_ranks() -> None:
    tensors = misshapen(1, 3)

    def find(channel: Channel) -> Layout:
        return layout_of(tensors[channel.rank], channel)

    for error in rank_threads(2, find).raised(PeerError, within_s=3):
        assert "rank 1 holds (3, 2)" in error.failures[1]


def test_ranks_that_follow_different_readings_are_refused() -> None:
    """Rank 4 has its rows as FSDP2 makes them, rank 5 as distribute_tensor does: row 6 is lost."""
    tensors = on_every_rank((3, 2), strided(7, 2))
    tensors[4] = on_every_rank((3, 2), by_fsdp2(7))[4]

    def find(channel: Channel) -> dict[str, Layout]:
        return layouts_of({"a": torch.zeros(3), "w": tensors[channel.rank]}, channel)

    for error in rank_threads(6, find).raised(PlanError, within_s=3):
        assert [problem.where for problem in error.problems] == ["w"]
        assert "fit neither reading" in str(error)


def test_different_keys_are_told() -> None:
    def find(channel: Channel) -> None:
        layouts_of({"w": torch.zeros(2), f"own {channel.rank}": torch.zeros(1)}, channel)

    for error in rank_threads(2, find).raised(DisagreementError, within_s=3):
        assert "'own 1' is missing" in error.values[0]


def test_different_meshes_are_told_however_large() -> None:
    def find(channel: Channel) -> None:
        ranks = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
        if channel.rank:
            ranks[4:6] = [5, 4]
        layouts_of({"w": torch.zeros(2)}, channel, ranks=ranks)

    for error in rank_threads(2, find).raised(DisagreementError, within_s=3):
        assert "'w'" in error.values[0] != error.values[1]


def test_one_rank_with_a_partial_tensor_is_told_by_all() -> None:
    def make(mesh: DeviceMesh) -> torch.Tensor:
        placement = Partial() if dist.get_rank() == 1 else Replicate()
        return DTensor.from_local(torch.zeros(4), mesh, [placement], run_check=False)

    tensors = on_every_rank((2,), make)

    def find(channel: Channel) -> None:
        layouts_of({"w": tensors[channel.rank]}, channel)

    for error in rank_threads(2, find).raised(PeerError, within_s=3):
        assert "sum it first" in error.failures[1]


# Executing with DTensors that a rank alone cannot read


def gathered(tensors: list[torch.Tensor], rows: int) -> list[int]:
    """The rows as rank 0 has them after every rank has sent what it holds."""

    def move(channel: Channel) -> list[int]:
        own = tensors[channel.rank]
        layout = layouts_of({"w": own}, channel)["w"]
        plan = Plan(
            Transfer("w", rank, 0, piece.region)
            for rank in layout.ranks
            for piece in layout.pieces(rank)
        )
        whole = torch.zeros(rows, 2)
        execute(plan, channel, {"w": own, "unused": own}, {"w": whole}, timeout=20)
        return [int(row) // 2 for row in whole[:, 0].tolist()]

    return rank_threads(len(tensors), move, deadline_s=40).values()[0]


@pytest.mark.parametrize("make", [by_fsdp2(27), strided(27, 4)], ids=["by order", "by index"])
def test_ranks_find_out_together_how_to_read_what_they_send(make: Make) -> None:
    """Rank 10 has two rows in both readings, but other ones."""
    tensors = on_every_rank((3, 4), make)
    readings = readings_of(tensors[10])
    assert len({layout.local_shape(10) for layout in readings}) == 1
    assert len({tuple(rows_in(layout, 10)) for layout in readings}) == 2
    assert gathered(tensors, 27) == list(range(27))


def scattered(tensors: list[torch.Tensor], rows: int) -> list[list[int]]:
    """What every rank holds after rank 0 has sent all of them their rows."""

    def move(channel: Channel) -> list[int]:
        own = tensors[channel.rank]
        layout = layouts_of({"w": own}, channel)["w"]
        with torch.no_grad():
            local_tensor(own).zero_()
        plan = Plan(
            Transfer("w", 0, rank, piece.region)
            for rank in layout.ranks
            for piece in layout.pieces(rank)
        )
        sources: dict[str, Any] = {"w": torch.arange(2.0 * rows).view(rows, 2)}
        execute(plan, channel, sources if channel.rank == 0 else {}, {"w": own}, timeout=20)
        return rows_of(own)

    return list(rank_threads(len(tensors), move, deadline_s=40).values())


@pytest.mark.parametrize("make", [by_fsdp2(27), strided(27, 4)], ids=["by order", "by index"])
def test_ranks_find_out_together_how_to_read_what_they_receive(make: Make) -> None:
    tensors = on_every_rank((3, 4), make)
    held = list(map(rows_of, tensors))
    assert scattered(tensors, 27) == held
