"""Report: the owners that a plan has found, what they cost, and how good that is."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Policy = Literal["joint", "greedy", "optimal"]


@dataclass(frozen=True)
class OwnerPlan:
    """Who owns what, what that costs, and how far it is from what any plan could reach.

    - `owners`: per group, per item, the owning rank.
    - `costs`: of each item, aligned with `owners`.
    - `loads`: per rank, the costs that it owns, and its initial load.
    - `lower_bound`: no plan with these candidates has a lower makespan. It is at least the even
      share and the largest item; where few ranks may own much, or where items do not divide
      evenly, it is higher.
    - `bytes_per_rank`: what each rank receives in one step, shards as an owner and results as a
      holder together. Where no rank holds what another one holds, it also sends as much.
    - `bytes_lower_bound`: what all ranks receive at least, if each item has one owner.
    """

    owners: tuple[tuple[int, ...], ...]
    costs: tuple[tuple[float, ...], ...]
    loads: tuple[float, ...]
    lower_bound: float
    bytes_per_rank: tuple[int, ...]
    bytes_lower_bound: int
    policy: Policy

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.loads)

    @property
    def makespan(self) -> float:
        """The highest load; 0 where there is nothing to do."""
        return max(self.loads)

    @property
    def ratio(self) -> float:
        """How many times the lower bound the makespan is; 1.0 where both are 0."""
        return self.makespan / self.lower_bound if self.lower_bound else 1.0

    @property
    def total_bytes(self) -> int:
        """What all ranks together receive in one step."""
        return sum(self.bytes_per_rank)

    @cached_property
    def digest(self) -> str:
        """A short name of the plan: equal plans have equal ones, on every rank."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:32]

    def to_json(self) -> str:
        """The plan as one JSON object with sorted names."""
        form = {
            "format": 1,
            "owners": self.owners,
            "costs": self.costs,
            "loads": self.loads,
            "lower_bound": self.lower_bound,
            "bytes_per_rank": self.bytes_per_rank,
            "bytes_lower_bound": self.bytes_lower_bound,
            "policy": self.policy,
        }
        return json.dumps(form, sort_keys=True)

    def plot(self, path: str) -> None:
        """Draw load and bytes of each rank into a picture file; its ending says of which kind.

        ImportError where matplotlib is missing; it comes with `ownerplan[cli]`.
        """
        from ownerplan.plot import plot_loads

        plot_loads(self, path)
