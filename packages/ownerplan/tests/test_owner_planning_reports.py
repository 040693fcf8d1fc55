"""What users of such planners have reported, each as the case that it was about.

A name says whose report it was: the project, and its number there. Reports about the step itself
are held by the tests of the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from ownerplan import GlobalLayout, flop_cost_fn, plan_owners
from ownerplan.layout import Range
from ownerplan.owner_planning import (
    GroupOwnerLayout,
    OwnerGatherPlan,
    OwnerScatterPlan,
    assign_owner_work,
)


@dataclass(frozen=True)
class FakeMesh:
    """A mesh that has only what planning and packing may use."""

    mesh: torch.Tensor
    rank: int = 0

    def get_rank(self) -> int:
        return self.rank


def line(count: int, rank: int = 0) -> FakeMesh:
    return FakeMesh(torch.arange(count), rank)


def test_deepspeed_7807_an_owner_sees_the_whole_reduced_matrix() -> None:
    """One matrix over the border of a flat buffer: each rank's part is final, none is partial."""
    layout = GlobalLayout.build([(5, 4)], 2)
    full = torch.arange(20.0)
    owners = {0: 1}
    sent = OwnerGatherPlan.pack(GroupOwnerLayout(line(2, 0), layout, owners), {0: full[:12]})
    plan = OwnerGatherPlan.pack(GroupOwnerLayout(line(2, 1), layout, owners), {0: full[12:]})
    assert torch.equal(plan.reconstruct_full(0, {0: sent.send_buffers[1]}), full)


def test_prime_rl_3437_rows_need_not_divide_by_ranks() -> None:
    """72 rows over 16 ranks."""
    layout = GlobalLayout.build([(72, 8)], 16)
    ranges = layout.get_rank_ranges(line(16))
    assert layout.size == 640
    assert [held.numel for held in ranges.values()] == [40] * 16
    assert assign_owner_work(layout, line(16), [0]) == {0: 0}
    for rank in (0, 14, 15):
        part = min(max(576 - 40 * rank, 0), 40)
        owners = GroupOwnerLayout(line(16, rank), layout, {0: 0})
        plan = OwnerGatherPlan.pack(owners, {0: torch.zeros(part)})
        assert {at: sent.numel() for at, sent in plan.send_buffers.items()} == (
            {0: part} if rank and part else {}
        )


@pytest.mark.parametrize(("shape", "ranks"), [((2, 16), 3), ((2, 5), 4), ((1, 7), 2), ((3, 8), 4)])
def test_speculators_821_fewer_rows_than_ranks(shape: tuple[int, int], ranks: int) -> None:
    layout = GlobalLayout.build([shape], ranks)
    numel = shape[0] * shape[1]
    full = torch.arange(float(numel))
    plans = []
    for rank in range(ranks):
        owners = GroupOwnerLayout(line(ranks, rank), layout, {0: ranks - 1})
        held = layout.get_rank_ranges(owners.mesh)[rank]
        shard = full[held.start : min(held.end, numel)]
        plans.append(OwnerGatherPlan.pack(owners, {0: shard} if shard.numel() else {}))
    received = {
        rank: plan.send_buffers[ranks - 1]
        for rank, plan in enumerate(plans)
        if ranks - 1 in plan.send_buffers
    }
    assert torch.equal(plans[-1].reconstruct_full(0, received), full)


def test_megatron_lm_2162_balance_by_cost_and_not_by_count() -> None:
    """As many kinds of shapes as ranks: dealt out by count, each rank has one kind only."""
    layer = [(64, 64), (16, 64), (16, 64), (64, 64)]
    plan = plan_owners([layer] * 4, 4, cost_fn=flop_cost_fn(5))
    assert plan.loads == (sum(plan.loads) / 4,) * 4


def test_megatron_lm_7117_the_result_does_not_depend_on_the_sharding() -> None:
    """The cost is that of the full shape, 6528 rows of a fused projection, on 2 ranks or on 64."""
    seen = set()

    def cost(shape: torch.Size) -> int:
        seen.add(tuple(shape))
        return 1

    for ranks in (2, 64):
        layout = GlobalLayout.build([(6528, 64), (64, 64)], ranks)
        assign_owner_work(layout, line(ranks), [0, 1], cost)
    assert seen == {(6528, 64), (64, 64)}


