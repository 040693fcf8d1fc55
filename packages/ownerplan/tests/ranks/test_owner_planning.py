"""Owner planning on real meshes and DTensors, with buffers that really travel."""

from __future__ import annotations

from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from distcore.testing import RankPool
from distcore.v1 import Channel
from ownerplan.layout import GlobalLayout, intersect_ranges
from ownerplan.owner_planning import (
    GroupOwnerLayout,
    OwnerGatherPlan,
    OwnerScatterPlan,
    select_ge_2d_params,
)

SHAPES = ((6, 4), (3,), (2, 16), (4, 2, 3), (1, 4))
MATRICES = (0, 2, 3, 4)


def full_of(index: int) -> torch.Tensor:
    return torch.arange(prod(SHAPES[index]), dtype=torch.float32) + 1000 * index


def step_on(channel: Channel, ranks: Any) -> tuple[dict[int, int], int]:
    """One gather, a step that negates, one scatter; returns the owners and what was sent."""
    mesh = DeviceMesh("cpu", torch.tensor(ranks))
    if channel.rank not in mesh.mesh.flatten().tolist():
        return {}, 0
    placements = [Shard(0), *[Replicate()] * (mesh.ndim - 1)]
    params = [distribute_tensor(torch.zeros(shape), mesh, placements) for shape in SHAPES]
    layout = GlobalLayout.build(SHAPES, mesh.size())
    group = SimpleNamespace(
        mesh=mesh,
        main_weight=SimpleNamespace(layout=layout),
        fsdp_parameters=[SimpleNamespace(sharded=torch.nn.Parameter(param)) for param in params],
    )
    owners = GroupOwnerLayout.from_group(group)
    held = layout.get_rank_ranges(mesh)[channel.rank]
    shards = {}
    for index in range(len(SHAPES)):
        run = layout.get_tensor_range(index)
        part = intersect_ranges(run, held)
        if part.numel:
            shards[index] = full_of(index).narrow(0, part.start - run.start, part.numel)
    gather = OwnerGatherPlan.pack(owners, shards)
    received = travel(gather.send_buffers, gather.recv_sizes)
    results = {}
    for index in gather.own_shards:
        full = gather.reconstruct_full(index, received)
        assert torch.equal(full, full_of(index))
        results[index] = -full.view(SHAPES[index])
    scatter = OwnerScatterPlan.pack(owners, results)
    back = scatter.unpack(travel(scatter.send_buffers, scatter.recv_sizes))
    back |= {index: scatter.own_result(index, full) for index, full in results.items()}
    for index in MATRICES:
        if index in shards:
            assert torch.equal(back[index], -shards[index])
    return owners.tensor_to_owner, sum(map(torch.Tensor.numel, gather.send_buffers.values()))


def travel(sends: dict[int, torch.Tensor], sizes: dict[int, int]) -> dict[int, torch.Tensor]:
    received = {rank: torch.empty(numel) for rank, numel in sizes.items()}
    work = [dist.P2POp(dist.isend, buffer, rank) for rank, buffer in sends.items()]
    work += [dist.P2POp(dist.irecv, buffer, rank) for rank, buffer in received.items()]
    for handle in dist.batch_isend_irecv(work) if work else []:
        handle.wait()
    return received


@pytest.mark.parametrize(
    "ranks", [[0], [2, 0, 1], [0, 1, 2, 3], [[0, 1], [2, 3]], [[3, 1], [2, 0]]]
)
def test_a_step_over_a_real_mesh(pool: RankPool, ranks: list[Any]) -> None:
    found = [owners for owners, _ in pool.run(step_on, ranks).values() if owners]
    assert all(owners == found[0] for owners in found)
    assert sorted(found[0]) == list(MATRICES)


def see_empty_shards(channel: Channel) -> list[tuple[bool, int]]:
    mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    tensors = [distribute_tensor(torch.zeros(shape), mesh, [Shard(0)]) for shape in ((2, 4), (2,))]
    return [(select_ge_2d_params(tensor), tensor.to_local().numel()) for tensor in tensors]


def test_deepspeed_8438_eligibility_goes_by_the_global_shape(pool: RankPool) -> None:
    seen = list(pool.run(see_empty_shards).values())
    assert seen[3] == [(True, 0), (False, 0)]
    assert all([eligible for eligible, _ in one] == [True, False] for one in seen)
