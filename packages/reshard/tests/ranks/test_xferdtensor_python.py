"""The face on torch process groups: what it carries, and how mistakes reach every rank."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from distcore.testing import RankPool, rank_threads
from distcore.v1 import Channel, DisagreementError, PeerError
from distcore.v1.runtime import GroupChannel
from reshard import ReshardPlan
from reshard import xferdtensor_python as face
from reshard.ends import Ends
from reshard.face import engine
from reshard.face.offers import Offer, Terms
from reshard.xferdtensor_python import xferdtensor_python_impl

R = Replicate()
S0, S1 = Shard(0), Shard(1)


class Mesh:
    def __init__(self, ranks: Any) -> None:
        self.mesh = torch.tensor(ranks)


class Ref:
    """A reference to a distributed tensor, as a caller may have it."""

    def __init__(
        self,
        local: torch.Tensor | None,
        shape: Sequence[int],
        dtype: torch.dtype | None = None,
    ) -> None:
        self._local_tensor = local
        self.shape = torch.Size(shape)
        self.dtype = dtype or (torch.float32 if local is None else local.dtype)
        self.device = torch.device("cpu")


class Strided:
    """A cut of what axes further right have cut into `split_factor` parts before."""

    def __init__(self, dim: int, split_factor: int) -> None:
        self.dim, self.split_factor = dim, split_factor


@dataclass
class Side:
    """A mesh with placements, and what each of its ranks holds of a tensor, by torch.chunk."""

    mesh: torch.Tensor
    placements: list[Any]

    @property
    def ranks(self) -> list[int]:
        return [int(rank) for rank in self.mesh.flatten().tolist()]

    def part(self, full: torch.Tensor, rank: int) -> torch.Tensor | None:
        """The oracle: cut axis by axis, the strided ones last."""
        if rank not in self.ranks:
            return None
        at = (self.mesh == rank).nonzero()[0].tolist()
        axes = sorted(
            range(len(at)), key=lambda axis: hasattr(self.placements[axis], "split_factor")
        )
        for axis in axes:
            if self.placements[axis] != R:
                full = self.cut(full, self.placements[axis].dim, self.mesh.shape[axis], at[axis])
        return full

    @staticmethod
    def cut(full: torch.Tensor, dim: int, count: int, at: int) -> torch.Tensor:
        step = -(-full.shape[dim] // count)
        low = min(full.shape[dim], at * step)
        return full.narrow(dim, low, min(step, full.shape[dim] - low))

    def ref(self, full: torch.Tensor, rank: int, *, blank: bool, turned: bool) -> Ref | None:
        """The reference of `rank`; `turned` has its dims in reverse order in memory."""
        part = self.part(full, rank)
        if part is None:
            return None
        shape = tuple(reversed(part.shape)) if turned else tuple(part.shape)
        local = torch.zeros(shape, dtype=part.dtype)
        local = local.permute(tuple(reversed(range(part.ndim)))) if turned else local
        if not blank:
            local.copy_(part)
        return Ref(local, full.shape)


@dataclass
class Case:
    """A tensor, where it is, and where it shall be."""

    size: int
    full: torch.Tensor
    src: Side
    dst: Side
    turned: bool


DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.uint16)


@st.composite
def sides(draw: st.DrawFn, size: int, ndim: int) -> Side:
    lengths: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        lengths.append(draw(st.integers(1, max(1, size // prod(lengths)))))
    ranks = draw(st.permutations(range(size)))[: prod(lengths)]
    dims = [draw(st.sampled_from([None, *range(ndim)])) for _ in lengths]
    placements: list[Any] = [R if dim is None else Shard(dim) for dim in dims]
    if draw(st.booleans()):
        for dim in {*dims} - {None}:
            axes = [axis for axis, one in enumerate(dims) if one == dim]
            if len(axes) > 1:
                factor = prod(lengths[axis] for axis in axes[1:])
                placements[axes[0]] = Strided(int(dim or 0), factor)
    return Side(torch.tensor(ranks).reshape(lengths), placements)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.integers(1, 6))
    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    full = torch.arange(prod(shape)).remainder(101).reshape(shape).to(dtype)
    src, dst = draw(sides(size, len(shape))), draw(sides(size, len(shape)))
    return Case(size, full, src, dst, draw(st.booleans()))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = (t.contiguous().flatten().view(torch.uint8).tolist() for t in (one, other))
    return one.shape == other.shape and len({*map(str, bits)}) == 1


def carried(channel: GroupChannel, case: Case) -> None:
    rank = channel.rank
    src = case.src.ref(case.full, rank, blank=False, turned=case.turned)
    dst = case.dst.ref(case.full, rank, blank=True, turned=not case.turned)
    before = None if src is None or src._local_tensor is None else src._local_tensor.clone()
    group: Any = channel.group
    face.xferdtensor_python_impl(
        src,
        Mesh(case.src.mesh.tolist()),
        case.src.placements,
        dst,
        Mesh(case.dst.mesh.tolist()),
        case.dst.placements,
        group,
    )
    expected = case.dst.part(case.full, rank)
    if expected is not None and dst is not None and dst._local_tensor is not None:
        assert same(dst._local_tensor, expected)
    if before is not None and src is not None and src._local_tensor is not None:
        assert same(src._local_tensor, before)


@settings(max_examples=25)
@given(cases())
def test_every_destination_holds_its_part(case: Case) -> None:
    rank_threads(case.size, carried, case).values()


FULL = torch.arange(24.0).reshape(4, 6)


def rows_to_columns(channel: Channel, **changes: Any) -> torch.Tensor | None:
    """Rows on ranks 0 and 1 to columns on ranks 2 and 3; `changes` replace arguments."""
    rank = channel.rank
    group: Any = channel.group if isinstance(channel, GroupChannel) else channel
    dst = Ref(torch.zeros(4, 3), FULL.shape) if rank in (2, 3) else None
    arguments: dict[str, Any] = {
        "src_tensor": Ref(FULL.chunk(2)[rank].clone(), FULL.shape) if rank < 2 else None,
        "src_mesh": Mesh([0, 1]),
        "src_placement": [S0],
        "dst_tensor": dst,
        "dst_mesh": Mesh([2, 3]),
        "dst_placement": [S1],
        "process_group": group,
    }
    xferdtensor_python_impl(**{**arguments, **changes})
    return None if dst is None else dst._local_tensor


def test_ranks_outside_both_meshes_take_part() -> None:
    *_, third, fourth, fifth, sixth = rank_threads(6, rows_to_columns).values()
    assert third is not None
    assert third.tolist() == FULL[:, :3].tolist()
    assert fourth is not None
    assert fourth.tolist() == FULL[:, 3:].tolist()
    assert fifth is sixth is None


def over_a_channel(channel: GroupChannel) -> torch.Tensor | None:
    return rows_to_columns(channel, process_group=channel)


def with_metadata_only(channel: GroupChannel) -> torch.Tensor | None:
    if channel.rank > 3:
        nothing = Ref(None, FULL.shape)
        return rows_to_columns(channel, src_tensor=nothing, dst_tensor=nothing)
    return rows_to_columns(channel)


@pytest.mark.parametrize("call", [over_a_channel, with_metadata_only])
def test_other_forms_of_the_same_call(call: Any) -> None:
    found = rank_threads(5, call).values()[3]
    assert found is not None
    assert found.tolist() == FULL[:, 3:].tolist()


def parameters(channel: GroupChannel) -> torch.Tensor:
    """Rows on both ranks become the whole on both; local tensors are Parameters."""
    local = nn.Parameter(torch.zeros(4, 6))
    group: Any = channel.group
    xferdtensor_python_impl(
        Ref(nn.Parameter(FULL.chunk(2)[channel.rank].clone()), FULL.shape),
        Mesh([0, 1]),
        [S0],
        Ref(local, FULL.shape),
        Mesh([0, 1]),
        [R],
        group,
    )
    assert local.grad_fn is None
    return local.detach()


def test_parameters_are_written_in_place() -> None:
    for found in rank_threads(2, parameters).values():
        assert found.tolist() == FULL.tolist()


def in_place(channel: GroupChannel) -> list[float]:
    """The two ranks swap their halves, which are at once source and destination."""
    local = torch.full((3,), float(channel.rank))
    ref = Ref(local, (6,))
    group: Any = channel.group
    xferdtensor_python_impl(ref, Mesh([0, 1]), [S0], ref, Mesh([1, 0]), [S0], group)
    found: list[float] = local.tolist()
    return found


def test_a_source_may_be_the_destination() -> None:
    assert rank_threads(2, in_place).values() == ([1.0] * 3, [0.0] * 3)


# Seven rows over 3 x 2 ranks, cut as FSDP2 does over tensor parallelism. The two readings of such
# a placement differ in who of the last two ranks holds the last row.
BY_ORDER = [[0, 1], [4], [2, 3], [5], [], [6]]
BY_INDEX = [[0, 1], [4], [2, 3], [5], [6], []]
BY_BOTH = [[0, 1], [4], [2, 3], [5], [6], [6]]


def strided(channel: GroupChannel, rows: list[list[int]]) -> list[float]:
    mesh = Mesh([[0, 1], [2, 3], [4, 5]])
    whole = torch.zeros(7)
    group: Any = channel.group
    xferdtensor_python_impl(
        Ref(torch.tensor(rows[channel.rank], dtype=torch.float32), (7,)),
        mesh,
        [Strided(0, 2), S0],
        Ref(whole, (7,)),
        mesh,
        [R, R],
        group,
    )
    found: list[float] = whole.tolist()
    return found


@pytest.mark.parametrize("rows", [BY_ORDER, BY_INDEX], ids=["order", "index"])
def test_strided_placements_are_read_as_the_local_tensors_are(rows: list[list[int]]) -> None:
    for found in rank_threads(6, strided, rows).values():
        assert found == [0, 1, 2, 3, 4, 5, 6]


def test_local_tensors_that_fit_no_one_reading_are_refused() -> None:
    for error in rank_threads(6, strided, BY_BOTH).raised(ValueError, within_s=3):
        assert "src_tensor: no one reading of its strided placements" in str(error)


# --- mistakes -------------------------------------------------------------------------------


class Broken(Ref):
    """A reference of which the local tensor cannot be had."""

    @property
    def _local_tensor(self) -> torch.Tensor:
        raise RuntimeError("the storage is gone")

    @_local_tensor.setter
    def _local_tensor(self, value: object) -> None:
        pass


def columns(width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(4, width, dtype=dtype)


FAULTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "local shape": (
        {"dst_tensor": Ref(columns(2), FULL.shape)},
        PeerError,
        r"rank 3: .*dst_tensor of rank 3: the planned shape is \(4, 3\), got \(4, 2\)",
    ),
    "global shape": (
        {"dst_tensor": Ref(columns(4), (4, 8))},
        DisagreementError,
        r"shape of src_tensor and dst_tensor.*rank 3: float32 \[4, 8\]",
    ),
    "dtype": (
        {"dst_tensor": Ref(columns(3, torch.float64), FULL.shape)},
        DisagreementError,
        r"dtype .* of src_tensor and dst_tensor.*rank 3: float64",
    ),
    "local dtype": (
        {"dst_tensor": Ref(columns(3, torch.float64), FULL.shape, torch.float32)},
        PeerError,
        "dst_tensor of rank 3: the local tensor is torch.float64, the tensor torch.float32",
    ),
    "missing": (
        {"dst_tensor": None},
        PeerError,
        "dst_tensor of rank 3: none was given",
    ),
    "stray": (
        {"src_tensor": Ref(columns(6), FULL.shape)},
        PeerError,
        "src_tensor of rank 3: a local tensor of shape .* outside the mesh",
    ),
    "placement": (
        {"src_placement": [S1]},
        DisagreementError,
        r"src_tensor.*S\(1\)",
    ),
    "mesh": (
        {"src_mesh": Mesh([1, 0])},
        DisagreementError,
        r"src_tensor.*mesh \[1, 0\]",
    ),
    "partial": (
        {"src_placement": [Partial()]},
        PeerError,
        r"rank 3: NotImplementedError: .*only Shard and Replicate",
    ),
    "count": (
        {"dst_placement": [S1, R]},
        PeerError,
        "rank 3: ValueError: dst_placement has 2 entries for a 1D mesh",
    ),
    "exception": (
        {"dst_tensor": Broken(None, FULL.shape)},
        PeerError,
        "rank 3: RuntimeError: the storage is gone",
    ),
    "no memory": (
        {"dst_tensor": Ref(torch.zeros(4, 3).to_sparse(), FULL.shape)},
        PeerError,
        "rank 3: .*dense",
    ),
    "expanded": (
        {"dst_tensor": Ref(torch.zeros(4, 1).expand(4, 3), FULL.shape)},
        PeerError,
        "rank 3.*share one place in memory",
    ),
}


def one_rank_errs(channel: GroupChannel, fault: str) -> None:
    """Rank 3 errs; whatever it is, nobody's destination changes, and the group stays usable."""
    dst = Ref(torch.zeros(4, 3), FULL.shape) if channel.rank == 2 else None
    changes = FAULTS[fault][0] if channel.rank == 3 else {"dst_tensor": dst}
    try:
        rows_to_columns(channel, **changes)
    finally:
        assert dst is None or dst._local_tensor is None or not dst._local_tensor.any()
        found = rows_to_columns(channel)
        assert channel.rank < 2 or (found is not None and found.any())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_on_one_rank_raises_on_all(fault: str) -> None:
    _, kind, text = FAULTS[fault]
    for error in rank_threads(4, one_rank_errs, fault).raised(kind, within_s=3):
        with pytest.raises(kind, match=f"(?s){text}"):
            raise error


