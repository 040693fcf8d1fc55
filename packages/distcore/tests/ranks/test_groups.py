"""DistributedProcessGroup and ParallelState with and without groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from distcore import DistributedProcessGroup, ParallelState
from distcore.testing import RankPool, rank_threads
from distcore.v1.channel import Channel
from distcore.v1.errors import PeerError, PlanError
from distcore.v1.runtime import GroupChannel

UNUSED = DistributedProcessGroup(-1)
synced = DistributedProcessGroup.get_dist_syncd_obj


def test_without_a_run_nothing_is_initialized() -> None:
    state = ParallelState()
    assert state.data_parallel_group.rank() == -1
    assert state.data_parallel_group.world_size() == -1
    assert synced(7, [state.data_parallel_group], sum) == 7
    assert synced(7, [], sum) == 7
    assert repr(UNUSED) == "group: -1, initialized: False, world size: -1"
    assert repr(state) == (
        "data_parallel_group: group: None, initialized: False, world size: -1, "
        "tensor_parallel_group: group: -1, initialized: False, world size: -1, "
        "expert_model_parallel_group: group: -1, initialized: False, world size: -1"
    )


@pytest.mark.parametrize("group", ["world", object(), 1.5])
def test_what_is_no_group_is_refused(group: Any) -> None:
    with pytest.raises(PlanError, match="expected a process group, None or -1"):
        DistributedProcessGroup(group)


def in_grid(channel: Channel) -> dict[str, object]:
    """Four ranks: tp = [0, 1], [2, 3]; dp = [0, 2], [1, 3]; the object is the rank."""
    rank = channel.rank

    def mine(groups: list[list[int]]) -> DistributedProcessGroup:
        made = {tuple(ranks): dist.new_group(ranks) for ranks in groups}
        return DistributedProcessGroup(next(g for ranks, g in made.items() if rank in ranks))

    tp, dp = mine([[0, 1], [2, 3]]), mine([[0, 2], [1, 3]])
    world = DistributedProcessGroup(None)
    return {
        "grid": synced(rank, [tp, dp], sum),
        "tuple": synced(rank, (tp, dp), sum),
        "tp": synced([rank], tp, lambda rows: [row[0] for row in rows]),
        "unused": synced(rank, UNUSED, sum),
        "unused and tp": synced(rank, [UNUSED, tp], max),
        "world": synced(rank, world, max),
        "rank": (tp.rank(), dp.rank(), world.rank()),
        "size": (tp.world_size(), dp.world_size(), world.world_size()),
    }


def test_the_object_is_folded_over_the_groups_in_order(pool: RankPool) -> None:
    found = pool.run(in_grid).values()
    assert [row["grid"] for row in found] == [6, 6, 6, 6]
    assert [row["tuple"] for row in found] == [6, 6, 6, 6]
    assert [row["tp"] for row in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [row["unused"] for row in found] == [0, 1, 2, 3]
    assert [row["unused and tp"] for row in found] == [1, 1, 3, 3]
    assert [row["world"] for row in found] == [3, 3, 3, 3]
    assert [row["rank"] for row in found] == [(0, 0, 0), (1, 0, 1), (0, 1, 2), (1, 1, 3)]
    assert {row["size"] for row in found} == {(2, 2, 4)}


def outside(channel: Channel) -> tuple[int, bool, int]:
    """The group [1, 2]: the others keep their object."""
    group = DistributedProcessGroup(dist.new_group([1, 2]))
    return synced(channel.rank + 5, group, sum), group.is_initialized(), group.rank()


def test_a_rank_outside_the_group_keeps_its_object(pool: RankPool) -> None:
    assert pool.run(outside).values() == (
        (5, False, -1),
        (13, True, 0),
        (13, True, 1),
        (8, False, -1),
    )


def test_a_group_outside_the_default_world() -> None:
    def fold(channel: GroupChannel) -> tuple[int, bool, int]:
        group = DistributedProcessGroup(channel.group)
        return synced(channel.rank + 1, group, sum), group.is_initialized(), group.rank()

    assert rank_threads(2, fold).values() == ((3, True, 0), (3, True, 1))


def test_an_op_that_fails_on_one_rank_raises_on_all() -> None:
    def fold(channel: GroupChannel) -> int:
        def op(values: list[int]) -> int:
            return values[9 * channel.rank]

        return synced(1, DistributedProcessGroup(channel.group), op)

    for error in rank_threads(2, fold).raised(PeerError, within_s=3):
        assert list(error.failures) == [1]
