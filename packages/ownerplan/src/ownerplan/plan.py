"""Plan: the owners of all matrices of a model, over all groups at once, with a certificate.

With one group per layer, and each group balanced for itself, every layer gives the same rank too
much, and nothing evens out. So groups are planned together. Everything here is a function of
shapes and numbers: no torch, no group, the same result on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from distcore.v1 import Assignment, PlanError, Problem, balance, itemsize
from ownerplan.cost import CostFn, ns_cost_fn
from ownerplan.report import OwnerPlan, Policy
from ownerplan.table import Candidates, Item, Key, Table
from ownerplan.thrift import save_moves

POLICIES: Final = ("joint", "greedy", "optimal")
DEFAULT_NS_STEPS: Final = 5
GOOD_ENOUGH: Final = 1.02
"""How far above the bound `joint` may stop without a search."""


def plan_owners(
    groups: Iterable[Iterable[Item]],
    num_ranks: int,
    *,
    cost_fn: CostFn | None = None,
    candidates: Candidates | None = None,
    policy: Policy = "joint",
    dtype: str = "float32",
    initial_load: Iterable[float] | None = None,
) -> OwnerPlan:
    """Give every item of every group to one of the ranks 0 to `num_ranks` - 1.

    An item is a full shape, which counts as cut along dim 0 into equal chunks over all ranks; a
    `Work`; or any object with `cost` and `candidates`, whose bytes are not counted. `cost_fn`
    takes a shape; without it the cost is that of `ns_cost_fn(5)`. Any rank may own an item,
    unless the item names its candidates or `candidates` does, per group and item, or as "holders"
    for the ranks that hold some of it.

    - `joint`: all groups at once. First the items with one candidate, then the longest ones, each
      to the least loaded rank. If that leaves more than 2 % above the bound, it goes on as
      `optimal` does.
    - `optimal`: all groups at once, the least makespan that a bounded search finds, and proven to
      be the least where it equals `lower_bound`. Small cases always end at the least.
    - `greedy`: each group for itself, as `ownerplan.owner_planning.assign_owner_work` does it.

    `joint` and `optimal` are never above `greedy`. With them, owners that receive fewer bytes are
    then preferred, as far as the makespan stays. `dtype` is that of the elements that travel. Ties
    go to the lowest rank.

    Raises:
        PlanError: a cost or a shape that is none, a rank that does not exist, an item without a
            candidate, a `num_ranks` below 1. It lists what is wrong.

    >>> plan = plan_owners([[(4, 4), (4, 4), (4, 8)]] * 2, 2)
    >>> plan.owners, plan.makespan, plan.ratio
    (((0, 1, 0), (0, 1, 1)), 1344, 1.0)
    """
    if policy not in POLICIES:
        text = f"{policy!r} is none of {', '.join(POLICIES)}"
        raise PlanError(Problem("policy", "unknown", text))
    table = Table(groups, num_ranks, cost_fn or ns_cost_fn(DEFAULT_NS_STEPS), candidates)
    initial = [0] * num_ranks if initial_load is None else list(initial_load)
    found = _assign(table, policy, initial)
    owners = [found.owner[key] for key in table.keys]
    if policy == "greedy" or found.makespan > found.lower_bound:
        alone = _assign_groups(table, initial)
        options = (alone,) if policy == "greedy" else (owners, alone)
        owners = min(options, key=lambda some: max(_loads(table, some, initial)))
    if policy != "greedy":
        owners = _save_bytes(table, owners, initial)
    return _report(
        table, owners, initial, lower_bound=found.lower_bound, policy=policy, dtype=dtype
    )


def _assign(table: Table, policy: Policy, initial: Sequence[float]) -> Assignment[Key]:
    """All items together; what is wrong with any of them is found here."""
    order = table.in_order(range(len(table.keys)))
    keys = [table.keys[at] for at in order]
    costs = [table.costs[at] for at in order]
    candidates = [table.candidates[at] for at in order]
    if policy != "optimal":
        found = balance(keys, costs, candidates, table.num_ranks, initial=initial)
        if policy == "greedy" or found.ratio <= GOOD_ENOUGH:
            return found
    return balance(keys, costs, candidates, table.num_ranks, policy="optimal", initial=initial)


def _assign_groups(table: Table, initial: Sequence[float]) -> list[int]:
    """Each group for itself, as if there were no other."""
    owners = [0] * len(table.keys)
    for group in table.groups:
        order = table.in_order(group)
        costs = [table.costs[at] for at in order]
        candidates = [table.candidates[at] for at in order]
        found = balance(order, costs, candidates, table.num_ranks, initial=initial)
        for at, owner in found.owner.items():
            owners[at] = owner
    return owners


def _save_bytes(table: Table, owners: Sequence[int], initial: Sequence[float]) -> list[int]:
    anybody = range(table.num_ranks)
    loads = _loads(table, owners, initial)
    # Items of one shape share these, so that many of them on many ranks take little memory.
    held = {id(work): dict(work.held) for work in table.works if work is not None}
    allowed = {
        id(ranks): None if ranks == anybody else frozenset(ranks) for ranks in table.candidates
    }
    return save_moves(
        owners,
        costs=table.costs,
        held=[held.get(id(work), {}) for work in table.works],
        allowed=[allowed[id(ranks)] for ranks in table.candidates],
        loads=loads,
        ceiling=max(loads),
    )


def _loads(table: Table, owners: Sequence[int], initial: Sequence[float]) -> list[float]:
    loads = list(initial)
    for owner, cost in zip(owners, table.costs, strict=True):
        loads[owner] += cost
    return loads


def _report(
    table: Table,
    owners: Sequence[int],
    initial: Sequence[float],
    *,
    lower_bound: float,
    policy: Policy,
    dtype: str,
) -> OwnerPlan:
    received, least = [0] * table.num_ranks, 0
    for owner, work in zip(owners, table.works, strict=True):
        if work is None or not work.held:
            continue
        for rank, numel in work.held:
            received[rank] += numel
        own = next((numel for rank, numel in work.held if rank == owner), 0)
        received[owner] += work.numel - 2 * own
        least += work.numel + sum(n for _, n in work.held) - 2 * max(n for _, n in work.held)
    loads = tuple(_loads(table, owners, initial))
    size = itemsize(dtype)
    return OwnerPlan(
        owners=tuple(tuple(owners[at] for at in group) for group in table.groups),
        costs=tuple(tuple(table.costs[at] for at in group) for group in table.groups),
        loads=loads,
        lower_bound=min(lower_bound, max(loads)),
        bytes_per_rank=tuple(size * numel for numel in received),
        bytes_lower_bound=size * least,
        policy=policy,
    )