def zeros_stay(channel: GroupChannel) -> None:
    dst = Ref(torch.zeros(4, 3), FULL.shape) if channel.rank > 1 else None
    try:
        rows_to_columns(channel, dst_tensor=dst)
    finally:
        assert dst is None or dst._local_tensor is None or not dst._local_tensor.any()


def test_a_rank_that_fails_when_all_have_read_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    real = engine._ends

    def ends(plan: ReshardPlan, offer: Offer, terms: Terms, rank: int) -> Ends:
        if rank == 3:
            raise MemoryError("no room for a copy")
        return real(plan, offer, terms, rank)

    monkeypatch.setattr(engine, "_ends", ends)
    for error in rank_threads(4, zeros_stay).raised(PeerError, within_s=3):
        assert "rank 3: MemoryError: no room for a copy" in str(error)


class Counting:
    """A channel that counts its exchanges of rows."""

    def __init__(self, inner: Channel) -> None:
        self._inner = inner
        self.exchanges = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_gather(self, row: bytes, *, timeout_s: float | None = None) -> tuple[bytes, ...]:
        self.exchanges += 1
        return self._inner.all_gather(row, timeout_s=timeout_s)


def exchanges(channel: GroupChannel) -> int:
    counting: Any = Counting(channel)
    rows_to_columns(channel, process_group=counting)
    return int(counting.exchanges)


