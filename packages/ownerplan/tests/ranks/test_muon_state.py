"""OwnerMuon's state: sharded like the parameters, the same keys everywhere, saved and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from distcore.testing import RankPool
from distcore.v1 import Channel
from ownerplan import OwnerMuon

STEPS = range(3), range(3, 6)


class Model(nn.Module):
    """Three matrices, of which the last one is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.Linear(6, 10, bias=False)
        self.down = nn.Linear(10, 2, bias=False)
        self.unused = nn.Linear(5, 7, bias=False)


def used(model: Model) -> list[torch.Tensor]:
    return [model.up.weight, model.down.weight]


def train(model: Model, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in used(model):
            full = torch.randn(tuple(param.shape), generator=generator)
            param.grad = full
            if isinstance(param, DTensor):
                param.grad = distribute_tensor(
                    full, param.device_mesh, param.placements, src_data_rank=None
                )
        optimizer.step()


def in_one_process() -> Model:
    model = Model()
    optimizer = torch.optim.Muon(model.parameters(), lr=0.1)
    for steps in STEPS:
        train(model, optimizer, steps)
    return model


def group(mesh: DeviceMesh) -> Any:
    return mesh.get_group()


def save(channel: Channel, folder: str, size: int) -> dict[str, list[str]]:
    mesh = DeviceMesh("cpu", list(range(size)))
    if channel.rank >= size:
        return {}
    model = Model()
    fully_shard(model, mesh=mesh)
    optimizer = OwnerMuon(model.parameters(), lr=0.1, bucket_bytes=256)
    train(model, optimizer, STEPS[0])
    weights, state = get_state_dict(model, optimizer)
    state_dict_saver.save(
        {"model": weights, "optimizer": state}, checkpoint_id=folder, process_group=group(mesh)
    )
    found: Any = state["state"]
    return {name: sorted(held) for name, held in found.items()}


def resume(channel: Channel, folder: str, size: int) -> None:
    mesh = DeviceMesh("cpu", list(range(size)))
    if channel.rank >= size:
        return
    model = Model()
    for param in model.parameters():
        nn.init.zeros_(param)
    fully_shard(model, mesh=mesh)
    optimizer = OwnerMuon(model.parameters(), lr=9.0, slots=1)
    weights, state = get_state_dict(model, optimizer)
    state_dict_loader.load(
        {"model": weights, "optimizer": state}, checkpoint_id=folder, process_group=group(mesh)
    )
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    assert optimizer.param_groups[0]["lr"] == 0.1
    train(model, optimizer, STEPS[1])
    for param, other in zip(model.parameters(), in_one_process().parameters(), strict=True):
        assert isinstance(param, DTensor)
        assert torch.equal(param.full_tensor(), other)


@pytest.mark.parametrize(("saved", "resumed"), [(2, 3), (2, 1), (3, 4), (4, 2)])
def test_a_run_saved_on_some_ranks_goes_on_on_others(
    pool: RankPool, tmp_path: Path, saved: int, resumed: int
) -> None:
    keys = pool.run(save, str(tmp_path), saved).values()
    expected = {name: ["momentum_buffer"] for name in ("up.weight", "down.weight", "unused.weight")}
    assert keys[:saved] == (expected,) * saved
    pool.run(resume, str(tmp_path), resumed).values()


def add_group_later(channel: Channel) -> None:
    mesh = DeviceMesh("cpu", list(range(4)))
    model, alone = Model(), Model()
    fully_shard(model, mesh=mesh)
    ours = OwnerMuon([model.up.weight], lr=0.1)
    theirs = torch.optim.Muon([alone.up.weight], lr=0.1)
    for one, optimizer in ((model, ours), (alone, theirs)):
        train(one, optimizer, STEPS[0])
        optimizer.add_param_group({"params": [one.down.weight], "lr": 0.3})
        train(one, optimizer, STEPS[1])
    for param, other in zip(used(model), used(alone), strict=True):
        assert isinstance(param, DTensor)
        assert torch.equal(param.full_tensor(), other)


def test_a_group_may_be_added_later(pool: RankPool) -> None:
    pool.run(add_group_later).values()


def step_after_close(channel: Channel) -> None:
    mesh = DeviceMesh("cpu", list(range(4)))
    model = Model()
    fully_shard(model, mesh=mesh)
    ours = OwnerMuon(model.parameters(), lr=0.1)
    train(model, ours, STEPS[0])
    ours.close()
    ours.close()
    train(model, ours, STEPS[1])
    expected = in_one_process()
    for param, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert isinstance(param, DTensor)
        assert torch.equal(param.full_tensor(), other)


def test_a_closed_optimizer_steps_on(pool: RankPool) -> None:
    pool.run(step_after_close).values()


def load_whole_momentum(channel: Channel) -> str:
    mesh = DeviceMesh("cpu", list(range(4)))
    param = nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)]))
    optimizer = OwnerMuon([param])
    optimizer.state[param]["momentum_buffer"] = torch.zeros(8, 4)
    param.grad = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
    with pytest.raises(ValueError, match="load it sharded like the parameter") as error:
        optimizer.step()
    return str(error.value)


def test_momentum_that_is_not_sharded_is_refused(pool: RankPool) -> None:
    for text in pool.run(load_whole_momentum).values():
        assert "parameter 0 of group 0: the momentum has (8, 4) where the parameter has" in text
