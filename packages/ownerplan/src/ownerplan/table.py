"""Table: the groups that `plan_owners` was given, checked and turned into aligned lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Literal, Protocol, runtime_checkable

from distcore.v1 import PlanError, Problem
from ownerplan.cost import CostFn
from ownerplan.work import Work, work_in_chunks

Key = tuple[int, int]
"""A work item: its group, and its place in it."""

Candidates = Literal["holders"] | Sequence[Sequence[Iterable[int]]]


@runtime_checkable
class CostedWork(Protocol):
    """A work item whose cost and candidates are known, as planning of one buffer has it."""

    @property
    def cost(self) -> float:
        """What the step costs."""
        ...

    @property
    def candidates(self) -> Sequence[int]:
        """The ranks that may own it."""
        ...


Item = Work | CostedWork | Sequence[int]


class Table:
    """All items of all groups: their keys, costs, candidates and works, aligned.

    `groups` are the places of each group's items. A work of None has no shape, so no bytes.
    """

    def __init__(
        self,
        groups: Iterable[Iterable[Item]],
        num_ranks: int,
        cost_fn: CostFn,
        candidates: Candidates | None,
    ) -> None:
        """Read the arguments of `plan_owners`."""
        if num_ranks < 1:
            raise PlanError(Problem("num_ranks", "range", f"{num_ranks} is below 1"))
        self.num_ranks = num_ranks
        self.groups: list[range] = []
        self.keys: list[Key] = []
        self.costs: list[float] = []
        self.works: list[Work | None] = []
        self.candidates: list[Sequence[int]] = []
        self._any = range(num_ranks)
        self._chunked: dict[tuple[int, ...], Work] = {}
        for group, items in enumerate(groups):
            start = len(self.keys)
            for place, item in enumerate(items):
                self._add((group, place), item, cost_fn)
            self.groups.append(range(start, len(self.keys)))
        if candidates == "holders":
            self._keep_holders()
        elif candidates is not None:
            self._take_candidates(candidates)

    def in_order(self, places: Iterable[int]) -> list[int]:
        """The places with those first that have one candidate, then by falling cost."""
        return sorted(places, key=lambda at: (len(self.candidates[at]) > 1, -self.costs[at]))

    def _add(self, key: Key, item: Item, cost_fn: CostFn) -> None:
        self.keys.append(key)
        if not isinstance(item, Work) and isinstance(item, CostedWork):
            self.works.append(None)
            self.costs.append(item.cost)
            self.candidates.append(tuple(item.candidates))
            return
        work = item if isinstance(item, Work) else self._read_shape(key, item)
        self.works.append(work)
        self.costs.append(cost_fn(work.shape) if work.cost is None else work.cost)
        self.candidates.append(self._any if work.candidates is None else work.candidates)

    def _read_shape(self, key: Key, item: CostedWork | Sequence[int]) -> Work:
        try:
            shape = tuple(index(side) for side in item)  # type: ignore[union-attr]
        except TypeError:
            text = f"{item!r} is no shape, no Work and has no cost and candidates"
            raise PlanError(Problem(f"item {key}", "type", text)) from None
        if shape not in self._chunked:
            self._chunked[shape] = work_in_chunks(shape, self.num_ranks)
        return self._chunked[shape]

    def _keep_holders(self) -> None:
        for at, work in enumerate(self.works):
            if work is not None and work.candidates is None:
                self.candidates[at] = work.holders

    def _take_candidates(self, given: Sequence[Sequence[Iterable[int]]]) -> None:
        lengths = [len(group) for group in given]
        if lengths != [len(group) for group in self.groups]:
            text = f"groups of {lengths} for groups of {[len(group) for group in self.groups]}"
            raise PlanError(Problem("candidates", "length", text))
        self.candidates = [tuple(ranks) for group in given for ranks in group]
