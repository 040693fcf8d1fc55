"""Resharder and face with real FSDP2, HSDP and tensor-parallel modules on six ranks.

Six ranks are what it takes for a dim of 7 over 3 x 2 ranks, the smallest case in which torch itself
reads one strided placement in two ways. They are threads of one process: meshes and modules go
over torch's threaded process group, the transfers over gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.multi_threaded_pg import (
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

from distcore.testing import rank_threads
from distcore.v1 import Channel
from reshard import Resharder, transfer
from reshard.xferdtensor_python import xferdtensor_python_impl

SIDES = (5, 7, 8, 9, 13)
KINDS = ("fsdp", "hsdp 2x3", "hsdp 3x2", "fsdp+tp 3x2", "fsdp+tp 2x3")
Body = Callable[[Channel, str, int], Any]


@pytest.fixture
def threaded() -> Iterator[None]:
    """Each thread has a default process group of its own, of torch's threaded kind."""
    c10d: Any = torch._C._distributed_c10d
    c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    yield
    _uninstall_threaded_pg()
    c10d._set_thread_isolation_mode(False)


def in_world(channel: Channel, store: Store, body: Body, kind: str) -> dict[int, Any]:
    dist.init_process_group("threaded", rank=channel.rank, world_size=channel.size, store=store)
    try:
        return {side: body(channel, kind, side) for side in SIDES}
    finally:
        dist.destroy_process_group()


def run(body: Body, kind: str) -> tuple[dict[int, Any], ...]:
    """What `body` returns by rank and side; one world for all sides."""
    return rank_threads(6, in_world, HashStore(), body, kind).values()


def full_of(side: int) -> dict[str, torch.Tensor]:
    """The weights of one process: every element another number."""
    with torch.device("meta"):
        shapes = {key: tensor.shape for key, tensor in Mlp(side).state_dict().items()}
    return {
        key: torch.arange(float(shape.numel())).reshape(shape) + 1000 * at
        for at, (key, shape) in enumerate(shapes.items())
    }


class Mlp(nn.Module):
    """Two projections whose sides six ranks do not divide."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.up = nn.Linear(side, side)
        self.down = nn.Linear(side, side)


def sharded(kind: str, side: int) -> dict[str, Any]:
    """The state dict of an Mlp with these weights on six ranks."""
    name, _, sizes = kind.partition(" ")
    model = Mlp(side)
    model.load_state_dict(full_of(side))
    shape = tuple(map(int, sizes.split("x"))) if sizes else (6,)
    names = {"fsdp": ("fsdp",), "hsdp": ("dp", "fsdp"), "fsdp+tp": ("fsdp", "tp")}[name]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if name == "fsdp+tp":
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        mesh = mesh["fsdp"]
    fully_shard(model, mesh=mesh)
    return model.state_dict()


def to_two_ranks(channel: Channel, kind: str, side: int) -> int:
    """From the module to whole tensors on ranks 1 and 4; how many rows of `up` this rank had."""
    full, src = full_of(side), sharded(kind, side)
    takes = channel.rank in (1, 4)
    dst = {key: torch.zeros_like(tensor) for key, tensor in full.items()} if takes else None
    report = transfer(src, dst, channel)
    assert report.nbytes_received == report.bound_received_nbytes
    for key, tensor in (dst or {}).items():
        assert tensor.tolist() == full[key].tolist(), (side, key)
    return len(src["up.weight"].to_local())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("threaded")
def test_a_module_reaches_two_of_its_ranks(kind: str) -> None:
    rows = run(to_two_ranks, kind)
    if kind == "fsdp+tp 3x2":  # rank 4 is at (2, 0), and has nothing
        assert [found[7] for found in rows] == [2, 1, 2, 1, 0, 1]


def from_one_rank(channel: Channel, kind: str, side: int) -> None:
    """From whole tensors on rank 3 to the module."""
    full, dst = full_of(side), sharded(kind, side)
    for tensor in dst.values():
        tensor.to_local().zero_()
    with Resharder(full if channel.rank == 3 else None, dst, channel) as resharder:
        resharder.run(verify="digest")
    for key, tensor in dst.items():
        assert tensor.full_tensor().tolist() == full[key].tolist(), (side, key)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("threaded")
def test_a_module_is_filled_from_one_of_its_ranks(kind: str) -> None:
    run(from_one_rank, kind)


def to_each_other(channel: Channel, kind: str, side: int) -> None:
    """Tensor by tensor through the face, from the module to one that is cut otherwise."""
    src, dst = sharded(kind, side), sharded("hsdp 2x3", side)
    full = full_of(side)
    for key, tensor in dst.items():
        tensor.to_local().zero_()
        ends: list[Any] = []
        for one in (src[key], tensor):
            mesh: DeviceMesh = one.device_mesh
            ends += [one, mesh, one.placements]
        carry: Any = xferdtensor_python_impl
        carry(*ends, channel)
        assert tensor.full_tensor().tolist() == full[key].tolist(), (side, key)


@pytest.mark.usefixtures("threaded")
def test_the_face_carries_modules_to_each_other() -> None:
    run(to_each_other, "fsdp+tp 3x2")
