"""What travels to owners and back, on every rank of random layouts, without a process group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ownerplan.assignment import assign_owner_work
from ownerplan.layout import GlobalLayout, intersect_ranges
from ownerplan.owner_layout import GroupOwnerLayout
from ownerplan.packing import OwnerGatherPlan, OwnerScatterPlan

Policy = Literal["greedy", "optimal"]
POLICIES: tuple[Policy, ...] = ("greedy", "optimal")
Ranks = list[int] | list[list[int]]


@dataclass(frozen=True)
class FakeMesh:
    """A mesh without a process group, seen from one rank."""

    mesh: Ranks
    rank: int

    def get_rank(self) -> int:
        return self.rank


@dataclass(frozen=True)
class Run:
    """One gather and one scatter over all ranks, all played here."""

    layout: GlobalLayout
    mesh: Ranks
    owners: dict[int, int]

    def seen_from(self, rank: int) -> GroupOwnerLayout:
        return GroupOwnerLayout(FakeMesh(self.mesh, rank), self.layout, self.owners)

    @property
    def ranks(self) -> tuple[int, ...]:
        some = self.mesh[0]
        return self.seen_from(some if isinstance(some, int) else some[0]).ranks

    def full(self, index: int) -> torch.Tensor:
        numel = self.layout.get_tensor_range(index).numel
        return torch.arange(numel, dtype=torch.float64) + 1000 * index

    def shard(self, index: int, rank: int) -> torch.Tensor:
        run = self.layout.get_tensor_range(index)
        ranges = self.layout.get_rank_ranges(FakeMesh(self.mesh, rank))
        part = intersect_ranges(run, ranges[rank])
        start = part.start - run.start if part.numel else 0
        return self.full(index)[start : start + part.numel]

    def gathers(self) -> dict[int, OwnerGatherPlan]:
        return {
            rank: OwnerGatherPlan.pack(
                self.seen_from(rank), {index: self.shard(index, rank) for index in self.owners}
            )
            for rank in self.ranks
        }

    def scatters(self) -> dict[int, OwnerScatterPlan]:
        return {
            rank: OwnerScatterPlan.pack(
                self.seen_from(rank),
                {at: -self.full(at) for at, owner in self.owners.items() if owner == rank},
            )
            for rank in self.ranks
        }

    def moved(self) -> int:
        """The elements that do not lie on their owner."""
        return sum(
            self.full(index).numel() - self.shard(index, owner).numel()
            for index, owner in self.owners.items()
        )


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Layouts over 1 to 6 ranks on one or two axes, in any order; owners of all kinds."""
    sizes = draw(st.sampled_from([(1,), (2,), (3,), (5,), (6,), (2, 1), (2, 2), (2, 3), (3, 2)]))
    count = sizes[0] * (sizes[1] if len(sizes) == 2 else 1)
    ranks = list(draw(st.permutations(range(7))))[:count]
    mesh: Ranks = ranks
    if len(sizes) == 2:
        mesh = [ranks[at : at + sizes[1]] for at in range(0, count, sizes[1])]
    shapes = draw(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 4)), max_size=6))
    layout = GlobalLayout.build(shapes, count)
    indices = [at for at, shape in enumerate(shapes) if shape[0] and draw(st.booleans())]
    if draw(st.booleans()):
        policy: Policy = draw(st.sampled_from(POLICIES))
        owners = assign_owner_work(layout, FakeMesh(mesh, 0), indices, policy=policy)
    else:
        owners = {index: draw(st.sampled_from(ranks)) for index in indices}
    return Run(layout, mesh, owners)


@given(runs())
def test_owners_get_what_they_own_and_nothing_else_travels(run: Run) -> None:
    plans = run.gathers()
    for index, owner in run.owners.items():
        received = buffers_to(owner, plans)
        assert torch.equal(plans[owner].reconstruct_full(index, received), run.full(index))
    check_traffic(plans, run.moved())


@given(runs())
def test_holders_get_their_part_of_every_result(run: Run) -> None:
    plans = run.scatters()
    for rank, plan in plans.items():
        unpacked = plan.unpack(buffers_to(rank, plans))
        wanted = {
            index: -run.shard(index, rank)
            for index, owner in run.owners.items()
            if owner != rank and run.shard(index, rank).numel()
        }
        assert unpacked.keys() == wanted.keys()
        assert all(torch.equal(unpacked[index], wanted[index]) for index in wanted)
        for index, owner in run.owners.items():
            if owner == rank:
                own = plan.own_result(index, -run.full(index))
                assert torch.equal(own, -run.shard(index, rank))
    check_traffic(plans, run.moved())


def buffers_to(
    rank: int, plans: dict[int, OwnerGatherPlan] | dict[int, OwnerScatterPlan]
) -> dict[int, torch.Tensor]:
    return {
        source: plan.send_buffers[rank]
        for source, plan in plans.items()
        if rank in plan.send_buffers
    }


def check_traffic(
    plans: dict[int, OwnerGatherPlan] | dict[int, OwnerScatterPlan], moved: int
) -> None:
    """Every buffer is expected at its other end, and together they are as large as they must be."""
    sent = {
        (source, target): buffer.numel()
        for source, plan in plans.items()
        for target, buffer in plan.send_buffers.items()
    }
    expected = {
        (source, target): numel
        for target, plan in plans.items()
        for source, numel in plan.recv_sizes.items()
    }
    assert sent == expected
    assert all(source != target and numel for (source, target), numel in sent.items())
    assert sum(sent.values()) == moved


