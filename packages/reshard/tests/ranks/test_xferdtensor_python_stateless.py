"""The face on the stateless kind of group: a rank and a communicator, here over gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from distcore.testing import rank_threads
from distcore.v1 import Channel, DisagreementError, Message, PeerError
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
        return type(self)(self.channel, tuple(rank for _, rank in members), self.log)


class Counted(Communicator):
    """One that says how many ranks it has, as nccl4py's do: so the ranks can hear each other."""

    @property
    def nranks(self) -> int:
        return len(self.ranks)


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
    communicator: type[Communicator] = Counted


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
    return Case(
        size, full, src, dst, draw(st.booleans()), draw(st.sampled_from([Communicator, Counted]))
    )


def carried(channel: Channel, case: Case) -> list[str]:
    rank = channel.rank
    log: list[str] = []
    group = Stateless(rank, case.communicator(channel, tuple(channel.ranks), log))
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
    even = Case(6, torch.arange(32.0).reshape(8, 4), src, dst, False, Communicator)
    logs = rank_threads(6, carried, even).values()
    assert logs[0] == ["split", "group", "group"]
    assert logs[5] == ["split", "group", "allgather", "group", "allgather"]
    uneven = Case(6, torch.arange(28.0).reshape(7, 4), src, dst, False, Communicator)
    logs = rank_threads(6, carried, uneven).values()
    assert logs[2] == ["split", "group", "broadcast", "group", "broadcast"]
    assert logs[5] == ["split", "broadcast", "broadcast"]


def test_the_ranks_hear_each_other_twice_before_they_send() -> None:
    src, dst = (torch.tensor([0, 1]), [Shard(0)]), (torch.tensor([[2, 3], [4, 5]]), [R, Shard(0)])
    even = Case(6, torch.arange(32.0).reshape(8, 4), src, dst, turned=False)
    first = ["allgather", "split", "allgather", "group"]
    again = ["allgather", "allgather", "group"]
    logs = rank_threads(6, carried, even).values()
    assert logs[0] == [*first, *again]
    assert logs[5] == [*first, "allgather", *again, "allgather"]


def call(channel: Channel, **changes: Any) -> torch.Tensor | None:
    """Rows of ranks 0 and 1 to both of ranks 2 and 3; `changes` replace arguments.

    Where it raises, the ranks have heard each other and done nothing else.
    """
    log: list[str] = []
    group = Stateless(channel.rank, Counted(channel, tuple(channel.ranks), log))
    full = torch.arange(8.0).reshape(4, 2)
    src = full.chunk(2)[channel.rank].clone() if channel.rank < 2 else None
    dst = torch.zeros(4, 2) if channel.rank > 1 else None
    arguments: dict[str, Any] = {
        "src_tensor": Ref(src, full),
        "src_mesh": Mesh([0, 1]),
        "src_placement": [Shard(0)],
        "dst_tensor": Ref(dst, full),
        "dst_mesh": Mesh([2, 3]),
        "dst_placement": [R],
    }
    try:
        face.xferdtensor_python_impl(**{**arguments, **changes}, process_group=group)
    except Exception:
        assert [entry for entry in log if entry != "split"] in (["allgather"], ["allgather"] * 2)
        assert dst is None or not dst.any()
        raise
    return dst


class Adrift(Ref):
    """A reference that cannot say where it is."""

    @property
    def device(self) -> torch.device:
        raise RuntimeError("the device is gone")

    @device.setter
    def device(self, value: object) -> None:
        pass


class Lost(Ref):
    """A reference of which the local tensor cannot be had."""

    @property
    def _local_tensor(self) -> torch.Tensor:
        raise RuntimeError("the storage is gone")

    @_local_tensor.setter
    def _local_tensor(self, value: object) -> None:
        pass


