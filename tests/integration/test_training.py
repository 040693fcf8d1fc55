"""Packages together in a training run: FSDP2 on four ranks, each step beside one that knew nothing.

Everything is compared bit for bit.
"""

from __future__ import annotations

import copy
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckptx
from distcore.testing import RankPool
from distcore.v1 import Channel
from fttransport import HTTPTransport, LayoutMismatch, Security, join_metadata
from ownerplan import OwnerMuon
from reshard import Resharder

LIMIT = timedelta(seconds=20)


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """A nested state dict with every DTensor gathered, as copies."""
    return {key: whole_of(value) for key, value in state.items()}


def whole_of(value: Any) -> Any:
    if isinstance(value, dict):
        return whole(value)
    if isinstance(value, list):
        return [whole_of(one) for one in value]
    return value.full_tensor().clone() if isinstance(value, DTensor) else copy.deepcopy(value)


def differences(one: Any, other: Any, path: str = "state") -> list[str]:
    """Where two nested states are not the same, bit for bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return [f"{path}: {one.keys() ^ other.keys()}"]
        return [d for key in one for d in differences(one[key], other[key], f"{path}.{key}")]
    if isinstance(one, list) and isinstance(other, list):
        pairs = enumerate(zip(one, other, strict=True))
        return [d for at, (a, b) in pairs for d in differences(a, b, f"{path}[{at}]")]
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return [] if torch.equal(one, other) and one.dtype == other.dtype else [path]
    return [] if one == other else [path]


def mesh_of(*shape: int) -> DeviceMesh:
    """Four ranks that hold shards, or two replicas of two."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