TWO = GlobalLayout.build([(6, 4), (4, 4)], 2)


def owned(rank: int, owners: dict[int, int] | None = None) -> GroupOwnerLayout:
    return GroupOwnerLayout(FakeMesh([0, 1], rank), TWO, {0: 1, 1: 1} if owners is None else owners)


def test_own_shards_are_views() -> None:
    shards = {0: torch.zeros(1, 4), 1: torch.zeros(4, 4)}
    plan = OwnerGatherPlan.pack(owned(1), shards)
    for index, shard in shards.items():
        assert plan.own_shards[index].data_ptr() == shard.data_ptr()


def test_what_was_never_cut_is_the_own_shard_itself() -> None:
    """So a step in place would change the momentum; `out` is for those who want to do that."""
    shard = torch.zeros(4, 4)
    plan = OwnerGatherPlan.pack(owned(1), {0: torch.zeros(4), 1: shard})
    full = plan.reconstruct_full(1, {})
    assert full.data_ptr() == shard.data_ptr()
    copy = plan.reconstruct_full(1, {}, out=torch.empty(4, 4))
    copy.fill_(1)
    assert not shard.any()


def test_what_was_put_together_is_a_copy() -> None:
    received = {0: torch.ones(20)}
    plan = OwnerGatherPlan.pack(owned(1), {0: torch.ones(4), 1: torch.ones(16)})
    plan.reconstruct_full(0, received).zero_()
    assert received[0].all()
    assert plan.own_shards[0].all()


def test_sent_buffers_are_copies() -> None:
    shard = torch.ones(5, 4)
    plan = OwnerGatherPlan.pack(owned(0), {0: shard})
    shard.zero_()
    assert plan.send_buffers[1].all()


def test_results_are_unpacked_as_views() -> None:
    plan = OwnerScatterPlan.pack(owned(0), {})
    received = torch.ones(20)
    assert plan.unpack({1: received})[0].data_ptr() == received.data_ptr()


def test_shards_come_in_any_shape_and_memory_order() -> None:
    values = torch.arange(20.0).reshape(5, 4)
    turned = values.T.contiguous().T
    assert not turned.is_contiguous()
    for shard in (values.reshape(2, 10), turned, values.clone().requires_grad_()):
        plan = OwnerGatherPlan.pack(owned(0), {0: shard})
        assert torch.equal(plan.send_buffers[1], torch.arange(20.0))
        assert not plan.send_buffers[1].requires_grad


def test_results_come_in_any_shape_and_memory_order() -> None:
    values = torch.arange(24.0).reshape(6, 4)
    for full in (values.reshape(-1), values.T.contiguous().T, values.clone().requires_grad_()):
        plan = OwnerScatterPlan.pack(owned(1), {0: full, 1: torch.zeros(4, 4)})
        assert torch.equal(plan.send_buffers[0], torch.arange(20.0))
        assert torch.equal(plan.own_result(0, full), torch.arange(20.0, 24.0))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.bool]
)
def test_every_dtype_travels(dtype: torch.dtype) -> None:
    values = (torch.arange(20) % 2).to(dtype)
    plan = OwnerGatherPlan.pack(owned(0), {0: values})
    assert plan.send_buffers[1].dtype == dtype
    assert torch.equal(plan.send_buffers[1].view(torch.uint8), values.view(torch.uint8))
    whole = OwnerGatherPlan.pack(owned(1), {0: values[:4], 1: values[:16]})
    full = whole.reconstruct_full(0, plan.send_buffers | {0: values})
    assert full.dtype == dtype


def test_shards_that_are_not_needed_are_left_alone() -> None:
    plan = OwnerGatherPlan.pack(owned(0, {1: 1}), {0: torch.zeros(3), 1: torch.zeros(0)})
    assert (plan.send_buffers, plan.recv_sizes, plan.own_shards) == ({}, {}, {})


def test_results_of_others_are_left_alone() -> None:
    plan = OwnerScatterPlan.pack(owned(0), {0: torch.zeros(2), 1: torch.zeros(3).bool()})
    assert plan.send_buffers == {}


def test_an_owner_that_holds_nothing_needs_no_shard() -> None:
    layout = GlobalLayout.build([(1, 4)], 2)
    owners = GroupOwnerLayout(FakeMesh([0, 1], 1), layout, {0: 1})
    plan = OwnerGatherPlan.pack(owners, {})
    assert plan.recv_sizes == {0: 4}
    full = plan.reconstruct_full(0, {0: torch.arange(4.0)})
    assert torch.equal(full, torch.arange(4.0))


@pytest.mark.parametrize("out", [torch.empty(23), torch.empty(4, 6).T])
def test_out_must_have_room(out: torch.Tensor) -> None:
    plan = OwnerGatherPlan.pack(owned(1), {0: torch.ones(4), 1: torch.ones(16)})
    with pytest.raises(ValueError, match="tensor 0: out must be contiguous and have 24 elements"):
        plan.reconstruct_full(0, {0: torch.ones(20)}, out=out)


def test_plans_are_frozen() -> None:
    plan = OwnerScatterPlan.pack(owned(0), {})
    with pytest.raises(AttributeError):
        plan.recv_sizes = {}  # type: ignore[misc]