WHOLE = torch.zeros(4, 2)
FAULTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "local shape": ({"dst_tensor": Ref(torch.zeros(3, 2), WHOLE)}, ValueError, "planned shape"),
    "dtype": ({"dst_tensor": Ref(WHOLE.int(), WHOLE.int())}, ValueError, "dtypes differ"),
    "missing": ({"dst_tensor": None}, ValueError, "did not receive a destination"),
    "neither": ({"dst_tensor": None, "src_tensor": None}, ValueError, "neither a source"),
    "count": ({"src_placement": [Shard(0), R]}, ValueError, "has 2 entries for a 1D mesh"),
    "partial": ({"src_placement": [Partial()]}, NotImplementedError, "only Shard and Replicate"),
    "exception": ({"dst_tensor": Lost(None, WHOLE)}, RuntimeError, "the storage is gone"),
    "device": (
        {"src_tensor": None, "dst_tensor": Adrift(None, WHOLE)},
        RuntimeError,
        "the device is gone",
    ),
}
"""What rank 3 gives instead, and what it raises itself."""


def one_rank_errs(channel: Channel, fault: str) -> None:
    call(channel, **FAULTS[fault][0] if channel.rank == 3 else {})


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_on_one_rank_is_told_to_all(fault: str) -> None:
    _, kind, text = FAULTS[fault]
    *others, own = rank_threads(4, one_rank_errs, fault).raised(Exception, within_s=3)
    assert type(own) is kind
    assert text in str(own)
    for error in others:
        assert isinstance(error, PeerError)
        assert "src_tensor" in str(error)
        assert "rank 3" in str(error)
        assert text in str(error)


def one_rank_differs(channel: Channel, name: str, value: Any) -> None:
    changes = {name: value} if channel.rank == 1 else {}
    call(channel, **changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dst_placement", [Shard(0)]),
        ("src_mesh", Mesh([1, 0])),
        ("dst_mesh", Mesh([3, 2])),
    ],
)
def test_what_one_rank_describes_differently_is_shown_to_all(name: str, value: Any) -> None:
    outcomes = rank_threads(4, one_rank_differs, name, value)
    for error in outcomes.raised(DisagreementError, within_s=3):
        assert f"{name[:3]}_tensor" in str(error)
        assert len({*error.values.values()}) == 2


def other_shapes(channel: Channel) -> None:
    """The two sides have different global shapes, and no rank is in both."""
    wide = torch.zeros(4, 3)
    call(channel, **{"dst_tensor": Ref(wide, wide), "src_tensor": None} if channel.rank > 1 else {})


def test_shapes_that_differ_between_the_sides_are_shown_to_all() -> None:
    for error in rank_threads(4, other_shapes).raised(DisagreementError, within_s=3):
        assert "rank 0: torch.float32 [4, 2]" in str(error)
        assert "rank 2: torch.float32 [4, 3]" in str(error)


def whole_to_whole(channel: Channel) -> None:
    """Nothing to stripe: there is one row."""
    row = torch.zeros(1, 2)
    gives = channel.rank < 2
    mine, none = Ref(row.clone(), row), Ref(None, row)
    src, dst = (mine, none) if gives else (none, mine)
    call(channel, src_tensor=src, src_placement=[R], dst_tensor=dst)


@pytest.mark.parametrize(
    ("name", "way"),
    [("_stage_striped_operations", call), ("_stage_rank_operations", whole_to_whole)],
)
def test_a_rank_without_memory_for_its_buffers_is_told_of(
    name: str, way: Callable[[Channel], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(face, name)

    def stage(rank: int, *args: Any) -> Any:
        if rank == 2:
            raise MemoryError("no room for a copy")
        return real(rank, *args)

    monkeypatch.setattr(face, name, stage)
    for rank, error in enumerate(rank_threads(4, way).raised(Exception, within_s=3)):
        assert isinstance(error, MemoryError if rank == 2 else PeerError)
        assert "no room for a copy" in str(error)


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


def test_without_a_count_of_ranks_each_raises_before_it_calls_the_communicator() -> None:
    for error in rank_threads(2, one_shape_is_wrong).raised(ValueError, within_s=3):
        assert "planned shape is (2,), got (3,)" in str(error)