def test_a_small_tensor_takes_two_exchanges_before_it_moves_and_one_after() -> None:
    assert rank_threads(5, exchanges).values() == (3,) * 5


def with_partial(channel: GroupChannel) -> None:
    rows_to_columns(channel, src_placement=[Partial()])


def with_an_unknown_rank(channel: GroupChannel) -> None:
    rows_to_columns(channel, dst_mesh=Mesh([2, 9]))


def with_a_rank_twice(channel: GroupChannel) -> None:
    rows_to_columns(channel, dst_mesh=Mesh([2, 2]))


def test_what_all_ranks_do_wrong_raises_as_it_is() -> None:
    for refused in rank_threads(4, with_partial).raised(NotImplementedError, within_s=3):
        assert "only Shard and Replicate" in str(refused)
        assert "reshard.transfer reduces a partial source" in str(refused)
    for wrong in rank_threads(4, with_a_rank_twice).raised(ValueError, within_s=3):
        assert "expected every rank once" in str(wrong)


def test_a_mesh_beyond_the_group_is_refused() -> None:
    for error in rank_threads(4, with_an_unknown_rank).raised(PeerError, within_s=3):
        assert "dst_tensor of rank 3" in str(error)


# --- real tensors ---------------------------------------------------------------------------


def bits(tensor: torch.Tensor) -> list[int]:
    found: list[int] = tensor.detach().contiguous().view(torch.int32).flatten().tolist()
    return found


