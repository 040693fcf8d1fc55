"""Draft: an assignment in the making, first the greedy one, then the best that can be found."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Generic

from distcore.v1.assignment.bounds import Demand, least_level, lower_bound
from distcore.v1.assignment.flow import Effort
from distcore.v1.assignment.greedy import assign_in_order
from distcore.v1.assignment.groups import Groups
from distcore.v1.assignment.instance import Instance, Item
from distcore.v1.assignment.search import FEW_ITEMS, find_least
from distcore.v1.assignment.shares import divide_evenly, divide_in_order
from distcore.v1.assignment.workload import Workload

_BOUND_EFFORT: Final = 4_000_000
_SEARCH_EFFORT: Final = 4_000_000
_ROUNDS: Final = 3


class Draft(Generic[Item]):
    """Where every item of an instance goes.

    `whole` are the items that stay whole, `owners` their ranks, aligned; `shares` are those of
    each divisible item. `makespan` and `bound` (no makespan is lower) are in the unit of
    the instance's weights.
    """

    def __init__(self, instance: Instance[Item]) -> None:
        """Assign greedily, first what stays whole, then what may be divided."""
        self._instance = instance
        self.whole = [item for item, flag in enumerate(instance.divisible) if not flag]
        self._parts = [item for item, flag in enumerate(instance.divisible) if flag]
        kinds = [instance.kinds[item] for item in self.whole]
        self._work = Workload(
            [instance.weights[item] for item in self.whole], kinds, instance.sets, instance.base
        )
        costs = [instance.costs[item] for item in self.whole]
        self.owners = assign_in_order(costs, kinds, instance.sets, list(instance.initial))
        self._find_bound()
        loads = self._work.loads(self.owners)
        self.shares = divide_in_order(instance, self._parts, loads, self.bound)
        self.makespan = max(loads)

    def _find_bound(self) -> None:
        instance = self._instance
        self._groups = Groups.of(instance.sets, instance.num_ranks)
        everything = replace(self._work, weights=instance.weights, kinds=instance.kinds)
        self._amounts = everything.amounts
        demand = Demand(self._amounts, self._groups, instance.base)
        hint = self._work.loads(self.owners)
        weights = [instance.weights[item] for item in self._parts]
        assign_in_order(weights, [instance.kinds[i] for i in self._parts], instance.sets, hint)
        self._level = least_level(demand, Effort(_BOUND_EFFORT), hint)
        self.bound = lower_bound(instance, self._level, demand)

    def improve(self) -> None:
        """Lower the makespan as far as possible, and raise the bound to it if that is proven."""
        effort = Effort(_SEARCH_EFFORT)
        if self._parts:
            self._improve_divided(effort)
            return
        found = find_least(
            self._work, self.owners, self.bound, self._groups, effort=effort, level=self._level
        )
        self.owners, self.makespan = found.owners, found.makespan
        if found.proven:
            self.bound = found.makespan

    def _improve_divided(self, effort: Effort) -> None:
        """Place the whole items from several views of the others, and divide those around them."""
        greedy = self.owners
        self._divide_around(greedy)
        few = len(self.whole) <= FEW_ITEMS
        for base in (self._level_base(), self._instance.base) if few else (self._level_base(),):
            self._divide_around(self._place_whole(base, greedy, effort))
        for _ in range(_ROUNDS if few else 0):
            before = self.makespan
            base = list(self._instance.base)
            for rank, amount in (share for found in self.shares.values() for share in found):
                base[rank] += amount
            self._divide_around(self._place_whole(base, self.owners, effort))
            if self.makespan == before:
                return

    def _place_whole(self, base: list[int], first: list[int], effort: Effort) -> list[int]:
        if self.makespan <= self.bound:
            return first
        work = replace(self._work, base=base)
        return find_least(work, first, self.bound, self._groups, effort=effort).owners

    def _divide_around(self, owners: list[int]) -> None:
        """Divide what may be divided around these owners of the rest; keep it if it is better."""
        if self.makespan <= self.bound:
            return
        loads = self._work.loads(owners)
        shares = divide_evenly(self._instance, self._parts, loads, self._groups)
        if shares is not None and max(loads) < self.makespan:
            self.owners, self.shares, self.makespan = owners, shares, max(loads)

    def _level_base(self) -> list[int]:
        """What lies on the ranks if the divisible items lie as in the flow of the bound."""
        base = list(self._instance.base)
        if self._level.flow is None:
            return base
        scale = self._level.value.denominator
        kept = self._work.amounts
        for ranks, held in zip(self._groups.ranks, self._level.flow.held, strict=True):
            parts = 0
            for kind, amount in held.items():
                if amount:
                    parts += amount * (self._amounts[kind] - kept[kind]) // self._amounts[kind]
            for rank in ranks:
                base[rank] += parts // (scale * len(ranks))
        return base
