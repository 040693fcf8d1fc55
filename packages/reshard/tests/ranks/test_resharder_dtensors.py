"""Resharder with real DTensors and real FSDP2, HSDP and tensor-parallel modules, on four ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from distcore.testing import RankPool
from distcore.v1 import Channel, DisagreementError, PeerError, PlanError
from reshard import Resharder, transfer

Full = dict[str, torch.Tensor]
SIDES = ((5, 7), (8, 9), (13, 5), (9, 13), (7, 8))


class Mlp(nn.Module):
    """Two projections, of sides that few meshes divide."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        torch.manual_seed(inner * 100 + outer)
        self.up = nn.Linear(outer, inner)
        self.down = nn.Linear(inner, outer)


def full_of(inner: int, outer: int) -> Full:
    """The weights of one process."""
    return {key: tensor.detach().clone() for key, tensor in Mlp(inner, outer).state_dict().items()}


def sharded(kind: str, inner: int, outer: int) -> dict[str, Any]:
    """The state dict of an Mlp on four ranks."""
    model = Mlp(inner, outer)
    if kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    elif kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp")))
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["fsdp"])
    return model.state_dict()


def empty(full: Full, mesh: DeviceMesh, placements: list[Placement]) -> dict[str, DTensor]:
    """DTensors of zeros; on a rank outside the mesh torch makes empty ones."""
    made = {}
    for key, tensor in full.items():
        fitting = [
            Replicate() if isinstance(p, Shard) and p.dim >= tensor.ndim else p for p in placements
        ]
        made[key] = distribute_tensor(torch.zeros_like(tensor), mesh, fitting, src_data_rank=None)
    return made


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(torch.int32).flatten().tolist()


def assert_holds(made: dict[str, Any], full: Full) -> None:
    """Every rank of a 1-D mesh holds its part of the full tensors, bit for bit.

    torch's own full_tensor goes by the order of the group, not by that of the mesh.
    """
    for key, tensor in made.items():
        coordinate = tensor.device_mesh.get_coordinate()
        if coordinate is None:
            continue
        expected = full[key]
        (placement,) = tensor.placements
        if isinstance(placement, Shard):
            runs = list(expected.chunk(tensor.device_mesh.size(), placement.dim))
            runs.append(expected.narrow(placement.dim, 0, 0))
            expected = runs[min(coordinate[0], len(runs) - 1)]
        assert bits(tensor.to_local()) == bits(expected), key


def to_pair(channel: Channel, kind: str, inner: int, outer: int) -> None:
    full = full_of(inner, outer)
    pair = DeviceMesh("cpu", [3, 2])
    src = sharded(kind, inner, outer)
    for placement in (Shard(0), Shard(1), Replicate()):
        dst = empty(full, pair, [placement])
        report = transfer(src, dst)
        assert report.nbytes_received == report.bound_received_nbytes
        assert_holds(dst, full)


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "fsdp+tp"])
def test_a_module_reaches_a_pair_of_ranks(
    pool: RankPool, kind: str, sides: tuple[int, int]
) -> None:
    pool.run(to_pair, kind, *sides).values()


def from_pair(channel: Channel, kind: str, inner: int, outer: int) -> None:
    full = full_of(inner, outer)
    pair = DeviceMesh("cpu", [1, 2])
    src = {
        key: distribute_tensor(tensor, pair, [Shard(tensor.ndim - 1)], src_data_rank=None)
        for key, tensor in full.items()
    }
    dst = sharded(kind, inner, outer)
    for tensor in dst.values():
        tensor.to_local().zero_()
    member = pair.get_coordinate() is not None
    with Resharder(src if member else None, dst) as resharder:
        resharder.run()
    for key, tensor in dst.items():
        assert bits(tensor.full_tensor()) == bits(full[key]), key


@pytest.mark.parametrize("sides", SIDES[:3])
@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "fsdp+tp"])
def test_a_module_is_filled_from_a_pair_of_ranks(
    pool: RankPool, kind: str, sides: tuple[int, int]
) -> None:
    pool.run(from_pair, kind, *sides).values()


def like_redistribute(channel: Channel) -> None:
    generator = torch.Generator().manual_seed(7)
    mesh = init_device_mesh("cpu", (2, 2))
    choices: list[Placement] = [Replicate(), Shard(0), Shard(1), Shard(2)]
    for _ in range(25):
        shape = torch.randint(1, 8, (3,), generator=generator).tolist()
        picks = torch.randint(0, 4, (4,), generator=generator).tolist()
        full = torch.rand(shape, generator=generator)
        src = distribute_tensor(full, mesh, [choices[pick] for pick in picks[:2]])
        placements = [choices[pick] for pick in picks[2:]]
        expected = src.redistribute(mesh, placements)
        made = distribute_tensor(torch.zeros_like(full), mesh, placements)
        transfer(src, made)
        assert bits(made.to_local()) == bits(expected.to_local()), (shape, placements)