def of_two_dimensions(channel: Channel, side: int) -> None:
    """From FSDP2 over tensor parallelism to columns on the ranks 3 and 1, as DTensors."""
    torch.manual_seed(side)
    model = nn.Linear(4, side)
    full = model.weight.detach().clone()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    parallelize_module(model, mesh["tp"], ColwiseParallel())
    fully_shard(model, mesh=mesh["fsdp"])
    weight: Any = model.weight
    half = DeviceMesh("cpu", [3, 1])
    blank: Any = distribute_tensor(torch.zeros_like(full), half, [S1], src_data_rank=None)
    xferdtensor_python_impl(weight, weight.device_mesh, weight.placements, blank, half, [S1], None)
    if channel.rank in (1, 3):
        # Not get_local_rank: that goes by the order of the group, not by that of the mesh.
        expected = full.chunk(2, 1)[0 if channel.rank == 3 else 1]
        assert bits(blank.to_local()) == bits(expected)


@pytest.mark.parametrize("side", [5, 8, 13])
def test_fsdp_over_tensor_parallelism(pool: RankPool, side: int) -> None:
    pool.run(of_two_dimensions, side).values()


def in_a_subgroup(channel: Channel) -> None:
    """Rows on the ranks 1 and 3 become columns; ranks are global ones, and 0 and 2 stay out."""
    group = dist.new_group([1, 3])
    if channel.rank in (1, 3):
        at = channel.rank // 2
        local = torch.zeros(4, 3)
        xferdtensor_python_impl(
            Ref(FULL.chunk(2)[at].clone(), FULL.shape),
            Mesh([1, 3]),
            [S0],
            Ref(local, FULL.shape),
            Mesh([1, 3]),
            [S1],
            group,
        )
        assert bits(local) == bits(FULL.chunk(2, 1)[at])
    dist.destroy_process_group(group)


def test_ranks_of_a_subgroup_are_global(pool: RankPool) -> None:
    pool.run(in_a_subgroup).values()


@pytest.mark.parametrize("rows", [16, 1 << 18])
def test_a_rank_that_cannot_plan_fails_all_with_its_reason(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a tensor so large that ranks of one host would look for a short way."""
    here, real = threading.local(), face._planned

    def planned(*args: Any) -> Any:
        if here.rank == 1:
            raise MemoryError("no room to plan")
        return real(*args)

    monkeypatch.setattr(face, "_planned", planned)

    def job(channel: GroupChannel) -> None:
        here.rank = channel.rank
        group: Any = channel.group
        src, dst = Ref(torch.ones(rows // 2, 2), (rows, 2)), Ref(torch.zeros(rows, 1), (rows, 2))
        try:
            face.xferdtensor_python_impl(src, Mesh([0, 1]), [S0], dst, Mesh([0, 1]), [S1], group)
        finally:
            assert dst._local_tensor is not None
            assert not dst._local_tensor.any()

    for error in rank_threads(2, job).raised(PeerError, within_s=3):
        assert "rank 1: MemoryError: no room to plan" in str(error)
