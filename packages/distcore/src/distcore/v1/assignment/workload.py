"""Workload: items that stay whole, as flat lists: what the parts of the search work on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """A weight and a kind for each item; a set of ranks for each kind; a load for each rank."""

    weights: Sequence[int]
    kinds: Sequence[int]
    sets: Sequence[tuple[int, ...]]
    base: Sequence[int]

    @property
    def longest_first(self) -> list[int]:
        """The items, heaviest first, in the order given where equal."""
        return sorted(range(len(self.weights)), key=lambda item: -self.weights[item])

    @property
    def tightest_first(self) -> list[int]:
        """The items, those with the fewest candidates first, then the heaviest."""
        width = [len(ranks) for ranks in self.sets]
        kinds, weights = self.kinds, self.weights
        return sorted(range(len(weights)), key=lambda i: (width[kinds[i]], -weights[i]))

    @property
    def amounts(self) -> list[int]:
        """The weight of all items of each kind."""
        amounts = [0] * len(self.sets)
        for weight, kind in zip(self.weights, self.kinds, strict=True):
            amounts[kind] += weight
        return amounts

    def loads(self, owners: Sequence[int]) -> list[int]:
        """The load of each rank if `owners`, one per item, take them."""
        loads = list(self.base)
        for owner, weight in zip(owners, self.weights, strict=True):
            loads[owner] += weight
        return loads