def test_megatron_lm_4486_uneven_segments_have_offsets_of_their_own() -> None:
    layout = GlobalLayout(((5, 4), (3, 4)), (0, 20), 32, (0, 4, 28))
    mesh = line(3)
    assert layout.get_rank_ranges(mesh) == {0: Range(0, 4), 1: Range(4, 24), 2: Range(28, 4)}
    owners = GroupOwnerLayout(line(3, 1), layout, {0: 0, 1: 2})
    shards = {0: torch.arange(4.0, 20.0), 1: torch.arange(20.0, 28.0)}
    plan = OwnerGatherPlan.pack(owners, shards)
    assert torch.equal(plan.send_buffers[0], shards[0])
    assert torch.equal(plan.send_buffers[2], shards[1])


def test_xtuner_2069_nothing_is_gathered_everywhere() -> None:
    """76 matrices of one shape on 64 ranks: no rank gets more than two of them, and its parts."""
    plan = plan_owners([[(512, 64)] * 76], 64, dtype="bfloat16")
    whole, part = 2 * 512 * 64, 2 * 8 * 64
    assert max(plan.bytes_per_rank) == 2 * (whole - part) + 74 * part
    assert plan.total_bytes == 76 * 2 * (whole - part)


def test_prime_rl_3490_a_rank_without_work_has_a_plan_too() -> None:
    """So that every rank can enter the one collective that all must enter."""
    layout = GlobalLayout.build([(1, 4)], 16)
    for rank in range(16):
        owners = GroupOwnerLayout(line(16, rank), layout, {0: 0})
        gather = OwnerGatherPlan.pack(owners, {0: torch.zeros(4)} if rank == 0 else {})
        scatter = OwnerScatterPlan.pack(owners, {0: torch.zeros(4)} if rank == 0 else {})
        assert (gather.send_buffers, gather.recv_sizes) == ({}, {})
        assert (scatter.send_buffers, scatter.recv_sizes) == ({}, {})


def test_paddlefleet_1703_experts_are_gathered_whole() -> None:
    """A stack of experts is one tensor: its owner gets it whole, however it was cut."""
    layout = GlobalLayout.build([(3, 4, 2)], 4)
    full = torch.arange(24.0)
    plans = {
        rank: OwnerGatherPlan.pack(
            GroupOwnerLayout(line(4, rank), layout, {0: 3}),
            {0: full[8 * rank : 8 * rank + 8]} if rank < 3 else {},
        )
        for rank in range(4)
    }
    received = {rank: plans[rank].send_buffers[3] for rank in range(3)}
    whole = plans[3].reconstruct_full(0, received).view(3, 4, 2)
    assert torch.equal(whole[1], full[8:16].view(4, 2))


def test_the_original_owner_planning_moves_more_than_it_must_on_ties() -> None:
    layout = GlobalLayout.build([(4, 8), (8, 8), (12, 8)], 3)
    moved = {
        policy: sum(
            layout.get_tensor_range(index).numel - held_by(layout, index, owner)
            for index, owner in assign_owner_work(
                layout,
                line(3),
                range(3),
                policy=policy,
            ).items()
        )
        for policy in ("greedy", "optimal")
    }
    assert moved == {"greedy": 96, "optimal": 64}


def held_by(layout: GlobalLayout, index: int, rank: int) -> int:
    run, held = layout.get_tensor_range(index), layout.get_rank_ranges(line(3))[rank]
    return max(0, min(run.end, held.end) - max(run.start, held.start))


def test_the_original_owner_planning_lets_ranks_plan_differently() -> None:
    """Every plan has a digest, by which ranks can see that they planned the same."""
    layer = [(64, 64), (16, 64)]
    same = {plan_owners([layer], 2).digest for _ in range(3)}
    assert len(same) == 1
    assert same != {plan_owners([layer[::-1]], 2).digest}