class Training:
    """A model in training with AdamW, sharded over a mesh of any shape."""

    def __init__(self, *shape: int) -> None:
        torch.manual_seed(7)
        self.mesh = mesh_of(*shape)
        layers = [torch.nn.Linear(33, 18), torch.nn.GELU(), torch.nn.Linear(18, 7)]
        self.model = torch.nn.Sequential(*layers)
        for layer in (self.model[0], self.model[2], self.model):
            fully_shard(layer, mesh=self.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def backward(self, step: int) -> None:
        """The gradients of one batch, which is the same on all ranks."""
        batch = torch.randn(8, 33, generator=torch.Generator().manual_seed(step))
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()

    def train(self, *steps: int) -> None:
        for step in steps:
            self.backward(step)
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def restore(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def save_with_dcp(training: Training, path: str) -> None:
    state_dict_saver.save(training.state(), checkpoint_id=path)


def save_with_ckptx(training: Training, path: str) -> None:
    ckptx.save(training.state(), Path(path), format="dcp")


def load_with_dcp(training: Training, path: str) -> None:
    state = training.state()
    state_dict_loader.load(state, checkpoint_id=path)
    training.restore(state)


def load_with_ckptx(training: Training, path: str) -> None:
    state = training.state()
    ckptx.load(state, path)
    training.restore(state)


WAYS = {
    "dcp to ckptx": (save_with_dcp, load_with_ckptx),
    "ckptx to dcp": (save_with_ckptx, load_with_dcp),
    "ckptx to ckptx": (save_with_ckptx, load_with_ckptx),
}


def interrupted(channel: Channel, path: str, way: str) -> list[str]:
    """Train, save, go on on another mesh from what was saved; what differs then."""
    save, load = WAYS[way]
    first = Training(2, 2)
    first.train(0, 1, 2)
    save(first, path)
    saved = whole(first.state())
    second = Training(4)
    second.train(9)  # the optimizer has a state of its own, which must go
    load(second, path)
    return differences(saved, whole(second.state()))


@pytest.mark.parametrize("way", WAYS)
def test_training_is_saved_with_one_and_loaded_with_the_other(
    way: str, pool: RankPool, tmp_path: Path
) -> None:
    assert pool.run(interrupted, str(tmp_path / "saved"), way).values() == ([], [], [], [])


def resumed(channel: Channel, path: str) -> list[str]:
    """Three steps and three more from a checkpoint are six steps without a stop."""
    straight = Training(2, 2)
    straight.train(*range(6))
    first = Training(2, 2)
    first.train(0, 1, 2)
    save_with_ckptx(first, path)
    second = Training(2, 2)
    second.train(9)
    load_with_ckptx(second, path)
    second.train(3, 4, 5)
    return differences(whole(straight.state()), whole(second.state()))


def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(
    pool: RankPool, tmp_path: Path
) -> None:
    assert pool.run(resumed, str(tmp_path / "saved")).values() == ([], [], [], [])


def rollout(channel: Channel) -> tuple[list[int], list[str]]:
    """Three versions go to two ranks that hold columns, each while the next gradients are made."""
    alone = Training(4)
    trainer = Training(4)
    columns = DeviceMesh("cpu", [2, 3])
    served: dict[str, Tensor] = {}
    if channel.rank >= 2:
        for key, value in trainer.model.state_dict().items():
            placed = [Shard(value.dim() - 1)]
            served[key] = distribute_tensor(torch.zeros(value.shape), columns, placed)
    versions, wrong = [], []
    # In a group of its own, since the trainer's collectives go on meanwhile.
    with Resharder(trainer.model.state_dict(), served, dist.new_group()) as resharder:
        for step in range(3):
            alone.train(step)
            expected = whole(trainer.model.state_dict())
            handle = resharder.start()
            trainer.backward(step)
            versions.append(handle.wait().version)
            # What the rollout ranks have is what the trainer had when the transfer began.
            if served:
                found = whole(dict(served))
                wrong += differences(expected, found)
            trainer.optimizer.step()
    return versions, wrong + differences(whole(alone.state()), whole(trainer.state()))


def test_weights_go_to_a_rollout_while_the_trainer_runs(pool: RankPool) -> None:
    assert pool.run(rollout).values() == (([1, 2, 3], []),) * 4


def healed_into_columns(channel: Channel) -> list[str]:
    """Ranks 0 and 1 hold rows and serve them; 2 and 3 hold columns and receive them."""
    rows, columns = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    full = {"w": torch.arange(63.0).view(9, 7), "e": torch.arange(30.0).view(5, 6).bfloat16()}
    security = Security(token="integration")
    source: HTTPTransport[Any] = HTTPTransport(LIMIT, 0, security=security, bind="127.0.0.1")
    if channel.rank < 2:
        state: dict[str, Any] = {"step": 5, "bias": torch.ones(4)}
        for key, value in full.items():
            state[key] = distribute_tensor(value, rows, [Shard(0)], src_data_rank=None)
        source.send_checkpoint([2, 3], 5, state, LIMIT)
    told = channel.all_gather(source.metadata().encode().ljust(300))
    metadata = join_metadata([one.decode().strip() for one in told[:2]])
    wrong: list[str] = []
    if channel.rank >= 2:
        own: dict[str, Any] = {"step": 0, "bias": torch.zeros(4)}
        for key, value in full.items():
            zeros = torch.zeros_like(value)
            own[key] = distribute_tensor(zeros, columns, [Shard(1)], src_data_rank=None)
        receiver: HTTPTransport[Any] = HTTPTransport(
            LIMIT, 2, state_dict=lambda: own, security=security, bind="127.0.0.1"
        )
        found = receiver.recv_checkpoint(0, metadata, 5, LIMIT)
        wrong = differences({**full, "step": 5, "bias": torch.ones(4)}, whole(found))
        # One source alone has not all of it.
        with pytest.raises(LayoutMismatch):
            receiver.recv_checkpoint(0, told[0].decode().strip(), 5, LIMIT)
        receiver.shutdown()
    channel.all_gather(b"healed")
    source.shutdown()
    return wrong


def test_a_replica_heals_into_another_layout(pool: RankPool) -> None:
    assert pool.run(healed_into_columns).values() == ([], [], [], [])


def muon_on_another_mesh(channel: Channel, path: str) -> list[str]:
    """OwnerMuon's momentum goes through a checkpoint onto another mesh, and the steps go on."""

    def start(*shape: int) -> tuple[torch.nn.Module, OwnerMuon]:
        torch.manual_seed(3)
        model = torch.nn.Linear(12, 20, bias=False)
        fully_shard(model, mesh=mesh_of(*shape))
        return model, OwnerMuon(model.parameters(), lr=0.02)

    def train(model: torch.nn.Module, muon: OwnerMuon, *steps: int) -> None:
        for step in steps:
            batch = torch.randn(5, 12, generator=torch.Generator().manual_seed(step))
            muon.zero_grad()
            model(batch).square().mean().backward()
            muon.step()

    def state(model: torch.nn.Module, muon: OwnerMuon) -> dict[str, Any]:
        momentum = muon.state_dict()["state"]
        return {"model": model.state_dict(), "momentum": {str(k): v for k, v in momentum.items()}}

    one, first = start(2, 2)
    train(one, first, 0, 1)
    ckptx.save(state(one, first), Path(path))
    expected = whole(state(one, first))
    other, second = start(4)
    train(other, second, 8)
    ckptx.load(state(other, second), path)
    return differences(expected, whole(state(other, second)))


def test_muon_goes_on_on_another_mesh(pool: RankPool, tmp_path: Path) -> None:
    outcome = pool.run(muon_on_another_mesh, str(tmp_path / "saved"))
    assert outcome.values() == ([], [], [], [])
