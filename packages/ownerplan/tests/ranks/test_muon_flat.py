"""OwnerMuon on segments of flat buffers, in thread ranks and, as DTensors, in processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from distcore.testing import RankPool, rank_threads
from distcore.v1 import Channel, PeerError
from ownerplan import FlatBuffer, GlobalLayout, OwnerMuon
from ownerplan.matrix_view import View
from ownerplan.newton_schulz import newton_schulz

Shapes = tuple[tuple[int, ...], ...]
STEPS = 3


def whole(layout: GlobalLayout, seed: int) -> torch.Tensor:
    """The buffer, with numbers in its gaps too."""
    return torch.randn(layout.size, generator=torch.Generator().manual_seed(seed))


def tensor_of(buffer: torch.Tensor, layout: GlobalLayout, at: int) -> torch.Tensor:
    held = layout.get_tensor_range(at)
    return buffer[held.start : held.end].view(layout.tensor_shapes[at])


def in_one_process(layout: GlobalLayout, tensors: tuple[int, ...]) -> torch.Tensor:
    """The buffer after some steps of torch.optim.Muon on the tensors that take part."""
    buffer = whole(layout, 0)
    params = [nn.Parameter(tensor_of(buffer, layout, at).flatten(1).clone()) for at in tensors]
    optimizer = torch.optim.Muon(params, lr=0.1)
    for step in range(STEPS):
        gradient = whole(layout, 1 + step)
        for param, at in zip(params, tensors, strict=True):
            param.grad = tensor_of(gradient, layout, at).flatten(1).clone()
        optimizer.step()
    for param, at in zip(params, tensors, strict=True):
        tensor_of(buffer, layout, at).copy_(param.detach().view(layout.tensor_shapes[at]))
    return buffer


def train(
    channel: Channel, layout: GlobalLayout, ranks: Any, options: dict[str, Any]
) -> tuple[torch.Tensor, slice]:
    """This rank's segment after the same steps."""
    mesh = SimpleNamespace(mesh=ranks)
    held = layout.get_rank_ranges(mesh)[channel.rank]
    part = slice(held.start, held.end)
    param = nn.Parameter(whole(layout, 0)[part].clone())
    flat = FlatBuffer(layout, mesh, group=channel)
    optimizer = OwnerMuon([{"params": [param], "flat": flat}], lr=0.1, **options)
    for step in range(STEPS):
        param.grad = whole(layout, 1 + step)[part].clone()
        optimizer.step()
    optimizer.close()
    return param.detach(), part


def check(shapes: Shapes, ranks: Any, size: int, **options: Any) -> None:
    layout = GlobalLayout.build(shapes, size)
    eligible = tuple(at for at, shape in enumerate(shapes) if len(shape) >= 2)
    expected = in_one_process(layout, eligible)
    for found, part in rank_threads(size, train, layout, ranks, options).values():
        assert torch.equal(found, expected[part])


@pytest.mark.parametrize(
    ("shapes", "ranks", "size"),
    [
        (((6, 4), (4, 4)), [0, 1], 2),
        (((6, 4), (4, 4)), [0], 1),
        (((6, 3), (4, 2), (2, 2)), [0, 1, 2], 3),
        (((7, 4), (2, 4)), [0, 1, 2, 3], 4),
        (((1, 4),), [0, 1, 2, 3], 4),
        (((6, 4), (4, 4)), [1, 0], 2),
        (((8, 4),), [[0, 1], [2, 3]], 4),
        (((4, 2, 3), (5,), (3, 6)), [0, 1], 2),
    ],
)
def test_flat_buffers_step_as_in_one_process(shapes: Shapes, ranks: Any, size: int) -> None:
    """Gaps, padding and tensors of one dim stay as they are."""
    check(shapes, ranks, size)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(1, 600),
    st.integers(1, 3),
)
def test_buckets_and_slots_change_nothing(
    shapes: list[tuple[int, int]], size: int, bucket_bytes: int, slots: int
) -> None:
    check(tuple(shapes), list(range(size)), size, bucket_bytes=bucket_bytes, slots=slots)


def with_views(channel: Channel) -> None:
    """A fused tensor and a stack, in blocks, beside the same as plain parameters."""
    shapes = ((6, 4), (2, 3, 4), (5, 4))
    views: dict[int, View] = {0: (3, 2, 1), 1: "batch"}
    layout = GlobalLayout.build(shapes, channel.size)
    mesh = SimpleNamespace(mesh=list(range(channel.size)))
    held = layout.get_rank_ranges(mesh)[channel.rank]
    part = slice(held.start, held.end)
    param = nn.Parameter(whole(layout, 0)[part].clone())
    flat = FlatBuffer(layout, mesh, tensors=(1, 0), views=views, group=channel)
    buffer = whole(layout, 0)
    alone = [nn.Parameter(tensor_of(buffer, layout, at)) for at in (0, 1)]
    ours = OwnerMuon([{"params": [param], "flat": flat}])
    theirs = OwnerMuon(
        [
            {"params": [one], "matrix_view": view}
            for one, view in zip(alone, views.values(), strict=True)
        ]
    )
    gradient = whole(layout, 1)
    param.grad = gradient[part].clone()
    for at, one in enumerate(alone):
        one.grad = tensor_of(gradient, layout, at).clone()
    ours.step()
    theirs.step()
    assert torch.equal(param.detach(), buffer[part])
    assert ours.last_report is not None


def test_tensors_may_be_seen_as_several_matrices() -> None:
    rank_threads(3, with_views).values()


def one_fails(channel: Channel) -> None:
    def kernel(matrix: torch.Tensor, schedule: Any, eps: float) -> torch.Tensor:
        if channel.rank == 0:
            raise ArithmeticError("no matrix")
        return newton_schulz(matrix, schedule, eps)

    train(channel, GlobalLayout.build(((9, 4), (9, 4)), 3), [0, 1, 2], {"kernel": kernel})


def test_where_one_rank_fails_all_raise() -> None:
    for error in rank_threads(3, one_fails).raised(PeerError, within_s=10):
        assert list(error.failures) == [0]


def as_dtensor(channel: Channel) -> None:
    layout = GlobalLayout.build(((6, 4), (4, 4), (3,)), 4)
    mesh = DeviceMesh("cpu", list(range(4)))
    param = nn.Parameter(distribute_tensor(whole(layout, 0), mesh, [Shard(0)]))
    optimizer = OwnerMuon([{"params": [param], "flat": FlatBuffer(layout)}], lr=0.1)
    for step in range(STEPS):
        param.grad = distribute_tensor(whole(layout, 1 + step), mesh, [Shard(0)])
        optimizer.step()
    assert isinstance(param, DTensor)
    assert torch.equal(param.full_tensor(), in_one_process(layout, (0, 1)))
    assert optimizer.state[param]["momentum_buffer"].placements == param.placements


def test_a_buffer_may_be_a_dtensor(pool: RankPool) -> None:
    """Then its momentum is one too, and is saved as such."""
    pool.run(as_dtensor).values()
