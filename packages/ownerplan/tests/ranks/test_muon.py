"""OwnerMuon on ranks: bit for bit what torch.optim.Muon does in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from distcore.testing import RankPool
from distcore.v1 import Channel
from ownerplan.muon import OwnerMuon
from ownerplan.step_report import StepReport

STEPS = 5
SHAPES = ((5, 8), (64, 32), (2, 16), (8, 3), (1, 7), (33, 47))
Full = list[torch.Tensor]


def gradients(shapes: tuple[tuple[int, ...], ...], step: int) -> Full:
    """The gradients of one step, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def weights(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype = torch.float32) -> Full:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def in_one_process(shapes: tuple[tuple[int, ...], ...], **options: Any) -> Full:
    """What torch.optim.Muon makes of the weights in STEPS steps."""
    params = [torch.nn.Parameter(weight) for weight in weights(shapes)]
    optimizer = torch.optim.Muon(params, **options)
    for step in range(STEPS):
        for param, gradient in zip(params, gradients(shapes, step), strict=True):
            param.grad = gradient
        optimizer.step()
    return [param.detach() for param in params]


def placed(full: Full, mesh: DeviceMesh, placements: list[Placement]) -> list[Any]:
    return [distribute_tensor(one, mesh, placements, src_data_rank=None) for one in full]


def assert_same(params: list[Any], expected: Full) -> None:
    for param, whole in zip(params, expected, strict=True):
        assert torch.equal(param.full_tensor(), whole), tuple(whole.shape)


def train(
    mesh: DeviceMesh,
    placements: list[Placement],
    shapes: tuple[tuple[int, ...], ...] = SHAPES,
    **options: Any,
) -> tuple[list[Any], StepReport]:
    params = [torch.nn.Parameter(one) for one in placed(weights(shapes), mesh, placements)]
    optimizer = OwnerMuon(params, **options)
    for step in range(STEPS):
        grads = placed(gradients(shapes, step), mesh, placements)
        for param, gradient in zip(params, grads, strict=True):
            param.grad = gradient
        optimizer.step()
    optimizer.close()
    assert optimizer.last_report is not None
    return params, optimizer.last_report


def step_sharded(
    channel: Channel, size: int, dim: int, options: dict[str, Any], own: dict[str, Any]
) -> int:
    mesh = DeviceMesh("cpu", list(range(size)))
    if channel.rank >= size:
        return 0
    params, report = train(mesh, [Shard(dim)], **options, **own)
    assert_same(params, in_one_process(SHAPES, **options))
    return report.matrices


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_sharded_parameters_step_as_in_one_process(pool: RankPool, size: int, dim: int) -> None:
    counts = pool.run(step_sharded, size, dim, {}, {}).values()
    assert sum(counts) == len(SHAPES)


@pytest.mark.parametrize(
    "options",
    [
        {"nesterov": False, "lr": 0.1},
        {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
        {"momentum": 0.4, "ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
        {"ns_steps": 0},
    ],
)
def test_all_hyperparameters_count_as_in_one_process(
    pool: RankPool, options: dict[str, Any]
) -> None:
    pool.run(step_sharded, 3, 0, options, {}).values()


@pytest.mark.parametrize("bucket_bytes", [1, 3000, 1 << 26])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_buckets_and_slots_change_nothing(pool: RankPool, bucket_bytes: int, slots: int) -> None:
    own = {"bucket_bytes": bucket_bytes, "slots": slots}
    pool.run(step_sharded, 4, 0, {}, own).values()


def step_hsdp(channel: Channel) -> StepReport:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
    params, report = train(mesh, [Replicate(), Shard(0)])
    assert_same(params, in_one_process(SHAPES))
    return report


def test_replicas_share_the_work(pool: RankPool) -> None:
    """Four ranks that hold everything twice orthogonalize each matrix once."""
    reports = pool.run(step_hsdp).values()
    assert sum(report.matrices for report in reports) == len(SHAPES)
    assert all(report.matrices for report in reports)


def moved(channel: Channel, replicas: bool, bucket_bytes: int, dim: int) -> StepReport:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]] if replicas else [0, 1, 2, 3])
    placements: list[Placement] = [Replicate(), Shard(dim)] if replicas else [Shard(dim)]
    _, report = train(mesh, placements, ((256, 256),) * 8, bucket_bytes=bucket_bytes)
    return report


def test_bytes_are_those_of_the_bound(pool: RankPool) -> None:
    """Two ways, two bytes, and all but the owner's own quarter."""
    reports = pool.run(moved, False, 1 << 20, 0).values()
    assert sum(report.nbytes_received for report in reports) == 2 * 2 * 8 * 256 * 256 * 3 // 4
    assert sum(report.nbytes_sent for report in reports) == 2 * 2 * 8 * 256 * 256 * 3 // 4


def test_replicas_send_once_and_all_of_them_receive(pool: RankPool) -> None:
    """Half of each matrix to its owner; then a half to each of the three others."""
    reports = pool.run(moved, True, 1 << 20, 0).values()
    assert sum(report.nbytes_received for report in reports) == 2 * 8 * 256 * 256 * 2


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("bucket_bytes", [400_000, 800_000])
def test_the_memory_for_exchanges_keeps_to_its_budget(
    pool: RankPool, dim: int, bucket_bytes: int
) -> None:
    """Two slots, and a quarter more where parts have to be packed.

    A round of four matrices takes 256 KiB on each rank, so these are two buckets, or one.
    """
    rounds = 2 if bucket_bytes < 2 * (1 << 18) else 1
    for report in pool.run(moved, False, bucket_bytes, dim).values():
        assert report.matrices == 2
        assert report.exchanges == 2 * rounds
        assert report.collectives == 1 + 2 * report.exchanges
        assert 0 < report.held_nbytes <= bucket_bytes * 2 * (5 if dim else 4) // 4
