"""What users of other libraries reported, on four ranks with real DTensors; each named after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from distcore.testing import RankPool, rank_threads
from distcore.v1 import Channel, PeerError
from reshard import Hook, Resharder, transfer


def embedding(channel: Channel) -> list[float]:
    model = nn.Embedding(4, 1)
    with torch.no_grad():
        model.weight.copy_(torch.arange(4.0).reshape(4, 1))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], RowwiseParallel())
    fully_shard(model, mesh=mesh["dp"])
    made = torch.zeros(4, 1)
    transfer(model.state_dict()["weight"], made)
    return made.flatten().tolist()


def test_pytorch_129229_rows_of_fsdp2_over_tp_keep_their_order(pool: RankPool) -> None:
    assert pool.run(embedding).values() == ([0.0, 1.0, 2.0, 3.0],) * 4


def bare_strided(channel: Channel, length: int) -> list[float]:
    mesh = DeviceMesh("cpu", [0, 1])
    full = torch.arange(float(length))
    src = distribute_tensor(full, mesh, [_StridedShard(0, split_factor=2)], src_data_rank=None)
    made = torch.zeros(length)
    transfer({"w": src}, {"w": made})
    return made.tolist()


@pytest.mark.parametrize("length", [5, 7, 8])
def test_pytorch_168134_a_bare_strided_shard_is_read_as_torch_made_it(
    pool: RankPool, length: int
) -> None:
    assert pool.run(bare_strided, length).values() == ([float(n) for n in range(length)],) * 4


def uneven(channel: Channel) -> list[list[float]]:
    mesh = init_device_mesh("cpu", (4,))
    full = torch.arange(50.0).reshape(5, 10)
    src = distribute_tensor(full, mesh, [Shard(0)])
    made = torch.zeros(5, 10)
    transfer(src, made)
    return made.tolist()


def test_pytorch_115310_five_rows_over_four_ranks_stay_five(pool: RankPool) -> None:
    expected = torch.arange(50.0).reshape(5, 10).tolist()
    assert pool.run(uneven).values() == (expected,) * 4


def small_staging(channel: Channel) -> tuple[int, int, int]:
    """The largest tensor is 400 kB, a shard of it 100 kB, and the staging bound 64 KiB."""
    mesh = init_device_mesh("cpu", (4,))
    full = torch.arange(100_000.0).reshape(250, 400)
    src = distribute_tensor(full, mesh, [Shard(0)])
    dst = distribute_tensor(torch.zeros_like(full), mesh, [Shard(1)])
    with Resharder({"w": src}, {"w": dst}, max_staging_bytes=1 << 16) as resharder:
        report = resharder.run()
    assert dst.to_local().tolist() == full.chunk(4, 1)[channel.rank].tolist()
    return report.staging_nbytes, report.kept_nbytes, report.rounds


def test_openrlhf_1226_no_rank_ever_holds_a_full_tensor(pool: RankPool) -> None:
    for staging, kept, rounds in pool.run(small_staging).values():
        assert staging <= 1 << 16
        assert kept == 0
        assert rounds > 1


def all_senders(channel: Channel) -> int:
    """HSDP to one rank's worth of columns each: every replica sends its share."""
    mesh = init_device_mesh("cpu", (2, 2))
    src = {f"w{n}": distribute_tensor(torch.ones(8, 8), mesh, [Replicate(), Shard(0)])
           for n in range(8)}  # fmt: skip
    target = init_device_mesh("cpu", (4,))
    dst = {
        key: distribute_tensor(torch.zeros(8, 8), target, [Shard(1)], src_data_rank=None)
        for key in src
    }
    return transfer(src, dst).nbytes_sent


def test_verl_7167_no_single_rank_sends_for_all(pool: RankPool) -> None:
    sent = pool.run(all_senders).values()
    assert max(sent) == min(sent) == 8 * 32


def lost_bytes(channel: Channel) -> tuple[int, bool]:
    """One rank is made to believe that it received less than it lacks."""
    src = torch.ones(4) if channel.rank == 0 else None
    dst = torch.zeros(4) if channel.rank == 1 else None
    with Resharder(src, dst, channel) as resharder:
        if channel.rank == 1:
            resharder._bound += 1
        with pytest.raises(PeerError, match="received 16 bytes, expected 17"):
            resharder.run()
        return resharder.version, resharder.dirty


def test_tokenspeed_1373_what_was_not_received_is_no_success() -> None:
    assert rank_threads(2, lost_bytes).values() == ((0, True), (0, True))


def kernel_layout(channel: Channel) -> list[list[float]] | None:
    """The receiving engine keeps the weight transposed; only its hook may write it."""
    src = torch.tensor([[1.0, 2.0, 3.0]]) if channel.rank == 0 else None
    engine = torch.zeros(3, 1)

    def store(received: torch.Tensor, local: torch.Tensor) -> None:
        engine.copy_(received.t())

    dst = torch.zeros(1, 3) if channel.rank == 1 else None
    hooks = {"tensor": Hook(after=store)} if channel.rank == 1 else None
    transfer(src, dst, channel, hooks=hooks)
    return engine.tolist() if channel.rank == 1 else None


def test_skyrl_1680_weights_in_a_kernels_own_layout() -> None:
    assert rank_threads(2, kernel_layout).values() == (None, [[1.0], [2.0], [3.0]])


def while_training(channel: Channel) -> int:
    """FSDP2 training goes on in the default group while the weights travel in another."""
    torch.manual_seed(0)
    model = nn.Linear(16, 12)
    mesh = init_device_mesh("cpu", (4,))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group = torch.distributed.new_group(list(range(4)))
    pair = DeviceMesh("cpu", [2, 3])
    sent: dict[str, Any] = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    dst: dict[str, DTensor] = {
        key: distribute_tensor(torch.zeros(tensor.shape), pair, [Shard(0)], src_data_rank=None)
        for key, tensor in sent.items()
    }
    with Resharder(sent, dst, group) as resharder:
        for step in range(3):
            with torch.no_grad():
                for key, tensor in model.state_dict().items():
                    sent[key].copy_(tensor)
            expected = {key: tensor.full_tensor() for key, tensor in sent.items()}
            handle = resharder.start()
            model(torch.full((2, 16), 1.0 + step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert handle.wait(30).version == step + 1
            for key, tensor in dst.items():
                if pair.get_coordinate() is not None:
                    part = expected[key].chunk(2)[channel.rank - 2]
                    assert torch.equal(tensor.to_local(), part), key
        return resharder.version


def test_weights_travel_while_training_goes_on(pool: RankPool) -> None:
    assert pool.run(while_training).values() == (3, 3, 3, 3)
