"""The face on the stateless kind of group: a rank and a communicator, here over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from distcore.testing import rank_threads
from distcore.v1 import Channel, Message
from reshard import xferdtensor_python as face

R = Replicate()


def as_bytes(buffer: torch.Tensor) -> torch.Tensor:
    assert buffer.is_contiguous()
    return buffer.view(-1).view(torch.uint8)


class Communicator:
    """Calls in the manner of nccl4py; between `group_start` and `group_end` they only gather."""

    def __init__(self, channel: Channel, ranks: tuple[int, ...], log: list[str]) -> None:
        self.channel, self.ranks, self.log = channel, ranks, log
        self.sends: dict[int, list[torch.Tensor]] = {}
        self.receives: dict[int, list[torch.Tensor]] = {}

    def group_start(self) -> None:
        self.log.append("group")

    def group_end(self) -> None:
        messages = [
            [Message(self.ranks[peer], tuple(buffers)) for peer, buffers in sorted(side.items())]
            for side in (self.sends, self.receives)
        ]
        self.channel.start(*messages).wait()
        self.sends, self.receives = {}, {}

    def send(self, buffer: torch.Tensor, peer: int, stream: object) -> None:
        self.sends.setdefault(peer, []).append(as_bytes(buffer))

    def recv(self, buffer: torch.Tensor, peer: int, stream: object) -> None:
        self.receives.setdefault(peer, []).append(as_bytes(buffer))

    def broadcast(
        self, sendbuf: torch.Tensor, recvbuf: torch.Tensor, root: int, stream: object
    ) -> None:
        self.log.append("broadcast")
        for peer, rank in enumerate(self.ranks):
            if self.ranks[root] == self.channel.rank != rank:
                self.send(sendbuf, peer, stream)
        if self.ranks[root] != self.channel.rank:
            self.recv(recvbuf, root, stream)
        self.group_end()

    def allgather(self, sendbuf: torch.Tensor, recvbuf: torch.Tensor, stream: object) -> None:
        self.log.append("allgather")
        parts = as_bytes(recvbuf).chunk(len(self.ranks))
        for peer, rank in enumerate(self.ranks):
            if rank != self.channel.rank:
                self.send(sendbuf, peer, stream)
                self.recv(parts[peer], peer, stream)
            else:
                assert parts[peer].data_ptr() == sendbuf.data_ptr()
        self.group_end()

    def split(self, color: int, key: int) -> Communicator:
        self.log.append("split")
        rows = self.channel.all_gather(bytes([color, key]))
        members = sorted(
            (row[1], rank)
            for rank, row in zip(self.channel.ranks, rows, strict=True)
            if row[0] == color
        )
        return Communicator(self.channel, tuple(rank for _, rank in members), self.log)


@dataclass(eq=False)
class Stateless:
    rank: int
    nccl_communicator: Communicator


class Mesh:
    def __init__(self, ranks: Any) -> None:
        self.mesh = torch.tensor(ranks)


class Ref:
    def __init__(self, local: torch.Tensor | None, full: torch.Tensor) -> None:
        self._local_tensor = local
        self.shape, self.dtype, self.device = full.shape, full.dtype, full.device


Side = tuple[torch.Tensor, list[Any]]


@dataclass
class Case:
    size: int
    full: torch.Tensor
    src: Side
    dst: Side
    turned: bool


@pytest.fixture(autouse=True)
def _empty_caches() -> Iterator[None]:
    yield
    face.clear_xferdtensor_python_caches()


def part_of(side: Side, full: torch.Tensor, rank: int) -> torch.Tensor | None:
    """What `rank` holds, cut axis by axis with torch.chunk."""
    mesh, placements = side
    found = (mesh == rank).nonzero().tolist()
    if not found:
        return None
    for at, count, placement in zip(found[0], mesh.shape, placements, strict=True):
        if placement != R:
            parts = full.chunk(count, placement.dim)
            none = full.narrow(placement.dim, 0, 0)
            full = parts[at] if at < len(parts) else none
    return full


def turned(part: torch.Tensor) -> torch.Tensor:
    """The same with its dims in reverse order in memory."""
    dims = tuple(reversed(range(part.ndim)))
    return part.permute(dims).contiguous().permute(dims)


@st.composite
def sides(draw: st.DrawFn, size: int, ndim: int) -> Side:
    lengths: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        lengths.append(draw(st.integers(1, max(1, size // prod(lengths)))))
    ranks = draw(st.permutations(range(size)))[: prod(lengths)]
    dims = [draw(st.sampled_from([None, *range(ndim)])) for _ in lengths]
    return torch.tensor(ranks).reshape(lengths), [R if d is None else Shard(d) for d in dims]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.integers(1, 6))
    shape = draw(st.lists(st.integers(0, 6), max_size=3))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.int16]))
    full = torch.arange(prod(shape)).remainder(101).reshape(shape).to(dtype)
    src, dst = draw(sides(size, len(shape))), draw(sides(size, len(shape)))
    return Case(size, full, src, dst, draw(st.booleans()))


def carried(channel: Channel, case: Case) -> list[str]:
    rank = channel.rank
    log: list[str] = []
    group = Stateless(rank, Communicator(channel, tuple(channel.ranks), log))
    held, wanted = (part_of(side, case.full, rank) for side in (case.src, case.dst))
    src = None if held is None else held.clone()
    dst = None if wanted is None else torch.zeros_like(wanted)
    if case.turned:
        src, dst = (None if one is None else turned(one) for one in (src, dst))
    for _ in range(2):  # the second time everything is cached
        if dst is not None:
            dst.zero_()
        face.xferdtensor_python_impl(
            Ref(src, case.full),
            Mesh(case.src[0].tolist()),
            case.src[1],
            Ref(dst, case.full),
            Mesh(case.dst[0].tolist()),
            case.dst[1],
            group,
        )
        assert dst is None or wanted is None or dst.tolist() == wanted.tolist()
        assert src is None or held is None or src.tolist() == held.tolist()
    face.clear_xferdtensor_python_caches(group)
    return log


@settings(max_examples=20)
@given(cases())
def test_every_destination_holds_its_part(case: Case) -> None:
    rank_threads(case.size, carried, case).values()


def test_replicas_are_gathered_from_stripes_or_hear_a_broadcast() -> None:
    src, dst = (torch.tensor([0, 1]), [Shard(0)]), (torch.tensor([[2, 3], [4, 5]]), [R, Shard(0)])
    even = Case(6, torch.arange(32.0).reshape(8, 4), src, dst, turned=False)
    logs = rank_threads(6, carried, even).values()
    assert logs[0] == ["split", "group", "group"]
    assert logs[5] == ["split", "group", "allgather", "group", "allgather"]
    uneven = Case(6, torch.arange(28.0).reshape(7, 4), src, dst, turned=False)
    logs = rank_threads(6, carried, uneven).values()
    assert logs[2] == ["split", "group", "broadcast", "group", "broadcast"]
    assert logs[5] == ["split", "broadcast", "broadcast"]


def one_shape_is_wrong(channel: Channel) -> None:
    log: list[str] = []
    group = Stateless(channel.rank, Communicator(channel, tuple(channel.ranks), log))
    full = torch.zeros(4)
    src = Ref(torch.zeros(3), full)
    try:
        face.xferdtensor_python_impl(
            src, Mesh([0, 1]), [Shard(0)], Ref(None, full), Mesh([0]), [R], group
        )
    finally:
        assert log == []


def test_mistakes_are_found_before_the_communicator_is_called() -> None:
    for error in rank_threads(2, one_shape_is_wrong).raised(ValueError, within_s=3):
        assert "planned shape is (2,), got (3,)" in str(error)