def test_the_result_is_that_of_redistribute_on_one_mesh(pool: RankPool) -> None:
    pool.run(like_redistribute).values()


def reduced(channel: Channel, op: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    pair = DeviceMesh("cpu", [2, 0])
    for shape in ((5, 7), (1,), (), (0, 3), (2, 3, 4)):
        torch.manual_seed(dist.get_rank())
        local = torch.randint(-4, 5, shape).float()
        placements: list[Placement] = [Partial(op), Replicate()]
        if shape == (5, 7):
            placements = [Partial(op), Partial(op)]
        else:  # what is repeated must be equal
            dist.broadcast(local, group=mesh.get_group(1), group_src=0)
        src = DTensor.from_local(local, mesh, placements, run_check=False)
        expected = src.full_tensor()
        dst = distribute_tensor(torch.zeros(shape), pair, [Replicate()], src_data_rank=None)
        with Resharder(src, dst) as resharder:
            resharder.run()
            resharder.run(verify="digest")
        if pair.get_coordinate() is not None:
            assert bits(dst.to_local()) == bits(expected), (shape, op)


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
def test_a_partial_source_is_reduced_on_the_way(pool: RankPool, op: str) -> None:
    pool.run(reduced, op).values()


def partial_and_cut(channel: Channel) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(dist.get_rank())
    local = torch.randint(-4, 5, (5, 2 if dist.get_rank() % 2 == 0 else 1)).to(torch.bfloat16)
    src = DTensor.from_local(
        local, mesh, [Partial(), Shard(1)], run_check=False, shape=torch.Size((5, 3)), stride=(3, 1)
    )
    dst = distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0), Replicate()])
    transfer(src, dst, cast="convert")
    assert dst.full_tensor().tolist() == src.full_tensor().float().tolist()


def test_a_partial_source_that_is_cut_and_converted(pool: RankPool) -> None:
    pool.run(partial_and_cut).values()


def parameters(channel: Channel) -> None:
    full = torch.arange(12.0).reshape(4, 3)
    mesh = init_device_mesh("cpu", (4,))
    src: Any = nn.Parameter(distribute_tensor(full, mesh, [Shard(0)]))
    dst: Any = nn.Parameter(distribute_tensor(torch.zeros(4, 3), mesh, [Shard(1)]))
    transfer({"w": src}, {"w": dst})
    assert dst.full_tensor().tolist() == full.tolist()
    assert dst.requires_grad
    assert dst.grad_fn is None


def test_parameters_are_written_in_place(pool: RankPool) -> None:
    pool.run(parameters).values()


def in_subgroup(channel: Channel) -> list[float]:
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return []
    src = torch.arange(3.0) if dist.get_rank() == 3 else None
    dst = torch.zeros(3) if dist.get_rank() == 1 else None
    transfer(src, dst, group)
    return [] if dst is None else dst.tolist()


def test_a_subgroup_need_not_begin_at_rank_0(pool: RankPool) -> None:
    assert pool.run(in_subgroup).values() == ([], [0.0, 1.0, 2.0], [], [])


def wrong_placement(channel: Channel) -> None:
    mesh = init_device_mesh("cpu", (4,))
    placement = Shard(1) if dist.get_rank() == 2 else Shard(0)
    src = distribute_tensor(torch.ones(4, 4), mesh, [placement], src_data_rank=None)
    dst = distribute_tensor(torch.zeros(4, 4), mesh, [Shard(1)], src_data_rank=None)
    try:
        transfer({"w": src}, {"w": dst})
    finally:
        assert dst.to_local().sum() == 0


def test_a_placement_that_differs_on_one_rank_is_told_to_all(pool: RankPool) -> None:
    outcomes = pool.run(wrong_placement)
    for error in outcomes.raised(DisagreementError, within_s=3):
        assert "'w'" in str(error)
        assert "rank 2" in str(error)


def stranger(channel: Channel) -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    group = dist.new_group([1, 2, 3])
    if dist.get_rank() == 0:
        return
    src = distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None)
    transfer({"w": src}, {"w": torch.zeros(4)}, group)


def test_a_mesh_with_a_rank_outside_the_group_is_refused(pool: RankPool) -> None:
    outcomes = pool.run(stranger)
    for outcome in list(outcomes)[1:]:
        assert isinstance(outcome.exception, PlanError)
        assert "w: rank 0" in str(outcome.exception)


def lost_shape(channel: Channel) -> None:
    mesh = init_device_mesh("cpu", (4,))
    rows = 3 if dist.get_rank() == 1 else 1
    src = DTensor.from_local(
        torch.ones(rows, 2),
        mesh,
        [Shard(0)],
        run_check=False,
        shape=torch.Size((4, 2)),
        stride=(2, 1),
    )
    transfer({"w": src}, {"w": torch.zeros(4, 2)})


def test_a_local_tensor_of_another_shape_is_told_to_all(pool: RankPool) -> None:
    for error in pool.run(lost_shape).raised(PeerError, within_s=3):
        assert "rank 1" in str(error)
        assert "w:" in str(error)
