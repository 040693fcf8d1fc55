"""Distribution: which rank of a group reads or writes which shard, and which ranks need it.

Everything here is a function of the shard tables of all ranks, so it is the same on each of them.
Ranks are positions in the group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeVar

from ckptx.errors import CheckpointPlanError
from ckptx.sharded import ShardedTensor, ShardId, is_main_replica
from distcore.v1 import Problem, balance

T = TypeVar("T")


class ShardDistribution(NamedTuple):
    """How the shards of one group are dealt out; the group itself is not named in it.

    - `main_rank_for_shard`: who reads (or writes) a shard, in the order of assignment.
    - `shards_in_this_group`: the shards that this group sees to.
    - `shard_to_metadata`: a shard of every id that any rank has, without data.
    - `all_ranks_for_shard`: who has a place for it, ascending.
    """

    main_rank_for_shard: dict[ShardId, int]
    shards_in_this_group: set[ShardId]
    shard_to_metadata: dict[ShardId, ShardedTensor]
    all_ranks_for_shard: dict[ShardId, list[int]]


@dataclass(frozen=True, slots=True)
class ShardRow:
    """One shard of a group: what it is, which ranks have it, and which as the main copy."""

    metadata: ShardedTensor
    ranks: tuple[int, ...]
    mains: tuple[int, ...]


def shard_nbytes(shard: ShardedTensor) -> int:
    """The bytes of a shard's elements."""
    return prod(shard.local_shape) * shard.dtype.itemsize


def shard_rows(all_shards: Sequence[Iterable[ShardedTensor]]) -> tuple[ShardRow, ...]:
    """The shards of a group, in order of first appearance; `all_shards` has a rank's per item.

    A shard that one rank has twice (tied weights) counts once. CheckpointPlanError names every
    shard that two ranks describe differently, and both of them.
    """
    first: dict[ShardId, tuple[int, ShardedTensor]] = {}
    ranks: dict[ShardId, list[int]] = {}
    mains: dict[ShardId, list[int]] = {}
    problems = []
    for rank, shards in enumerate(all_shards):
        for shard in shards:
            name = shard.shard_id
            if name not in first:
                first[name] = (rank, shard.without_data())
                ranks[name], mains[name] = [], []
            known_by, known = first[name]
            if _form(known) != _form(shard):
                text = f"rank {known_by} has {_form(known)}, rank {rank} {_form(shard)}"
                problems.append(Problem(f"{name[0]} at {name[1]}", "metadata", text))
            _note(ranks[name], rank)
            if is_main_replica(shard.replica_id):
                _note(mains[name], rank)
    if problems:
        raise CheckpointPlanError(problems)
    return tuple(
        ShardRow(shard, tuple(ranks[name]), tuple(mains[name]))
        for name, (_, shard) in first.items()
    )


def distribution_of(
    rows: Iterable[ShardRow], num_ranks: int, *, ignore_groups: bool
) -> ShardDistribution:
    """The distribution for a save (`ignore_groups=False`) or a load (True).

    A save sees to the shards whose main copy is in this group; a load to all, those without a
    main copy here last. CheckpointPlanError where two ranks claim the main copy in a save: one of
    them would be dropped unseen. (In a load it does not matter which copy is filled first.)
    """
    rows = tuple(rows)
    problems = [
        Problem(
            f"{row.metadata.key} at {row.metadata.global_offset}",
            "replica_id",
            f"ranks {list(row.mains)} of the group all claim the main copy",
        )
        for row in rows
        if len(row.mains) > 1 and not ignore_groups
    ]
    if problems:
        raise CheckpointPlanError(problems)
    seen = {row.metadata.shard_id: row for row in rows if row.mains or ignore_groups}
    ranks = {name: list(row.ranks) for name, row in seen.items()}
    sizes = {name: shard_nbytes(row.metadata) for name, row in seen.items()}
    cross = {name for name, row in seen.items() if not row.mains}
    return ShardDistribution(
        distribute_shards_to_ranks(ranks, sizes, num_ranks, cross),
        set(seen),
        {row.metadata.shard_id: row.metadata for row in rows},
        ranks,
    )


def distribute_shards_to_ranks(
    shard_to_ranks: Mapping[T, Collection[int]],
    shard_to_size: Mapping[T, int],
    num_ranks: int,
    cross_parallelization_group_loads: Collection[T],
) -> dict[T, int]:
    """Give each shard to the rank, of those that have it, with the fewest bytes so far.

    Shards take their turns by this order: those in `cross_parallelization_group_loads` last; then
    those that fewer ranks have first; then the larger first; then by shard id. Ties between ranks
    go to the lowest. The result is in that order too, and the same on all ranks.

    KeyError where a size is missing; CheckpointPlanError (a ValueError) where a shard has no rank,
    or one that is not below `num_ranks`.

    >>> distribute_shards_to_ranks({"A": [0, 1], "B": [0]}, {"A": 100, "B": 100}, 2, set())
    {'B': 0, 'A': 1}
    """
    cross = set(cross_parallelization_group_loads)
    kinds: dict[tuple[int, ...], tuple[int, ...]] = {}
    candidates = {}
    for shard, ranks in shard_to_ranks.items():
        listed = tuple(ranks)
        if listed not in kinds:
            kinds[listed] = tuple(sorted(set(listed)))
        candidates[shard] = kinds[listed]
    problems = [
        Problem(f"{shard}", "ranks", f"{list(ranks)} are not ranks 0 to {num_ranks - 1}")
        for shard, ranks in candidates.items()
        if not ranks or ranks[0] < 0 or ranks[-1] >= num_ranks
    ]
    if problems:
        raise CheckpointPlanError(problems)
    turns = sorted(
        (shard in cross, len(r), -shard_to_size[shard], shard) for shard, r in candidates.items()
    )
    order = [shard for _, _, _, shard in turns]
    if not order:
        return {}
    costs = [shard_to_size[shard] for shard in order]
    return balance(order, costs, [candidates[shard] for shard in order], num_ranks).owner


def _form(shard: ShardedTensor) -> str:
    """What must be the same for all copies of a shard."""
    return f"{shard.dtype} {shard.local_shape} of {shard.global_shape}"


def _note(ranks: list[int], rank: int) -> None:
    if not ranks or ranks[-1] != rank:
        ranks.append(rank)
