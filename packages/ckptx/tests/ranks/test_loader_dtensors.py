"""load on processes: DTensor, FSDP2 and HSDP, compared with what torch itself distributes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    zeros,
)

import ckptx
from ckptx import CheckpointPeerError, LoadReport
from distcore.testing import RankPool, rank_pool
from distcore.v1 import Channel


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool(4) as pool:
        yield pool


def numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


PLACEMENTS: dict[str, tuple[Placement, Placement]] = {
    "copies of rows": (Replicate(), Shard(0)),
    "copies of columns": (Replicate(), Shard(1)),
    "rows and columns": (Shard(0), Shard(1)),
    "rows twice": (Shard(0), Shard(0)),
    "copies": (Replicate(), Replicate()),
}
SHAPES = ((7, 6), (1, 6), (16, 4))
WEIGHTS = {f"{name} {shape}": numbered(*shape) for name in PLACEMENTS for shape in SHAPES} | {
    "plain": numbered(5)
}


def load_dtensors(channel: Channel, path: str, with_group: bool) -> LoadReport:
    mesh = init_device_mesh("cpu", (2, 2))
    state: dict[str, Tensor] = {"plain": torch.zeros(5)}
    for name, placements in PLACEMENTS.items():
        for shape in SHAPES:
            state[f"{name} {shape}"] = zeros(*shape, device_mesh=mesh, placements=placements)
    report = ckptx.load(state, path, group=channel if with_group else None)
    assert torch.equal(state["plain"], WEIGHTS["plain"])
    for name, placements in PLACEMENTS.items():
        for shape in SHAPES:
            found = state[f"{name} {shape}"]
            expected = distribute_tensor(numbered(*shape), mesh, placements)
            assert isinstance(found, DTensor)
            assert torch.equal(found.to_local(), expected.to_local()), (name, shape)
    return report


@pytest.mark.parametrize("with_group", [True, False])
def test_dtensors_get_what_torch_would_give_them(
    pool: RankPool, tmp_path: Path, with_group: bool
) -> None:
    save_file(WEIGHTS, tmp_path / "x.safetensors")
    reports = pool.run(load_dtensors, str(tmp_path), with_group).values()
    nbytes = sum(tensor.nbytes for tensor in WEIGHTS.values())
    assert sum(report.bytes_read for report in reports) == nbytes
    assert all(report.bytes_received == report.lower_bound_received for report in reports)


class Net(nn.Module):
    """Two layers, a buffer, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 3, bias=False)
        self.steps = nn.Buffer(torch.zeros(4, dtype=torch.int64))


def net() -> Net:
    torch.manual_seed(7)
    made = Net()
    made.steps.copy_(torch.tensor([3, 1, 4, 1]))
    return made


def load_fsdp(channel: Channel, path: str, shape: tuple[int, ...], own_mesh: bool) -> LoadReport:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copy", "shard")[-len(shape) :])
    with torch.device("meta"):
        model = Net()
    part = mesh["shard"] if own_mesh else mesh
    fully_shard(model.first, mesh=part)
    fully_shard(model, mesh=part)
    model.to_empty(device="cpu")
    report = ckptx.load(model.state_dict(), path, group=channel)
    for key, expected in net().state_dict().items():
        found = model.state_dict()[key]
        full = found.full_tensor() if isinstance(found, DTensor) else found
        assert torch.equal(full, expected), key
    return report


@pytest.mark.parametrize(("shape", "own_mesh"), [((4,), False), ((2, 2), False), ((2, 2), True)])
def test_fsdp2_and_hsdp_models_are_filled(
    pool: RankPool, tmp_path: Path, shape: tuple[int, ...], own_mesh: bool
) -> None:
    """With `own_mesh`, each replica knows nothing of the other: only its own shards' mesh."""
    weights = net().state_dict()
    save_file(weights, tmp_path / "x.safetensors")
    reports = pool.run(load_fsdp, str(tmp_path), shape, own_mesh).values()
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    assert sum(report.bytes_read for report in reports) == nbytes
    assert all(report.bytes_received == report.lower_bound_received for report in reports)


def load_strided(channel: Channel, path: str) -> None:
    """FSDP2 over tensor parallelism: dim 7 over dp 3 and tp 2 is where torch is wrong itself."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(3, 7))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    expected = {key: value.full_tensor() for key, value in model.state_dict().items()}
    if channel.rank == 0:
        save_file(expected, f"{path}/model.safetensors")
    channel.all_gather(b"written")
    before = {key: value.to_local().clone() for key, value in model.state_dict().items()}
    for value in model.state_dict().values():
        value.to_local().fill_(-1)
    ckptx.load(model.state_dict(), path, group=channel)
    for key, value in model.state_dict().items():
        assert torch.equal(value.to_local(), before[key]), key


def test_strided_shards_come_back_as_they_were(pool: RankPool, tmp_path: Path) -> None:
    pool.run(load_strided, str(tmp_path)).values()


def load_with_one_rank_short(channel: Channel, path: str) -> None:
    mesh = init_device_mesh("cpu", (4,))
    state = {key: zeros(6, 4, device_mesh=mesh, placements=[Shard(0)]) for key in ("a", "b")}
    if channel.rank == 3:
        del state["b"]
    try:
        ckptx.load(state, path, group=channel)
    finally:
        assert all(not value.to_local().any() for value in state.values())


def test_a_rank_that_lacks_a_key_fails_all_in_time(pool: RankPool, tmp_path: Path) -> None:
    save_file({"a": numbered(6, 4), "b": numbered(6, 4)}, tmp_path / "x.safetensors")
    outcomes = pool.run(load_with_one_rank_short, str(tmp_path))
    for error in outcomes.raised(CheckpointPeerError, within_s=3):
        assert list(error.failures) == [3]
        assert "b: in the checkpoint" in error.failures[3]
